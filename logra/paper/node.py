"""Makes a plan's runs on this node: `./reproduce.sh --profile h100`.

Each run is `torchrun --nproc-per-node 4 -m logra.rl.train`: the first GPUs train, the engines have those after them (`rl.engines`). A run whose
record is whole is left alone, one that was cut short goes on. What does not fit the cards is refused before a GPU is touched.

Exit code 0: all are made; 75: stopped by --wall-clock, SIGTERM or SIGUSR1 with a checkpoint, the same command goes on; 1: one failed, the
others were tried; 65: all that failed met numbers that are not finite, three updates in a row, which going on would meet again; 2: a request
that cannot be met, nothing has run.
"""
from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from rich.console import Console

from logra.memory import GIB
from logra.paper import plan
from logra.paper.plan import Planned
from logra.paper.profiles import ProfileError
from logra.paper.provenance import ROOT
from logra.rl import placement, stopping
from logra.rl.records import locked, records_root, write_whole

_INSTALL = ("make one with a CUDA build, python3.11 -m venv FOLDER; FOLDER/bin/pip install vllm==0.32.0 ray==2.60.0, and name FOLDER/bin/python in LOGRA_VLLM_PYTHON")


def main(profile: str, only: list[str] | None, planned: bool, as_json: bool, wall_clock: float | None, console: Console) -> int:
    """Shows or makes the schedule of profiles/<profile>/. Raises ProfileError for what cannot be done, before anything has run."""
    runs = plan.chosen(plan.load(ROOT / "profiles" / profile), only)
    if planned and as_json:
        print(json.dumps({"profile": profile, "runs": [run.as_row() for run in runs]}, indent=1).replace("NaN", "null"))
        return 0
    if planned:
        plan.show(runs, console if console.is_terminal else Console(width=160))     # in a pipe rich takes 80 columns
        return 0
    refused = [run for run in runs if not run.fits]
    if refused and (only or len(refused) == len(runs)):
        raise ProfileError("\n".join(run.refusal() for run in refused))
    for run in refused:
        console.print(f"refused    {run.refusal()}", highlight=False, soft_wrap=True)
    runs = [run for run in runs if run.fits]
    check(runs)
    return make(runs, wall_clock, console)


def folder_of(run: Planned) -> Path:
    return records_root() / run.config.record


def check(runs: list[Planned]) -> None:
    """Raises ProfileError, with all that is missing, unless this node can make these runs."""
    wrong, machine = [], runs[0].machine
    elsewhere = any(run.config.rollout != "ray" for run in runs) or "RAY_ADDRESS" in os.environ
    wanted = machine.training_gpus + (0 if elsewhere else machine.generating_gpus)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < wanted:
        wrong.append(f"this machine has {found} GPUs, and the schedule wants {wanted} of {machine.card_gb:g} GB ({machine.training_gpus} train, {machine.generating_gpus} generate): "
                     "start it on such a node (launch/slurm.sh, launch/node.sh), or see what it would do with --plan")
    else:
        smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(wanted)) / GIB
        for run in runs:
            wrong += [f"{run.name} needs {needs:.1f} GiB on each {kind} GPU, and the smallest here has {smallest:.1f}"
                      for kind, needs in (("training", run.needs_gib), ("generating", 0.0 if elsewhere else run.engine_gib)) if needs > smallest]
    for model in dict.fromkeys(run.config.model for run in runs):
        if not (ROOT / model / "config.json").is_file():
            wrong.append(f"{model} is no folder with a model: hf download NAME --local-dir {model}")
    if any(run.config.rollout in ("vllm", "ray") for run in runs):
        wrong += _engines(wanted, found >= wanted)
    if any(_model_type(run) == "qwen3_5" for run in runs) and importlib.util.find_spec("fla") is None:
        print("reproduce: fla is wanted for qwen3_5 (pip install flash-linear-attention, into .venv): without it linear attention is trained by transformers' plain "
              "code, which is more than ten times slower", file=sys.stderr)
    memory, largest = psutil.virtual_memory().total / GIB, max(runs, key=lambda run: run.host_gib)
    if memory < largest.host_gib:
        wrong.append(f"this machine has {memory:,.0f} GiB of memory, and {largest.name} needs {largest.host_gib:,.0f} beside its GPUs: each of {machine.training_gpus} training ranks "
                     "reads the whole model in float32 before it keeps its share: take a node with more, or fewer training_gpus")
    records_root().mkdir(parents=True, exist_ok=True)
    free, most = shutil.disk_usage(records_root()).free / GIB, max(run.disk_gib for run in runs)
    if free < most:
        wrong.append(f"{records_root()} has {free:,.0f} GiB free, and a run needs up to {most:,.0f}: name another folder in LOGRA_RECORDS")
    if wrong:
        raise ProfileError("\n".join(wrong))


