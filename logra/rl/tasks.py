"""Tasks: where prompts come from and how a response is judged.

A task is any object with `.name`, `.size(split)`, `.problem(split, index)` and `.verify(response, problem)`; nothing in the
library asks for more, so a user's own task is a class of her own. Two are here: `Sums`, the laptop learner's, and
`ReasoningGym`, every generator of the package of that name; those that are read from files are in `rl.data`. `task(name)` builds any.

Two rules hold for both. A problem depends on (seed, split, index) alone, so a resumed run meets the same prompts. And no
evaluation problem is a training problem: in `Sums` by construction, in `ReasoningGym` by exclusion.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pkgutil import resolve_name
from typing import Literal, Protocol

from logra.rl import verifiers

Split = Literal["train", "evaluation"]
SPLITS = ("train", "evaluation")


@dataclass(frozen=True)
class Problem:
    """One prompt with its answer.

    prompt   the text that the policy continues (a chat template, where one is used, is put around it by the rollout)
    answer   the reference answer, as text
    task     name of the task that made it
    index    its index within its split
    meta     whatever the verifier or an analysis needs besides
    judge    a picklable function (response, problem) -> score that `rewards.score` runs in a worker process under a time limit
             (see `rl.verifiers`); None where the task's own `verify` is trusted to end
    """

    prompt: str
    answer: str
    task: str
    index: int
    meta: dict = field(default_factory=dict, compare=False)
    judge: Callable[[str, Problem], float] | None = field(default=None, compare=False, repr=False)


class Task(Protocol):
    """What the training loop asks of a task."""

    name: str

    def size(self, split: Split) -> int | None:
        """Number of distinct indices of the split; None when there is no end to them."""

    def problem(self, split: Split, index: int) -> Problem:
        """The problem at `index`, the same one whenever it is asked for."""

    def verify(self, response: str, problem: Problem) -> float:
        """Score in [0, 1]; 1 is correct. May raise: `rewards.score` counts that as a failure worth 0. Not asked where the problem has a judge."""


def check(split: str, index: int) -> None:
    """Refuses a split that does not exist and a negative index. Raises ValueError."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(SPLITS)}")
    if index < 0:
        raise ValueError(f"index is {index}; an index counts from 0")


class Sums:
    """Sums of three two-digit numbers: `47+85+36=`. The answer is what stands after the response's last `=`.

    So `168` and `132+36=168` are both correct: a policy may answer at once or show its working first, and only the
    last number counts. Leading zeros, blanks and signs are wrong. One sum in eight (by a checksum of its own text) belongs to
    evaluation; training never draws those, whatever the seed.
    """

    name = "sums"

    def __init__(self, seed: int = 0):
        self.seed = seed

    def size(self, split: Split) -> None:
        return None

    def problem(self, split: Split, index: int) -> Problem:
        check(split, index)
        draws = random.Random(f"{self.name}/{self.seed}/{split}/{index}")
        while True:
            terms = [draws.randint(10, 99) for _ in range(3)]
            prompt = "+".join(map(str, terms)) + "="
            if (zlib.crc32(prompt.encode()) % 8 == 0) == (split == "evaluation"):
                return Problem(prompt, str(sum(terms)), self.name, index, {"terms": terms})

    def verify(self, response: str, problem: Problem) -> float:
        return float(response.rpartition("=")[2] == problem.answer)


