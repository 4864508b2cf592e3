"""The benchmarks run from end to end at small shapes, as a user starts them, and count what the closed form says. No time is asserted."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from models import small_smollm2

from logra import theory
from logra.rl import models
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


def test_peers_start_from_the_same_loss_and_hold_what_their_shapes_say(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("peers", BENCHMARKS / "peers.py")
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    small = small_smollm2(tmp_path / "small", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    monkeypatch.setattr(peers, "models", SimpleNamespace(SMOLLM2=small, load=models.load))
    for name, value in dict(RANK=8, UPDATES=3, EVERY=2, HELD_OUT=2).items():
        monkeypatch.setattr(peers, name, value)
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(8)))
    made = {method: peers.run(method, 1e-3, 1, tmp_path / "problems.jsonl") for method in ("dense", "lora", "logra-hadamard")}
    shapes = 2 * [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    entries, rows, sides = (sum(map(f, shapes)) for f in (lambda s: s[0] * s[1], lambda s: s[0], lambda s: 8 * (s[0] + s[1])))
    for method, gradients, moments in (("dense", entries, 2 * entries), ("lora", sides, 2 * sides), ("logra-hadamard", 8 * rows, 2 * rows)):       # v_d is float64
        record = made[method]
        assert record["loss"][0] == pytest.approx(made["dense"]["loss"][0], abs=1e-5) and record["evaluations"][3] != record["evaluations"][0]
        assert (len(record["loss"]), len(record["seconds"]), list(record["evaluations"])) == (3, 2, [0, 2, 3])
        assert record["bytes"]["gradients"] == 4 * gradients and moments <= record["bytes"]["optimizer"] / 4 <= moments + 2 * len(shapes)     # beside AdamW's counters of steps
