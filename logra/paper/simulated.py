"""Simulated memory of the paper's training calls: what Figures 1 and 3 and the memory map draw.

    python -m logra.paper.simulated            # simulates the shipped ledgers again and says which differ
    python -m logra.paper.simulated --ship     # ships those that records/ holds

A ledger of 27B parameters takes minutes, so those that the laptop profile draws are shipped; another is simulated and kept as a record.

All rows of Tables 1 and 2 are simulated under one set of assumptions, `logra.memory.PAPER`, with nothing set row by row. The paper states
the sizes, FSDP over four GPUs, BF16 computation, checkpointing and the micro-batch; the rest of the set is ours, and `RIVALS` are its alternatives.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from logra.memory_setting import GIB, LEAST, PAPER, Category, Setting
from logra.paper import printed, provenance
from logra.rl.records import RECORDED, ROOT, cores, log_input, write_whole
from logra.rl.runs import FORKED

MODELS = {"1.5B": "Qwen2.5-Math-1.5B", "7B": "Qwen2.5-Math-7B", "27B": "Qwen3.5-27B"}
TYPICAL = 1024                                              # tokens of a response in the probe of a typical update; the paper prints no lengths
ASSUMPTIONS = ("fp32 weights sharded over 4 GPUs (FSDP2), gathered in bf16, embedding and head through forward and backward; fp32 gradients and moments of the attention and "
               "MLP projections alone; every layer checkpointed; whole fp32 logits beside bf16 ones, their gradient written over them; S, A and a second d×r buffer in fp32, whole on "
               f"every GPU; one 4,096-token response a micro-batch; JVP probe of one response with eager attention, {TYPICAL:,} tokens in the average, 4,096 in the peak; "
               "no streams, workspaces, fragmentation; a set chosen with the printed averages in view")
RIVALS = {
    "the assumptions": {},
    "no second d×r buffer": dict(resident_factor=False),
    "… and A hashed a layer at a time": dict(resident_factor=False, keep_projections=False),
    "log_softmax of whole fp32 logits": dict(loss="whole"),
    "logits in chunks": dict(loss="chunked"),
    "dense: all weights trained": dict(trainable="all"),
    "whole logits, referenced through backward": dict(loss="kept"),
}
SHIPPED = RECORDED / "memory.json"
PROBED = 4096                                               # `probe_tokens` of a run with a long context: what of a response the probe takes


def capacity_gib() -> float:
    """The paper's GPU, "80 GB", read as 80·10⁹ bytes: the smaller reading, so that what fits it fits either."""
    return printed.text("gpu_memory") * 1e9 / GIB


def ledger(model: str, setting: Setting) -> dict:
    """`Ledger.summary()` of a shipped model's step, GiB: shipped, else from its record. A test simulates some of the shipped again."""
    if (known := shipped().get(key(model, setting))) is not None:
        log_input(SHIPPED)
        return known

    def make(folder: Path) -> None:
        (folder / "ledger.json").write_text(json.dumps(simulate(model, setting), indent=1) + "\n")

    folder = provenance.cached("memory", {"model": model, "setting": asdict(setting)}, make)
    return json.loads((folder / "ledger.json").read_text())


def simulate(model: str, setting: Setting) -> dict:
    """The same, made anew."""
    from logra import memory                                # with torch: who only draws shipped ledgers does not wait for it

    return memory.simulate(memory.configuration(model), setting).summary()


def shipped() -> dict[str, dict]:
    """{model and what differs from `Setting()`: its summary}."""
    return json.loads(SHIPPED.read_text()) if SHIPPED.exists() else {}


def key(model: str, setting: Setting) -> str:
    changes = {name: value for name, value in asdict(setting).items() if value != getattr(Setting(), name)}
    return " ".join([model, *(f"{name}={value}" for name, value in sorted(changes.items()))])


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


# Below the paper: this library's switches, one after another, each on top of those before.
SWITCHES = {
    "the paper's stack, as assumed": {},
    "no second d×r buffer": dict(resident_factor=False),
    "A hashed a layer at a time": dict(keep_projections=False),
    "logits in chunks": dict(loss="chunked"),
    "the probe's attention in blocks": dict(probe_attention="sdpa"),
    "S reduced to shards as it is made": dict(sharded_sketches=True),
    "the embedding gathered for its own use": dict(split_embedding=True),
    "one A for those that read the same": dict(share_inputs=True),
}
TARGETS = {"1.5B": 4.0, "7B": 12.5, "27B": 36.0}            # GiB a GPU that the switches are to reach: ours, not the paper's


