"""Runs the notebooks of a profile and keeps what they make: `./reproduce.sh`.

Each notebook runs in a process of its own (`logra.paper.execute`) and writes aside; only a run that is believed moves its files into the
profile's figure folder, into `manifest.json` beside them, and its executed copy, as HTML, into its `notebooks/`. A notebook is
`cached` when this machine has already run it with the same notebook, parameters, code and versions, and its files are still as they were.
As many run at a time as there are cores. The others go on when one fails; the exit code is then 1. It is 2 for a request that cannot be
met (nothing has run), 130 after Ctrl-C.
"""
from __future__ import annotations

import argparse
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from logra.paper import execute, profiles, provenance
from logra.paper.profiles import Task
from logra.paper.provenance import ROOT
from logra.rl.records import cores

COLOURS = {"cached": "cyan", "recomputed": "green", "FAILED": "bold red", "running": "dim"}
HEARTBEAT = 30.0             # seconds between lines about a running notebook where there is no terminal


class Reproduction:
    """One profile's notebooks and the folders that they fill."""

    def __init__(self, name: str, profile: profiles.Profile, console: Console) -> None:
        self.name, self.profile, self.console = name, profile, console
        self.build = ROOT / "build" / name
        self.figures = ROOT / profile.figures
        self.manifest = self.figures / "manifest.json"
        self.stop = threading.Event()                        # set: notebooks that run are ended, and none is begun
        self._taking = threading.Lock()                      # one notebook at a time changes the manifest
        self._running: dict[str, Spinner] = {}

    def why(self, task: Task, force: bool, draw: bool) -> str:
        """Why `task` must run, in a few words; empty when what it made is still good."""
        if force or draw:
            return "--force" if force else "--draw"
        try:
            before = json.loads(self._state(task).read_text())
        except (OSError, ValueError):
            return "not made here yet"
        if before["notebook_sha256"] != provenance.sha256(task.source):
            return "notebook changed"
        asked = task.parameters
        if changed := sorted(key for key in before["parameters"].keys() | asked.keys() if provenance.canonical({"": before["parameters"].get(key)}) != provenance.canonical({"": asked.get(key)})):
            return f"parameter {', '.join(changed)} changed"
        if before["code_sha256"] != code_sha256():
            return "code changed"
        now = provenance.versions()
        if changed := [f"{key} {before['versions'].get(key)} -> {now[key]}" for key in now if before["versions"].get(key) != now[key]]:
            return ", ".join(changed)
        if set(before["outputs"]) != {self._label(name) for name in task.outputs}:
            return "declared outputs changed"
        for label, digest in before["outputs"].items():
            if not (ROOT / label).is_file():
                return f"output missing: {label}"
            if provenance.sha256(ROOT / label) != digest:
                return f"output changed: {label}"
        for label, digest in before["inputs"].items():       # data files; a record may be gone once what it showed is drawn
            if (ROOT / label).is_file() and provenance.sha256(ROOT / label) != digest:
                return f"input changed: {label}"
        return "" if self._page(task).is_file() else f"page missing: {task.stem}.html"

    def make(self, task: Task, draw: bool) -> tuple[float, str]:
        """Runs `task` and takes what it made. Returns its seconds and how that compares with the manifest. Raises NotebookFailed or OSError."""
        command = f"./reproduce.sh --profile {self.name} --only {task.stem}"
        extra = {"LOGRA_COMMAND": command, "LOGRA_DRAW_ONLY": "1" if draw else "0"}
        aside = self.build / "aside" / task.stem
        try:
            with self._progress(task) as show:
                result = execute.run(task, aside, self.build / "logs" / f"{task.stem}.log", extra, show, self.stop)
            with self._taking:
                return result.seconds, self._take(task, result, _html(result.executed))
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _take(self, task: Task, result: execute.Result, rendered: str) -> str:
        outputs = {self._label(name): provenance.sha256(result.figures / name) for name in sorted(task.outputs)}
        entry = {
            "notebook": task.name, "notebook_sha256": provenance.sha256(task.source), "parameters": task.parameters, "inputs": result.inputs, "outputs": outputs,
            "seconds": round(result.seconds, 1), "versions": result.mark["versions"], "device": result.mark["device"], "code_sha256": code_sha256(),
        }
        manifest = self._read_manifest()
        before = {label: digest for artifact in manifest.values() for label, digest in artifact["outputs"].items()}
        listed = set(self.profile.notebooks) - {task.name}
        manifest = {name: artifact for name, artifact in manifest.items() if artifact["notebook"] in listed}
        for name in task.outputs:                            # the files of one figure, in all formats, are one artifact
            artifact = manifest.setdefault(Path(name).stem, entry | {"outputs": {}, "class": result.classes[name]})
            artifact["outputs"][self._label(name)] = outputs[self._label(name)]
        self._state(task).unlink(missing_ok=True)            # from here until the end, an interruption means: run it again
        _write(self._page(task), rendered)
        _move_in({result.figures / name: self.figures / name for name in task.outputs})
        _write(self.manifest, provenance.canonical(manifest) + "\n")
        _write(self._state(task), provenance.canonical(entry) + "\n")
        differ = sum(before.get(label) != digest for label, digest in outputs.items())
        if not before.keys() & outputs.keys():
            return f"{len(outputs)} files, new"
        return f"{len(outputs)} files, identical to the manifest's" if not differ else f"{differ} of {len(outputs)} files differ from the manifest's"

    def _read_manifest(self) -> dict[str, Any]:
        try:
            return json.loads(self.manifest.read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            self.say("", Text(f"{self.manifest.relative_to(ROOT)} is not JSON: begun anew"))
            return {}

    def _state(self, task: Task) -> Path:
        return self.build / "state" / f"{task.stem}.json"

    def _page(self, task: Task) -> Path:
        return self.figures / "notebooks" / f"{task.stem}.html"

    def write_index(self) -> None:
        """The reader's page, from the manifest and the ledger as they are now, where there is a ledger."""
        if not (ROOT / "data" / "paper" / "claims.csv").is_file():
            return
        from logra.paper import page                         # imports the method, seconds that a cached run does not need

        _write(self.figures / "index.html", page.render(self.figures, self.name))

    def _label(self, name: str) -> str:
        return f"{self.profile.figures}/{name}"

    @contextmanager
    def _progress(self, task: Task) -> Iterator[Any]:
        if self.console.is_terminal:
            spinner = self._running[task.stem] = Spinner("dots")
            try:
                yield lambda seconds, line: spinner.update(text=Text(f"{task.stem}  {seconds:.0f} s  {line}", overflow="ellipsis", no_wrap=True))
            finally:
                del self._running[task.stem]
            return
        self.say("running", Text(task.stem))
        due = HEARTBEAT

        def plain(seconds: float, line: str) -> None:
            nonlocal due
            if seconds >= due:
                self.say("running", Text(f"{task.stem}  {seconds:.0f} s  {line}"))
                due += HEARTBEAT

        yield plain

    def showing(self) -> Live:
        """On a terminal, one line for each notebook that runs."""
        return Live(get_renderable=lambda: Group(*list(self._running.values())), console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False)

    def say(self, status: str, text: Text) -> None:
        """One line, the status in front in its colour."""
        self.console.print(Text.assemble((f"{status:<11}", COLOURS.get(status, "")), text), soft_wrap=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the profile's lock: two runs at once would take each other's files. Raises ProfileError when another holds it."""
        self.build.mkdir(parents=True, exist_ok=True)
        with open(self.build / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise profiles.ProfileError(f"profile {self.name} is being reproduced by another process; wait for it to end") from None
            yield


@functools.cache
def code_sha256() -> str:
    """The hash of the package's code and its figure style: what a result can depend on besides the notebook."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "logra").rglob("*.py"), *(ROOT / "logra").rglob("*.mplstyle")]):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{provenance.sha256(path)}\n".encode())
    return digest.hexdigest()


def _html(executed: Path) -> str:
    import nbformat

    from logra.paper import reading                          # half a second to import: not for a run where all is cached

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                      # about missing alternative texts; nothing that a reader can act on
        return reading.html(nbformat.read(executed, as_version=4))


def _move_in(moves: dict[Path, Path]) -> None:
    """Copies all beside their targets first, then renames: a full disk changes no target. Raises OSError, leaving no partial file."""
    staged = {source: target.with_name(f".{target.name}.new") for source, target in moves.items()}
    try:
        for source, stage in staged.items():
            stage.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, stage)
            _sync(stage)
        for source, stage in staged.items():
            os.replace(stage, moves[source])
    finally:
        for stage in staged.values():
            stage.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.with_name(f".{path.name}.new")
    try:
        stage.write_text(text, encoding="utf-8")
        _sync(stage)
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())                            # some disks say that they are full only here


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        full = " (the disk is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        return f"its results could not be stored: {error}{full}. Nothing half-written was kept; run it again once that is mended"
    return str(error) if isinstance(error, execute.NotebookFailed) else f"{type(error).__name__}: {error}"


