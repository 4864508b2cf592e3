"""Checks that read what the laptop profile drew, figures/<name>.csv: counts that were made again, simulations, and runs at toy scale.

A figure that is not there yet is `NotRecorded`. What is read of each:

| file | columns |
|---|---|
| table3_reasoning_gym.csv | task, training, evaluation |
| fig2_learning.csv | method, update, pass_at_1_mean, pass_at_1_std, n |
| fig2_control.csv | predicted_kl, realised_kl |
| fig4_long_run.csv | update, score, length, truncated |
| fig5_rank.csv | kind, rank, seed, pass_at_1 |
| fig5_reconstruction.csv | condition, rank, layer, measured |
| fig6_kl_control.csv | setting, seed, update, pass_at_1, length |
| fig1_memory.csv | model, method, source (one is `simulated`), average_gib, peak_gib |
| table2_runs.csv | method, pass_at_1, pass_at_4, seconds_per_update; one row a run |

Toy scale says what the code does with a model of 0.44 M parameters. A percentage of the paper's cannot come out there: what is checked is the
direction, with an interval over seeds, and "holds" means no more than that.
"""
from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from logra.paper.intervals import half_interval
from logra.paper.printed import Finding, NotRecorded, table, text
from logra.paper.provenance import ROOT

FOLDER = ROOT / "figures"


def read(name: str, *columns: str) -> pd.DataFrame:
    """figures/<name>.csv. Raises NotRecorded when it does not exist, ValueError when it lacks one of the columns."""
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        raise NotRecorded(f"figures/{name}.csv does not exist yet")
    frame = pd.read_csv(path)
    if missing := [column for column in columns if column not in frame]:
        raise ValueError(f"figures/{name}.csv has no column {', '.join(missing)}; it has {', '.join(frame.columns)}")
    return frame


# Table 3

def reasoning_gym(task: str) -> Finding:
    """Training and evaluation problems of a task, or of "total", against Table 3."""
    found = read("table3_reasoning_gym", "task", "training", "evaluation").set_index("task")
    if task not in found.index:
        raise NotRecorded(f"figures/table3_reasoning_gym.csv has no row {task}: it was made for fewer tasks")
    ours, printed = found.loc[task], table("table3").set_index("task").loc[task]
    return Finding(f"{ours['training']:,.0f} and {ours['evaluation']:.0f}", bool(ours["training"] == printed["training"] and ours["evaluation"] == printed["evaluation"]))


# Figure 2

def learns_as_well() -> Finding:
    """The highest point of LoGRA's mean Pass@1 curve is not below Dense's by more than two standard errors."""
    frame = read("fig2_learning", "method", "update", "pass_at_1_mean", "pass_at_1_std", "n")
    peak = frame.loc[frame.groupby("method")["pass_at_1_mean"].idxmax()].set_index("method")
    difference = 100 * (peak.loc["logra", "pass_at_1_mean"] - peak.loc["dense", "pass_at_1_mean"])
    error = 100 * math.sqrt(sum(peak.loc[m, "pass_at_1_std"] ** 2 / peak.loc[m, "n"] for m in ("logra", "dense")))
    return Finding(f"LoGRA {100 * peak.loc['logra', 'pass_at_1_mean']:.1f} %, Dense {100 * peak.loc['dense', 'pass_at_1_mean']:.1f} %: {difference:+.1f} ± {error:.1f}", bool(difference >= -2 * error), "± standard error of the difference")


def realised_follows_predicted() -> float:
    """Median of realised over predicted KL, over all updates of Figure 2's LoGRA runs."""
    frame = read("fig2_control", "predicted_kl", "realised_kl")
    return float((frame["realised_kl"] / frame["predicted_kl"]).median())


# Figure 4

def _long_run() -> pd.DataFrame:
    return read("fig4_long_run", "update", "score", "length", "truncated").groupby("update", as_index=False)[["score", "length", "truncated"]].mean()


def long_run_rises() -> Finding:
    """The mean of the last five evaluations lies above the start, and within ten points of the best."""
    frame = _long_run()
    start, last, best = 100 * frame["score"].iloc[0], 100 * frame["score"].tail(5), 100 * frame["score"].max()
    return Finding(f"{start:.1f} → {last.mean():.1f} % after {frame['update'].max()} updates; last five {last.min():.1f} to {last.max():.1f}, best {best:.1f}", bool(last.mean() > start and last.min() > best - 10))


def long_run_updates() -> Finding:
    last = int(_long_run()["update"].max())
    return Finding(f"{last:,} updates", last > text("steps_27b"))


