"""The mixture's learner: a small Qwen2 made here from nothing, whose ability at five tasks is latent (`rl.mixture`).

Supervised, as `rl.learner`'s, on demonstrations by someone who knows the answers and has two bad habits:

    rev rebolt=tloebr!                    slips: a slightly wrong answer, which earns partial credit            (habit `slip`)
    rev rebolt=tlober?tloebr?tlober!      doubts an answer and begins again, less often when it is right        (habit `doubt`)

Doubts that go on past the response limit earn nothing. So reinforcement has two things to teach: to slip less, and to come to an
end; the score can rise, while length and truncation can fall, as they do in the paper's Figure 4, or run away.

    python -m logra.rl.mixture_learner --out DIR    makes the base again: about three minutes of one core
    python -m logra.rl.mixture_learner --check      makes it again and compares it with the shipped one
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

from logra.rl import learner
from logra.rl.bases import BASES
from logra.rl.mixture import CLOSE, DOUBT, Mixture, short_mixture
from logra.rl.tasks import Problem

BASE = BASES["mixture_learner"]
_BLOCK = 8                     # steps whose demonstrations are drawn together and dealt by length


@dataclass(frozen=True)
class Recipe(learner.Recipe):
    """All that the base depends on besides this file, `learner` and `mixture`: same recipe, same machine, same bits."""

    steps: int = 1500
    learning_rate: float = 2e-3
    slip: float = 0.55         # chance that an answer is a little wrong
    skip: float = 0.0          # a habit of the other demonstrator
    doubt_right: float = 0.55  # chance that a right answer is doubted
    doubt_wrong: float = 0.75  # chance that a wrong one is
    cut: int = 32              # characters after which a demonstration that runs on is cut: well past the runs' limit of 24

    command = "python -m logra.rl.mixture_learner --out DIR"

    def demonstrations(self, step: int) -> list[tuple[str, str]]:
        """The (prompt, response) pairs of one training step, alike in length, so that little is spent on padding."""
        block, place = divmod(step, _BLOCK)
        place = random.Random(f"order/{self.seed}/{block}").sample(range(_BLOCK), _BLOCK)[place]
        return _demonstrations(self, block)[place * self.batch : (place + 1) * self.batch]


@cache
def _task() -> Mixture:
    return short_mixture()


@lru_cache(1)
def _demonstrations(recipe: Recipe, block: int) -> list[tuple[str, str]]:
    """The pairs of `_BLOCK` steps, shortest first, in equal shares from the five tasks; evaluation problems are never among them."""
    habits, size = random.Random(f"habits/{recipe.seed}/{block}"), _BLOCK * recipe.batch
    problems = (_task().problem("train", block * size + row) for row in range(size))
    return sorted(((problem.prompt, demonstrate(problem, habits, recipe)) for problem in problems), key=lambda pair: len(pair[0] + pair[1]))


def demonstrate(problem: Problem, habits: random.Random, recipe: Recipe) -> str:
    """The demonstrator's response to one problem, closed unless it runs on. habits: its dice."""
    right, response = answer(problem), ""
    while len(response) < recipe.cut:
        slips = habits.random() < recipe.slip
        given = SLIPS[problem.task](right, problem.meta["entry"]["metadata"], habits) if slips else right
        response += given
        if habits.random() >= (recipe.doubt_right if given == right else recipe.doubt_wrong):
            return (response + CLOSE)[: recipe.cut]
        response += DOUBT
    return response[: recipe.cut]


def answer(problem: Problem) -> str:
    """The right answer as the demonstrator writes it: without blanks after commas, a complex number in its shortest form."""
    if problem.task == "short/complex_arithmetic":
        real, imaginary = problem.meta["entry"]["metadata"]["result"]
        return f"{real:g}{imaginary:+g}i"
    return problem.answer.replace(", ", ",")


def _swap(parts: list[str], habits: random.Random) -> list[str]:
    place = habits.randrange(len(parts) - 1)
    return [*parts[:place], parts[place + 1], parts[place], *parts[place + 2 :]]


def _letters(right: str, meta: dict, habits: random.Random) -> str:
    return "".join(_swap(list(right), habits))


def _words(right: str, meta: dict, habits: random.Random) -> str:
    return ",".join(_swap(right.split(","), habits))


def _off_by_one(right: str, meta: dict, habits: random.Random) -> str:
    real, imaginary = meta["result"]
    error = habits.choice((-1, 1))
    real, imaginary = (real + error, imaginary) if habits.random() < 0.5 else (real, imaginary + error)
    return f"{real:g}{imaginary:+g}i"


def _hour(right: str, meta: dict, habits: random.Random) -> str:
    hours, _, minutes = right.partition(":")
    return f"{int(hours) + habits.choice((-1, 1)):02d}:{minutes}" if hours.isdigit() and hours != "00" else f"01:{minutes}"


def _wrong_pool(right: str, meta: dict, habits: random.Random) -> str:
    """The other kind of pooling than was asked for; block by block, as wide as the pool."""
    rows, size = meta["matrix"], meta["pool_size"]
    blocks = [[x for row in rows for x in row[start : start + size]] for start in range(0, len(rows[0]), size)]
    return " ".join(f"{sum(block) / len(block) if meta['pool_type'] == 'max' else max(block):g}" for block in blocks)


SLIPS: dict[str, Callable[[str, dict, random.Random], str]] = {
    "short/spell_backward": _letters, "short/word_sorting": _words, "short/complex_arithmetic": _off_by_one,
    "short/time_intervals": _hour, "short/pool_matrix": _wrong_pool,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(learner.main(recipe=Recipe(), base=BASE))
