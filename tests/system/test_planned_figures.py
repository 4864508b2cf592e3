"""Figures of a plan's runs, by the runner and real kernels: what the real trainer recorded is drawn, by model and with its n, and nothing is trained."""

import os
import threading

import pandas as pd
import pytest
import yaml

from logra.paper import execute, plan, profiles
from logra.paper.execute import NotebookFailed
from logra.paper.provenance import ROOT
from logra.rl import runs

FIG2 = [f"{name}.{suffix}" for name in ("fig2_learning", "fig2_control") for suffix in ("pdf", "svg", "png", "csv")]
TABLE1 = [f"{name}.{suffix}" for name in ("table1_main", "table1_runs") for suffix in ("csv", "html", "tex")]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a plan of short runs of the learner at two sizes of a batch, the records of two of its three seeds, and the notebooks."""
    root = tmp_path_factory.mktemp("planned")
    (root / "plan").mkdir()
    (root / "profiles").mkdir()
    (root / "notebooks").symlink_to(ROOT / "notebooks")
    settings = dict(updates=4, prompts=8, micro_batch=8, evaluate_every=2, evaluation_prompts=8, relative_step=2e-3, learning_rate=3e-4)
    common = {"machine": {"training_gpus": 1, "generating_gpus": 0, "card_gb": 80}, "settings": settings,
              "models": {"small": {"model": "learner"}, "smaller": {"model": "learner", "prompts": 4, "micro_batch": 4}}}
    (root / "plan/common.yaml").write_text(yaml.safe_dump(common))
    (root / "plan/main.yaml").write_text(yaml.safe_dump({"title": "Main", "grid": {"model": ["small", "smaller"], "method": ["dense", "logra"], "seed": [1, 2, 42]}}, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGRA_RECORDS", str(root / "records"))
        runs.ensure([run.config for run in plan.load(root / "plan") if run.config.seed != 42])
    return root


def drawn(root, stem, outputs, **parameters):
    entry = {"timeout": 300, "outputs": outputs, "parameters": parameters}
    (root / "profiles/drawn.yaml").write_text(yaml.safe_dump({"figures": "figures", "notebooks": {f"figures/{stem}": entry}}))
    (task,) = profiles.tasks(root, "drawn")[1]
    own = {name: str(root / "home") for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "MPLCONFIGDIR")}
    extra = own | {"LOGRA_RECORDS": str(root / "records"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return execute.run(task, root / "aside" / stem, root / "logs" / f"{stem}.log", extra, lambda *_: None, threading.Event())


def test_figure_2_has_a_column_a_model_and_says_what_was_run(project):
    before = sorted(os.listdir(project / "records"))
    result = drawn(project, "fig2_learning", FIG2, plan=str(project / "plan"), models=["small", "smaller"], seeds=[1, 2], updates=2)
    assert set(result.classes.values()) == {"recorded run"} and sorted(os.listdir(project / "records")) == before
    recorded = {run.model: run.config for run in plan.load(project / "plan")}
    assert {name.rsplit("-", 1)[0] for name in result.inputs if name.startswith("main-")} == {f"main-{model}-{method}-seed{seed}" for model in recorded for method in ("dense", "logra") for seed in (1, 2)}
    curve = pd.read_csv(result.figures / "fig2_learning.csv")
    assert curve.groupby(["model", "method"])["update"].apply(list).to_dict() == {(model, method): [0, 2] for model in recorded for method in ("dense", "logra")}
    assert (curve["n"] == 2).all()
    picture = (result.figures / "fig2_learning.svg").read_text()
    assert all(f"<!-- {title} -->" in picture for title in ("small, Pass@1", "smaller, Pass@1", "small, Pass@4", "smaller, Pass@4"))
    assert "recorded run · learner; 1 × " in picture.replace("\n", " ")


def test_table_1_counts_the_plans_runs_beside_the_printed(project):
    result = drawn(project, "table1_main", TABLE1, plan=str(project / "plan"), models=["small", "smaller"], seeds=[1, 2])
    assert set(result.classes.values()) == {"recorded run"}
    table = pd.read_csv(result.figures / "table1_main.csv", keep_default_na=False)
    ours = table[table["source"] == "here, recorded run"]
    assert ours[["model", "method", "n"]].astype({"n": int}).values.tolist() == [[model, method, 2] for model in ("small", "smaller") for method in ("Dense AdamW", "LoGRA")]
    assert (ours["average memory"] == "–").all()             # no GPU, no peak
    assert table["source"].value_counts().to_dict() == {"paper, printed": 6, "simulated": 6, "here, recorded run": 4}
    single = pd.read_csv(result.figures / "table1_runs.csv").set_index(["model", "method", "seed"])
    for run in plan.load(project / "plan"):
        if run.config.seed != 42:
            found = runs.Run(run.config, project / "records" / run.config.record).evaluations["pass_at_1"].max()
            assert single.loc[(run.model, run.config.method, run.config.seed), "pass_at_1"] == pytest.approx(100 * found, rel=1e-5)


def test_a_run_without_a_record_is_named_and_not_made(project):
    with pytest.raises(NotebookFailed, match="raised MissingRecord: no whole record of lora-1.5b-seed42 .* make them with: ./reproduce.sh --profile h100 --only lora-1.5b-seed42"):
        drawn(project, "table2_lora", ["table2_lora.csv"], plan="h100", seeds=[42])
