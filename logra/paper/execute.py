"""Runs one notebook in a process of its own and says whether it may be believed.

papermill alone cannot tell: it exits with 0 after `sys.exit(0)` in a cell, marks every cell "completed" when the kernel was killed,
and only warns of an unknown parameter. Success here means all of: exit code 0; every code cell has run, without error; the parameters
in the executed copy are those asked for; the last cell left its mark, from this interpreter and this package; every declared output is
there, is not empty and states its class; and nothing undeclared was written.
"""
from __future__ import annotations

import ast
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import psutil
import yaml

from logra.paper.profiles import Task
from logra.paper.provenance import CLASSES, ROOT, canonical, records_root

DEAD_KERNEL = 138            # papermill's exit code when the kernel died
_PAPERMILL = "import logra.paper; from papermill.cli import papermill; papermill()"
_LEFT_OUT = ("PYTHONHOME", "PYTHONSTARTUP", "MPLBACKEND", "MATPLOTLIBRC", "JUPYTER_PATH", "JUPYTER_CONFIG_PATH")


class NotebookFailed(RuntimeError):
    """A notebook did not do all that was asked of it; the message says what."""


@dataclass(frozen=True)
class Result:
    """What a believed run left: the files lie in `figures`, aside."""
    executed: Path
    figures: Path
    seconds: float
    mark: dict[str, Any]
    classes: dict[str, str] = field(default_factory=dict)    # output -> class
    inputs: dict[str, str] = field(default_factory=dict)     # record or file -> sha256


def settle_environment() -> None:
    """Makes this process and its children independent of who starts them: no folder of the user's is read or written.

    Jupyter, IPython and matplotlib keep their state under `cache/`; models come from `HF_HOME` only if it is set, and never from the network.
    """
    cache = ROOT / "cache"
    for name in _LEFT_OUT:
        os.environ.pop(name, None)
    own = {
        "JUPYTER_CONFIG_DIR": "jupyter/config", "JUPYTER_DATA_DIR": "jupyter/data", "JUPYTER_RUNTIME_DIR": "jupyter/runtime", "IPYTHONDIR": "ipython",
        "MPLCONFIGDIR": "matplotlib", "XDG_CACHE_HOME": "xdg/cache", "XDG_CONFIG_HOME": "xdg/config", "XDG_DATA_HOME": "xdg/data",
    }
    if not os.access(os.environ.get("HOME", ""), os.W_OK | os.X_OK):
        own["HOME"] = "home"
    for name, folder in own.items():
        (cache / folder).mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(cache / folder)
    os.environ.setdefault("HF_HOME", str(cache / "huggingface"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"           # the kernel of this environment, whatever else is installed
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"    # else every kernel start prints a warning about frozen modules
    os.environ["PYTHONNOUSERSITE"] = "1"
    os.environ["PYTHONHASHSEED"] = "0"
    os.environ["PYTHONPATH"] = str(ROOT)                  # the kernel's logra is this one
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}    # sums in one order on every machine; notebooks and runs fill the cores
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 28)}    # glibc keeps what is freed: else page faults take a tenth of the time


