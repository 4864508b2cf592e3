"""Table 3: the eight-task Reasoning-Gym mixture and its 16 counts, by the split that training uses (`tasks.ReasoningGym`, C.2).

    python -m logra.rl.tasks table3 --json      {task: [training problems, evaluation problems]}

5,000 candidates for training and 25 for evaluation of each generator at its default difficulty, from one seed; a question is kept
once, and an evaluation question that training has is dropped. The counts are a matter of luck with that seed: 1234 gives the paper's.

codeio executes stored programs: they print, start threads, write files, and its questions move with Python's hash seed. So each
task is counted in a process of its own, with hash seed 0, in a temporary folder that is thrown away, its output redirected. About 16 of
codeio's 5,025 questions are still other ones at each generation (programs that draw unseeded numbers, read the clock, or print an address
or a path); the counts have not moved with them, so counts are recorded, and no hash of the questions.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm.auto import tqdm

from logra.rl.records import ROOT, core, cores, locked, log_input, records_root, refuse_if_only_drawing, write_whole
from logra.rl.tasks import SPLITS, ReasoningGym

TASKS = ("codeio", "emoji_mystery", "rectangle_count", "word_ladder", "pool_matrix", "tsumego", "sentence_reordering", "manipulate_matrix")
SEED, TRAINING, EVALUATION = 1234, 5000, 25
_LIMIT = 1800                                               # seconds for one task: a stored program may hang


def ensure(tasks: Sequence[str] = TASKS) -> dict[str, dict]:
    """The counts of these tasks, each counted once on this machine and kept under `records/`.

    Returns {task: {"train": problems, "evaluation": problems, "seconds": it took}}, in the order given, as many at a time
    as there are cores. Raises ValueError for a task that is not in the mixture, MissingRecord if only drawing was asked for,
    RuntimeError with the end of the output of a count that failed.
    """
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"{', '.join(unknown)}: not in Table 3; its tasks are {', '.join(TASKS)}")
    folders = {name: _folder(name) for name in tasks}
    missing = [name for name, folder in folders.items() if not (folder / "counts.json").exists()]
    for name in missing:
        refuse_if_only_drawing(folders[name])
    if missing:
        with ThreadPoolExecutor(min(cores(), len(missing))) as pool:
            for _ in tqdm(pool.map(_make, missing), total=len(missing), unit="task", desc="Table 3", disable=None):
                pass
    return {name: _read(log_input(folder)) for name, folder in folders.items()}


def configuration(task: str) -> dict:
    """All that a task's count depends on. codeio's programs compute with numpy and scipy: numpy 2.4 breaks some without a word."""
    packages = {name: importlib.metadata.version(name) for name in ("reasoning_gym", "numpy", "scipy")}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"task": task, "seed": SEED, "training": TRAINING, "evaluation": EVALUATION, "hash_seed": 0, "python": python, **packages}


def _folder(task: str) -> Path:
    text = json.dumps(configuration(task), sort_keys=True)
    return records_root() / f"table3-{task}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _read(folder: Path) -> dict:
    return json.loads((folder / "counts.json").read_text()) | json.loads((folder / "environment.json").read_text())


def _make(task: str) -> None:
    folder = _folder(task)
    with locked(folder), core(), tempfile.TemporaryDirectory(prefix="table3-") as scratch:
        if (folder / "counts.json").exists():
            return
        begun = time.perf_counter()
        counts = _count_apart(task, Path(scratch))
        folder.mkdir(exist_ok=True)
        write_whole(folder / "config.json", json.dumps(configuration(task), indent=1) + "\n")
        write_whole(folder / "environment.json", json.dumps({"seconds": round(time.perf_counter() - begun, 1)}) + "\n")
        write_whole(folder / "counts.json", json.dumps(counts) + "\n")      # last: it marks the record as whole


def _count_apart(task: str, scratch: Path) -> dict:
    """Counts in a process of its own; what a stored program prints or writes ends in `scratch`, what it starts ends with it."""
    work, result, log = scratch / "work", scratch / "counts.json", scratch / "log"
    work.mkdir()
    own = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "logra.rl.table3", task, str(result)]    # -P: no module from a folder that programs write to
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=work, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True)
        try:
            code = process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            code = f"none within {_LIMIT} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    if code != 0 or not result.exists():
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"counting {task} ended with exit code {code}; the end of its output:\n{end}")
    return json.loads(result.read_text())


def _count(task: str, result: Path) -> None:
    """Counts `task` in this process."""
    source = ReasoningGym(task, SEED, TRAINING, EVALUATION)
    write_whole(result, json.dumps({split: source.size(split) for split in SPLITS}))


def main(arguments: list[str] | None = None) -> int:
    """The command `python -m logra.rl.tasks table3`."""
    parser = argparse.ArgumentParser(prog="python -m logra.rl.tasks table3", description="Counts Table 3's problems; what was counted before is read from records/.")
    parser.add_argument("--json", action="store_true", help="{task: [training, evaluation]}")
    options = parser.parse_args(arguments)
    counts = ensure()
    if options.json:
        print(json.dumps({task: [found["train"], found["evaluation"]] for task, found in counts.items()}))
        return 0
    print(f"{'task':<20} training  evaluation")
    for task, found in counts.items():
        print(f"{task:<20} {found['train']:>8,}  {found['evaluation']:>10}")
    print(f"{'total':<20} {sum(f['train'] for f in counts.values()):>8,}  {sum(f['evaluation'] for f in counts.values()):>10}")
    return 0


if __name__ == "__main__":
    _count(sys.argv[1], Path(sys.argv[2]))
    os._exit(0)                                             # threads of stored programs do not keep the process
