"""Whole runs for gpu_check.py: `python -m logra.rl.train` under torchrun (FSDP2; NCCL on a GPU, gloo without), and with a vLLM engine that shares the GPU."""

import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from logra.rl.config import RunConfig
from logra.rl.placement import vllm_python
from logra.rl.records import ROOT

UPDATES = 3
# what a run of this rank's machine can switch on; each is a run of its own
SWITCHES = {"as the paper's": {}, "weights on the CPU": {"offload": True}, "weights gathered in bfloat16, sketches summed in the backward": {"gathered": "bfloat16", "sharded_sketches": True},
            "finite differences": {"probe": "finite_difference"}, "dense": {"method": "dense"}}
ENGINE = {"rollout": "ray", "sync": "exact", "engine_cache_gib": 0.5, "engine_seconds": 120.0}


def made(switches: dict, folder: Path) -> pd.DataFrame:
    """The metrics of a short run of the learner under torchrun. Raises RuntimeError, with the end of what it said, if it does not end well."""
    config = RunConfig(name="gpu-check", updates=UPDATES, prompts=16, micro_batch=8, max_new_tokens=16, rank=16, compute="bfloat16", checkpointing=True, incorrect_reward=-0.5,
                       evaluate_every=UPDATES, evaluation_prompts=8, checkpoint_every=2, **switches)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.model_dump()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "logra.rl.train", folder / "config.json", "--folder", folder / "run"]
    # the engine has the GPU on which the rank trains
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOGRA_ENGINE_GPUS": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    done = subprocess.run(list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: " + " | ".join((done.stdout + done.stderr).splitlines()[-12:]))
    return pd.read_parquet(folder / "run" / "metrics.parquet")


def lacking(metrics: pd.DataFrame) -> int:
    """Updates that are missing, were skipped, or have a number that is not finite in what every method records."""
    held = metrics[["reward", "loss", "gradient_norm" if "gradient_norm" in metrics else "sketch_norm"]]
    skipped = int(metrics["skipped"].max()) if "skipped" in metrics else 0
    return UPDATES - int(held.map(math.isfinite).all(axis=1).sum()) + skipped


def checks(engine: bool) -> tuple[list[tuple[str, float, float]], list[str]]:
    """(check, value, limit) of every run; what was left out, and why. A run that breaks off lacks all its updates, and what it said is printed."""
    rows, left_out, wanted = [], [], dict(SWITCHES)
    if engine:
        try:
            vllm_python()
            wanted["with a vLLM engine"] = ENGINE
        except FileNotFoundError as error:
            left_out.append(f"a vLLM engine: {error}")
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(made, switches, Path(place) / str(number)) for number, (name, switches) in enumerate(wanted.items())}
        for name, run in runs.items():
            check, metrics = f"a run of one rank, {name}: updates that are missing or not finite", None
            try:
                metrics = run.result()
            except RuntimeError as error:
                print(check, error, sep="\n", flush=True)
            rows.append((check, UPDATES if metrics is None else lacking(metrics), 0))
            if metrics is not None and "sync_equal" in metrics:
                rows += [("the engine's weights: updates after which they are not the trainer's bits", int((~metrics["sync_equal"]).sum()), 0),
                         ("the engine's weights: updates that were not sent as low-rank factors", int((metrics["sync"] != "update").sum()), 0),
                         ("mean log-probability, engine less trainer, nats", float(metrics["mismatch"].abs().mean()), 0.1)]
    return rows, left_out
