"""runs.ensure(configs): the records of these runs, made where they are missing.

Every run is a process of its own (`python -m logra.rl.train`), as many at a time as there are cores. A record that exists is
used; a run that was cut short goes on from its checkpoint; notebooks that need the same run share it. A run that takes too long for
every reader to make is shipped in data/recorded/ and used from there, unless the reader has made it: `Run.recorded` tells.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from logra.rl.config import RunConfig
from logra.rl.learner import base_sha256
from logra.rl.records import ROOT, locked, log_input, records_root, refuse_if_only_drawing, write_whole

RECORDED = ROOT / "data" / "recorded"


@dataclass(frozen=True)
class Run:
    """A finished run and its record."""

    config: RunConfig
    folder: Path

    @property
    def recorded(self) -> bool:
        """Whether the record was shipped, not made here."""
        return self.folder.is_relative_to(RECORDED)

    @property
    def metrics(self) -> pd.DataFrame:
        """One row an update (see `train.Trainer.step`)."""
        return pd.read_parquet(self.folder / "metrics.parquet")

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row an evaluation (see `evaluate.evaluate`)."""
        return pd.read_parquet(self.folder / "evaluations.parquet")

    @property
    def timings(self) -> pd.DataFrame:
        """Seconds of each part of each update."""
        return pd.read_parquet(self.folder / "timings.parquet")


def folder_of(config: RunConfig) -> Path:
    """Where the record is: among the reader's own, else the shipped ones; where it is to be made if it is in neither."""
    own = records_root() / f"{config.name}-{config.hash()}"
    shipped = RECORDED / own.name
    return shipped if not _made(own, config) and _made(shipped, config) else own


def ensure(configs: Sequence[RunConfig], workers: int | None = None) -> list[Run]:
    """The runs of these configurations, in their order.

    workers: runs at a time; by default as many as cores. Raises RuntimeError with the end of the log of a run that failed (the
    others finish first), MissingRecord if only drawing was asked for. Ctrl-C stops the runs; the next call goes on from their checkpoints.
    """
    missing = {folder_of(config): config for config in configs if not _made(folder_of(config), config)}
    for folder in missing:
        refuse_if_only_drawing(folder)
    if missing:
        _make(missing, workers or os.cpu_count() or 1)
    return [Run(config, log_input(folder_of(config))) for config in configs]


def _made(folder: Path, config: RunConfig) -> bool:
    if not (folder / "metrics.parquet").exists():
        return False
    if not config.same_run(json.loads((folder / "config.json").read_text())):
        raise ValueError(f"{folder} holds a run with other settings than {config}: move it away, and the run is made anew")
    made_from, now = json.loads((folder / "environment.json").read_text())["model_sha256"], base_sha256(config.model)
    if made_from != now:
        raise ValueError(f"{folder} was made from another base ({str(made_from)[:12]}, now {str(now)[:12]}): move it away, and the run is made anew")
    return True


def _make(missing: dict[Path, RunConfig], workers: int) -> None:
    stop, processes, failures = threading.Event(), [], []

    def one(folder: Path, config: RunConfig) -> None:
        with locked(folder):
            if stop.is_set() or (folder / "metrics.parquet").exists():
                return
            asked = folder.parent / f".{folder.name}.json"
            write_whole(asked, json.dumps(config.model_dump()))
            folder.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "logra.rl.train", str(asked), "--folder", str(folder), "--resume"]
            threads = {"OMP_NUM_THREADS": str(config.threads), "MKL_NUM_THREADS": str(config.threads)}
            with open(folder / "run.log", "a") as log:
                # a session of its own: Ctrl-C in the terminal reaches the run through us alone, and once
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | threads, start_new_session=True)
                processes.append(process)
                code = process.wait()
            if code and not stop.is_set():
                end = "\n".join((folder / "run.log").read_text(errors="replace").splitlines()[-15:])
                failures.append(f"the run {folder.name} failed with exit code {code}; the end of its log:\n{end}")
            asked.unlink(missing_ok=True)

    total = sum(config.updates for config in missing.values())
    with ThreadPoolExecutor(min(workers, len(missing))) as pool, tqdm(total=total, unit="update", desc=f"{len(missing)} runs") as bar:
        futures = [pool.submit(one, folder, config) for folder, config in missing.items()]
        try:
            while not all(future.done() for future in futures):
                time.sleep(0.5)
                bar.update(sum(_updates(folder, config) for folder, config in missing.items()) - bar.n)
            bar.update(sum(_updates(folder, config) for folder, config in missing.items()) - bar.n)
        except BaseException:
            stop.set()
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            raise
    for future in futures:
        future.result()
    if failures:
        raise RuntimeError("\n\n".join(failures))


def _updates(folder: Path, config: RunConfig) -> int:
    """How far a run is."""
    if (folder / "metrics.parquet").exists():
        return config.updates
    try:
        return sum('"metrics"' in line for line in (folder / "log.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0
