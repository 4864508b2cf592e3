"""Records: the folders that a run, or anything else that is expensive, leaves behind; the contract between running and drawing.

| variable | what it names |
|---|---|
| `LOGRA_RECORDS` | the folder of records (default `records/` in the project) |
| `LOGRA_INPUTS` | a file that gets one line `{"path": ..., "sha256": ...}` for each record that is read |
| `LOGRA_DRAW_ONLY`, `LOGRA_COMMAND` | `1` forbids making records; the command that would make them |
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import logra

ROOT = Path(logra.__file__).resolve().parent.parent
RECORDED = ROOT / "data" / "recorded"                       # the records that are shipped

# Files that say when, where and how fast a record was made, not what is in it.
_UNHASHED = {"environment.json", "timings.parquet"}


class MissingRecord(RuntimeError):
    """A record is needed that does not exist, and only drawing was asked for."""


def records_root() -> Path:
    """The folder of records: `LOGRA_RECORDS`, else `records/` in the project."""
    return Path(os.environ.get("LOGRA_RECORDS") or ROOT / "records").resolve()


def refuse_if_only_drawing(folder: Path) -> None:
    """Raises MissingRecord if `--draw` asked for figures from the records that exist."""
    if os.environ.get("LOGRA_DRAW_ONLY") == "1":
        command = os.environ.get("LOGRA_COMMAND", "./reproduce.sh")
        raise MissingRecord(f"record {folder.name} does not exist and --draw makes none; make it with: {command}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One maker of a record at a time; a second one waits, then finds it made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def core() -> Iterator[None]:
    """Waits for a free core and holds it: over all processes that make records in this folder, as many at a time as there are cores."""
    records_root().mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        locks = [stack.enter_context(open(records_root() / f".core-{number}.lock", "w")) for number in range(cores())]
        while True:
            for lock in locks:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            time.sleep(0.1)


def sha256(path: Path | str) -> str:
    """The SHA-256 of a file, or of a folder's files by name and content; logs, timings and `environment.json` are left out of a folder's."""
    path = Path(path)
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: given to be hashed, but there is no such file or folder")
    digest = hashlib.sha256()
    for file in sorted((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.relative_to(path).as_posix()):
        if file.name not in _UNHASHED and file.suffix != ".log":
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    return digest.hexdigest()


used: set[Path] = set()                                     # folders of records that this process has read


def log_input(path: Path | str) -> Path:
    """Says that this notebook reads `path` (a record's folder, or a data file): it is named, with its hash, in the manifest. Returns the path."""
    path = Path(path).resolve()
    if path.is_dir():
        used.add(path)
    if os.environ.get("LOGRA_INPUTS"):
        line = json.dumps({"path": str(path), "sha256": sha256(path)}) + "\n"
        with open(os.environ["LOGRA_INPUTS"], "a", encoding="utf-8") as stream:
            stream.write(line)                              # one write in append mode: lines of parallel workers do not mix
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either as it was or complete, never half."""
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text(text)
    os.replace(aside, path)


def to_disk(path: Path) -> None:
    """Until a file's bytes, or a folder's names, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
