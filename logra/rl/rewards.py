"""Rewards: a task's verifier, run over a batch of responses."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from logra.rl import pool
from logra.rl.tasks import Problem, Task

_KINDS = ("timed out", "crashed", "raised", "unparsable")
_EQUAL = 5                                                  # batches in a row of one reward alone, before that is said


@dataclass(frozen=True)
class Scores:
    """Rewards of one batch, in the responses' order.

    rewards    one float a response
    failures   responses on which the verifier raised, was ended at its time limit, or returned no number in [0, 1]; each is incorrect
    seconds    wall-clock time of the verifier over the batch
    kinds      responses judged in worker processes: how many of each of timed out, crashed, raised (these three are failures) and
               unparsable (no readable final answer: incorrect, and no failure); None if none was judged there
    reasons    the most frequent reasons given for these
    """

    rewards: list[float]
    failures: int
    seconds: float
    kinds: dict[str, int] | None = None
    reasons: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, int]:
        """`verifier_failures`, and where workers judged, verifier_timed_out, verifier_crashed, verifier_raised, verifier_unparsable."""
        kinds = {f"verifier_{kind.replace(' ', '_')}": count for kind, count in (self.kinds or {}).items()}
        return {"verifier_failures": self.failures} | kinds


def score(task: Task, problems: Sequence[Problem], responses: Sequence[str], incorrect: float = 0.0, binary: bool = True, limit: float = 5.0) -> Scores:
    """Judges responses[i] against problems[i]: by the problem's own `judge` in a worker process, else by `task.verify` here.

    incorrect   reward of a response that is not correct (the paper's text: 0; its public fork: −0.01)
    binary      correct means a verifier's score of 1 (C.1); with False the verifier's partial credit is the reward as it is
    limit       seconds of wall clock that one judgement in a worker may take

    A verifier that raises, hangs or dies never stops a run: the response counts as incorrect and as a failure.
    Raises ValueError when there are not as many responses as problems.
    """
    if len(problems) != len(responses):
        raise ValueError(f"{len(problems)} problems but {len(responses)} responses; give one response a problem")
    start = time.perf_counter()
    apart = [number for number, problem in enumerate(problems) if problem.judge is not None]
    judged = pool.verdicts([(problems[i].judge, responses[i], problems[i]) for i in apart], limit)
    verdicts = dict(zip(apart, judged))
    rewards, failures = [], 0
    for number, (problem, response) in enumerate(zip(problems, responses)):
        if number in verdicts:
            value, failed = verdicts[number].value, verdicts[number].kind not in ("scored", "unparsable")
        else:
            value, failed = _verify(task, problem, response)
        failures += failed
        rewards.append((1.0 if value >= 1.0 else incorrect) if binary or value == 0.0 else value)
    seconds, counts = time.perf_counter() - start, Counter(verdict.kind for verdict in judged)
    reasons = [f"{reason} ({count})" for reason, count in Counter(v.reason for v in judged if v.reason).most_common(3)]
    return Scores(rewards, failures, seconds, {kind: counts[kind] for kind in _KINDS} if apart else None, reasons)


def _verify(task: Task, problem: Problem, response: str) -> tuple[float, bool]:
    """(score, failed) by the task's own verifier, in this process."""
    try:
        value = float(task.verify(response, problem))
        if not 0.0 <= value <= 1.0 or math.isnan(value):
            raise ValueError(f"{task.name} scored {value}, outside [0, 1]")
    except Exception:
        return 0.0, True
    return value, False


def all_equal(scores: Scores, before: int) -> tuple[int, dict]:
    """Watches for a reward that is silently one value for all, from which nothing is learned.

    before: the batches in a row, up to the last one, whose rewards were all equal. Returns that number with this batch counted, and
    once it has come to 5, a metric `warning` that says why; it is logged as well.
    """
    if len(set(scores.rewards)) != 1:
        return 0, {}
    if before + 1 != _EQUAL:
        return before + 1, {}
    why = ", ".join(f"{count} {kind}" for kind, count in (scores.kinds or {"failures": scores.failures}).items())
    text = (f"every reward of {_EQUAL} batches in a row is {scores.rewards[0]:g}; of the last {len(scores.rewards)} responses: {why}"
            + (f"; {', '.join(scores.reasons)}" if scores.reasons else ""))
    logging.getLogger(__name__).warning(text)
    return before + 1, {"warning": text}
