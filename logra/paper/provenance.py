"""What a notebook calls so that its figures can be traced: inputs, outputs, expensive derived records, and the mark of completion.

Under the runner (`logra.paper.reproduce`) the environment names where each of these goes. By hand, in Jupyter, nothing need be set:
figures then go to `build/interactive/figures`, so that the committed ones are never touched.

| variable | what it names |
|---|---|
| `LOGRA_FIGURES` | the folder that figures are written to |
| `LOGRA_RECORDS` | the folder of records (default `records/`) |
| `LOGRA_INPUTS` | a file that gets one line `{"path": ..., "sha256": ...}` for each input read |
| `LOGRA_OUTPUTS` | a file that gets one line `{"path": ..., "class": ...}` for each output written |
| `LOGRA_MARKER`, `LOGRA_NONCE` | the file that `finish` writes, and the secret that it writes there |
| `LOGRA_DRAW_ONLY`, `LOGRA_COMMAND` | `1` forbids making records; the command that would make them |
"""
from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import logra

ROOT = Path(logra.__file__).resolve().parent.parent

# What a figure or table may be (design decision 7): every output states one of these.
CLASSES = ("recomputed here", "simulated", "toy scale", "recorded run", "printed in the paper")

# Files that say when and where a record was made, not what is in it.
_UNHASHED = {"environment.json", "timing.json"}


class MissingRecord(RuntimeError):
    """A record is needed that does not exist, and only drawing was asked for."""


def records_root() -> Path:
    """The folder of records: `LOGRA_RECORDS`, else `records/` in the project."""
    return Path(os.environ.get("LOGRA_RECORDS") or ROOT / "records").resolve()


def figures_folder() -> Path:
    """The folder that figures are written to: `LOGRA_FIGURES`, else `build/interactive/figures`. It is made if it is not there."""
    folder = Path(os.environ.get("LOGRA_FIGURES") or ROOT / "build" / "interactive" / "figures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def canonical(config: dict[str, Any]) -> str:
    """`config` as JSON that depends on its content alone (sorted keys). Raises TypeError or ValueError on what JSON cannot hold."""
    return json.dumps(config, sort_keys=True, indent=1, allow_nan=False)


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


def log_input(path: Path | str) -> Path:
    """Says that this notebook reads `path` (a record's folder, or a data file): it is named, with its hash, in the manifest. Returns the path."""
    path = Path(path).resolve()
    if os.environ.get("LOGRA_INPUTS"):
        _append(os.environ["LOGRA_INPUTS"], {"path": str(path), "sha256": sha256(path)})
    return path


def log_output(path: Path | str, kind: str) -> Path:
    """Says that `path`, in the figure folder, was written and what it is: one of `CLASSES`. `plots.save` calls it; a table's writer must.

    Raises ValueError on an unknown kind.
    """
    if kind not in CLASSES:
        raise ValueError(f"kind {kind!r} of {Path(path).name} is unknown; wanted one of {', '.join(map(repr, CLASSES))}")
    if os.environ.get("LOGRA_OUTPUTS"):
        _append(os.environ["LOGRA_OUTPUTS"], {"path": Path(path).name, "class": kind})
    return Path(path)


def cached(name: str, config: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder `records/<name>-<hash of config>`, filled by `make(folder)` if it does not exist yet.

    For what is expensive and is no training run. `config` must hold everything that the content depends on. `make` writes into a
    folder aside, which takes its name only when complete: a killed run leaves nothing that passes for a result. `config.json` is added.
    Raises MissingRecord when it does not exist and only drawing was asked for.
    """
    text = canonical(config)
    folder = records_root() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.exists():
        if os.environ.get("LOGRA_DRAW_ONLY") == "1":
            command = os.environ.get("LOGRA_COMMAND", "./reproduce.sh")
            raise MissingRecord(f"record {folder.name} does not exist and --draw makes none; make it with: {command}")
        aside = folder.with_name(f".{folder.name}.aside")
        aside.parent.mkdir(parents=True, exist_ok=True)
        with open(aside.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)             # a second notebook that wants the same record waits for it
            if not folder.exists():
                shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
                aside.mkdir()
                try:
                    make(aside)
                    (aside / "config.json").write_text(text + "\n")
                    aside.rename(folder)
                except BaseException:
                    shutil.rmtree(aside, ignore_errors=True)
                    raise
    log_input(folder)
    return folder


def finish(name: str) -> None:
    """The last line of a notebook: leaves the mark without which the runner takes nothing from it. `name` is the notebook's file name, no suffix."""
    if not os.environ.get("LOGRA_MARKER"):
        print(f"{name}: complete; figures are in {os.path.relpath(figures_folder(), ROOT)}")
        return
    mark = {"name": name, "nonce": os.environ.get("LOGRA_NONCE"), "prefix": sys.prefix, "root": str(ROOT), "versions": versions(), "device": device()}
    Path(os.environ["LOGRA_MARKER"]).write_text(json.dumps(mark))
    print(f"{name}: complete")


def versions() -> dict[str, str]:
    """The versions that a result can depend on, without importing any of them."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "transformers", "matplotlib", "logra")}
    return {"python": platform.python_version(), **found}


def device() -> str:
    """The accelerators that torch sees, else the processor."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _append(file: str, entry: dict[str, str]) -> None:
    # One write in append mode: lines of parallel workers do not mix.
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