class ReasoningGym:
    """A generator of the package reasoning_gym, with the paper's split (C.2) and the package's own scorer.

    Item i of a generator depends on seed + i alone, so two seeds that lie close share items. One seed is used here: rows
    [0, training) are the training candidates, of which the first of each question is kept; rows [training, training +
    evaluation) are the evaluation candidates, of which those whose question is a training question are dropped.
    Training indices wrap around (epochs); evaluation indices do not.

    task         name of the generator, e.g. "chain_sum"
    seed         base seed of the generator (the paper's counts come out with 1234)
    training     candidate rows for training
    evaluation   candidate rows for evaluation
    config       fields of the generator's own configuration, e.g. max_terms=3

    The score is the generator's `score_answer` of what stands inside the response's last <answer>…</answer>; a response without
    the tags scores 0. Some scorers hang on long answers, so it is taken in a worker process.
    Raises ValueError for a generator or a field that does not exist.
    """

    judge = staticmethod(verifiers.reasoning_gym)

    def __init__(self, task: str, seed: int = 1234, training: int = 5000, evaluation: int = 25, **config):
        import reasoning_gym  # takes seconds to import, and `Sums` does not need it

        self.name = f"reasoning_gym/{task}"
        self.scorer = {"generator": task, "config": config}
        self.rows = {"train": range(training), "evaluation": range(training, training + evaluation)}
        known = reasoning_gym.factory.DATASETS
        if task not in known:
            near = [name for name in sorted(known) if set(re.split("_", task)) & set(re.split("_", name))]
            raise ValueError(f"reasoning_gym has no task {task!r}; similar: {', '.join(near) or 'none'}; there are {len(known)}")
        try:
            self.generator = reasoning_gym.create_dataset(task, seed=seed, size=training + evaluation, **config)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym task {task!r} refused the configuration {config}: {error}") from error

    def prompt(self, entry: dict) -> str:
        """What the policy is given of an entry; two entries of one prompt are one problem."""
        return entry["question"]

    @cached_property
    def kept(self) -> dict[str, list[int]]:
        """Row numbers of each split, after exclusion. Generates every row once."""
        return {split: [row for row, _ in found] for split, found in self._generated().items()}

    def entries(self) -> dict[str, list[dict]]:
        """The entries of each split, after exclusion, each of them generated once: the generators that run programs do not
        give the same entry twice, and a second one might be no longer what was compared."""
        return {split: [entry for _, entry in found] for split, found in self._generated().items()}

    def _generated(self) -> dict[str, list[tuple[int, dict]]]:
        first = {}
        for row in self.rows["train"]:
            entry = self.generator[row]
            first.setdefault(self.prompt(entry), (row, entry))
        evaluation = [(row, self.generator[row]) for row in self.rows["evaluation"]]
        return {"train": list(first.values()), "evaluation": [(row, entry) for row, entry in evaluation if self.prompt(entry) not in first]}

    def size(self, split: Split) -> int:
        check(split, 0)
        return len(self.kept[split])

    def problem(self, split: Split, index: int) -> Problem:
        check(split, index)
        size = self.size(split)
        if size == 0 or (split == "evaluation" and index >= size):
            raise IndexError(f"{self.name} has {size} {split} problems, index {index} was asked for; raise `{split}` candidates")
        entry = self.generator[self.kept[split][index % size]]
        return Problem(self.prompt(entry), str(entry["answer"]), self.name, index, {"entry": entry, **self.scorer}, self.judge)

    def verify(self, response: str, problem: Problem) -> float:
        return self.judge(response, problem)


def task(name: str, seed: int | None = None, **config) -> Task:
    """Builds a task by name, with its own settings as keywords.

    name: "sums"; "short_mixture" (`rl.mixture`); "reasoning_gym/<generator>" with the generator's fields; "dapo_math", "gsm8k",
    "reasoning_gym_hard" or "jsonl" (`rl.data`); or module:function, a user's own, which returns a task.
    seed: of the problems or their order; None takes the class's default. Raises ValueError for a name that is none of these.
    """
    if seed is not None:
        config["seed"] = seed
    if name == Sums.name:
        return Sums(**config)
    if name == "short_mixture":
        from logra.rl.mixture import short_mixture           # it builds on this module

        return short_mixture(**config)
    family, _, generator = name.partition("/")
    if family == "reasoning_gym" and generator:
        return ReasoningGym(generator, **config)
    if re.fullmatch(r"[\w.]+:[\w.]+", name):
        return resolve_name(name)(**config)
    from logra.rl import data

    if name in data.TASKS:
        return data.TASKS[name](**config)
    raise ValueError(f"unknown task {name!r}; use {Sums.name!r}, 'short_mixture', 'reasoning_gym/<generator>', {', '.join(map(repr, data.TASKS))}, "
                     "or module:function of your own")


if __name__ == "__main__":
    import sys

    from logra.rl import table3

    if sys.argv[1:2] != ["table3"]:
        sys.exit("usage: python -m logra.rl.tasks table3 [--json]")
    sys.exit(table3.main(sys.argv[2:]))
