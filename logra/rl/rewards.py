"""Rewards: a task's verifier, run over a batch of responses."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from logra.rl.tasks import Problem, Task


@dataclass(frozen=True)
class Scores:
    """Rewards of one batch, in the responses' order.

    rewards    one float a response
    failures   responses on which the verifier raised or returned no number in [0, 1]; each is scored as incorrect
    seconds    wall-clock time of the verifier over the batch
    """

    rewards: list[float]
    failures: int
    seconds: float


def score(task: Task, problems: Sequence[Problem], responses: Sequence[str], incorrect: float = 0.0, binary: bool = True) -> Scores:
    """Judges responses[i] against problems[i].

    incorrect   reward of a response that is not correct (the paper's text: 0; its public fork: −0.01)
    binary      correct means a verifier's score of 1 (C.1); with False the verifier's partial credit is the reward as it is

    A verifier that raises never stops a run: the response counts as incorrect and as a failure.
    Raises ValueError when there are not as many responses as problems.
    """
    if len(problems) != len(responses):
        raise ValueError(f"{len(problems)} problems but {len(responses)} responses; give one response a problem")
    rewards, failures, start = [], 0, time.perf_counter()
    for problem, response in zip(problems, responses):
        try:
            value = float(task.verify(response, problem))
            if not 0.0 <= value <= 1.0 or math.isnan(value):
                raise ValueError(f"{task.name} scored {value}, outside [0, 1]")
        except Exception:
            value, failures = 0.0, failures + 1
        rewards.append((1.0 if value >= 1.0 else incorrect) if binary or value == 0.0 else value)
    return Scores(rewards, failures, time.perf_counter() - start)
