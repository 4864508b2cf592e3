"""Checks of the paper against itself: arithmetic on the numbers that it prints, and where two of them do not go together.

Each function is named by a row of data/paper/claims.csv and returns a number in the claim's unit, or a `Finding`.
"""
from __future__ import annotations

import math

import pandas as pd
from scipy import stats

import logra
from logra.paper.printed import Finding, main_result, parameters, table, text

GIB = 2**30


def saving(model: str, statistic: str = "average") -> float:
    """Percent of Dense's memory that LoGRA saves, Table 1. statistic: "average" or "peak"."""
    dense, ours = (main_result(model, method)[f"{statistic}_gib"] for method in ("dense", "logra"))
    return 100 * (1 - ours / dense)


def largest_saving() -> float:
    return max(saving(model) for model in ("1.5B", "7B"))


def speedup(model: str) -> Finding:
    """Percent of updates an hour above Dense's, Table 1."""
    dense, ours = (main_result(model, method)["updates_per_hour"] for method in ("dense", "logra"))
    scatter = distinguishable(model, "updates_per_hour")
    return Finding(f"{100 * (ours / dense - 1):+.1f} %", bool(ours > dense), f"{'beyond' if scatter.holds else 'within'} the seeds' scatter: {scatter.ours}")


def distinguishable(model: str, column: str) -> Finding:
    """Whether LoGRA's mean differs from Dense's beyond the scatter of the seeds: Welch's t-test at 5 % on Table 1's mean, sd and n."""
    dense, ours = (main_result(model, method) for method in ("dense", "logra"))
    return _welch(ours, dense, column)


def no_advantage_over_lora() -> Finding:
    """The same between the two rows of Table 2: neither column differs."""
    rows = table("table2").set_index("method")
    found = {column: _welch(rows.loc["logra"], rows.loc["lora"], column) for column in ("pass_at_1", "pass_at_4")}
    return Finding(f"Pass@1: {found['pass_at_1'].ours}; Pass@4: {found['pass_at_4'].ours}", not any(f.holds for f in found.values()))


def _welch(ours: pd.Series, other: pd.Series, column: str) -> Finding:
    test = stats.ttest_ind_from_stats(ours[column], ours[f"{column}_sd"], ours["seeds"], other[column], other[f"{column}_sd"], other["seeds"], equal_var=False)
    return Finding(f"difference {ours[column] - other[column]:+.2f}, p = {test.pvalue:.2g}", bool(test.pvalue < 0.05))


def not_worse(model: str) -> Finding:
    """Neither Pass@1 nor Pass@4 of LoGRA lies below Dense's by more than the scatter of the seeds (one-sided Welch test at 5 %)."""
    dense, ours = (main_result(model, method) for method in ("dense", "logra"))
    found = {}
    for column, name in (("pass_at_1", "Pass@1"), ("pass_at_4", "Pass@4")):
        test = stats.ttest_ind_from_stats(ours[column], ours[f"{column}_sd"], 3, dense[column], dense[f"{column}_sd"], 3, equal_var=False, alternative="less")
        found[f"{name} {ours[column] - dense[column]:+.2f} points (p = {test.pvalue:.2g})"] = test.pvalue >= 0.05
    return Finding(", ".join(found), all(found.values()), "p: of a LoGRA that is worse, given n = 3 a side")


def lora_gap(column: str) -> float:
    """LoGRA minus LoRA in a column of Table 2."""
    rows = table("table2").set_index("method")
    return rows.loc["logra", column] - rows.loc["lora", column]


def lora_saving() -> Finding:
    rows = table("table2").set_index("method")
    average, peak = (100 * (1 - rows.loc["logra", c] / rows.loc["lora", c]) for c in ("average_gib", "peak_gib"))
    return Finding(f"{average:.1f} % less on average, {peak:.1f} % at the peak", bool(average > 0 and peak > 0))


def text_repeats_table1() -> Finding:
    """The numbers of Table 1 that Section 3.2 repeats."""
    columns = {"pass1": "pass_at_1", "pass4": "pass_at_4", "average": "average_gib", "peak": "peak_gib", "rate": "updates_per_hour"}
    models = {"1_5b": "1.5B", "7b": "7B", "27b": "27B"}
    repeated = {}
    for key in table("text")["key"]:
        kind, _, rest = key.partition("_")
        model, _, method = rest.rpartition("_")
        if kind in columns and model in models and method in ("dense", "logra"):
            repeated[key] = text(key) == main_result(models[model], method)[columns[kind]]
    wrong = [key for key, same in repeated.items() if not same]
    return Finding(f"{len(repeated) - len(wrong)} of {len(repeated)} numbers agree", not wrong, ", ".join(wrong))


def attainable() -> Finding:
    """Whether every Pass@k ± sd of Tables 1 and 2 can come from three seeds of 2,000 responses (Pass@4: 500 problems)."""
    wrong, count = [], 0
    for name in ("table1", "table2"):
        rows = table(name)
        for _, row in rows[rows["seeds"] == 3].iterrows():
            for column, total in (("pass_at_1", text("math_responses")), ("pass_at_4", text("math_problems"))):
                count += 1
                if not _attainable(row[column], row[f"{column}_sd"], 100 / total):
                    wrong.append(f"{name} {row['method']} {column}")
    return Finding(f"{count - len(wrong)} of {count} are", not wrong, ", ".join(wrong))


