"""A plan's records as notebooks read them: which runs, what is said where one is missing, and how a GPU's measured peaks are counted."""

import json

import pandas as pd
import pytest
import yaml
from processes import on_ranks

from logra.paper import plan, planned_runs
from logra.paper.profiles import ProfileError
from logra.paper.provenance import ROOT
from logra.rl import runs
from logra.rl.ranks import Alone, Ranks
from logra.rl.records import MissingRecord

PEAKS = {("dense", 1): (4.0, 6.0), ("dense", 2): (4.0, 8.0), ("logra", 1): (2.0, 3.0), ("logra", 2): (2.0, 1.0)}     # GiB of two updates


@pytest.fixture(autouse=True)
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path / "records"))


@pytest.fixture
def profile(tmp_path):
    """A plan of four runs on a node of four training GPUs, and their records written by hand."""
    folder = tmp_path / "plan"
    folder.mkdir()
    common = {"machine": {"training_gpus": 4, "generating_gpus": 4, "card_gb": 80}, "settings": {"rollout": "ray", "sync": "full", "engines": 4, "updates": 2},
              "models": {"1.5B": {"model": "models/Qwen2.5-Math-1.5B"}}}
    (folder / "common.yaml").write_text(yaml.safe_dump(common))
    (folder / "main.yaml").write_text(yaml.safe_dump({"title": "Main", "grid": {"model": ["1.5B"], "method": ["dense", "logra"], "seed": [1, 2]}}, sort_keys=False))
    for run in plan.load(folder):
        made = runs.folder_of(run.config)
        made.mkdir(parents=True)
        (made / "config.json").write_text(json.dumps(run.config.model_dump()))
        (made / "environment.json").write_text(json.dumps({"model_sha256": None, "machine": "x86_64", "ranks": 4, "gpu": "NVIDIA H100 80GB HBM3"}))
        pd.DataFrame({"number": [1, 2], "update": [0.5, 0.5], "peak_gib": PEAKS[run.config.method, run.config.seed]}).to_parquet(made / "timings.parquet")
        pd.DataFrame({"update": [1, 2], "length": [7.0, 9.0]}).to_parquet(made / "metrics.parquet")
    return str(folder)


def test_the_runs_that_are_asked_for_come_by_model_and_method(profile):
    found = planned_runs.read(profile, "main")
    assert {model: {method: [run.config.seed for run in group] for method, group in methods.items()} for model, methods in planned_runs.by_method(found).items()} == {
        "1.5B": {"dense": [1, 2], "logra": [1, 2]}}
    assert [run.config.seed for _, run in planned_runs.read(profile, "main", ["1.5B"], [2], ["logra"])] == [2]
    assert planned_runs.about(found) == "Qwen2.5-Math-1.5B; 4 × NVIDIA H100 80GB HBM3 train, 4 vLLM engines generate"
    with pytest.raises(ValueError, match="seed 3: plan/main.yaml has no run of it; it has 1, 2"):
        planned_runs.read(profile, "main", seeds=[1, 3])
    with pytest.raises(ProfileError, match="no run's name begins so"):
        planned_runs.read(profile, "mian")


def test_memory_is_counted_as_in_table_1(profile):
    found = planned_runs.read(profile, "main")
    rows = planned_runs.peaks(found)
    assert rows["update"].tolist() == [1, 2] * 4 and rows["length"].tolist() == [7, 9] * 4 and rows["peak"].iloc[1] == 6 * 2 ** 30
    table = planned_runs.memory(found).set_index("method")
    assert table["average_gib"].to_dict() == {"dense": 5.5, "logra": 2.0} and table["peak_gib"].to_dict() == {"dense": 7.0, "logra": 2.0}       # of the curve of means
    timings = found[0][1].folder / "timings.parquet"        # made on a CPU
    pd.read_parquet(timings).drop(columns="peak_gib").to_parquet(timings)
    assert planned_runs.peaks(found[:1])["peak"].isna().all() and planned_runs.memory(found[:1])["peak_gib"].isna().all()


def test_a_missing_record_is_named_with_its_command_and_a_refused_run_is_not(capsys):
    with pytest.raises(MissingRecord) as error:
        planned_runs.read("h100", "main", ["27B"], [1])
    assert "no whole record of main-27b-logra-seed1 in records/" in str(error.value) and "./reproduce.sh --profile h100 --only main-27b-logra-seed1 " in str(error.value)
    assert planned_runs.read("h100", "main", ["27B"], [1], ["dense"]) == [] and "main-27b-dense-seed1" in capsys.readouterr().out
    for group, number in {"main": 15, "lora": 3, "control": 8, "ablation": 12, "long": 1}.items():      # what the notebooks ask for
        with pytest.raises(MissingRecord) as error:
            planned_runs.read("h100", group)
        names = str(error.value).split("--only ")[1].split(" (")[0].split()
        assert len(names) == number and set(names) <= {run.name for run in plan.load(ROOT / "profiles" / "h100")}


def _most(number, ranks):
    return Ranks().most([3.5, 1.25][number])


def test_the_peak_is_that_of_the_rank_that_needed_most(tmp_path):
    assert on_ranks(_most, 2, tmp_path) == [3.5, 3.5] and Alone().most(2.5) == 2.5
