"""Tasks give the same problem for the same index, keep evaluation out of training, and judge by the answer alone."""

import pytest

from logra.rl.rewards import score
from logra.rl.tasks import Problem, Sums, task

SMALL = dict(training=60, evaluation=40, min_terms=2, max_terms=2, min_digits=1, max_digits=1)  # 200 questions: they collide


@pytest.mark.parametrize("name, config", [("sums", {}), ("reasoning_gym/chain_sum", SMALL)])
def test_a_problem_depends_on_seed_split_and_index_alone(name, config):
    one, two, other = task(name, seed=5, **config), task(name, seed=5, **config), task(name, seed=6, **config)
    forwards = [one.problem("train", index) for index in range(20)]
    backwards = [two.problem("train", index) for index in reversed(range(20))][::-1]
    assert forwards == backwards
    assert forwards != [other.problem("train", index) for index in range(20)]
    assert {problem.task for problem in forwards} == {name}
    assert [problem.index for problem in forwards] == list(range(20))


def test_sums_train_and_evaluation_share_no_problem_whatever_the_seeds():
    train = {Sums(seed).problem("train", index).prompt for seed in range(3) for index in range(20_000)}
    evaluation = {Sums(seed).problem("evaluation", index).prompt for seed in range(3) for index in range(5_000)}
    assert len(evaluation) > 10_000 and not train & evaluation


def test_reasoning_gym_drops_evaluation_questions_that_training_has():
    sums = task("reasoning_gym/chain_sum", **SMALL)
    train = [sums.problem("train", index).prompt for index in range(sums.size("train"))]
    evaluation = [sums.problem("evaluation", index).prompt for index in range(sums.size("evaluation"))]
    assert len(set(train)) == len(train) < 60 and 0 < len(evaluation) < 40, "the case must have collisions to say anything"
    assert not set(train) & set(evaluation)
    assert sums.problem("train", len(train)).prompt == train[0], "training goes round"
    with pytest.raises(IndexError, match="evaluation problems"):
        sums.problem("evaluation", len(evaluation))


def test_sums_verifier_looks_at_the_number_after_the_last_equals_sign():
    problem = Problem("47+85+36=", "168", "sums", 0, {"terms": [47, 85, 36]})
    right = ["168", "132+36=168", "999+1=168", "=168"]
    wrong = ["", "=", "167", "168=", "168 ", " 168", "0168", "+168", "168+0", "132+36=168=169", "1682", "16", "168\n"]
    assert score(Sums(), [problem] * 4, right).rewards == [1.0] * 4
    assert score(Sums(), [problem] * len(wrong), wrong).rewards == [0.0] * len(wrong)


def test_sums_answer_is_the_sum():
    for index in range(200):
        problem = Sums(1).problem("train", index)
        assert eval(problem.prompt.rstrip("=")) == int(problem.answer)


def test_reasoning_gym_scores_by_the_packages_own_scorer_inside_answer_tags():
    chain = task("reasoning_gym/chain_sum")
    problem = chain.problem("train", 0)
    responses = [f"so <answer>{problem.answer}</answer>", f"<answer>1</answer><answer> {problem.answer}.0 </answer>", problem.answer,
                 f"<answer>{problem.answer} or so</answer>"]
    assert score(chain, [problem] * 4, responses).rewards == [1.0, 1.0, 0.0, 0.0]
    partial = score(chain, [problem] * 4, responses, binary=False).rewards[3]
    assert 0 < partial < 1, "partial credit is there, and only on request"


def test_a_verifier_that_fails_costs_one_reward_and_is_counted():
    class Broken:
        name = "broken"

        def verify(self, response, problem):
            return {"good": 1.0, "half": 0.5, "nan": float("nan"), "big": 7.0}[response]

    problems = [Problem("p", "a", "broken", index) for index in range(5)]
    scores = score(Broken(), problems, ["good", "missing", "nan", "big", "half"], incorrect=-0.01)
    assert scores.rewards == [1.0, -0.01, -0.01, -0.01, -0.01] and scores.failures == 3 and scores.seconds >= 0
    with pytest.raises(ValueError, match="5 problems but 1 responses"):
        score(Broken(), problems, ["good"])


@pytest.mark.parametrize("name, config, message", [
    ("sum", {}, "unknown task"), ("reasoning_gym/", {}, "unknown task"), ("reasoning_gym/chain_sums", {}, "similar: .*chain_sum"),
    ("reasoning_gym/chain_sum", {"terms": 3}, "refused the configuration"), ("reasoning_gym/chain_sum", {"min_terms": 9}, "refused"),
])  # fmt: skip
def test_a_wrong_name_or_field_is_refused(name, config, message):
    with pytest.raises(ValueError, match=message):
        task(name, **config)


def test_a_wrong_split_or_index_is_refused():
    with pytest.raises(ValueError, match="unknown split 'test'"):
        Sums().problem("test", 0)
    with pytest.raises(ValueError, match="index is -1"):
        Sums().problem("train", -1)