def _flat(model: str, setting: Setting, **columns) -> list[dict]:
    """A row for each phase: its categories, and their sum `gib`."""
    return [{"model": model, **columns, "phase": phase, **sizes, "gib": sum(sizes.values())} for phase, sizes in ledger(MODELS.get(model, model), setting)["phases"].items()]


def staircase(models: list[str], switches: list[str], **changes) -> pd.DataFrame:
    """Bytes by category at each phase's peak, switch by switch. changes: of the setting, such as rank and context."""
    found, setting = [], replace(PAPER, **changes)
    for switch in switches:
        setting = replace(setting, **SWITCHES[switch])
        for model in models:
            found += _flat(model, setting, switch=switch)
    return pd.DataFrame(found)


TRADES = {
    "all of the above": {},
    "no checkpointing": dict(checkpointing=False, probe="none"),    # the probe makes no graph: it needs what it did
    "no checkpointing, one A each": dict(checkpointing=False, share_inputs=False, probe="none"),
    "selective checkpointing": dict(selective=True, probe="none"),
    "finite differences, gathered in float32": dict(probe="finite_difference", gathered="float32"),    # the only way that a run lets them be
}


def trades(models: list[str], **changes) -> pd.DataFrame:
    """Switches that save bytes for time, or time for bytes, a row for each model, method and switch. GiB: `step`, at the training step's highest; of these
    `activations`, `projections` (with what hashing them needs) and `gathered`; `probe`, none where there is none or it is the one of "all of the above"."""
    wanted, found = [("dense", "all of the above"), ("dense", "no checkpointing")] + [("logra", switch) for switch in TRADES], []
    for model in models:
        for method, switch in wanted:
            phases = {row["phase"]: row for row in _flat(model, replace(LEAST, method=method, **changes | TRADES[switch]))}
            step = phases["train"]
            parts = {category.value: step[category.value] for category in (Category.ACTIVATIONS, Category.PROJECTIONS, Category.GATHERED)}
            found.append({"model": model, "method": method, "switch": switch, "step": step["gib"], **parts, "probe": phases["probe"]["gib"] if "probe" in phases else float("nan")})
    return pd.DataFrame(found)


def grid(model: str, ranks: list[int], contexts: list[int], **changes) -> pd.DataFrame:
    """The least setting over ranks and contexts, the probe as long as the context."""
    return pd.DataFrame([row for rank in ranks for context in contexts
                         for row in _flat(model, replace(LEAST, rank=rank, context=context, probe_tokens=context, **changes), rank=rank, context=context)])


def between(grid: pd.DataFrame, rank: float, context: float) -> pd.DataFrame:
    """A grid's categories by phase at a rank and context between its own: linear in either, as nearly all of them are."""
    categories = [category.value for category in Category]
    found = {}
    for phase, frame in grid.groupby("phase", sort=False):
        values = frame.set_index(["rank", "context"])[categories]
        ranks, contexts = (sorted(values.index.unique(level)) for level in ("rank", "context"))
        (r0, r1, u), (c0, c1, v) = _bracket(ranks, rank), _bracket(contexts, context)
        low, high = (values.loc[(r, c0)] * (1 - v) + values.loc[(r, c1)] * v for r in (r0, r1))
        found[phase] = low * (1 - u) + high * u
    return pd.DataFrame(found)


def _bracket(points: list, x: float) -> tuple:
    low = max([p for p in points[:-1] if p <= x], default=points[0])
    high = points[min(points.index(low) + 1, len(points) - 1)]
    return low, high, (x - low) / (high - low) if high > low else 0.0


def needs(model: str, setting: Setting, lengths: list[int], room: float = math.inf) -> dict[int, float]:
    """{context: GiB at the highest peak} of contexts simulated in turn, up to the first that needs more than `room`. Where a response is longer than
    `PROBED` tokens, the probe takes so many of it: forward AD has no fused attention.

    Those beyond `PROBED`, which take minutes, are simulated on one GPU and on four. On another number they need more than a shorter one by what they do on
    four: GPUs share weights and sketches, while a token's activations are whole on each.
    """
    def need(context: int, gpus: int) -> float:
        return ledger(MODELS.get(model, model), replace(setting, context=context, probe_tokens=min(context, PROBED), gpus=gpus))["peak_gib"]

    found, before = {}, 0
    for context in sorted(lengths):
        if before >= PROBED and setting.gpus not in (1, 4):
            found[context] = found[before] + need(context, 4) - need(before, 4)
        else:
            found[context] = need(context, setting.gpus)
        if found[context] > room:
            break
        before = context
    return found


