"""The runs of a real pretrained model, SmolLM2-135M-Instruct on `rl.chat`'s two tasks, that ext_real_model draws. Their settings stand here once.

    sizes = real_runs.sizes()
    swept, best = real_runs.sweep({"logra": [8e-3, 3.2e-2, 1.28e-1], …}, updates=15, seed=7, sizes=sizes)
    made = real_runs.make(best, seeds=[1, 2], sizes=sizes)              # {"logra-64": [Run, Run], "logra-256": …, "dense": …, "lora": …}
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import logra
from logra.paper import learner_runs, provenance, reconstruction
from logra.rl import footprint, models, rollout, runs, tasks
from logra.rl.config import RunConfig
from logra.rl.models import SMOLLM2
from logra.rl.records import RECORDED, core
from logra.rl.train import Trainer

# line in the figures -> method and rank. Every method trains the same matrices, those that rank 256 allows: q, o, gate, up and down
VARIANTS = {"logra-64": ("logra", 64), "logra-256": ("logra", 256), "dense": ("dense", 64), "lora": ("lora", 64)}
LABELS = {"logra-64": "LoGRA, rank 64", "logra-256": "LoGRA, rank 256", "dense": "Dense AdamW", "lora": "LoRA, rank 64"}
SWEPT = {"logra": "logra-64", "dense": "dense", "lora": "lora"}          # the line that a method's sweep runs; rank 256 takes rank 64's budget
LATE = 5                                                                # updates at the end of a sweep's run, whose mean reward decides it


def sizes(updates: int = 100, prompts: int = 32, evaluate_every: int = 10, evaluation_prompts: int = 80, max_new_tokens: int = 12) -> dict[str, Any]:
    """What all runs share. A schedule's horizon is one and a half times the run, as in the paper (300 against 200)."""
    return dict(updates=updates, prompts=prompts, micro_batch=prompts, evaluate_every=evaluate_every, evaluation_prompts=evaluation_prompts,
                max_new_tokens=max_new_tokens, schedule_updates=updates * 3 // 2, budget_updates=updates * 3 // 2)


def config(line: str, seed: int, value: float, sizes: Mapping[str, Any], **more) -> RunConfig:
    """The run of one line at its learning rate, or its initial KL budget, both annealed to a tenth but for LoRA's (Table 4, D.4).
    The mismatch κ that the control subtracts (Eq. 17) is that between sampling in float32 and training in bfloat16."""
    method, rank = VARIANTS[line]
    own = {"logra": dict(budget=value, budget_end=value / 10), "dense": dict(learning_rate=value, learning_rate_end=value / 10),
           "lora": dict(learning_rate=value)}[method]
    return RunConfig(name=f"smollm2-{line}", model=SMOLLM2, task="logra.rl.chat:chat_mixture", method=method, rank=rank, selected_above=256, seed=seed,
                     temperature=0.7, binary_reward=False, compute="bfloat16", probe_responses=4, evaluation_samples=1, checkpoint_every=10,
                     **{"evaluation_resamples": 1000, **sizes, **own, **more})


def first(updates: int, line: str, seed: int, value: float, sizes: Mapping[str, Any], **more) -> RunConfig:
    """The first updates of such a run, without evaluations that anybody would read: what a sweep compares, and ext_equal_memory."""
    return config(line, seed, value, dict(sizes) | dict(updates=updates, evaluate_every=updates, evaluation_prompts=2, evaluation_resamples=0), **more)


def sweep(values: Mapping[str, Sequence[float]], updates: int, seed: int, sizes: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, float]]:
    """The first `updates` updates of a run a value of each method, on a seed that no figure uses; and by method the value with the highest
    mean reward over the last of them. A method with a single value is not swept."""
    pairs = [(method, value) for method, chosen in values.items() if len(chosen) > 1 for value in chosen]
    made = runs.ensure([first(updates, SWEPT[method], seed, value, sizes) for method, value in pairs])
    column = "reward, last five updates"
    rows = pd.DataFrame([{"method": method, "setting": learner_runs.SETTINGS[method], "value": value, column: run.metrics["reward"].tail(LATE).mean()}
                         for (method, value), run in zip(pairs, made)], columns=["method", "setting", "value", column])
    found = rows.loc[rows.groupby("method")[column].idxmax()].set_index("method")["value"].to_dict()
    return rows, {method: found.get(method, chosen[0]) for method, chosen in values.items()}