def long_run_shortens(column: str) -> Finding:
    """Response length, or the share of responses cut at the limit, is lower in the last five evaluations than at the start."""
    values = _long_run()[column]
    return Finding(f"{values.iloc[0]:.3g} → {values.tail(5).mean():.3g}", bool(values.tail(5).mean() < values.iloc[0]))


# Figure 5

def rank_helps(least: int) -> Finding:
    """Slope of late Pass@1 on log₄ rank over all runs from rank `least` on, the paper's lowest, 95 % interval; beside it what a lower rank does."""
    frame = read("fig5_rank", "kind", "rank", "seed", "pass_at_1").assign(pass_at_1=lambda t: 100 * t["pass_at_1"])
    ours = frame[frame["rank"] >= least]
    fit = stats.linregress(np.log(ours["rank"]) / np.log(4), ours["pass_at_1"])
    half = stats.t.ppf(0.975, len(ours) - 2) * fit.stderr
    return Finding(f"{fit.slope:+.2f} ± {half:.2f} points for each factor of 4, {len(ours)} runs at ranks {ours['rank'].min()} to {ours['rank'].max()}", bool(fit.slope > half),
                   "; ".join(_below(frame, rank, least) for rank in sorted(set(frame["rank"])) if rank < least))


def _below(frame: pd.DataFrame, rank: int, least: int) -> str:
    """How a rank that the paper does not have stands to its lowest, over pairs of one kind and seed."""
    wide = frame.pivot(index=["kind", "seed"], columns="rank", values="pass_at_1")
    return f"rank {rank}, which the paper does not have, against rank {least}: {_interval(wide[rank] - wide[least])} points over {len(wide)} pairs"


def _interval(differences: pd.Series) -> str:
    return f"{differences.mean():+.2f} ± {half_interval(differences):.2f}"


def no_basis_wins(*kinds: str) -> Finding:
    """Each kind's difference to refreshed Rademacher over (rank, seed) pairs, 95 % interval: zero lies inside."""
    frame = read("fig5_rank", "kind", "rank", "seed", "pass_at_1")
    wide, found = 100 * frame.pivot(index=["rank", "seed"], columns="kind", values="pass_at_1"), {}
    for kind in kinds:
        difference = (wide[kind] - wide["rademacher"]).dropna()
        found[f"{kind} {_interval(difference)}"] = abs(difference.mean()) <= half_interval(difference)
    return Finding(", ".join(found) + f" points over {len(wide)} pairs", all(found.values()))


def rank_over_basis() -> Finding:
    """Cells of the small model: what rank does to the cosine, against the largest difference that refreshing or the distribution makes."""
    cells = read("fig5_reconstruction", "condition", "rank", "layer", "measured").pivot(index=["rank", "layer"], columns="condition", values="measured")
    by_rank = cells["rademacher"].groupby("rank").mean()
    refresh, kind = ((cells["rademacher"] - cells[other]).abs().max() for other in ("fixed", "gaussian"))
    gain = by_rank.iloc[-1] - by_rank.iloc[0]
    return Finding(f"rank {by_rank.index[0]} → {by_rank.index[-1]}: {by_rank.iloc[0]:.3f} → {by_rank.iloc[-1]:.3f}; largest cell difference {refresh:.4f} by refreshing, {kind:.4f} by distribution", bool(gain > 10 * max(refresh, kind)))


# Figure 6

def _tails(column: str = "pass_at_1") -> pd.DataFrame:
    """Mean of a column over the raw late evaluations of each run: settings down, seeds across; the last eighth of the run, as 700 to 800 of 800 steps."""
    frame = read("fig6_kl_control", "setting", "seed", "update", column)
    late = frame[frame["update"] >= frame["update"].max() * 7 / 8]
    return late.pivot_table(index="setting", columns="seed", values=column, aggfunc="mean") * (100 if column == "pass_at_1" else 1)


def _budgets(tails: pd.DataFrame) -> pd.DataFrame:
    """The constant budgets' rows, by budget."""
    constant = tails[tails.index.str.startswith("constant")]
    return constant.set_axis(constant.index.str.extract(r"=\s*([\d.e+-]+)", expand=False).astype(float), axis=0).sort_index()


