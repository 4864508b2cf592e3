"""Problems read from files: the paper's mathematics (C.1), its Reasoning-Gym mixture (C.2), GSM8K, and a user's own.

    python -m logra.rl.data dapo_math [train=FILE] [evaluation=FILE]      counts, hashes and overlap, as JSON

| task | training | evaluation |
|---|---|---|
| `dapo_math` | DAPO-Math-7.5K: the first 7,500 different prompts of the release | MATH-500 |
| `gsm8k` | GSM8K's training set | its test set |
| `reasoning_gym_hard` | Table 3's eight generators, 38,948 problems | their 193 |
| `jsonl` | a file of lines {"prompt": …, "answer": …} | another |

A file is a local path or an address that fsspec reads; the defaults are `hf://` addresses on the Hugging Face hub, read as a stream. Files
are .jsonl or .parquet, also .gz. Training goes over all problems, in an order that `seed` and the epoch decide, then over all again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from logra.rl import verifiers
from logra.rl.tasks import Problem, Split, check

DAPO = "hf://datasets/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet"
MATH500 = "hf://datasets/HuggingFaceH4/MATH-500@6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be/test.jsonl"
GSM8K = "hf://datasets/openai/gsm8k/main/{}-00000-of-00001.parquet"
MIXTURE = 38_948, 193                                       # problems of Table 3's mixture
UNIQUE = 7500                                               # prompts of DAPO-Math-7.5K
BEFORE = ("Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) "
          "where $Answer is the answer to the problem.\n\n")
AFTER = "\n\nRemember to put your answer on its own line after \"Answer:\"."
BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."

# What copies seen so far came to: `content` of DAPO-Math-7.5K (its last problem in row 7,707), from another data set that contains it, and
# `answers` of MATH-500. Another hash is said, not refused.
SEEN = {"dapo_math": "3908a8690f917e5d2966a1eb320f123b6d20f72f22efbd1c351191b4d3f9a4a4",
        "math500": "9e613c7e9abeae65ece70d1cbcb673976bea9f98b48a8c406192b7bfa9624552"}


class Questions:
    """A task whose problems are lists. Each problem says its own task, so that a list may mix several; it is judged in a worker.

    seed: of the order in which training goes round. Raises ValueError for no problems, or none of evaluation.
    """

    def __init__(self, name: str, train: list[Problem], evaluation: list[Problem], seed: int = 0):
        self.name, self.seed, self.rows = name, seed, {"train": train, "evaluation": evaluation}
        if empty := [split for split, rows in self.rows.items() if not rows]:
            raise ValueError(f"task {name!r} has no {' and no '.join(empty)} problems: name a file that has some")
        self._order: tuple[int, list[int]] = -1, []

    def size(self, split: Split) -> int:
        check(split, 0)
        return len(self.rows[split])

    def problem(self, split: Split, index: int) -> Problem:
        check(split, index)
        rows = self.rows[split]
        if split == "evaluation":
            if index >= len(rows):
                raise IndexError(f"{self.name} has {len(rows)} evaluation problems, index {index} was asked for")
            return replace(rows[index], index=index)
        epoch, place = divmod(index, len(rows))
        if self._order[0] != epoch:
            order = list(range(len(rows)))
            random.Random(f"{self.name}/{self.seed}/order/{epoch}").shuffle(order)
            self._order = epoch, order
        return replace(rows[self._order[1][place]], index=index)

    def verify(self, response: str, problem: Problem) -> float:
        """The judge's score, in this process and without a time limit; `rewards.score` takes it in a worker."""
        return problem.judge(response, problem)

    def sha256(self) -> dict[str, str]:
        """{split: SHA-256 of its prompts and answers in order}: what a run was trained and evaluated on."""
        return {split: content(rows) for split, rows in self.rows.items()}