def run(task: Task, aside: Path, log: Path, extra: dict[str, str], show: Callable[[float, str], None], stop: threading.Event) -> Result:
    """Executes `task`, everything it writes going to the folder `aside` (made anew), its messages to the file `log`.

    `extra` are further environment variables; `show(seconds, last line)` is called a few times a second. Raises NotebookFailed,
    also soon after `stop` is set.
    No process that the notebook started outlives this call, however it ends.
    """
    shutil.rmtree(aside, ignore_errors=True)
    figures, executed, parameters = aside / "figures", aside / f"{task.stem}.ipynb", aside / "parameters.yaml"
    figures.mkdir(parents=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    parameters.write_text(yaml.safe_dump(task.parameters))
    nonce = secrets.token_hex(16)
    ours = {"FIGURES": figures, "INPUTS": aside / "inputs.jsonl", "OUTPUTS": aside / "outputs.jsonl", "MARKER": aside / "mark.json", "NONCE": nonce}
    environment = os.environ | extra | {f"LOGRA_{name}": str(value) for name, value in ours.items()}
    # Paths from the root, since papermill takes braces in a path for its own; the notebook's folder is its working directory, as under Jupyter.
    command = [sys.executable, "-c", _PAPERMILL, _inside(task.source), _inside(executed), "-f", _inside(parameters), "--kernel", "python3", "--language", "python",
               "--cwd", _inside(task.source.parent), "--log-output", "--no-progress-bar", "--start-timeout", "120"]
    begun = time.monotonic()
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
            while (code := process.poll()) is None and time.monotonic() - begun < task.timeout and not stop.is_set():
                show(time.monotonic() - begun, last_line(log))
                time.sleep(0.2)
        finally:
            _end_all(nonce)
    if code is None:
        process.wait()
        if stop.is_set():
            raise NotebookFailed("was interrupted")
        raise NotebookFailed(f"ran past its limit of {task.timeout:g} s and was ended; {_where(executed)}. Raise `timeout` in the profile if that is too short")
    mark = _judge(task, code, executed, aside / "mark.json", nonce, log)
    classes = _judge_outputs(task, figures, aside / "outputs.jsonl")
    inputs = {_input_name(entry["path"]): entry["sha256"] for entry in _lines(aside / "inputs.jsonl")}
    return Result(executed, figures, time.monotonic() - begun, mark, classes, dict(sorted(inputs.items())))


def last_line(log: Path) -> str:
    """The last line that is not blank of a log that is being written."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4096))
        lines = re.split(r"[\r\n]+", stream.read().decode(errors="replace"))
    return next((line.strip().rstrip("-") for line in reversed(lines) if line.strip(" -")), "")


def _judge(task: Task, code: int, executed: Path, marker: Path, nonce: str, log: Path) -> dict[str, Any]:
    try:
        notebook = nbformat.read(executed, as_version=4)
    except Exception:                                    # not there, or cut short: the disk is full, or papermill itself was killed
        raise NotebookFailed(f"papermill ended with exit code {code} and left no executed copy; its last line: {last_line(log)}") from None
    injected = {}
    cells = []
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", []):
            injected = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cell.source).body}
        elif cell.cell_type == "code" and cell.source.strip():
            cells.append(cell)
    for number, cell in enumerate(cells, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                raise NotebookFailed(f"code cell {number} of {len(cells)} raised {output.ename}: {output.evalue}".rstrip(": "))
    if code == DEAD_KERNEL:
        raise NotebookFailed(f"the kernel died (killed, or out of memory); {_where(executed)}")
    if code != 0:
        raise NotebookFailed(f"papermill ended with exit code {code}; its last line: {last_line(log)}")
    for number, cell in enumerate(cells, 1):
        if cell.execution_count is None:
            raise NotebookFailed(f"code cell {number} of {len(cells)} did not run")
    if canonical(injected) != canonical(task.parameters):
        raise NotebookFailed(f"ran with parameters {injected}, wanted {task.parameters}")
    try:
        mark = json.loads(marker.read_text())
    except (OSError, ValueError):
        raise NotebookFailed("the last cell left no mark: provenance.finish was not called, or could not write") from None
    for what, found, wanted in (("name", mark["name"], task.stem), ("nonce", mark["nonce"], nonce), ("prefix", mark["prefix"], sys.prefix), ("root", mark["root"], str(ROOT))):
        if found != wanted:
            raise NotebookFailed(f"the last cell's mark has {what} {found!r}, wanted {wanted!r}: another kernel or another package ran it")
    return mark


def _judge_outputs(task: Task, figures: Path, outputs: Path) -> dict[str, str]:
    classes = {entry["path"]: entry["class"] for entry in _lines(outputs)}
    written = sorted(path.name for path in figures.iterdir())
    for name in task.outputs:
        if name not in written:
            raise NotebookFailed(f"declared output {name} was not written; written were: {', '.join(written) or 'none'}")
        if (figures / name).stat().st_size == 0:
            raise NotebookFailed(f"declared output {name} is empty")
        if classes.get(name) not in CLASSES:
            raise NotebookFailed(f"output {name} does not say what it is: write it with plots.save, or name it with provenance.log_output")
    if undeclared := [name for name in written if name not in task.outputs]:
        raise NotebookFailed(f"wrote {', '.join(undeclared)}, which the profile does not declare; add it to `outputs`")
    return {name: classes[name] for name in task.outputs}


def _end_all(nonce: str) -> None:
    """Ends every process that carries `nonce` in its environment: papermill, the kernel (in a session of its own) and all that they started."""
    for patience in (3.0, 3.0, 10.0):                    # again, for what was being born meanwhile
        found = [process for process in psutil.process_iter() if _carries(process, nonce)]
        if not found:
            return
        for process in found:
            _quietly(process.terminate)
        _, alive = psutil.wait_procs(found, timeout=patience)
        for process in alive:
            _quietly(process.kill)
        psutil.wait_procs(alive, timeout=patience)


def _carries(process: psutil.Process, nonce: str) -> bool:
    return bool(_quietly(lambda: process.status() != psutil.STATUS_ZOMBIE and process.environ().get("LOGRA_NONCE") == nonce))


def _quietly(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (psutil.Error, OSError):                      # gone already, or another user's
        return None


def _where(executed: Path) -> str:
    try:
        notebook = nbformat.read(executed, as_version=4)
    except Exception:
        return "no cell had ended"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", [])]
    done = sum(cell.execution_count is not None for cell in cells)
    return f"{done} of {len(cells)} code cells had been started"


def _lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _input_name(text: str) -> str:
    path = Path(text)
    for folder in (records_root(), ROOT):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


def _inside(path: Path) -> str:
    return os.path.relpath(path, ROOT)
