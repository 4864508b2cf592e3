"""A run whose responses vLLM samples, beside the same run by the Hugging Face rollout that is given these responses: the same weights, to the bit?

    python benchmarks/engine_trial.py [--model smollm2-135m-instruct] [--updates 20] [--prompts 32] [--budget 1.28e-1] [--out FILE]

The settings are those of `logra.paper.real_runs` at rank 64. The engine runs in bfloat16 in a process of its own, kept up with by exact low-rank
updates; the other trainer samples on its own float32 weights, which is timed, and is then handed the engine's responses with their log-probabilities.
Exits 1 unless after every update both trainers hold the same bits and the engine's are those of the trainer rounded to bfloat16. Needs vLLM's
interpreter (./reproduce.sh setup-vllm); the trial runs in the project's.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

from logra import sync
from logra.paper import real_runs
from logra.rl.rollout import Rollout
from logra.rl.train import Trainer


class Timed:
    """A rollout whose sampling is timed; `seconds` stays the rollout's own, of its last publication. `given`: batches that are handed out in the place of its own."""

    def __init__(self, rollout, given: list[Rollout] | None = None):
        self.rollout, self.given, self.batches, self.tokens, self.sampling = rollout, given, [], 0, 0.0

    def generate(self, *arguments) -> Rollout:
        began = time.perf_counter()
        sampled = self.rollout.generate(*arguments)
        self.sampling += time.perf_counter() - began
        self.tokens += int(sampled.response_mask.sum())
        self.batches.append(sampled)
        return sampled if self.given is None else self.given[len(self.batches) - 1]

    def __getattr__(self, name):
        return getattr(self.rollout, name)

    def speed(self) -> dict:
        return {"tokens": self.tokens, "seconds": round(self.sampling, 2), "tokens_per_second": round(self.tokens / self.sampling, 1)}


def trial(model: str, updates: int, prompts: int, budget: float) -> dict:
    """Both trainers, update by update; see above."""
    sizes = real_runs.sizes(updates=updates, prompts=prompts, evaluate_every=updates, evaluation_prompts=2, max_new_tokens=12)
    config = real_runs.config("logra-64", 1, budget, sizes).model_copy(update={"model": model})
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    engine = Trainer(config.model_copy(update={"rollout": "vllm", "sync": "exact"}))
    try:
        engine.rollout = Timed(engine.rollout)
        own = Trainer(config)
        own.rollout = Timed(own.rollout, given=engine.rollout.batches)
        rows = []
        for update in range(1, updates + 1):
            row, other = engine.step(), own.step()
            weights = own.model.state_dict()
            differing, entries = engine.rollout.engine.compare(sync.full_weights(engine.method.sketches, torch.bfloat16))
            rows.append({"update": update, "same_weights": all(torch.equal(x, weights[name]) for name, x in engine.model.state_dict().items()),
                         "same_metrics": all(row[name] == other[name] for name in other), "engine_differing": differing, "engine_entries": entries,
                         **{name: row[name] for name in ("reward", "length", "mismatch", "predicted_kl", "realised_kl", "sync", "sync_bytes")},
                         "sync_seconds": engine.seconds["sync"]})
            print(rows[-1], flush=True)
        return {"model": model, "updates": rows, "vllm": engine.rollout.speed(), "hugging_face": own.rollout.speed()}
    finally:
        engine.rollout.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/engine_trial.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=real_runs.SMOLLM2)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--budget", type=float, default=1.28e-1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    found = trial(options.model, options.updates, options.prompts, options.budget)
    found |= {"command": f"python benchmarks/engine_trial.py --updates {options.updates} --prompts {options.prompts} --budget {options.budget}", "torch": torch.__version__,
              "python": platform.python_version(), "machine": platform.machine(), "seconds": round(time.perf_counter() - began)}
    same = all(row["same_weights"] and row["same_metrics"] and row["engine_differing"] == 0 for row in found["updates"])
    print(f"{'the same bits' if same else 'NOT the same bits'} after each of {options.updates} updates; tokens a second: vLLM {found['vllm']['tokens_per_second']} (bfloat16), "
          f"Hugging Face {found['hugging_face']['tokens_per_second']} (float32)")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