def content(problems: Iterable[Problem]) -> str:
    """SHA-256 of prompts and answers, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update((json.dumps([problem.prompt, problem.answer], ensure_ascii=False) + "\n").encode())
    return digest.hexdigest()


def rows(path: str) -> Iterator[dict]:
    """The rows of a .jsonl or .parquet file in order, read as they are asked for. Raises ValueError for another kind or a broken line."""
    import fsspec

    path = str(path)
    if path.endswith(".parquet"):
        import pyarrow.parquet

        with fsspec.open(path, "rb") as stream:
            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(1000):
                yield from batch.to_pylist()
    elif re.search(r"\.jsonl(\.gz)?$", path):
        with fsspec.open(path, "rt", encoding="utf-8", compression="infer") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    if line.strip():
                        yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
    else:
        raise ValueError(f"{path}: wanted a file .jsonl, .jsonl.gz or .parquet")


def dapo(path: str, count: int = UNIQUE) -> list[Problem]:
    """DAPO-Math-7.5K (C.1): in the release's order, the first row of each different content of the first message, until there are `count`.

    The release's rows hold `prompt`, a list of messages with the template in the text, and `reward_model.ground_truth`; rows of
    `problem` and `answer` get the template. Each problem's meta: problem (without template), row (its number in the file, from 0).
    Raises ValueError if the file ends before there are `count`.
    """
    found: dict[str, Problem] = {}
    number = -1
    for number, row in enumerate(rows(path)):
        try:
            prompt = row["prompt"][0]["content"] if "prompt" in row else BEFORE + row["problem"] + AFTER
            answer = row["reward_model"]["ground_truth"] if "prompt" in row else row["answer"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, row {number}: wanted prompt[0].content and reward_model.ground_truth, or problem and answer; it has {sorted(row)}") from error
        if prompt not in found:
            bare = prompt.removeprefix(BEFORE).removesuffix(AFTER)
            meta = {"problem": bare, "row": row.get("source_row", number)}
            found[prompt] = Problem(prompt, str(answer), "dapo_math", len(found), meta, verifiers.math)
            if len(found) == count:
                return _known("dapo_math", list(found.values()), content(found.values()))
    raise ValueError(f"{path} has {len(found):,} different prompts in {number + 1:,} rows; DAPO-Math-7.5K needs {count:,}: give the whole release")


def math500(path: str, count: int | None = 500) -> list[Problem]:
    """MATH-500: the problem as it is (the chat template says how to answer), its answer for the verifier. Raises ValueError for another number than `count`."""
    found = [Problem(row["problem"], str(row["answer"]), "math500", number, {"problem": row["problem"], "unique_id": row.get("unique_id")}, verifiers.math)
             for number, row in enumerate(rows(path))]
    if count is not None and len(found) != count:
        raise ValueError(f"{path} has {len(found)} problems, MATH-500 has {count}")
    return _known("math500", found, answers(found))


def answers(problems: Iterable[Problem]) -> str:
    """SHA-256 of the answers alone, one a line."""
    return hashlib.sha256("".join(problem.answer + "\n" for problem in problems).encode()).hexdigest()


def _known(name: str, problems: list[Problem], found: str) -> list[Problem]:
    if found != SEEN[name]:
        logging.getLogger(__name__).warning(f"{name}: these {len(problems):,} problems hash to {found[:12]}, the copy that this code was tried on to {SEEN[name][:12]}")
    return problems


def gsm8k(path: str) -> list[Problem]:
    """GSM8K: the question, and a sentence that asks for a box; the answer is what stands behind ####."""
    return [Problem(row["question"] + BOXED, row["answer"].rpartition("####")[2].strip().replace(",", ""), "gsm8k", number, {"problem": row["question"]}, verifiers.math)
            for number, row in enumerate(rows(path))]


def own(path: str, verifier: str = "math") -> list[Problem]:
    """A user's file: lines with `prompt` and `answer`, and `task` where scores are to be told apart. See `jsonl` for `verifier`."""
    judge = {"math": verifiers.math, "exact": verifiers.exact}.get(verifier)
    if judge is None:
        if not re.fullmatch(r"[\w.]+:[\w.]+", verifier):
            raise ValueError(f"verifier is {verifier!r}: wanted math, exact, or module:function")
        judge = verifiers.Named(verifier)
        judge.prepare(None)                                 # a name that does not exist is said before anything is trained
    found = []
    for number, row in enumerate(rows(path)):
        if not {"prompt", "answer"} <= row.keys():
            raise ValueError(f"{path}, row {number}: wanted the fields prompt and answer; it has {', '.join(sorted(row)) or 'none'}")
        found.append(Problem(row["prompt"], str(row["answer"]), row.get("task", "jsonl"), number, {"problem": row["prompt"]}, judge))
    return found