def on_line(needed: dict[int, float], context: int) -> float:
    """GiB that a context needs, read from simulated ones: on the straight line through its neighbours, or through the last two of them.

    What a context needs is flat while gathered weights or the probe decide, and from there a line: attention runs in blocks, so that every activation
    is as long as the context. Between two lengths the line lies above what is needed, if anything.
    """
    low, high, part = _bracket(sorted(needed), context)
    return needed[low] + (needed[high] - needed[low]) * part


def longest(needed: dict[int, float], room: float, most: int) -> int:
    """The longest context that fits, a multiple of 256 and `most` at most, as `on_line` reads what it needs; 0 if the shortest simulated does not."""
    if needed[min(needed)] > room:
        return 0
    low, high = 0, most // 256                              # contexts in 256 tokens: the need only grows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if on_line(needed, max(256 * middle, min(needed))) <= room else (low, middle - 1)
    return 256 * low


def fits(models: dict[str, list[int]], cards: list[str], rank: int, most: dict[str, int]) -> pd.DataFrame:
    """For cards such as "4 x 80" (GB): the longest context that fits (0: not even the shortest simulated), a model's `most` tokens at most, and GiB that it needs, or
    that the shortest does. models: of each, the lengths that are simulated. simulated_to: the longest of them that was needed."""
    found = []
    for card in cards:
        number, size = card.split(" x ")
        room = float(size) * 1e9 / GIB
        for model, lengths in models.items():
            needed = needs(model, replace(LEAST, rank=rank, gpus=int(number)), lengths, room)
            context = longest(needed, room, most[model])
            found.append({"model": model, "cards": card, "room_gib": room, "longest_context": context, "simulated_to": max(needed),
                          "gib": on_line(needed, max(context, min(needed)))})
    return pd.DataFrame(found)


def off_line(models: dict[str, list[int]], beyond: list[tuple[str, int, int]], rank: int) -> pd.DataFrame:
    """How far the lines of `fits` are from contexts that were simulated and that they do not use. beyond: (model, GPUs, context)."""
    found = []
    for model, gpus, context in beyond:
        setting = replace(LEAST, rank=rank, gpus=gpus)
        line = on_line(needs(model, setting, models[model]), context)
        found.append({"model": model, "gpus": gpus, "context": context, "gib": needs(model, setting, [context])[context], "line_gib": line})
    return pd.DataFrame(found, columns=["model", "gpus", "context", "gib", "line_gib"])


def positions(model: str) -> int:
    """The longest context that a model was made for."""
    return json.loads((ROOT / "logra" / "model_configs" / f"{MODELS.get(model, model)}.json").read_text())["max_position_embeddings"]


def ship() -> int:
    """Adds the ledgers under records/ to the shipped ones. Returns how many there are then."""
    found = shipped()
    for folder in sorted(provenance.records_root().glob("memory-*")):
        config = json.loads((folder / "config.json").read_text())
        found[key(config["model"], Setting(**config["setting"]))] = json.loads((folder / "ledger.json").read_text())
    write_whole(SHIPPED, json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    return len(found)


def differing(keys: list[str]) -> list[str]:
    """Those of these shipped ledgers that this code does not give to the byte."""
    known = shipped()
    models, settings = [key.split()[0] for key in keys], [Setting(**known[key]["setting"]) for key in keys]
    with ProcessPoolExecutor(cores(), mp_context=FORKED) as pool:
        made = tqdm(pool.map(simulate, models, settings), total=len(keys), unit="ledger")
        return [key for key, found in zip(keys, made) if found["phases"] != known[key]["phases"]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m logra.paper.simulated", description="Simulates the shipped memory ledgers again and says which differ.")
    parser.add_argument("--ship", action="store_true", help="add the ledgers under records/ to the shipped ones")
    if parser.parse_args().ship:
        print(f"{ship()} ledgers in {SHIPPED.relative_to(ROOT)}")
        return 0
    found = differing(list(shipped()))
    print("\n".join(found) or "all as shipped")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
