"""The ledger lists what the paper prints, measures what it says it measures, and its verdicts can go either way."""
import inspect
import json
import re

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest

from logra.paper import checks_figures, checks_printed, claims, plan, printed, profiles
from logra.paper.provenance import ROOT
from logra.rl.learner import load_base

# What our checks contradict without any run. A change here is a change of what the project says of the paper.
CONTRADICTED = {
    "contradiction-updates", "contradiction-peak-1.5b", "contradiction-spike", "contradiction-windows", "contradiction-pass4", "contradiction-lora",
    "contradiction-lora-updates", "contradiction-rank", "contradiction-sync", "contradiction-scope", "contradiction-control", "contradiction-annealing",
    "contradiction-editing",
}  # fmt: skip


@pytest.fixture(scope="module")
def ledger():
    return claims.ledger()


def test_every_claim_says_how_it_is_checked():
    rows = claims.listed()
    assert len(rows) > 100 and rows["id"].is_unique
    for row in rows.to_dict("records"):
        assert row["section"] and row["claim"] and row["paper"] and row["how"] and row["kind"] in claims.KINDS, row["id"]
        assert bool(row["check"]) == (row["kind"] != "needs eight GPUs"), row["id"]
        assert bool(row["tolerance"]) <= bool(row["reason"]), f"{row['id']}: a tolerance has a reason"
        if row["check"]:
            module, _, function = row["check"].partition(".")
            inspect.signature(getattr(claims.CHECKS[module], function)).bind(*json.loads(row["arguments"] or "[]"))
        assert row["notebook"] or (row["kind"] not in ("toy scale", "simulated", "needs eight GPUs")), f"{row['id']}: a notebook shows it"


def test_every_check_is_of_a_claim():
    used = set(claims.listed()["check"])
    for name, module in claims.CHECKS.items():
        own = [f for f, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__ and not f.startswith("_")]
        if module is checks_figures:
            own.remove("read")
        assert {f"{name}.{function}" for function in own} <= used, module.__name__


def test_a_number_that_the_ledger_calls_the_papers_is_printed_there():
    numbers = {float(value) for name in ("table1", "table2", "table3") for value in printed.table(name).select_dtypes("number").stack()} | set(printed.table("text")["value"].astype(float))
    derived = {"saving-peak-1.5b", "saving-peak-7b", "tail-evaluations", "responses", "batches"}      # said to be ours, or a product of printed numbers
    for row in claims.listed().to_dict("records"):
        paper = claims._number(row["paper"])
        if isinstance(paper, float) and row["id"] not in derived and row["section"] not in ("2.1", "A.1"):     # those are identities: 0, 1
            assert paper in numbers | {0.0, 1.0}, row["id"]


def test_verdicts_without_runs_are_the_known_ones(ledger):
    fails = {claim.id for claim in ledger if claim.verdict == "fails" and not claim.command.startswith("./reproduce.sh")}
    assert fails == CONTRADICTED
    for claim in ledger:
        assert claim.verdict in claims.VERDICTS
        assert (claim.ours is None) == (claim.verdict in ("not checkable here", "not recorded yet")), claim.id
        assert claim.note or claim.verdict != "not checkable here", f"{claim.id}: says why"


@pytest.mark.parametrize("paper, verdict", [("45.7", "holds"), ("45.72", "fails"), ("45.62", "holds"), ("45.6", "fails")])
def test_a_number_holds_within_its_tolerance_alone(paper, verdict):
    row = next(row for row in claims.listed().to_dict("records") if row["id"] == "saving-7b")
    claim = claims._checked(row | {"paper": paper})         # 45.663 ± 0.05
    assert (claim.verdict, round(claim.ours, 3)) == (verdict, 45.663)


def _curve(dense, ours):
    return pd.DataFrame([{"method": m, "update": u, "pass_at_1_mean": v * u / 10, "pass_at_1_std": 0.01, "n": 3} for m, v in (("dense", dense), ("logra", ours)) for u in (0, 5, 10)])


