"""A mixture of reasoning_gym tasks, small enough for a laptop's learner, with partial credit: Figure 4's data in miniature.

Five generators of the package, unchanged, with their own scorers, all of which grade: a nearly right answer is worth something.
What is ours is the writing. The generators ask in English, at lengths of 40 to 560 characters; a character-level model of half a
million parameters gets the question's data alone, in at most 17, and answers as briefly:

    rev rebolt=           tlober!                 spell_backward       credit: share of letters in place
    up not the and=       and,not,the!            word_sorting         credit: share of words in place
    (4-7i)-(-10-8i)=      14+1i!                  complex_arithmetic   credit: exp(−distance)
    17:53-20:01=          02:08!                  time_intervals       credit: falls linearly with the error
    avg 36/54=            4.5!                    pool_matrix          credit: 0.1 for the right shape

A response may doubt itself, `tlobre?tlober!`: what stands between the last `?` and the closing `!` is the answer. Without the closing
mark there is none, and the score is 0, as without the answer tags in the package's own format: so a response that is cut off scores 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

from logra.rl.tasks import Problem, ReasoningGym, Split, Task, check

DOUBT, CLOSE = "?", "!"


def _complex(real: float, imaginary: float) -> str:
    return f"{real:g}{imaginary:+g}i" if imaginary else f"{real:g}"


def _sum(meta: dict) -> str:
    return "({}){}({})=".format(_complex(*meta["num1"]), meta["operation"], _complex(*meta["num2"]))


def _span(meta: dict) -> str:
    return "-".join(meta[side][11:16] for side in ("start_time", "end_time")) + "="      # of "2026-11-29 17:53:00"


def _pool(meta: dict) -> str:
    return meta["pool_type"][:3].replace("ave", "avg") + " " + "/".join("".join(map(str, row)) for row in meta["matrix"]) + "="


def _sort(meta: dict) -> str:
    return {"ascending": "up", "descending": "down"}[meta["direction"]] + " " + " ".join(meta["original_words"]) + "="


# generator -> its fields, and the short prompt from an entry's metadata. Of the fields, only those that keep a question short differ.
FORMS: dict[str, tuple[dict, Callable[[dict], str]]] = {
    "spell_backward": (dict(min_word_len=4, max_word_len=6), lambda meta: f"rev {meta['word']}="),
    "word_sorting": (dict(min_words=3, max_words=3, min_word_length=3, max_word_length=3), _sort),
    "complex_arithmetic": (dict(min_real=-9, max_real=9, min_imag=-9, max_imag=9, operations_weights=[0.5, 0.5, 0.0, 0.0]), _sum),
    "time_intervals": (dict(task_types=["time"], max_time_difference_seconds=4 * 3600), _span),
    "pool_matrix": (dict(min_rows=2, max_rows=2, min_cols=4, max_cols=4, min_pool_size=2, max_pool_size=2), _pool),
}


class ShortForm(ReasoningGym):
    """One of `FORMS`: a generator's problems in the short writing above, its split and its scorer as in `ReasoningGym`.

    Raises ValueError for a generator without a short form.
    """

    judge = None                                             # these five scorers end, whatever the answer: no worker process

    def __init__(self, generator: str, seed: int = 1234, training: int = 12_000, evaluation: int = 64):
        if generator not in FORMS:
            raise ValueError(f"there is no short form of {generator!r}; there are {', '.join(FORMS)}: write one in rl/mixture.py")
        fields, self.short = FORMS[generator]
        super().__init__(generator, seed, training, evaluation, **fields)
        self.name = f"short/{generator}"

    def prompt(self, entry: dict) -> str:
        return self.short(entry["metadata"])                 # two stories with the same times are one problem here

    def verify(self, response: str, problem: Problem) -> float:
        if not response.endswith(CLOSE):
            return 0.0
        answer = response.removesuffix(CLOSE).rpartition(DOUBT)[2]
        return float(self.generator.score_answer(answer, problem.meta["entry"]))


class Mixture:
    """Several tasks as one, in equal shares: index i belongs to member i mod n. Each problem says which member it is of.

    Evaluation goes round the members until each has given all that it has, so that members of unequal size are used whole; a mean
    over its problems would then favour the larger ones, and `evaluate` reports the mean of the members' means beside it (C.2).
    Raises ValueError for no member, or two of one name.
    """

    def __init__(self, members: Sequence[Task], name: str = "mixture"):
        self.name, self.members = name, {member.name: member for member in members}
        doubled = [name for name, count in Counter(member.name for member in members).items() if count > 1]
        if doubled or not members:
            raise ValueError(f"a mixture needs members, each of a name of its own; given {'twice: ' + ', '.join(doubled) if doubled else 'none'}")

    @cached_property
    def _evaluation(self) -> list[tuple[str, int]]:
        sizes = {name: member.size("evaluation") for name, member in self.members.items()}
        return [(name, index) for index in range(max(sizes.values())) for name, size in sizes.items() if index < size]

    def size(self, split: Split) -> int | None:
        sizes = [member.size(split) for member in self.members.values()]
        return None if None in sizes else sum(sizes)

    def problem(self, split: Split, index: int) -> Problem:
        check(split, index)
        if split == "evaluation" and self.size("evaluation") is not None:
            if index >= len(self._evaluation):
                raise IndexError(f"{self.name} has {len(self._evaluation)} evaluation problems, index {index} was asked for")
            name, index = self._evaluation[index]
        else:
            name, index = list(self.members)[index % len(self.members)], index // len(self.members)
        return self.members[name].problem(split, index)

    def verify(self, response: str, problem: Problem) -> float:
        return self.members[problem.task].verify(response, problem)


def short_mixture(seed: int = 1234, training: int = 12_000, evaluation: int = 64) -> Mixture:
    """All of `FORMS` in equal shares; `training` and `evaluation` candidates a generator, before exclusion."""
    return Mixture([ShortForm(generator, seed, training, evaluation) for generator in FORMS], "short_mixture")