def dapo_math(train: str = DAPO, evaluation: str = MATH500, seed: int = 0) -> Questions:
    """The paper's mathematics: DAPO-Math-7.5K and MATH-500 (C.1). The data as released: no problem is dropped for standing in both."""
    return Questions("dapo_math", dapo(train), math500(evaluation), seed)


def gsm8k_task(train: str = GSM8K.format("train"), evaluation: str = GSM8K.format("test"), seed: int = 0) -> Questions:
    return Questions("gsm8k", gsm8k(train), gsm8k(evaluation), seed)


def jsonl(train: str, evaluation: str, verifier: str = "math", seed: int = 0) -> Questions:
    """A user's own problems. verifier: math, exact, or module:function with function(response, answer) -> score in [0, 1], run in a worker."""
    return Questions("jsonl", own(train, verifier), own(evaluation, verifier), seed)


def reasoning_gym_hard(seed: int = 0) -> Questions:
    """Table 3's mixture (C.2): generated once on this machine (`table3.problems`); the package's own sentence asks for answer tags.

    The paper evaluates it with evaluation_samples 1, evaluation_top_p 0.95, evaluation_prompts 193, and reports `macro`.
    Raises ValueError for other than its counts: another version of the package, or of what codeio's programs compute with, makes other problems."""
    from logra.rl import table3

    found = table3.problems()
    if (made := tuple(len(found[split]) for split in ("train", "evaluation"))) != MIXTURE:
        raise ValueError(f"the mixture has {made[0]:,} training and {made[1]:,} evaluation problems here, Table 3's has {MIXTURE[0]:,} and {MIXTURE[1]:,}: install the versions of "
                         "requirements/, remove the folders reasoning-gym-hard-* of the records, and generate it again")
    return Questions("reasoning_gym_hard", found["train"], found["evaluation"], seed)


TASKS = {"dapo_math": dapo_math, "gsm8k": gsm8k_task, "jsonl": jsonl, "reasoning_gym_hard": reasoning_gym_hard}


def normalised(text: str) -> str:
    """A problem without what typesetting changes: case, blanks, dollar signs, spacing commands, punctuation behind a word."""
    text = re.sub(r"\\(?:left|right|[,;!:]|quad|qquad|displaystyle|text|mathrm|dfrac|tfrac)\b|\\[,;!: ]", " ", text.lower())
    return re.sub(r"[\s$]+", "", re.sub(r"(?<=[\w$)}])[.,;:!?]+(?=\s|\Z)", "", text))


def overlap(train: Iterable[Problem], evaluation: Iterable[Problem]) -> dict:
    """Evaluation problems that stand in training: {"exact": [index, …], "normalised": [index, …]}, the second including the first.

    Compared without prompt templates (meta["problem"], where there is one). The paper's split removes none of them (C.1).
    """
    train, evaluation = ([problem.meta.get("problem", problem.prompt) for problem in problems] for problems in (train, evaluation))
    found = {}
    for name, form in (("exact", str), ("normalised", normalised)):
        seen = {form(text) for text in train}
        found[name] = [index for index, text in enumerate(evaluation) if form(text) in seen]
    return found


def report(task: Questions) -> dict:
    """Counts by task, hashes and overlap."""
    counts = {split: {name: sum(p.task == name for p in rows) for name in sorted({p.task for p in rows})} for split, rows in task.rows.items()}
    last = {split: rows[-1].meta["row"] for split, rows in task.rows.items() if "row" in rows[-1].meta}     # where the release reached its count
    return {"task": task.name, "problems": counts, "last_row": last, "sha256": task.sha256(), "overlap": overlap(task.rows["train"], task.rows["evaluation"])}


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in TASKS or not all("=" in word for word in sys.argv[2:]):
        sys.exit(f"usage: python -m logra.rl.data {{{','.join(TASKS)}}} [train=FILE] [evaluation=FILE] [verifier=…]")
    print(json.dumps(report(TASKS[sys.argv[1]](**dict(word.split("=", 1) for word in sys.argv[2:]))), indent=1))