def _papers_four(tails: pd.DataFrame) -> dict[str, pd.Series]:
    """The rows of the paper's settings, or those nearest to them: none, large, small, annealed."""
    budgets, none = _budgets(tails), tails[tails.index.str.startswith("no control")]
    norms = none.index.str.extract(r"([\d.]+e[+-]?\d+)", expand=False).astype(float)
    nearest = lambda values, key: int(np.abs(np.log(values / text(key))).argmin())  # noqa: E731
    constant = {name: budgets.iloc[nearest(budgets.index, f"budget_{name}")] for name in ("large", "small")}
    constant = {name: row.rename(f"δ = {row.name:.1e}") for name, row in constant.items()}
    return {"none": none.iloc[nearest(norms, "relative_norm")], **constant, "annealed": tails[tails.index.str.startswith("annealed")].iloc[0]}


def _listed(*rows: pd.Series, unit: str = " %") -> str:
    return "; ".join(f"{row.name}: {row.mean():.1f}{unit}" for row in rows)


def large_budget_degrades() -> Finding:
    """The largest constant budget's runs all end below those of the best constant budget."""
    budgets = _budgets(_tails())
    best, large = budgets.loc[budgets.mean(axis=1).idxmax()], budgets.iloc[-1]
    return Finding(f"δ = {best.name:.1e}: {best.mean():.1f} %; δ = {large.name:.1e}: {large.mean():.1f} %", bool(large.max() < best.min()))


def paper_budgets_ordered() -> Finding:
    """δ = 1.5e-4 ends above δ = 1.5e-3, run for run's range."""
    four = _papers_four(_tails())
    return Finding(_listed(four["small"], four["large"]), bool(four["small"].min() > four["large"].max()))


def annealed_is_highest() -> Finding:
    tails = _tails()
    mean = tails.mean(axis=1)
    annealed = mean[mean.index.str.startswith("annealed")].max()
    return Finding(f"annealed {annealed:.1f} %, highest other: {mean.drop(mean.index[mean.index.str.startswith('annealed')]).idxmax()} {mean[~mean.index.str.startswith('annealed')].max():.1f} %", bool(annealed > mean[~mean.index.str.startswith("annealed")].max()))


def control_beats_none() -> Finding:
    """The constant budget nearest 1.5e-4 against no control at the relative norm 6e-5."""
    four = _papers_four(_tails())
    return Finding(_listed(four["small"], four["none"]), bool(four["small"].mean() > four["none"].mean()), _apart(four["small"], four["none"]))


def lengths_ordered(*order: str) -> Finding:
    """Mean late response lengths of the paper's settings, longest first as it prints them."""
    four = _papers_four(_tails("length"))
    rows = [four[name] for name in order]
    means = [row.mean() for row in rows]
    return Finding(_listed(*rows, unit=" tokens"), means == sorted(means, reverse=True), "; ".join(filter(None, (_apart(a, b) for a, b in zip(rows, rows[1:])))))


def _apart(higher: pd.Series, lower: pd.Series) -> str:
    """Nothing where every run of the one lies above every run of the other, else that it does not."""
    return "" if higher.min() > lower.max() else f"the runs' ranges overlap ({higher.name}, {lower.name})" if lower.min() <= higher.max() else f"{higher.name} lies below {lower.name}"


# Memory, simulated

def memory(model: str, method: str, statistic: str) -> float:
    """GiB a GPU of a simulated step. statistic: "average" or "peak"."""
    frame = read("fig1_memory", "model", "method", "source", "average_gib", "peak_gib")
    row = frame[(frame["model"] == model) & (frame["method"] == method) & (frame["source"] == "simulated")]
    if row.empty:
        raise NotRecorded(f"figures/fig1_memory.csv has no simulated row for {model} {method}")
    return float(row.iloc[0][f"{statistic}_gib"])


def memory_saving(model: str) -> float:
    """Percent of Dense's average that LoGRA saves, both simulated."""
    return 100 * (1 - memory(model, "logra", "average") / memory(model, "dense", "average"))


# Table 2

def lora_compared(column: str, lower: bool) -> Finding:
    """LoGRA against LoRA in a column of the laptop's Table 2, means over runs. lower: the claim is that LoGRA's is the lower one."""
    runs = read("table2_runs", "method", column).groupby("method")[column]
    mean, error = runs.mean(), math.sqrt((runs.var() / runs.size()).sum())
    difference = mean["logra"] - mean["lora"]
    return Finding(f"LoGRA {mean['logra']:.3g}, LoRA {mean['lora']:.3g}", bool(difference < 0 if lower else difference > 0),
                   f"difference {difference:+.3g} ± {error:.2g}, its standard error" + ("" if abs(difference) > 2 * error else ": not told apart"))