def reproduce(arguments: argparse.Namespace, console: Console) -> int:
    """Runs what the command line asks for; returns the exit code. Raises ProfileError before anything has run."""
    profile, tasks = profiles.tasks(ROOT, arguments.profile, arguments.only)
    work = Reproduction(arguments.profile, profile, console)
    begun, counts, failed = time.monotonic(), {"cached": 0, "recomputed": 0, "FAILED": 0}, []

    def one(task: Task) -> tuple[str, str]:
        try:
            if why := work.why(task, arguments.force, arguments.draw):
                seconds, compared = work.make(task, arguments.draw)
                return "recomputed", f"{seconds:7.1f} s  {why}; {compared}"
            return "cached", f"{0:7.1f} s  nothing changed since it was made"
        except Exception as error:                           # whatever it is, the other notebooks go on
            return "FAILED", f"{_reason(error)} (log: build/{work.name}/logs/{task.stem}.log)"

    with work.alone(), ThreadPoolExecutor(cores() + 1) as pool:      # one more than cores: some wait for runs, of which there are as many as cores
        futures = {pool.submit(one, task): task for task in tasks}
        try:
            with work.showing():
                for future in as_completed(futures):
                    stem, (status, detail) = futures[future].stem, future.result()
                    counts[status] += 1
                    failed += [stem] if status == "FAILED" else []
                    work.say(status, Text(f"{stem:<24} {detail}"))
        except KeyboardInterrupt:
            running = ", ".join(task.stem for future, task in futures.items() if future.running())
            work.stop.set()
            pool.shutdown(cancel_futures=True)
            work.say("", Text(f"interrupted in {running}: nothing of it was taken; records that were complete or checkpointed are kept. The same command goes on from there."))
            return 130
        if counts["recomputed"] or not (work.figures / "index.html").is_file() and work.manifest.is_file():
            work.write_index()
    done = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    where = f"to read: {profile.figures}/index.html"
    console.print(Text(f"{done}{f' ({chr(44).join(failed)})' if failed else ''} in {time.monotonic() - begun:.0f} s; {where}"), soft_wrap=True)
    return 1 if failed else 0


