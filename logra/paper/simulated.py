"""Simulated memory of the paper's training calls, kept as records: what Figures 1 and 3 and the memory map draw.

All rows of Tables 1 and 2 are simulated under one set of assumptions, `logra.memory.PAPER`, with nothing set row by row. The paper states
the sizes, FSDP over four GPUs, BF16 computation, checkpointing and the micro-batch; the rest of the set is ours, and `RIVALS` are its alternatives.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from logra import memory
from logra.memory import GIB, PAPER, Category, Setting
from logra.paper import printed, provenance

MODELS = {"1.5B": "Qwen2.5-Math-1.5B", "7B": "Qwen2.5-Math-7B", "27B": "Qwen3.5-27B"}
TYPICAL = 1024                                              # tokens of a response in the probe of a typical update; the paper prints no lengths
ASSUMPTIONS = ("fp32 weights sharded over 4 GPUs (FSDP2), gathered in bf16, embedding and head through forward and backward; fp32 gradients and moments of the attention and "
               "MLP projections alone; every layer checkpointed; whole fp32 logits beside bf16 ones, their gradient written over them; S, A and a second d×r buffer in fp32, whole on "
               f"every GPU; one 4,096-token response a micro-batch; JVP probe of one response with eager attention, {TYPICAL:,} tokens in the average, 4,096 in the peak; "
               "no streams, workspaces, fragmentation")
RIVALS = {
    "the assumptions": {},
    "no second d×r buffer": dict(resident_factor=False),
    "… and A hashed a layer at a time": dict(resident_factor=False, keep_projections=False),
    "log_softmax of whole fp32 logits": dict(loss="whole"),
    "logits in chunks": dict(loss="chunked"),
    "dense: all weights trained": dict(trainable="all"),
}
_ELSEWHERE = {"__init__.py", "sync.py", "theory.py", "vllm_engine.py", "wire.py"}


def capacity_gib() -> float:
    """The paper's GPU, "80 GB", read as 80·10⁹ bytes: the smaller reading, so that what fits it fits either."""
    return printed.text("gpu_memory") * 1e9 / GIB


def ledger(model: str, setting: Setting) -> dict:
    """`Ledger.summary()` of a shipped model's step, from its record; a record is of the code that it was made with."""
    def make(folder: Path) -> None:
        (folder / "ledger.json").write_text(json.dumps(memory.simulate(memory.configuration(model), setting).summary(), indent=1) + "\n")

    folder = provenance.cached("memory", {"model": model, "setting": asdict(setting), "code": _code()}, make)
    return json.loads((folder / "ledger.json").read_text())


def _code() -> str:
    """A hash of all that a simulated step runs of the library."""
    root = Path(memory.__file__).parent
    files = [file for file in sorted(root.glob("*.py")) if file.name not in _ELSEWHERE]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def bar(model: str, method: str, **changes) -> dict:
    """A simulated row of Table 1 or 2: average_gib and peak_gib (none where it does not fit the GPU), needs_gib, and before_adam_gib,
    the peak of the backward that comes before AdamW has its state."""
    setting = replace(PAPER, method=method, **changes)
    found = ledger(MODELS[model], setting)
    peak = average = found["peak_gib"]
    if method == "logra" and setting.probe != "none":
        average = ledger(MODELS[model], replace(setting, probe_tokens=TYPICAL))["peak_gib"]
    train = found["phases"]["train"]
    row = {"model": model, "method": method, "source": "simulated", "average_gib": average, "peak_gib": peak, "needs_gib": peak,
           "step_gib": found["step_peak_gib"], "probe_gib": found["probe_peak_gib"], "before_adam_gib": sum(train.values()) - train[Category.OPTIMIZER.value]}
    if peak > capacity_gib():
        row["average_gib"] = row["peak_gib"] = float("nan")
    return row


def rows(models: list[str]) -> pd.DataFrame:
    """Table 1's rows of some of the paper's models, and Table 2's LoRA at 1.5B."""
    wanted = [(model, method) for model in models for method in ("dense", "logra")] + [("1.5B", "lora")] * ("1.5B" in models)
    return pd.DataFrame([bar(model, method) for model, method in wanted])


def rivals(models: list[str], names: list[str]) -> pd.DataFrame:
    """What each set of assumptions gives for the averages of Tables 1 and 2: columns rival, model, method, gib, printed_gib. Without a probe, which
    decides no average."""
    table, lora = printed.table("table1"), printed.table("table2").set_index("method").loc["lora", "average_gib"]
    known = {(row.model, row.method): row.average_gib for row in table.itertuples()} | {("1.5B", "lora"): lora}
    found = []
    for name in names:
        for (model, method), value in known.items():
            if model in models and not (model == "27B" and method == "dense"):
                gib = ledger(MODELS[model], replace(PAPER, method=method, probe="none", **RIVALS[name]))["peak_gib"]
                found.append({"rival": name, "model": model, "method": method, "gib": gib, "printed_gib": value})
    return pd.DataFrame(found)