def make(best: Mapping[str, float], seeds: Sequence[int], sizes: Mapping[str, Any], lines: Sequence[str] = tuple(VARIANTS)) -> dict[str, list[runs.Run]]:
    """The runs of each line, one a seed. The first seed's LoGRA runs keep their weights half-way and at the end."""
    def one(line: str, seed: int) -> RunConfig:
        kept = {"keep_weights_at": tuple(sorted({sizes["updates"] // 2, sizes["updates"]} - {0}))} if VARIANTS[line][0] == "logra" and seed == seeds[0] else {}
        return config(line, seed, best[VARIANTS[line][0]], sizes, **kept)

    made = runs.ensure([one(line, seed) for seed in seeds for line in lines])                # a seed of all before the next
    return {line: made[i::len(lines)] for i, line in enumerate(lines)}


def again(run: runs.Run, updates: int) -> tuple[pd.DataFrame, bool]:
    """The run's first updates made once more, measured: its rows as in `Run.metrics`, the bytes of `footprint.measure`, and `process_mib`, the most
    resident memory that the process had until then. With them, whether they are shipped and were not made here."""
    def measure(folder: Path) -> None:
        with core(), ProcessPoolExecutor(1, mp_context=runs.FORKED) as process:
            process.submit(_again, run.config, updates).result().to_parquet(folder / "rows.parquet")

    folder = provenance.cached("smollm2-again", {"run": run.config.hash(), "updates": updates}, measure)
    return pd.read_parquet(folder / "rows.parquet"), folder.is_relative_to(RECORDED)


def _again(config: RunConfig, updates: int) -> pd.DataFrame:
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    trainer, rows, made = Trainer(config), [], []
    step = trainer.step
    trainer.step = lambda: made.append(step()) or made[-1]               # `measure` keeps bytes alone of the row
    for _ in range(updates):
        found = footprint.measure(trainer)
        rows.append({**made[-1], **found, "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024})
    return pd.DataFrame(rows)


def ledger(line: str) -> dict[str, int]:
    """Bytes of what a line's method holds of every selected matrix between two parts of an update, from shapes alone: weights (of the whole
    model), gradients, optimizer, projections; the categories of `footprint`."""
    model, _ = models.load(SMOLLM2)
    weights = sum(p.numel() for p in model.parameters())
    selected = [(s.d, s.k) for s in logra.attach(model, 256).values()]
    method, rank = VARIANTS[line]
    rows, columns, entries = (sum(f(d, k) for d, k in selected) for f in (lambda d, k: d, lambda d, k: k, lambda d, k: d * k))
    elements = {"dense": (weights, entries, 2 * entries, 0), "lora": (weights + rank * (rows + columns), rank * (rows + columns), 2 * rank * (rows + columns), 0),
                "logra": (weights, rank * rows, 2 * rows, rank * columns)}[method]           # RowAdam's statistics are float64
    return dict(zip(("weights", "gradients", "optimizer", "projections"), (4 * n for n in elements)))


def responses(run: runs.Run, problems: int) -> pd.DataFrame:
    """What the base and the run's last weights answer to the first held-out problems, one response each, sampled as at an evaluation.

    Columns: task, question, answer, and of `before` and `after` the text, its score (score_before, …), and whether it ended by itself (ended_before, …).
    The run must have kept its weights (`keep_weights_at`).
    """
    config = run.config

    def sample(folder: Path) -> None:
        task = tasks.task(config.task, **config.task_config)
        asked = [task.problem("evaluation", i) for i in range(problems)]
        rows = pd.DataFrame({"task": [p.task for p in asked], "question": [p.prompt[-1]["content"] for p in asked], "answer": [p.answer for p in asked]})
        for when, source in (("before", config.model), ("after", run.folder / f"weights-{config.updates:06d}")):
            model, tokenizer = models.load(source)
            out = rollout.generate(model, tokenizer, [p.prompt for p in asked], rollout.named_seed(config.seed, "responses"), config.max_new_tokens,
                                   config.evaluation_temperature, config.evaluation_top_p, recorded=False)
            rows[when], rows[f"ended_{when}"] = out.texts, out.complete.numpy()
            rows[f"score_{when}"] = [task.verify(text, problem) for text, problem in zip(out.texts, asked)]
        rows.to_parquet(folder / "responses.parquet")

    return pd.read_parquet(provenance.cached("smollm2-responses", {"run": config.hash(), "problems": problems}, sample) / "responses.parquet")


def states(run: runs.Run, responses: int, ranks: Sequence[int], projection_seeds: int) -> pd.DataFrame:
    """Figure 5(b, c) at the run's start, middle and end: the cosine of a minibatch's policy gradient with its reconstruction, as
    `reconstruction.measure` takes it, averaged as there. Columns: update, condition, rank, measured, standard_error, closed_form, correct (share of the
    responses). The run must have kept its weights."""
    config, tables = run.config, []
    for update in sorted({0, *config.keep_weights_at}):
        def measure(folder: Path) -> None:
            source = run.folder / f"weights-{update:06d}" if update else config.model
            asked = reconstruction.Settings(model=str(source), minibatches=1, responses=responses, ranks=tuple(ranks), projection_seeds=projection_seeds)
            for name, table in zip(("cosines", "gradients", "responses"), reconstruction.measure(asked, progress=False)):
                table.to_parquet(folder / f"{name}.parquet")

        found = provenance.cached("smollm2-state", {"run": config.hash(), "update": update, "responses": responses, "ranks": list(ranks), "seeds": projection_seeds}, measure)
        cosines, gradients, answers = (pd.read_parquet(found / f"{name}.parquet") for name in ("cosines", "gradients", "responses"))
        cells = reconstruction.cells(cosines, gradients).groupby(["condition", "rank"]).agg(
            measured=("measured", "mean"), standard_error=("standard_error", lambda e: (e ** 2).sum() ** 0.5 / len(e)), closed_form=("closed_form", "mean"))
        tables.append(cells.reset_index().assign(update=update, correct=answers[answers["used"]]["reward"].mean()))
    return pd.concat(tables, ignore_index=True)
