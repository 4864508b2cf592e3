"""The benchmarks run from end to end at small shapes, as a user starts them, and count what the closed form says. No time is asserted."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from logra import theory
from logra.rl.records import ROOT

BENCHMARKS = ROOT / "benchmarks"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHON": sys.executable}


def run(tmp_path, *command):
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, env=ENVIRONMENT | {"OUT": str(tmp_path), "LIMIT": "1800"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def speed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed")
    run(folder, sys.executable, BENCHMARKS / "speed.py", "--models", "tiny", "--ranks", 4, 16, "--tokens", 32, "--repetitions", 2, "--out", folder / "speed.json",
        "--parts", "projections", "layer", "checkpointed", "terms", "optimizer", "hash", "update", "model", "whole")
    return json.loads((folder / "speed.json").read_text())


def test_every_part_has_its_rows_with_times_and_ratios(speed):
    found = {(row["part"], row["dtype"], row["method"], row["rank"]) for row in speed["rows"]}
    for part in ("projections", "layer", "checkpointed"):
        for dtype in ("float32", "bfloat16", "autocast"):
            assert {(part, dtype, "dense", None), (part, dtype, "logra", 4), (part, dtype, "lora", 16)} <= found
    assert {("model", "float32", "logra", 16), ("whole update", "autocast", "lora", 4), ("update", "float32", "probe of a response", 16),
            ("hash", "float32", "gaussian", 4), ("optimizer", "float32", "RowAdam.step", 16), ("terms", "bfloat16", "P = X Aᵀ", 4)} <= found
    assert all(len(row["samples"]) >= 1 and row["seconds"] >= row["seconds_least"] > 0 and math.isfinite(row["ratio"]) for row in speed["rows"])
    for share in speed["shares"]:
        assert sum(share[piece] for piece in ("passes", "probe", "propose", "round", "apply")) == pytest.approx(1)


def test_the_products_of_a_pass_are_those_of_the_closed_form(speed):
    sizes = [(96, 96), (48, 96), (48, 96), (96, 96), (160, 96), (160, 96), (96, 160)]
    for row in speed["rows"]:
        if row["part"] == "projections" and row["method"] in ("dense", "logra"):
            assert row["flops"] == sum(theory.step_flops(32, d, k, row["rank"]) for d, k in sizes)
        if row["part"] == "projections" and row["method"] == "logra":
            assert row["flops_ratio"] == pytest.approx(row["floor"])


def test_the_other_methods_are_measured_or_said_to_be_missing(speed):
    here = {name for name in ("flora_opt", "galore_torch") if importlib.util.find_spec(name)}
    assert set(speed["left out"]) == {"flora_opt", "galore_torch"} - here
    assert ("flora" in {row["method"] for row in speed["rows"]}) == (not speed["left out"])


def test_the_gpu_check_runs_without_a_gpu(tmp_path):
    run(tmp_path, "bash", BENCHMARKS / "gpu_check.sh", "--device", "cpu", "--small")
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(result["checks"]) >= 20 and sum("a run of one rank" in check["check"] for check in result["checks"]) == 6 and all(check["holds"] == "yes" for check in result["checks"]), result["checks"]
    assert {(row["model"], row["method"]) for row in result["memory"]} == {("tiny", method) for method in ("dense", "logra", "lora")}
    assert all(row["step"] == pytest.approx(row["simulated step"], rel=0.1) for row in result["memory"])
    assert {"dense", "logra", "lora"} <= {row["method"] for row in result["times"]} and not result["left out"]


def test_the_gpu_check_asks_for_a_gpu_where_there_is_none(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import torch; torch.cuda.is_available = lambda: False; "
               "import gpu_check; gpu_check.main([])", str(BENCHMARKS)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and "sees no CUDA device" in done.stderr