def _ranks(slope, gaussian, lowest=0.0):
    runs = [{"kind": kind, "rank": rank, "seed": seed, "pass_at_1": 0.3 + slope * i + 0.001 * ((seed + 2 * i) % 3) + (gaussian if kind == "gaussian" else 0.0005 * (seed - 1) * (kind == "fixed"))}
            for kind in ("fixed", "rademacher", "gaussian") for i, rank in enumerate((4, 16, 64)) for seed in range(3)]
    return pd.DataFrame(runs + [run | {"rank": 1, "pass_at_1": run["pass_at_1"] - lowest} for run in runs if run["rank"] == 4])


def _tails(values, lengths=(9,) * 6):
    names = ("no control, norm 6e-05", "no control, norm 6e-03", "constant δ = 1.5e-05", "constant δ = 1.5e-04", "constant δ = 1.5e-03", "annealed 2e-04 → 2e-05")
    return pd.DataFrame([{"setting": s, "seed": seed, "update": u, "pass_at_1": v + 0.001 * seed, "length": n + 0.1 * seed} for s, v, n in zip(names, values, lengths) for seed in (1, 2) for u in (0, 100, 200)])


def _long(scores, lengths):
    return pd.DataFrame([{"update": 150 * i, "score": s, "length": n, "truncated": n / 100} for i, (s, n) in enumerate(zip(scores, lengths))])


def _memory(ours):
    return pd.DataFrame([{"model": "7B", "method": m, "source": s, "average_gib": g, "peak_gib": g} for m, s, g in (("dense", "printed", 99), ("dense", "simulated", 32.0), ("logra", "simulated", ours))])


def _cells(gap):
    return pd.DataFrame([{"condition": c, "rank": r, "layer": layer, "measured": v + (gap if c == "gaussian" else 0)} for c in ("fixed", "rademacher", "gaussian") for r, v in ((4, 0.05), (256, 0.35)) for layer in (0, 1)])


GOOD, BAD = (0.5, 0.3, 0.55, 0.6, 0.4, 0.7), (0.65, 0.3, 0.4, 0.5, 0.6, 0.45)


@pytest.mark.parametrize("figure, claim, good, bad", [
    ("fig2_learning", "performance-toy", _curve(0.80, 0.79), _curve(0.80, 0.70)),
    ("fig2_control", "quadratic-training", pd.DataFrame({"predicted_kl": [1.0, 1.0, 1.0], "realised_kl": [1.05, 0.95, 9.0]}), pd.DataFrame({"predicted_kl": [1.0], "realised_kl": [1.2]})),
    ("fig4_long_run", "score-toy", _long([0.3, 0.6, 0.6, 0.6, 0.6, 0.6], [9] * 6), _long([0.3, 0.9, 0.6, 0.6, 0.6, 0.6], [9] * 6)),
    ("fig4_long_run", "steps-toy", _long([0.3] * 9, [9] * 9), _long([0.3] * 8, [9] * 8)),
    ("fig4_long_run", "length-toy", _long([0.3] * 6, [9, 8, 7, 6, 5, 4]), _long([0.3] * 6, [4, 5, 6, 7, 8, 9])),
    ("fig4_long_run", "truncated-toy", _long([0.3] * 6, [9, 8, 7, 6, 5, 4]), _long([0.3] * 6, [4, 5, 6, 7, 8, 9])),
    ("fig5_rank", "rank-toy", _ranks(0.05, 0), _ranks(0.0, 0, lowest=0.2)),          # a rank that the paper does not have decides nothing
    ("fig5_rank", "basis-toy", _ranks(0.05, 0), _ranks(0.05, -0.05)),
    ("fig5_reconstruction", "cosine-toy", _cells(0.001), _cells(0.1)),
    ("fig6_kl_control", "budget-large-toy", _tails(GOOD), _tails(BAD)),
    ("fig6_kl_control", "budget-paper-toy", _tails(GOOD), _tails(BAD)),
    ("fig6_kl_control", "budget-annealed-toy", _tails(GOOD), _tails(BAD)),
    ("fig6_kl_control", "control-none-toy", _tails(GOOD), _tails(BAD)),
    ("fig6_kl_control", "length-control-toy", _tails(GOOD, (5, 9, 8, 7, 10, 6)), _tails(GOOD, (5, 9, 8, 7, 6, 10))),
    ("fig1_memory", "saving-7b-simulated", _memory(17.3), _memory(28.0)),
    ("fig1_memory", "memory-7b-logra-peak", _memory(22.0), _memory(28.0)),
    ("table2_runs", "lora-pass1-toy", pd.DataFrame({"method": ["lora", "logra"], "pass_at_1": [0.7, 0.6]}), pd.DataFrame({"method": ["lora", "logra"], "pass_at_1": [0.6, 0.7]})),
    ("table3_reasoning_gym", "table3-codeio", pd.DataFrame({"task": ["codeio"], "training": [4868], "evaluation": [25]}), pd.DataFrame({"task": ["codeio"], "training": [4868], "evaluation": [24]})),
])
def test_what_a_figure_drew_decides_its_claims(tmp_path, monkeypatch, figure, claim, good, bad):
    monkeypatch.setattr(checks_figures, "FOLDER", tmp_path)
    (empty,) = claims.ledger([claim])
    assert (empty.verdict, empty.ours, empty.note) == ("not recorded yet", None, f"figures/{figure}.csv does not exist yet")
    for data, verdict in ((good, "holds"), (bad, "fails")):
        data.to_csv(tmp_path / f"{figure}.csv", index=False)
        (found,) = claims.ledger([claim])
        assert found.verdict == verdict and found.ours is not None, found
    good.iloc[:, :1].to_csv(tmp_path / f"{figure}.csv", index=False)
    with pytest.raises(ValueError, match=rf"figures/{figure}.csv has no column"):
        claims.ledger([claim])


