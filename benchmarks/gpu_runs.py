"""Whole runs for gpu_check.py: `python -m logra.rl.train` under torchrun (FSDP2; NCCL on a GPU, gloo without), and with a vLLM engine that shares the GPU."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from logra.rl.config import RunConfig
from logra.rl.placement import vllm_python
from logra.rl.records import ROOT

# what a run of this rank's machine can switch on; each is a run of its own
SWITCHES = {"as the paper's": {}, "weights on the CPU": {"offload": True}, "weights gathered in bfloat16, sketches summed in the backward": {"gathered": "bfloat16", "sharded_sketches": True},
            "finite differences": {"probe": "finite_difference"}, "dense": {"method": "dense"}, "killed and resumed": {"updates": 40}}
ENGINE = {"rollout": "ray", "sync": "exact", "engine_cache_gib": 0.5, "engine_seconds": 120.0}


def made(switches: dict, folder: Path, killed: bool) -> int:
    """Makes a short run of the learner under torchrun, killed: once at its first checkpoint, and resumed. Returns how many updates are missing, were
    skipped, or have a number that is not finite; its record is in folder/run. Raises RuntimeError, with the end of what it said, if it does not end well."""
    config = RunConfig(**{"name": "gpu-check", "updates": 3, "prompts": 16, "micro_batch": 8, "max_new_tokens": 16, "rank": 16, "compute": "bfloat16", "checkpointing": True,
                          "incorrect_reward": -0.5, "evaluate_every": 3, "evaluation_prompts": 8, "checkpoint_every": 2} | switches)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.model_dump()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "logra.rl.train", folder / "config.json", "--folder", folder / "run",
               "--resume"]
    # the engine has the GPU on which the rank trains
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOGRA_ENGINE_GPUS": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    for last in (False, True) if killed else (True,):
        with (folder / "log").open("a") as log:
            process = subprocess.Popen(list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        while not last and process.poll() is None and not list(folder.glob("run/checkpoint/update-*")):
            time.sleep(0.02)
        if not last:
            os.killpg(process.pid, signal.SIGKILL)
        if (code := process.wait()) != (0 if last else -signal.SIGKILL):
            raise RuntimeError(f"exit code {code}: " + " | ".join((folder / "log").read_text().splitlines()[-12:]))
    metrics = pd.read_parquet(folder / "run" / "metrics.parquet")
    held = metrics[["reward", "loss", "gradient_norm" if "gradient_norm" in metrics else "sketch_norm"]]
    skipped = int(metrics["skipped"].max()) if "skipped" in metrics else 0
    return config.updates - int(held.map(math.isfinite).all(axis=1).sum()) + skipped


def checks(engine: bool) -> tuple[list[tuple[str, float, float]], list[str]]:
    """(check, value, limit) of every run; what was left out, and why. What a run that breaks off said is printed."""
    rows, left_out, wanted = [], [], dict(SWITCHES)
    if engine:
        try:
            vllm_python()
            wanted["with a vLLM engine"] = ENGINE
        except FileNotFoundError as error:
            left_out.append(f"a vLLM engine: {error}")
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(3) as pool:
        folders = {name: Path(place) / str(number) for number, name in enumerate(wanted)}
        runs = {name: pool.submit(made, switches, folders[name], "killed" in name) for name, switches in wanted.items()}
        for name, run in runs.items():
            check = f"a run of one rank, {name}: updates that are missing or not finite"
            try:
                rows.append((check, run.result(), 0))
            except RuntimeError as error:
                print(check, error, sep="\n", flush=True)
                rows.append((check, math.inf, 0))
                continue
            if wanted[name] is ENGINE:
                metrics = pd.read_parquet(folders[name] / "run" / "metrics.parquet")
                rows += [("the engine's weights: updates after which they are not the trainer's bits", int((~metrics["sync_equal"]).sum()), 0),
                         ("the engine's weights: updates that were not sent as low-rank factors", int((metrics["sync"] != "update").sum()), 0),
                         ("mean log-probability, engine less trainer, nats", float(metrics["mismatch"].abs().mean()), 0.1)]
    return rows, left_out
