"""Evaluation's numbers, against counting by hand, and its intervals, against what they must cover."""

import json

import numpy as np
import pytest
import torch

from logra.rl.evaluate import evaluate, summary
from logra.rl.config import RunConfig
from logra.rl.rollout import Rollout
from logra.rl.tasks import Problem


def of(score, tasks=None, **settings):
    score = torch.tensor(score, dtype=torch.float64)
    lengths, complete = torch.arange(score.numel()), torch.arange(score.numel()) % 4 > 0
    return summary(score, tasks or ["t"] * len(score), lengths, complete, {}, **settings)


def test_pass_at_1_is_over_all_samples_and_pass_at_k_over_problems():
    found = of([[1, 0, 0, 0], [0, 0.5, 0, 0], [1, 1, 1, 1], [0.9, 0, 0, 1]])
    assert found == {"pass_at_1": 6 / 16, "pass_at_k": 3 / 4, "score": 7.4 / 16, "length": 7.5, "truncated": 0.25, "samples": 16}


def test_macro_weighs_tasks_equally_whatever_their_sizes():
    found = of([[1], [1], [1], [0.5]], ["a", "a", "a", "b"])
    assert (found["score/a"], found["score/b"], found["macro"], found["score"]) == (1, 0.5, 0.75, 0.875)


def test_an_interval_is_of_problems_and_the_same_for_a_seed():
    draws = np.random.default_rng(0)
    clustered = np.repeat(draws.random((200, 1)) < 0.6, 4, 1).astype(float)     # a problem's four samples agree: 200 draws, not 800
    found = of(clustered, resamples=999, seed=3)
    assert found == of(clustered, resamples=999, seed=3) and found != of(clustered, resamples=999, seed=4)
    width, expected = found["pass_at_1_high"] - found["pass_at_1_low"], 2 * 1.96 * np.sqrt(0.24 / 200)
    assert abs(width / expected - 1) < 0.15 and found["pass_at_1_low"] < found["pass_at_1"] < found["pass_at_1_high"]
    assert not [name for name in of(clustered) if name.endswith(("_low", "_high"))]


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    draws, hits = np.random.default_rng(1), 0
    for trial in range(120):
        found = of((draws.random((60, 1)) < 0.5).astype(float), resamples=299, seed=trial)
        hits += found["score_low"] <= 0.5 <= found["score_high"]
    assert 105 <= hits <= 120                               # 114 expected; the percentile interval is a little short at 60 problems


def test_macro_is_resampled_within_tasks_and_equal_scores_have_no_width():
    found = of([[1]] * 10 + [[0]] * 10, ["a"] * 10 + ["b"] * 10, resamples=199)
    assert (found["macro_low"], found["macro_high"]) == (0.5, 0.5) and found["score_high"] > found["score_low"]


class Letters:
    """Two problems of each of two tasks; right is the answer itself."""

    name = "letters"

    def size(self, split):
        return 4

    def problem(self, split, index):
        return Problem("ab"[index % 2], "ab"[index % 2], "even" if index % 2 == 0 else "odd", index)

    def verify(self, response, problem):
        return float(response == problem.answer)


@pytest.mark.parametrize("prompts", [3, 100])
def test_each_problem_is_sampled_as_often_as_asked_and_the_row_is_plain(prompts):
    asked = []

    def sample(given, seed):
        asked.extend(given)
        b = len(given)
        return Rollout(*[torch.ones(b, 2, dtype=torch.int64)] * 2, torch.ones(b, 2, dtype=torch.bool), torch.zeros(b, 2), torch.ones(b, dtype=torch.bool), ["a"] * b)

    row = evaluate(sample, Letters(), RunConfig(evaluation_prompts=prompts, evaluation_samples=2), update=7)
    count = min(prompts, 4)
    assert asked == [letter for i in range(count) for letter in ["ab"[i % 2]] * 2]
    assert list(row)[:8] == ["update", "pass_at_1", "pass_at_k", "score", "length", "truncated", "samples", "verifier_failures"] and row["update"] == 7
    assert (row["score/even"], row["score/odd"], row["macro"], row["samples"]) == (1, 0, 0.5, 2 * count) and json.loads(json.dumps(row)) == row
