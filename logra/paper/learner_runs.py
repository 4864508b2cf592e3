"""The small learner's runs that Figures 1 to 3 and Tables 1, 2 and 4 speak of. Their settings stand here once, so that a run is made once.

    sizes = learner_runs.sizes(updates=200, prompts=128, evaluate_every=5, evaluation_prompts=128, relative_step=2e-3)
    swept, best = learner_runs.sweep({"dense": [1e-4, 3e-4, 1e-3], "logra": [2e-4, 1e-3, 5e-3]}, seed=7, sizes=sizes)
    made = learner_runs.make(best, seeds=[1, 2, 42], sizes=sizes)       # {"dense": [Run, Run, Run], "logra": [...]}
    bytes_ = learner_runs.footprints({m: [run.config for run in group] for m, group in made.items()}, updates=100, every=5)
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from logra.paper import provenance
from logra.rl import runs
from logra.rl.config import RunConfig
from logra.rl.records import core, cores

LABELS = {"dense": "Dense AdamW", "logra": "LoGRA", "lora": "LoRA"}
SETTINGS = {"dense": "learning rate", "logra": "KL budget", "lora": "learning rate"}      # what is swept
LATE = 5                                                     # evaluations at the end, whose mean decides a sweep
PROJECTIONS = {"fixed": dict(projection="rademacher", refresh=False), "rademacher": dict(projection="rademacher"),
               "gaussian": dict(projection="gaussian"), "hadamard": dict(projection="hadamard")}


def sizes(updates: int, prompts: int, evaluate_every: int, evaluation_prompts: int, relative_step: float) -> dict[str, Any]:
    """What all methods share. A schedule's horizon is one and a half times the run, as in the paper (300 against 200)."""
    return dict(updates=updates, prompts=prompts, micro_batch=prompts, evaluate_every=evaluate_every, evaluation_prompts=evaluation_prompts,
                schedule_updates=updates * 3 // 2, budget_updates=updates * 3 // 2, relative_step=relative_step)


def dense(seed: int, rate: float, sizes: Mapping[str, Any]) -> RunConfig:
    """AdamW, warm-up and cosine to a tenth (Table 4)."""
    return RunConfig(name="learner-dense", method="dense", seed=seed, learning_rate=rate, learning_rate_end=rate / 10, **sizes)


def logra(seed: int, budget: float, sizes: Mapping[str, Any]) -> RunConfig:
    """RowAdam on refreshed Rademacher sketches, the predicted-KL budget annealed to a tenth (Table 4)."""
    return RunConfig(name="learner-logra", method="logra", seed=seed, budget=budget, budget_end=budget / 10, **sizes)


def lora(seed: int, rate: float, sizes: Mapping[str, Any]) -> RunConfig:
    """AdamW on adapters of LoGRA's rank and matrices, at a constant rate (D.4)."""
    return RunConfig(name="learner-lora", method="lora", seed=seed, learning_rate=rate, **sizes)


def late_sizes(updates: int, prompts: int, evaluate_every: int, evaluation_prompts: int, late: int, relative_step: float) -> dict[str, Any]:
    """What all of `projected` share: only the last `late` evaluations are made, beside the one at the start."""
    return dict(updates=updates, prompts=prompts, micro_batch=prompts, evaluate_every=evaluate_every, evaluate_from=updates - (late - 1) * evaluate_every,
                evaluation_prompts=evaluation_prompts, budget_updates=updates * 3 // 2, relative_step=relative_step)


def projected(kind: str, rank: int, budget: float, seed: int, sizes: Mapping[str, Any]) -> RunConfig:
    """A run of Figure 5(a): one of `PROJECTIONS`, a rank, and a budget annealed to a tenth."""
    return RunConfig(name="learner-rank", seed=seed, rank=rank, budget=budget, budget_end=budget / 10, **PROJECTIONS[kind], **sizes)


MAKERS = {"dense": dense, "logra": logra, "lora": lora}


def sweep(values: Mapping[str, Sequence[float]], seed: int, sizes: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, float]]:
    """One run a value of each method, on a seed that no figure uses; and by method the value with the highest Pass@1 over the last evaluations."""
    pairs = [(method, value) for method, chosen in values.items() for value in chosen]
    made = runs.ensure([MAKERS[method](seed, value, sizes) for method, value in pairs])
    column = "Pass@1, last five evaluations"
    rows = pd.DataFrame([{"method": method, "setting": SETTINGS[method], "value": value, column: run.evaluations["pass_at_1"].tail(LATE).mean()}
                         for (method, value), run in zip(pairs, made)])
    return rows, rows.loc[rows.groupby("method")[column].idxmax()].set_index("method")["value"].to_dict()


def make(best: Mapping[str, float], seeds: Sequence[int], sizes: Mapping[str, Any]) -> dict[str, list[runs.Run]]:
    """The runs of each method at its value, one a seed."""
    made = runs.ensure([MAKERS[method](seed, value, sizes) for method, value in best.items() for seed in seeds])
    return {method: made[i * len(seeds):(i + 1) * len(seeds)] for i, method in enumerate(best)}


def footprints(configs: Mapping[str, Sequence[RunConfig]], updates: int, every: int) -> pd.DataFrame:
    """Bytes of the training call along these runs, as `logra.rl.footprint` measures them: one row a run and measured update.

    Columns: method, seed, micro_batch, and those of `footprint.measure`. Each run's first updates are made again, measured, once: a record of its own.
    """
    def one(config: RunConfig) -> pd.DataFrame:
        def measure(folder: Path) -> None:
            with core():
                processes.submit(_trace, config, updates, every).result().to_parquet(folder / "bytes.parquet")

        folder = provenance.cached("footprint", {"run": config.hash(), "updates": updates, "every": every}, measure)
        return pd.read_parquet(folder / "bytes.parquet").assign(method=config.method, seed=config.seed, micro_batch=config.micro_batch)

    # a process is started when something is submitted: none where every record exists
    with ProcessPoolExecutor(cores(), mp_context=runs.FORKED) as processes, ThreadPoolExecutor(cores()) as threads:
        return pd.concat(threads.map(one, [config for group in configs.values() for config in group]), ignore_index=True)


def _trace(config: RunConfig, updates: int, every: int) -> pd.DataFrame:
    from logra.rl import footprint                          # with torch: where nothing is measured, nobody waits for it

    return footprint.trace(config, updates, every)


def summary(made: Mapping[str, Sequence[runs.Run]], bytes_: pd.DataFrame, last: int) -> pd.DataFrame:
    """One row a run, as Tables 1 and 2 count: method, seed; updates, those without an update; average_mib, peak_mib; updates_per_hour,
    seconds_per_update (the training call alone); pass_at_1, pass_at_4, a run's highest up to update `last`, in percent."""
    rows = []
    for method, group in made.items():
        for run in group:
            seconds, evaluations, metrics = run.timings, run.evaluations, run.metrics
            evaluations = evaluations[evaluations["update"] <= last]
            size = metrics["gradient_norm" if "gradient_norm" in metrics else "sketch_norm"]
            moved = metrics["update"][size > 0]
            own = bytes_[(bytes_["method"] == method) & (bytes_["seed"] == run.config.seed) & bytes_["update"].isin(moved)]["peak"] / 2 ** 20
            call = seconds[[part for part in ("train", "probe", "update") if part in seconds]].sum(axis=1)[(size > 0).to_numpy()]
            rows.append({"method": method, "seed": run.config.seed, "updates": len(metrics), "without_update": len(metrics) - len(moved),
                         "average_mib": own.mean(), "peak_mib": own.max(), "updates_per_hour": 3600 / seconds["total"].mean(),
                         "seconds_per_update": call.mean(),
                         "pass_at_1": 100 * evaluations["pass_at_1"].max(), "pass_at_4": 100 * evaluations["pass_at_k"].max()})
    return pd.DataFrame(rows)


def peak_of_mean(bytes_: pd.DataFrame) -> pd.DataFrame:
    """Of each method's curve of per-update peaks, averaged over seeds: its highest point and the sample sd over seeds there, MiB (Table 1's definition)."""
    curve = (bytes_.assign(mib=bytes_["peak"] / 2 ** 20).groupby(["method", "update"])["mib"].agg(["mean", "std"])).reset_index()
    return curve.loc[curve["mean"].fillna(-1).groupby(curve["method"]).idxmax()].set_index("method")


def value(mean: float, sd: float, digits: int = 2, unit: str = "") -> str:
    """"67.87 ± 1.23"; without a spread where it is NaN, "–" for a mean that is."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.{digits}f}" + ("" if pd.isna(sd) else f" ± {sd:.{digits}f}") + (unit and f" {unit}")


def plus_minus(values: pd.Series, digits: int = 2, unit: str = "") -> str:
    """The same of values: their mean and sample standard deviation; the mean alone of a single value."""
    return value(values.mean(), values.std(), digits, unit)