def test(arguments: list[str]) -> int:
    """pytest and nbval, in one run with one closing line."""
    places = ["tests/unit", "tests/system", "tests/notebooks"]
    nbval = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with", "tests/notebooks/sanitize.cfg"]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *nbval, *places, *arguments])


def schedule(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """A profile that is a folder of runs, see `logra.paper.plan`: its plan, or the runs themselves."""
    if chosen.draw or chosen.force:
        parser.error(f"--draw and --force are for profiles of notebooks, and profiles/{chosen.profile} holds runs")
    from logra.paper import node
    from logra.rl import stopping

    try:
        limit = None if chosen.wall_clock is None else stopping.seconds(chosen.wall_clock)
        return node.main(chosen.profile, chosen.only, chosen.plan, chosen.json, limit, Console(highlight=False))
    except (ValueError, profiles.ProfileError) as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2


def main(arguments: list[str]) -> int:
    """The command line; see `--help`."""
    try:
        execute.settle_environment()
    except OSError as error:
        print(f"reproduce: the project's folder must be writable: {error}", file=sys.stderr)
        return 2
    if arguments[:1] == ["test"]:
        return test(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="./reproduce.sh", description="Runs the notebooks of a profile and writes its figures and manifest.json.", epilog="./reproduce.sh test [pytest options]: the tests."
    )
    parser.add_argument("--profile", default="laptop", help="a file in profiles/ (default: laptop)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only the notebooks whose name begins with one of these, e.g. fig5")
    parser.add_argument("--draw", action="store_true", help="draw again from the records; a missing record is an error")
    parser.add_argument("--force", action="store_true", help="run also what is cached")
    runs = parser.add_argument_group("profiles that are folders of runs (h100)")
    runs.add_argument("--plan", action="store_true", help="print the schedule with its memory, hours and disk, and run nothing")
    runs.add_argument("--json", action="store_true", help="with --plan, as JSON")
    runs.add_argument("--wall-clock", metavar="D-HH:MM:SS", help="stop before then, with a checkpoint and exit code 75")
    chosen = parser.parse_args(arguments)
    if (ROOT / "profiles" / chosen.profile).is_dir():
        return schedule(chosen, parser)
    if chosen.plan or chosen.json or chosen.wall_clock:
        parser.error(f"--plan, --json and --wall-clock are for a profile that is a folder of runs, and profiles/{chosen.profile} is none")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)    # ended from outside: the notebook's processes end too
    try:
        return reproduce(chosen, Console(highlight=False))
    except profiles.ProfileError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
