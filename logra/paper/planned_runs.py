"""The runs of a plan (`logra.paper.plan`) as a notebook draws them: their records are read, and nothing is trained.

    found = planned_runs.read("h100", "main", models=["1.5B", "7B"], seeds=[1, 2, 42])     # [("1.5B", Run), …]
    made = planned_runs.by_method(found)                     # {"1.5B": {"dense": [Run, Run, Run], "logra": […]}, …}
    memory = planned_runs.peaks(found)                       # as `learner_runs.footprints`
    note = planned_runs.about(found)                         # "Qwen2.5-Math-1.5B, …; 4 × NVIDIA H100 80GB HBM3 train, 4 vLLM engines generate"
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from logra.paper import learner_runs, plan
from logra.rl import runs
from logra.rl.records import ROOT, MissingRecord
from logra.rl.runs import Run


def read(profile: str, group: str, models: Sequence[str] = (), seeds: Sequence[int] = (), methods: Sequence[str] = ()) -> list[tuple[str, Run]]:
    """(a model's label, a run of it), in the plan's order: the runs of profiles/<profile>/<group>.yaml, of these models, seeds and methods where any are named.

    A run that the plan refuses, since it does not fit the cards, is left out, and said to be. Raises MissingRecord that names every run whose
    record is not whole, with the command that makes it; ValueError for a model or a seed that the group does not have; ProfileError for
    a plan or a group that is not there.
    """
    folder = ROOT / "profiles" / profile
    planned = plan.chosen(plan.load(folder), [f"{group}-"])
    for what, wanted, of in (("model", models, lambda run: run.model), ("seed", seeds, lambda run: run.config.seed)):
        if unknown := [value for value in wanted if value not in map(of, planned)]:
            raise ValueError(f"{what} {unknown[0]!r}: {folder.name}/{group}.yaml has no run of it; it has {', '.join(dict.fromkeys(str(of(run)) for run in planned))}")
        planned = [run for run in planned if not wanted or of(run) in wanted]
    planned = [run for run in planned if not methods or run.config.method in methods]
    found = {run.name: runs.find(run.config) for run in planned}
    refused = [run.name for run in planned if found[run.name] is None and not run.fits]
    if missing := [name for name, run in found.items() if run is None and name not in refused]:
        raise MissingRecord(f"no whole record of {', '.join(missing)} in {runs.records_root().name}/, and a notebook trains none of them; make them with: "
                            f"./reproduce.sh --profile {profile} --only {' '.join(missing)} (or ask for those that exist: the parameters `models` and `seeds`)")
    if refused:
        print(f"not run, since they do not fit the plan's cards: {', '.join(refused)}")
    return [(run.model, found[run.name]) for run in planned if run.name not in refused]


def by_method(found: Sequence[tuple[str, Run]]) -> dict[str, dict[str, list[Run]]]:
    """{a model's label: {method: its runs}}."""
    made: dict[str, dict[str, list[Run]]] = {}
    for model, run in found:
        made.setdefault(model, {}).setdefault(run.config.method, []).append(run)
    return made


def peaks(found: Sequence[tuple[str, Run]]) -> pd.DataFrame:
    """Bytes of every update's training call, the most over a run's training GPUs, as CUDA's allocator counted them: one row a run and update.
    Columns: model, method, seed, update, length (generated tokens a response), peak (NaN where a run was made without a GPU)."""
    def of(model: str, run: Run) -> pd.DataFrame:
        timings = run.timings.rename(columns={"number": "update", "update": "seconds"}).reindex(columns=["update", "peak_gib"])
        rows = timings.merge(run.metrics[["update", "length"]], on="update")
        return rows.assign(model=model, method=run.config.method, seed=run.config.seed, peak=rows["peak_gib"] * 2 ** 30)

    return pd.concat([of(model, run) for model, run in found], ignore_index=True)[["model", "method", "seed", "update", "length", "peak"]]


def memory(found: Sequence[tuple[str, Run]]) -> pd.DataFrame:
    """The same as a row of Table 1 a model and method: columns model, method, source, average_gib, peak_gib (of the curve of seed means)."""
    rows = []
    for (model, method), frame in peaks(found).groupby(["model", "method"], sort=False):
        average = frame.groupby("seed")["peak"].mean().mean() / 2 ** 30
        rows.append({"model": model, "method": method, "source": "measured", "average_gib": average, "peak_gib": learner_runs.peak_of_mean(frame).loc[method, "mean"] / 1024})
    return pd.DataFrame(rows)


def about(found: Sequence[tuple[str, Run]]) -> str:
    """For a figure's note: the models, and what trained and generated, as the records say it."""
    machines = []
    for _, run in found:
        environment = json.loads((run.folder / "environment.json").read_text())
        train = f"{environment.get('ranks', 1)} × {environment.get('gpu', environment['machine'] + ' without a GPU')} train"
        generate = {"ray": f", {run.config.engines} vLLM engines generate", "in_process": " and generate"}.get(run.config.rollout, f", {run.config.rollout} generates")
        machines.append(train + generate)
    return ", ".join(dict.fromkeys(Path(run.config.model).name for _, run in found)) + "; " + "; ".join(dict.fromkeys(machines))