def _engines(wanted: int, are_here: bool = True) -> list[str]:
    """What is wrong with the interpreter that has vLLM: it has to see `wanted` GPUs, if they are here (vLLM's CPU build sees none, and would generate on the CPU)."""
    try:
        asked = [placement.vllm_python(), "-c", "import vllm, ray, torch; print(torch.cuda.device_count())"]
    except FileNotFoundError as error:
        return [str(error)]
    if not are_here:                                        # said already, and importing vLLM takes half a minute
        return []
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode:
        return [f"{asked[0]} cannot import vllm, ray and torch: {(done.stderr.splitlines() or ['it ended with ' + str(done.returncode)])[-1]}"]
    if (seen := int(done.stdout.split()[-1])) < wanted:
        return [f"vLLM's interpreter {asked[0]} sees {seen} GPUs, and the schedule wants {wanted}: {_INSTALL}"]
    return []


def _model_type(run: Planned) -> str:
    config = ROOT / run.config.model / "config.json"
    return json.loads(config.read_text())["model_type"].removesuffix("_text") if config.is_file() else ""


def command(run: Planned, config: Path, folder: Path, left: float | None) -> list[str]:
    """torchrun over the training GPUs. left: seconds until the wall-clock limit."""
    limit = [] if left is None else ["--wall-clock", f"{left:.0f}"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.machine.training_gpus), "-m", "logra.rl.train", str(config),
            "--resume", "--folder", str(folder), *limit]


def make(runs: list[Planned], wall_clock: float | None, console: Console) -> int:
    """One after the other; the exit code."""
    until = None if wall_clock is None else time.monotonic() + wall_clock
    process, heard = None, []

    def tell(number, frame):
        # to the ranks, not to torchrun: it would kill them after half a minute, and an update may take ten
        heard.append(signal.Signals(number).name)
        with suppress(psutil.NoSuchProcess):
            for rank in psutil.Process(process.pid).children() if process is not None else ():
                rank.send_signal(signal.SIGUSR1)

    before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGUSR1)}
    failed = []
    try:
        for run in runs:
            folder = folder_of(run)
            with locked(folder):
                if (folder / "metrics.parquet").exists():
                    console.print(f"cached     {run.name}", highlight=False)
                    continue
                left = None if until is None else until - time.monotonic()
                if heard:
                    return stopping.GO_ON
                if left is not None and left <= (one := 3600 * run.hours / run.config.updates):
                    console.print(f"stopped    {run.name} is not begun: {max(left, 0):.0f} s are left, and an update takes {one:.0f} at the paper's printed rate; "
                                  "the same command goes on from there", highlight=False, soft_wrap=True)
                    return stopping.GO_ON
                folder.mkdir(parents=True, exist_ok=True)
                config = ROOT / "build" / "plan" / f"{folder.name}.json"
                config.parent.mkdir(parents=True, exist_ok=True)
                write_whole(config, json.dumps(run.config.model_dump(mode="json"), indent=1) + "\n")
                console.print(f"running    {run.name}: {run.hours:.0f} hours at the paper's printed rate; log: {folder / 'run.log'}", highlight=False, soft_wrap=True)
                with open(folder / "run.log", "a") as log:
                    process = subprocess.Popen(command(run, config, folder, left), stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
                    try:
                        code = process.wait()
                    except KeyboardInterrupt:
                        process.send_signal(signal.SIGINT)
                        process.wait()
                        raise
                    finally:
                        process = None
                if code == 0:
                    console.print(f"made       {run.name}", highlight=False)
                    continue
                told = folder / "stopped.json"              # torchrun has one code for all
                stopped = json.loads(told.read_text()) if told.exists() else {"code": 1, "why": f"torchrun ended with {code}; the end of its log:\n" + _end(folder / "run.log")}
                if heard or stopped["code"] == stopping.GO_ON:
                    console.print(f"stopped    {run.name}: {stopped['why']}; the same command goes on from there", highlight=False, soft_wrap=True)
                    return stopping.GO_ON
                console.print(f"FAILED     {run.name}: {stopped['why']}", highlight=False, soft_wrap=True)
                failed.append(stopped["code"])
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from the last checkpoint", highlight=False)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if not failed else stopping.NOT_FINITE if set(failed) == {stopping.NOT_FINITE} else 1


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
