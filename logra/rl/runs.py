"""runs.ensure(configs): the records of these runs, made where they are missing.

Every run is a process of its own, as `python -m logra.rl.train` makes it, as many at a time as there are cores; they are forked from
one server that has imported the method, which takes longer than a short run. A record that exists is used; a run that was cut
short goes on from its checkpoint; notebooks that need the same run share it. A run that takes too long for
every reader to make is shipped in data/recorded/ and used from there, unless the reader has made it: `Run.recorded` tells.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from logra.rl.bases import base_sha256
from logra.rl.config import RunConfig
from logra.rl.records import RECORDED, core, cores, locked, log_input, records_root, refuse_if_only_drawing

FORKED = get_context("forkserver")                           # not "fork": the caller may have threads
FORKED.set_forkserver_preload(["logra.rl.train", "logra.rl.footprint", "torch._dynamo", "torch._decomp.decompositions_for_jvp",
                               "transformers.models.qwen2.modeling_qwen2"])     # the last three would be imported by each run's first update
_polling = threading.Lock()


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
        """Seconds of each part of each update; peak_gib, the most memory that a training GPU had allocated in its training call, of a run on GPUs."""
        return pd.read_parquet(self.folder / "timings.parquet")


def folder_of(config: RunConfig) -> Path:
    """Where the record is: among the reader's own, else the shipped ones; where it is to be made if it is in neither."""
    own = records_root() / config.record
    shipped = RECORDED / own.name
    return shipped if not _made(own, config) and _made(shipped, config) else own


def find(config: RunConfig) -> Run | None:
    """The run of a configuration, if its record is whole; nothing is made."""
    folder = folder_of(config)
    return Run(config, log_input(folder)) if _made(folder, config) else None


def ensure(configs: Sequence[RunConfig]) -> list[Run]:
    """The runs of these configurations, in their order.

    Raises RuntimeError with the end of the log of a run that failed (the others finish first), MissingRecord if only drawing was
    asked for. Ctrl-C stops the runs; the next call goes on from their checkpoints.
    """
    missing = {folder_of(config): config for config in configs if not _made(folder_of(config), config)}
    for folder in missing:
        refuse_if_only_drawing(folder)
    if missing:
        _make(missing)
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


def _make(missing: dict[Path, RunConfig]) -> None:
    stop, processes, failures = threading.Event(), [], []

    def one(folder: Path, config: RunConfig) -> None:
        with locked(folder), core():
            if stop.is_set() or (folder / "metrics.parquet").exists():
                return
            folder.mkdir(exist_ok=True)
            process = FORKED.Process(target=_run, args=(config.model_dump(), folder, dict(os.environ)))
            processes.append(process)
            code = _exit_code(process)
            if code and not stop.is_set():
                end = "\n".join((folder / "run.log").read_text(errors="replace").splitlines()[-15:])
                failures.append(f"the run {folder.name} failed with exit code {code}; the end of its log:\n{end}")

    total = sum(config.updates for config in missing.values())
    with ThreadPoolExecutor(min(cores(), len(missing))) as pool, tqdm(total=total, unit="update", desc=f"{len(missing)} runs") as bar:
        futures = [pool.submit(one, folder, config) for folder, config in missing.items()]
        try:
            while not all(future.done() for future in futures):
                time.sleep(0.5)
                bar.update(sum(_updates(folder, config) for folder, config in missing.items()) - bar.n)
            bar.update(sum(_updates(folder, config) for folder, config in missing.items()) - bar.n)
        except BaseException:
            stop.set()
            with _polling:
                for process in processes:
                    if process.pid and process.is_alive():
                        os.kill(process.pid, signal.SIGINT)
            raise
    for future in futures:
        future.result()
    if failures:
        raise RuntimeError("\n\n".join(failures))


def _exit_code(process) -> int:
    """Start a process and wait for its end: the code that it really ended with, whatever other threads start meanwhile.

    multiprocessing polls every child when one is started; two threads that poll the same one race for its only exit code, and the
    loser reports 255.
    """
    with _polling:
        process.start()
    connection.wait([process.sentinel])
    with _polling:
        process.join()
        return process.exitcode


def _run(settings: dict, folder: Path, environment: dict[str, str]) -> None:
    """One run, in a process of its own; what it prints goes to its log."""
    os.environ.update(environment)                           # the server has that of its first caller
    os.setsid()                                              # Ctrl-C in the terminal reaches the run through its caller alone, and once
    with open(folder / "run.log", "a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    from logra.rl import train                               # in the server already

    try:
        train.run(RunConfig(**settings), folder)
    except KeyboardInterrupt:
        sys.exit(130)


def _updates(folder: Path, config: RunConfig) -> int:
    """How far a run is."""
    if (folder / "metrics.parquet").exists():
        return config.updates
    try:
        return sum('"metrics"' in line for line in (folder / "log.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0
