"""LoGRA beside its peers in supervised fine-tuning of SmolLM2-135M-Instruct: dense AdamW, LoRA (peft), GaLore (galore-torch), Flora (flora-opt).

    OMP_NUM_THREADS=1 python benchmarks/peers.py --problems gsm8k_train.jsonl --out data/recorded/peers

GaLore and Flora need: pip install --no-deps -r requirements/benchmarks.lock. All methods train the same 210 matrices at rank 64 (dense: in full) in
float32, on the same problems in the same order, without weight decay and at a constant rate. Each method makes a run at each of three rates; the one
whose held-out loss ends lowest counts. LoGRA's is made with two more seeds, for the noise of its projections. One file a run, written when it ends:
those that exist are not made again.

problems: JSONL of {"question", "answer"}, such as GSM8K's; of those of `TOKENS` tokens at most, the last `HELD_OUT` are held out. The loss is of the answer's tokens, in nats a token.
"""

import argparse
import hashlib
import json
import os
import shlex
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import peft
import torch
from torch.nn import functional as F

import logra
from logra.paper import provenance
from logra.rl import models
from logra.rl.footprint import Meter

SEEDS = (1, 2, 3)                                           # of LoGRA's projections; the first at every rate
RANK, BATCH, UPDATES, EVERY, HELD_OUT, MEASURED, TOKENS = 64, 2, 24, 8, 8, 2, 192
RATES = {                                                   # three values each, a factor of about three apart
    "logra-rademacher": (1e-4, 3e-4, 1e-3),                 # ‖ΔW‖/‖W‖ of an update
    "logra-hadamard": (1e-4, 3e-4, 1e-3),
    "dense": (1e-5, 3e-5, 1e-4),
    "lora": (1e-4, 3e-4, 1e-3),
    "galore": (3e-4, 1e-3, 3e-3),
    "flora": (1e-4, 3e-4, 1e-3),                            # its rate is times the RMS of the weight
}


def made(method: str, rate: float, seed: int, model):
    """(The optimizer, tensors that stand for the gradients): the model is changed to train the selected matrices alone."""
    names = list(logra.attach(model, RANK))
    logra.detach(model)
    if method.startswith("logra"):
        sketches = logra.attach(model, RANK, method.removeprefix("logra-"), seed=seed, modules=names)
        return logra.RowAdam(sketches, relative_step=rate), lambda: [sketch.S_dr for sketch in sketches.values()]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.removesuffix(".weight") in names)
    if method == "lora":
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names), model)
    weights = [p for p in model.parameters() if p.requires_grad]
    if method == "galore":
        from galore_torch import GaLoreAdamW

        groups = [dict(params=weights, rank=RANK, update_proj_gap=200, scale=0.25, proj_type="std")]      # its readme's settings
        optimizer = GaLoreAdamW(groups, lr=rate, no_deprecation_warning=True)
    elif method == "flora":
        from flora_opt import Flora

        optimizer = Flora(weights, lr=rate, rank=RANK, beta1=0.9)
    else:
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    return optimizer, lambda: [p.grad for p in weights if p.grad is not None]


def encoded(tokenizer, problem: dict) -> tuple[torch.Tensor, int]:
    """(Token ids, [1, t], how many of them are the question's)."""
    question = tokenizer.apply_chat_template([{"role": "user", "content": problem["question"]}], add_generation_prompt=True, tokenize=False)
    before = tokenizer(question, add_special_tokens=False).input_ids
    answer = tokenizer(problem["answer"] + tokenizer.eos_token, add_special_tokens=False).input_ids
    return torch.tensor([before + answer]), len(before)


def losses(model, ids: torch.Tensor, asked: int) -> torch.Tensor:
    """−log p of each of the answer's tokens."""
    return F.cross_entropy(model(input_ids=ids, use_cache=False).logits[0, asked - 1:-1], ids[0, asked:], reduction="none")


