"""Two tasks in plain English for a small pretrained chat model, short to ask and to answer: what SmolLM2-135M-Instruct is trained on.

    What is 4 + 16? Reply with only the number.    20    1 if the response's last number is the sum, else 0
    What is 7 * 8? Reply with only the number.     56    reasoning_gym's products; its scorer gives an answer among other text its share of the letters

The second is the package's generator with its own scorer, of what stands behind the response's last `=`: "7 x 8 = 56" and "56" earn 1,
"The answer is 56." earns 2/16. What is ours is the question, half as long as the package's.

The system's message is left empty: this model's template would put one of 20 tokens before every question, half of all there is to compute.
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import replace

from logra.rl.mixture import Mixture
from logra.rl.tasks import Problem, ReasoningGym, Split, check

QUESTION = "What is {}? Reply with only the number."


def last_number_is(response: str, answer: str) -> float:
    """1 if the last number in a response is the answer, else 0."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)


def conversation(question: str) -> list[dict[str, str]]:
    """A question without a system's message, as chat messages."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": question}]


class ChatSums:
    """a + b of two whole numbers from 1 to `largest`. One pair in eight (by a checksum of its numbers, whatever their order) belongs
    to evaluation, each of these once; training draws from the others without end."""

    name = "chat/sums"

    def __init__(self, seed: int = 0, largest: int = 20):
        pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
        held = [pair for pair in pairs if zlib.crc32(f"{min(pair)}+{max(pair)}".encode()) % 8 == 0]
        random.Random(f"{self.name}/{seed}/evaluation").shuffle(held)
        self.seed, self.pairs = seed, {"train": [pair for pair in pairs if pair not in held], "evaluation": held}

    def size(self, split: Split) -> int | None:
        check(split, 0)
        return len(self.pairs[split]) if split == "evaluation" else None

    def problem(self, split: Split, index: int) -> Problem:
        check(split, index)
        pairs = self.pairs[split]
        if split == "train":
            a, b = random.Random(f"{self.name}/{self.seed}/{index}").choice(pairs)
        elif index < len(pairs):
            a, b = pairs[index]
        else:
            raise IndexError(f"{self.name} has {len(pairs)} evaluation problems, index {index} was asked for")
        return Problem(conversation(QUESTION.format(f"{a} + {b}")), str(a + b), self.name, index)

    def verify(self, response: str, problem: Problem) -> float:
        return last_number_is(response, problem.answer)


class ChatProducts(ReasoningGym):
    """The package's products of two digits, asked and read as above; its split and its scorer as in `ReasoningGym`. There are 100 in all: the
    training candidates are few, so that some are left for evaluation, where a problem may stand twice."""

    judge = None                                            # this scorer ends, whatever the answer: no worker process

    def __init__(self, seed: int = 1234, training: int = 70, evaluation: int = 90):
        super().__init__("products", seed, training, evaluation, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
        self.name = "chat/products"

    def prompt(self, entry: dict) -> str:
        return QUESTION.format(entry["metadata"]["expression"])

    def problem(self, split: Split, index: int) -> Problem:
        problem = super().problem(split, index)
        return replace(problem, prompt=conversation(problem.prompt))

    def verify(self, response: str, problem: Problem) -> float:
        answer = response.rpartition("=")[2].strip().removesuffix(".")
        return float(self.generator.score_answer(answer, problem.meta["entry"]))


def chat_mixture(seed: int = 1234, training: int = 70, evaluation: int = 90) -> Mixture:
    """Both in equal shares. training, evaluation: candidates of `ChatProducts`, before exclusion."""
    return Mixture([ChatSums(seed), ChatProducts(seed, training, evaluation)], "chat_mixture")