def test_the_ledger_averages_the_raw_evaluations_that_figure_6s_table_does(tmp_path, monkeypatch):
    """The notebook's own cells, on evaluations that jump: a moving mean would carry what lies before the tail into it."""
    monkeypatch.setenv("LOGRA_FIGURES", str(tmp_path))
    monkeypatch.setattr(checks_figures, "FOLDER", tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    names, updates = ["no control, norm 6e-05", "constant δ = 1.5e-04", "constant δ = 1.5e-03", "annealed 2e-04 → 2e-05"], list(range(0, 161, 5))
    draw = np.random.default_rng(1)
    made = pd.DataFrame([{"setting": s, "seed": seed, "update": u, "pass_at_1": draw.random() / 2 + 0.5 * (u >= 140), "pass_at_k": 1.0, "length": 5 + draw.random() + 9 * (u >= 140), "truncated": 0.0,
                          "realised_kl": 1e-4, "predicted_kl": 1e-4} for s in names for seed in (1, 2) for u in updates])
    cells = [cell.source for cell in nbformat.read(ROOT / "notebooks" / "figures" / "fig6_kl_control.ipynb", as_version=4).cells if cell.cell_type == "code"]
    space = {"evaluations": made, "metrics": made, "settings": names, "seeds": [1, 2], "updates": 160, "window": 5, "about": "made", "kind": "toy scale"}
    exec("import matplotlib.pyplot as plt\nimport pandas as pd\nfrom logra.paper import plots, printed", space)
    for start in ("plots.use()", "tail ="):
        exec(next(source for source in cells if source.startswith(start)), space)
    plt.close("all")
    for column, unit in (("pass_at_1", 100), ("length", 1)):
        assert checks_figures._tails(column).mean(axis=1).to_dict() == pytest.approx((unit * space["table"][column, "mean"]).to_dict(), rel=1e-5)
    saved = pd.read_csv(tmp_path / "fig6_kl_control.csv")
    assert {"pass_at_1_moving_mean", "length_moving_mean"} <= set(saved) and abs(saved["pass_at_1"] - saved["pass_at_1_moving_mean"]).max() > 0.1


def test_every_printed_command_is_one_that_can_be_met(ledger):
    """Those of the node through the plan's own selection, which refuses dense 27B by name (test_plan); those of this machine through the profile's."""
    runs = plan.load(ROOT / "profiles" / "h100")
    for claim in ledger:
        words = claim.command.split()
        if words[:3] == ["./reproduce.sh", "--profile", "h100"]:
            chosen = plan.chosen(runs, words[4:])
            assert words[3] == "--only" and chosen and not any(run.name.startswith("main-27b-dense") for run in chosen), claim.id
            wanted = re.search(r"(1\.5|7|27)b$", claim.id)
            assert not wanted or {run.model for run in chosen} == {wanted[0].upper()}, f"{claim.id}: runs of its model"
        elif words[:1] == ["./reproduce.sh"]:
            assert [task.stem for task in profiles.tasks(ROOT, "laptop", words[2:])[1]] == [claim.notebook] and words[1] == "--only", claim.id
        else:
            assert words == ["python", "-m", "logra.paper.claims", claim.id] or not words and claim.verdict == "not checkable here", claim.id


def test_pass_rates_that_no_three_seeds_can_have_are_found():
    assert checks_printed._attainable(67.87, 1.23, 0.05)
    assert not checks_printed._attainable(67.86, 1.23, 0.05), "between two multiples of 1/60"
    assert not checks_printed._attainable(82.47, 0.02, 0.2), "three multiples of 0.2 that are not equal scatter more"


def test_the_readmes_summary_is_the_ledgers(ledger):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert claims.put(readme, claims.markdown(ledger), "README.md") == readme, "python -m logra.paper.claims --markdown README.md brings it up to date"


def test_the_readme_says_what_the_figures_data_say(ledger):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ends = checks_figures.read("fig2_learning").groupby("method").tail(5).groupby("method")["pass_at_1_mean"].mean()
    assert f"dense AdamW ends {100 * (ends['dense'] - ends['logra']):.1f} points above LoGRA" in readme
    (rank,) = [claim for claim in ledger if claim.id == "rank-toy"]
    assert ("from rank 4 on a higher rank does not learn more" in readme) == (rank.verdict == "fails")
    size = f"{load_base()[0].num_parameters() / 1e6:.2f} M"
    assert {f"{found} M" for found in re.findall(r"([\d.]+) M[ -]param", readme + checks_figures.__doc__)} == {size.strip()}


def test_the_summary_counts_every_claim_and_names_every_failure(ledger):
    text = claims.markdown(ledger)
    counts = [int(cell) for line in text.splitlines() if line.startswith(tuple(f"| {kind} |" for kind in claims.KINDS)) for cell in line.split("|")[2:-1] if cell.strip()]
    assert sum(counts) == len(ledger)
    assert all(f"`{claim.id}`" in text for claim in ledger if claim.verdict == "fails")


@pytest.mark.parametrize("text", ["no markers", "<!-- claims -->", "<!-- /claims --> <!-- claims -->", "<!-- claims --> <!-- claims --> <!-- /claims -->"])
def test_markers_that_are_not_there_once_in_order(text):
    with pytest.raises(ValueError, match="wanted <!-- claims --> and, after it, <!-- /claims -->, each once"):
        claims.put(text, "summary")


def test_the_command(ledger, tmp_path, capsys, monkeypatch):
    assert claims.main(["saving-1.5b", "rank-gain", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert {"id", "section", "claim", "paper", "ours", "tolerance", "how", "verdict", "command"} <= one.keys()
    assert (one["id"], one["paper"], one["ours"], one["tolerance"], one["verdict"]) == ("saving-1.5b", 21.8, 21.7865, 0.05, "holds")
    assert (two["ours"], two["verdict"], two["command"]) == (None, "not checkable here", "./reproduce.sh --profile h100 --only ablation")
    assert claims.main(["saving-1.5b"]) == 0
    assert "21.79 %" in capsys.readouterr().out
    file = tmp_path / "page.md"
    file.write_text("a\n<!-- claims -->\nbefore\n<!-- /claims -->\nb\n")
    monkeypatch.setattr(claims, "ledger", lambda only: ledger)
    assert claims.main(["--markdown", str(file)]) == 0
    assert file.read_text() == f"a\n<!-- claims -->\n{claims.markdown(ledger)}<!-- /claims -->\nb\n"
    assert claims.main(["--markdown"]) == 0
    assert capsys.readouterr().out == claims.markdown(ledger)
    with pytest.raises(SystemExit, match="2"):
        claims.main(["saving-1.5b", "--markdown", str(file)])
    monkeypatch.undo()
    assert claims.main(["saving-2b"]) == 2
    assert "no claim saving-2b" in capsys.readouterr().err