@torch.no_grad()
def held_out(model, problems) -> list[float]:
    """The mean loss of each problem."""
    return [float(losses(model, *problem).mean()) for problem in problems]


def update(model, optimizer, problems, label=lambda: None) -> float:
    """One update. label: called while the gradients are there."""
    total = sum(ids.shape[1] - asked for ids, asked in problems)
    loss = 0.0
    for ids, asked in problems:                             # one at a time: no padding
        part = losses(model, ids, asked).sum() / total
        part.backward()
        loss += float(part.detach())
    label()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run(method: str, rate: float, seed: int, path: Path) -> dict:
    """One run. `seconds`: of each update but those measured for memory; `bytes`: at the peak of update `MEASURED`, by category."""
    torch.manual_seed(0)
    model, tokenizer = models.load(models.SMOLLM2)
    rows = [encoded(tokenizer, json.loads(line)) for line in path.read_text().splitlines()]
    rows = [(ids, asked) for ids, asked in rows if ids.shape[1] <= TOKENS]
    train, kept = rows[:-HELD_OUT], rows[-HELD_OUT:]
    optimizer, gradients = made(method, rate, seed, model)
    meter = Meter()

    def label():
        meter.label([*model.parameters(), *model.buffers()], "weights")
        meter.label(gradients(), "gradients")
        states = [x for state in optimizer.state.values() for x in state.values()]
        states += [x.ortho_matrix for x in states if hasattr(x, "ortho_matrix")]
        meter.label([x for x in states if isinstance(x, torch.Tensor)], "optimizer")

    started = time.perf_counter()
    record = dict(method=method, rate=rate, seed=seed, rank=RANK, updates=UPDATES, batch=BATCH, tokens=TOKENS, held_out=HELD_OUT, problems=hashlib.sha256(path.read_bytes()).hexdigest(),
                  loss=[], seconds=[], evaluations={}, bytes=None)
    for number in range(1, UPDATES + 1):
        if (number - 1) % EVERY == 0:
            record["evaluations"][number - 1] = held_out(model, kept)
        batch = train[(number - 1) * BATCH:number * BATCH]
        before = time.perf_counter()
        if number == MEASURED:
            label()
            meter.restart()
            with meter.measuring():
                record["loss"].append(update(model, optimizer, batch, label))
            label()
            record["bytes"] = meter.at_peak() | {"peak": meter.peak}
        else:
            record["loss"].append(update(model, optimizer, batch))
            record["seconds"].append(time.perf_counter() - before)
    record["evaluations"][UPDATES] = held_out(model, kept)
    return record | {"wall_seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=RATES, default=list(RATES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    def ensured(method, rate, seed=SEEDS[0]) -> dict:
        file = args.out / f"{method}-{rate:.0e}-{seed}.json"
        if not file.exists():
            record = run(method, rate, seed, args.problems)
            packages = ("torch", "transformers", "peft", "galore-torch", "flora-opt")
            record |= {"command": f"OMP_NUM_THREADS=1 python benchmarks/peers.py --problems {shlex.quote(args.problems.name)} --out data/recorded/peers",
                       "versions": {"python": sys.version.split()[0]} | {name: version(name) for name in packages},
                       "machine": provenance.device(), "load": os.getloadavg()[0]}
            aside = file.with_suffix(".aside")
            aside.write_text(json.dumps(record) + "\n")
            aside.rename(file)
        record = json.loads(file.read_text())
        loss = statistics.fmean(record["evaluations"][str(UPDATES)])
        print(f"{method:18} {rate:.0e} seed {seed}: held-out {loss:.4f}, {statistics.median(record['seconds']):.2f} s an update", flush=True)
        return record | {"mean": loss}

    for method in args.methods:
        best = min((ensured(method, rate) for rate in RATES[method]), key=lambda record: record["mean"])
        for seed in SEEDS[1:] if method.startswith("logra") else ():
            ensured(method, best["rate"], seed)


if __name__ == "__main__":
    main()
