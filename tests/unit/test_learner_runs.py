"""The small learner's runs: what a sweep chooses, and how Tables 1 and 2 count, on records written by hand."""

import json

import pandas as pd
import pytest

from logra.paper import learner_runs
from logra.rl import runs
from logra.rl.bases import base_sha256

SIZES = learner_runs.sizes(updates=4, prompts=2, evaluate_every=2, evaluation_prompts=2, relative_step=2e-3)


def record(config, pass_at_1=(0.1, 0.2, 0.3), norms=(1.0, 1.0, 1.0, 1.0)):
    """A finished run's folder, where `runs.ensure` looks for it."""
    folder = runs.folder_of(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.model_dump()))
    (folder / "environment.json").write_text(json.dumps({"model_sha256": base_sha256(config.model)}))
    norm = "sketch_norm" if config.method == "logra" else "gradient_norm"
    pd.DataFrame({"update": [1, 2, 3, 4], norm: norms}).to_parquet(folder / "metrics.parquet")
    pd.DataFrame({"update": [0, 2, 4], "pass_at_1": pass_at_1, "pass_at_k": [2 * p for p in pass_at_1]}).to_parquet(folder / "evaluations.parquet")
    seconds = {"number": [1, 2, 3, 4], "rollout": 5.0, "train": [1.0, 1.0, 1.0, 101.0], "update": 0.5, "total": 10.0}
    pd.DataFrame(seconds | ({"probe": 0.25} if config.method == "logra" else {})).to_parquet(folder / "timings.parquet")
    return runs.Run(config, folder)


@pytest.fixture(autouse=True)
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path))


def test_a_sweep_takes_the_value_with_the_best_end_for_each_method():
    ends = {("dense", 1e-4): 0.5, ("dense", 1e-3): 0.4, ("lora", 1e-4): 0.2, ("lora", 1e-3): 0.6}
    for (method, rate), end in ends.items():
        record(learner_runs.MAKERS[method](7, rate, SIZES), pass_at_1=(0.9 - end, end, end))
    rows, best = learner_runs.sweep({"dense": [1e-4, 1e-3], "lora": [1e-4, 1e-3]}, 7, SIZES)
    assert best == {"dense": 1e-4, "lora": 1e-3} and len(rows) == 4


def test_runs_come_by_method_and_seed():
    for seed in (1, 2):
        record(learner_runs.dense(seed, 1e-3, SIZES)), record(learner_runs.logra(seed, 1e-4, SIZES))
    made = learner_runs.make({"dense": 1e-3, "logra": 1e-4}, [1, 2], SIZES)
    assert [[(run.config.method, run.config.seed) for run in group] for group in made.values()] == [[("dense", 1), ("dense", 2)], [("logra", 1), ("logra", 2)]]


def test_a_record_without_an_update_is_left_out_of_memory_and_time():
    made = {"dense": [record(learner_runs.dense(1, 1e-3, SIZES), norms=(1.0, 1.0, 1.0, 0.0))], "logra": [record(learner_runs.logra(1, 1e-3, SIZES))]}
    bytes_ = pd.DataFrame([{"method": method, "seed": 1, "update": u, "peak": mib * 2 ** 20} for method in made for u, mib in ((1, 10), (2, 20), (4, 90))])
    dense, logra = learner_runs.summary(made, bytes_, last=4).to_dict("records")
    assert (dense["without_update"], dense["average_mib"], dense["peak_mib"], dense["seconds_per_update"]) == (1, 15, 20, 1.5)
    assert (logra["without_update"], logra["average_mib"], logra["peak_mib"], logra["seconds_per_update"]) == (0, 40, 90, 26.75)
    assert (dense["pass_at_1"], dense["pass_at_4"], dense["updates_per_hour"]) == (pytest.approx(30), pytest.approx(60), 360)


def test_peak_memory_is_that_of_the_curve_of_means():
    bytes_ = pd.DataFrame([{"method": "dense", "seed": seed, "update": u, "peak": mib * 2 ** 20} for seed, curve in ((1, (9, 1)), (2, (1, 7))) for u, mib in enumerate(curve, 1)])
    peak = learner_runs.peak_of_mean(bytes_).loc["dense"]
    assert (peak["update"], peak["mean"]) == (1, 5) and peak["std"] == pytest.approx(32 ** 0.5)


def test_measured_bytes_are_a_record_of_their_own(tmp_path, monkeypatch):
    config = learner_runs.lora(1, 1e-3, SIZES | {"max_new_tokens": 4})
    rows = learner_runs.footprints({"lora": [config]}, updates=2, every=2)
    assert rows["update"].tolist() == [1, 2] and rows["method"].tolist() == ["lora"] * 2 and (rows["peak"] > 2 ** 20).all()
    monkeypatch.setattr("logra.rl.footprint.trace", None)   # a second time nothing is measured
    pd.testing.assert_frame_equal(learner_runs.footprints({"lora": [config]}, updates=2, every=2), rows)


@pytest.mark.parametrize("kind", learner_runs.PROJECTIONS)
def test_a_point_of_figure_5a_is_the_run_whose_record_is_shipped(kind):
    sizes = learner_runs.late_sizes(updates=80, prompts=64, evaluate_every=5, evaluation_prompts=64, late=8, relative_step=2e-3)
    run = runs.find(learner_runs.projected(kind, 1, 2e-4, 42, sizes))
    assert run.recorded and run.evaluations["update"].tolist() == [0, *range(45, 81, 5)]