def _attainable(mean: float, sd: float, unit: float) -> bool:
    """Three multiples of `unit` with this mean and sample sd, both rounded to two decimals."""
    reach = math.ceil(2 * (sd + 0.01) / unit)
    for total in range(math.floor(3 * (mean - 0.01) / unit), math.ceil(3 * (mean + 0.01) / unit) + 1):
        if abs(total * unit / 3 - mean) > 0.005 + 1e-9:
            continue
        for a in range(total // 3 - reach, total // 3 + 1):
            for b in range(a, total // 3 + reach + 1):
                c = total - a - b
                if c >= b and abs(math.sqrt(sum((x - total / 3) ** 2 for x in (a, b, c)) / 2) * unit - sd) <= 0.005 + 1e-9:
                    return True
    return False


def sum_of_table3(column: str) -> float:
    rows = table("table3").set_index("task")
    return float(rows.drop("total")[column].sum())


def most_of_table3(column: str) -> float:
    """The largest count of a task: what no duplicate took away."""
    return float(table("table3").set_index("task").drop("total")[column].max())


def shares_of_problems() -> Finding:
    """Figure 4's truncation rates as whole numbers of the 193 responses."""
    rates, total = [text("long_truncated_start"), text("long_truncated_end")], text("rg_evaluation")
    counts = [round(rate * total / 100) for rate in rates]
    return Finding(" and ".join(f"{count} of {total:.0f} = {100 * count / total:.2f} %" for count in counts), all(abs(100 * c / total - r) <= 0.005 for c, r in zip(counts, rates)))


def long_run_is_consistent() -> Finding:
    """The peak's step is one at which the run is evaluated; the last value lies among the last five, below the peak."""
    step, end = text("long_peak_step"), text("long_score_end")
    low, high, peak = text("long_last_low"), text("long_last_high"), text("long_score_peak")
    return Finding(f"{step:.0f} = {step / text('long_evaluate'):g} × 20; {low} ≤ {end} ≤ {high} < {peak}", step % text("long_evaluate") == 0 and low <= end <= high < peak)


def axis_break_hides_nothing() -> Finding:
    values = table("table1")[["average_gib", "peak_gib"]].stack().dropna()
    hidden = values[(values > text("axis_break_low")) & (values < text("axis_break_high"))]
    return Finding(f"{len(values) - len(hidden)} of {len(values)} printed values lie outside the gap", not len(hidden))


def product(*keys: str) -> float:
    """The product of numbers of the text."""
    return math.prod(text(key) for key in keys)


def gpus() -> float:
    return text("training_gpus") + text("generation_gpus")


def evaluations_in(first: str, last: str, every: float) -> float:
    return (text(last) - text(first)) / every + 1


def basis_differences() -> Finding:
    """The spread of the three rank-256 values of Figure 5(a), one run each, against the sd over seeds of Table 1's rank-256 runs."""
    values = [text(f"{name}_256") for name in ("fixed", "refreshed", "gaussian")]
    sd = main_result("1.5B", "logra")["pass_at_1_sd"]
    return Finding(f"spread {max(values) - min(values):.2f} points, one seed's sd {sd}", bool(max(values) - min(values) < 2 * sd), "one run a point")


def tails(*order: str) -> Finding:
    """Figure 6's printed tails in the order that the text gives them, highest first."""
    values = [text(f"tail_{name}") for name in order]
    return Finding(" > ".join(f"{name} {value:.2f}" for name, value in zip(order, values)), values == sorted(values, reverse=True) and len(set(values)) == len(values))


# Contradictions: each states a claim as a reader takes it, and what else the paper prints.

def updates_of_small_runs() -> Finding:
    """3.2's 20,000 updates against H, D.4 and the tables."""
    days = {model: text("updates_small") / main_result(model, "logra")["updates_per_hour"] / 24 for model in ("1.5B", "7B")}
    epochs = text("updates_small") * text("batch_prompts") / text("dapo_prompts")
    return Finding(f"{text('horizon'):.0f} at most", text("updates_small") <= text("horizon"), f"the schedule has H = 300, D.4 speaks of 300 updates and Table 2 prints the memory of Table 1's full runs; 20,000 would be {epochs:.0f} epochs and, at Table 1's rate, "
                   + " and ".join(f"{value:.0f} days a run at {model}" for model, value in days.items()))


def highest_seed(model: str) -> Finding:
    """The least that the highest of three seeds can have, given the mean and sample sd of Table 1's peak: mean + sd/√3."""
    ours, dense = main_result(model, "logra"), main_result(model, "dense")
    least, most = ours["peak_gib"] + ours["peak_gib_sd"] / math.sqrt(3), ours["peak_gib"] + 2 * ours["peak_gib_sd"] / math.sqrt(3)
    return Finding(f"one seed at {least:.2f} to {most:.2f} GiB", bool(most < dense["peak_gib"]),
                   f"three values with mean {ours['peak_gib']} and sd {ours['peak_gib_sd']} have a highest one of at least mean + sd/√3; Dense: {dense['peak_gib']}")


def peak_against_average(model: str) -> Finding:
    """How far the peak of the seed-mean curve lies above its average, and how far its seeds scatter there."""
    row = main_result(model, "logra")
    return Finding(f"peak {row['peak_gib'] / row['average_gib'] - 1:+.0%} over the average; its sd is {row['peak_gib_sd'] / row['average_gib_sd']:.0f} times the average's", bool(row["peak_gib"] <= row["average_gib"] + 2 * row["average_gib_sd"]),
                   "some seeds spike: a run needs a GPU with room for its peak")


def pass4_windows() -> Finding:
    """A peak over 300 steps cannot lie below the same runs' peak over the first 200."""
    shorter, longer = main_result("1.5B", "logra")["pass_at_4"], table("table2").set_index("method").loc["logra", "pass_at_4"]
    return Finding(f"{longer} over 300 steps, {shorter} over 200", bool(longer >= shorter), "so Table 2's Pass@4 is no peak, or the runs are others; its Pass@1 lies above Table 1's")


def memory_windows() -> Finding:
    """Table 1's memory covers full runs, Table 2's the first 300 steps."""
    one, two = main_result("1.5B", "logra"), table("table2").set_index("method").loc["logra"]
    columns = ["average_gib", "average_gib_sd", "peak_gib", "peak_gib_sd"]
    same = sum(one[c] == two[c] for c in columns)
    return Finding(f"{same} of {len(columns)} numbers identical", bool(same < len(columns)), "averages over windows of unlike lengths hardly agree in every digit: the full runs may have been 300 updates, or one table was copied")


def lora_state() -> Finding:
    """Gradients and moments a GPU of LoRA at rank 256 and of dense Adam on the 1.5B model, fp32, over four GPUs, against the printed averages."""
    shapes = table("shapes").query("model == '1.5B' and role == 'projection'")
    adapters = int((shapes["count"] * text("rank") * (shapes["d"] + shapes["k"])).sum())
    lora, dense = 16 * adapters / 4 / GIB, 12 * parameters("1.5B", projections_only=True) / 4 / GIB
    excess = table("table2").set_index("method").loc["lora", "average_gib"] - main_result("1.5B", "dense")["average_gib"]
    return Finding(f"{excess:+.2f} GiB printed, {lora - dense:+.2f} GiB by its state", bool(excess < 0), f"adapters with gradients and moments {lora:.2f} GiB, dense gradients and moments {dense:.2f} GiB: the two tables may not run the same stack")


def synchronisation_measured() -> Finding:
    """D.1 against the abstract, 2.2 and the conclusion."""
    ours = table("table4").set_index("setting").loc["Synchronisation of the rollout", "logra"]
    return Finding(ours, ours == "low rank", "D.1: the main runs send full weights; no number for low-rank synchronisation is printed")


def tasks_with_memory() -> Finding:
    """The abstract's 'across reasoning tasks': tasks on which both methods' memory was measured."""
    return Finding("1", False, "Tables 1 and 2 measure DAPO-Math-7.5K alone; on the Reasoning-Gym mixture no baseline ran")


def lora_updates() -> Finding:
    """3.4.2's 'first 300 training steps of each method' against D.4."""
    return Finding("fewer than 300 of LoRA, 300 of LoGRA", False, "D.4: LoRA's 300 logged steps hold records without an update (left out of its averages), LoGRA's 300 are actual updates")


def control_needed() -> Finding:
    """Section 3's opening and 3.3 against 3.4.3: accuracy without control, and its loss against the best."""
    controlled = [text(f"tail_{name}") for name in ("large", "small", "annealed")]
    none = text("tail_none")
    return Finding(f"without control {none} %, {max(controlled) - none:.2f} points below the best and {none - min(controlled):.2f} above the worst", none < min(controlled), "3.4.3 itself: the no-control baseline remains stable, nothing shows that control is necessary; the one collapse is a controlled run")


def annealed_budget_in_the_tail() -> Finding:
    """Eq. 16 with H = 1,500 over steps 700 to 800, against the constant budget of 1.5e-4."""
    budget = logra.CosineBudget(text("budget_start"), text("budget_end"), int(text("kl_horizon")))
    values = [budget(u) for u in range(int(text("kl_tail_first")), int(text("kl_tail_last")) + 1)]
    share = (text("budget_start") - values[-1]) / (text("budget_start") - text("budget_end"))
    return Finding(f"{values[0]:.2e} to {values[-1]:.2e}, {share:.0%} of the way", values[-1] < 1.1 * text("budget_end"),
                   f"Figure 6 stops at 800 of 1,500 steps: its 'annealed' curve has never met a budget below {values[-1]:.1e}, not far from the constant 1.5e-4")


def said_twice() -> Finding:
    return Finding("2 times", False, "C.2 prints the sentence on the equally weighted mean twice; D.2 ends in a semicolon, its last clause missing")
