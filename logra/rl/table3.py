"""Table 3: the eight-task Reasoning-Gym mixture and its 16 counts, by the split that training uses (`tasks.ReasoningGym`, C.2).

    python -m logra.rl.tasks table3 --json      {task: [training problems, evaluation problems]}

5,000 candidates for training and 25 for evaluation of each generator at its default difficulty, from one seed; a question is kept
once, and an evaluation question that training has is dropped. The counts are a matter of luck with that seed: 1234 gives the paper's.

codeio executes stored programs: they print, start threads, write files, and its questions move with Python's hash seed. So each
task is counted in a process of its own, with hash seed 0, in a temporary folder that is thrown away, its output redirected. About 16 of
codeio's 5,025 questions are still other ones at each generation (programs that draw unseeded numbers, read the clock, or print an address
or a path); the counts have not moved with them, so the table records counts, and no hash of the questions.

`problems()` is the mixture itself, to train on: generated once in the same way, kept with its hash. Two machines' copies agree but for those
few questions of codeio; a record of a run on it says the hash of the copy.
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

from logra.rl import verifiers
from logra.rl.records import ROOT, core, cores, locked, log_input, records_root, refuse_if_only_drawing, write_whole
from logra.rl.tasks import SPLITS, Problem, ReasoningGym, Split

TASKS = ("codeio", "emoji_mystery", "rectangle_count", "word_ladder", "pool_matrix", "tsumego", "sentence_reordering", "manipulate_matrix")
SEED, TRAINING, EVALUATION = 1234, 5000, 25
_LIMIT = 1800                                               # seconds for one task: a stored program may hang
_RECORDS = {"counts": "table3", "problems": "reasoning-gym-hard"}
_LAST = {"counts": "counts.json", "problems": "content.json"}   # the file that is written last
_SCORED = ("start_word", "end_word")                        # of an entry's metadata, what the eight scorers read (word_ladder's does)


def ensure(tasks: Sequence[str] = TASKS) -> dict[str, dict]:
    """The counts of these tasks, each counted once on this machine and kept under `records/`.

    Returns {task: {"train": problems, "evaluation": problems, "seconds": it took}}, in the order given, as many at a time
    as there are cores. Raises ValueError for a task that is not in the mixture, MissingRecord if only drawing was asked for,
    RuntimeError with the end of the output of a count that failed.
    """
    return {name: _read(log_input(folder)) for name, folder in _made(tasks, "counts").items()}


def problems(tasks: Sequence[str] = TASKS) -> dict[Split, list[Problem]]:
    """The problems of these tasks, each generated once on this machine and kept under `records/` with its hash: {"train": …, "evaluation": …}.

    A prompt is the package's default instruction, which asks for <answer>…</answer>, and the question. Raises as `ensure` does, and
    ValueError for a kept file that is not the one that was made.
    """
    from reasoning_gym.utils import SYSTEM_PROMPTS

    found: dict[Split, list[Problem]] = {split: [] for split in SPLITS}
    for name, folder in _made(tasks, "problems").items():
        log_input(folder)
        text = (folder / "problems.jsonl").read_bytes()
        if hashlib.sha256(text).hexdigest() != (made := _read(folder, "problems"))["sha256"]:
            raise ValueError(f"{folder / 'problems.jsonl'} does not hash to {made['sha256'][:12]}, which it had when it was made: remove the folder and generate it again")
        for line in text.splitlines():
            row = json.loads(line)
            entry, split = {key: row[key] for key in ("question", "answer", "metadata")}, found[row["split"]]
            meta = {"generator": name, "config": {}, "entry": entry, "problem": row["question"]}
            split.append(Problem(SYSTEM_PROMPTS["default"] + "\n" + row["question"], row["answer"], name, len(split), meta, verifiers.reasoning_gym))
    return found


def configuration(task: str) -> dict:
    """All that a task's count depends on. codeio's programs compute with numpy and scipy: numpy 2.4 breaks some without a word."""
    packages = {name: importlib.metadata.version(name) for name in ("reasoning_gym", "numpy", "scipy")}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"task": task, "seed": SEED, "training": TRAINING, "evaluation": EVALUATION, "hash_seed": 0, "python": python, **packages}


def _folder(task: str, kind: str = "counts") -> Path:
    text = json.dumps(configuration(task), sort_keys=True)
    return records_root() / f"{_RECORDS[kind]}-{task}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _read(folder: Path, kind: str = "counts") -> dict:
    return json.loads((folder / _LAST[kind]).read_text()) | json.loads((folder / "environment.json").read_text())


def _made(tasks: Sequence[str], kind: str) -> dict[str, Path]:
    """The records of these tasks, made where they are missing."""
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"{', '.join(unknown)}: not in Table 3; its tasks are {', '.join(TASKS)}")
    folders = {name: _folder(name, kind) for name in tasks}
    missing = [name for name, folder in folders.items() if not (folder / _LAST[kind]).exists()]
    for name in missing:
        refuse_if_only_drawing(folders[name])
    if missing:
        with ThreadPoolExecutor(min(cores(), len(missing))) as pool:
            for _ in tqdm(pool.map(lambda name: _make(name, kind), missing), total=len(missing), unit="task", desc=f"Table 3, {kind}", disable=None):
                pass
    return folders


def _make(task: str, kind: str) -> None:
    folder = _folder(task, kind)
    with locked(folder), core(), tempfile.TemporaryDirectory(prefix="table3-") as scratch:
        if (folder / _LAST[kind]).exists():
            return
        begun = time.perf_counter()
        result = _run_apart(task, kind, Path(scratch))
        folder.mkdir(exist_ok=True)
        if kind == "problems":
            text = result.read_text()
            write_whole(folder / "problems.jsonl", text)
            splits = [json.loads(line)["split"] for line in text.splitlines()]
            last = {**{split: splits.count(split) for split in SPLITS}, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        else:
            last = json.loads(result.read_text())
        write_whole(folder / "config.json", json.dumps(configuration(task), indent=1) + "\n")
        write_whole(folder / "environment.json", json.dumps({"seconds": round(time.perf_counter() - begun, 1)}) + "\n")
        write_whole(folder / _LAST[kind], json.dumps(last) + "\n")         # last: it marks the record as whole


def _run_apart(task: str, kind: str, scratch: Path) -> Path:
    """Generates in a process of its own; what a stored program prints or writes ends in `scratch`, what it starts ends with it."""
    work, result, log = scratch / "work", scratch / kind, scratch / "log"
    work.mkdir()
    own = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "logra.rl.table3", kind, task, str(result)]  # -P: no module from a folder that programs write to
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
        raise RuntimeError(f"generating {task} ended with exit code {code}; the end of its output:\n{end}")
    return result


def _generate(kind: str, task: str, result: Path) -> None:
    """Counts, or writes down, the problems of `task` in this process."""
    source = ReasoningGym(task, SEED, TRAINING, EVALUATION)
    if kind == "counts":
        write_whole(result, json.dumps({split: source.size(split) for split in SPLITS}))
        return
    lines = []
    for split, entries in source.entries().items():
        for entry in entries:
            metadata = {key: entry["metadata"][key] for key in _SCORED if key in entry["metadata"]}
            lines.append(json.dumps({"split": split, "question": entry["question"], "answer": entry["answer"], "metadata": metadata}) + "\n")
    write_whole(result, "".join(lines))


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
    _generate(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    os._exit(0)                                             # threads of stored programs do not keep the process
