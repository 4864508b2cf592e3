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

from logra.rl.records import RECORDED, ROOT, MissingRecord, locked, log_input, records_root, refuse_if_only_drawing, sha256, used

__all__ = ["CLASSES", "ROOT", "MissingRecord", "cached", "canonical", "device", "figures_folder", "finish", "log_input", "log_output", "measured", "records_root", "sha256", "stamp", "versions"]

# What a figure or table may be (design decision 7): every output states one of these.
CLASSES = ("recomputed here", "simulated", "toy scale", "recorded run", "printed in the paper")


def figures_folder() -> Path:
    """The folder that figures are written to: `LOGRA_FIGURES`, else `build/interactive/figures`. It is made if it is not there."""
    folder = Path(os.environ.get("LOGRA_FIGURES") or ROOT / "build" / "interactive" / "figures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def canonical(config: dict[str, Any]) -> str:
    """`config` as JSON that depends on its content alone (sorted keys). Raises TypeError or ValueError on what JSON cannot hold."""
    return json.dumps(config, sort_keys=True, indent=1, allow_nan=False)


def log_output(path: Path | str, kind: str) -> Path:
    """Says that `path`, in the figure folder, was written and what it is: one of `CLASSES`. `plots.save` calls it; a table's writer must.

    Raises ValueError on an unknown kind.
    """
    if kind not in CLASSES:
        raise ValueError(f"kind {kind!r} of {Path(path).name} is unknown; wanted one of {', '.join(map(repr, CLASSES))}")
    if os.environ.get("LOGRA_OUTPUTS"):
        with open(os.environ["LOGRA_OUTPUTS"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"path": Path(path).name, "class": kind}) + "\n")
    return Path(path)


def stamp(kind: str, note: str = "") -> str:
    """The small print of a figure or table: its class, how many of the records that the notebook has read were shipped and not made here, and the note."""
    shipped = sum(folder.is_relative_to(RECORDED) for folder in used) if kind in ("recomputed here", "toy scale") else 0
    return " · ".join([kind, *[f"{shipped} of {len(used)} records from data/recorded"] * bool(shipped), *[note] * bool(note)])


def cached(name: str, config: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder `records/<name>-<hash of config>`, filled by `make(folder)` if it does not exist yet.

    For what is expensive and is no training run. `config` must hold everything that the content depends on. `make` writes into a
    folder aside, which takes its name only when complete: a killed run leaves nothing that passes for a result. `config.json` is added.
    One that is shipped in data/recorded/ is used where the reader has none.
    Raises MissingRecord when it does not exist and only drawing was asked for.
    """
    text = canonical(config)
    folder = records_root() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    shipped = RECORDED / folder.name
    if shipped.exists() and not folder.exists():
        return log_input(shipped)
    if not folder.exists():
        refuse_if_only_drawing(folder)
        with locked(folder):
            if not folder.exists():                          # else another notebook made it meanwhile
                aside = folder.with_name(f".{folder.name}.aside")
                shutil.rmtree(aside, ignore_errors=True)     # what a killed run left
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


def measured(name: str, config: dict[str, Any], measure: Callable[[], Any]) -> Any:
    """`cached` for a result that is plain JSON: numbers, strings, lists and dicts by string. Floats come back to the bit."""
    folder = cached(name, config, lambda folder: (folder / "measured.json").write_text(json.dumps(measure())))
    return json.loads((folder / "measured.json").read_text())


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
