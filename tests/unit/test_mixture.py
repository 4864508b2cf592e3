"""The mixture of short reasoning_gym tasks: its split, its equal shares, its partial credit, its macro average, its learner."""

import json
import random
import shutil

import pytest
import torch

from logra.rl import learner, mixture_learner, runs, train
from logra.rl.config import RunConfig
from logra.rl.evaluate import evaluate, sampler
from logra.rl.mixture import FORMS, Mixture, ShortForm, short_mixture
from logra.rl.records import MissingRecord
from logra.rl.rewards import score
from logra.rl.tasks import Problem, Sums, task

SMALL = dict(training=400, evaluation=40)


@pytest.fixture(scope="module")
def mixture():
    return task("short_mixture", **SMALL)


def problems(mixture, split):
    return [mixture.problem(split, index) for index in range(mixture.size(split))]


def test_no_evaluation_prompt_is_a_training_prompt_though_questions_differ_in_their_stories():
    """time_intervals tells many stories: two questions may differ where their times, which are all that is asked here, do not."""
    mixture = short_mixture()
    evaluation = [problem.prompt for problem in problems(mixture, "evaluation")]
    train = {member.problem("train", index).prompt for member in mixture.members.values() for index in range(member.size("train"))}
    assert len(set(evaluation)) == len(evaluation) > 200 and not train & set(evaluation)
    clock = mixture.members["short/time_intervals"]
    questions = {clock.generator[row]["question"] for row in clock.rows["train"]}
    assert len(questions) > clock.size("train"), "the case must have such pairs to say anything"


def test_a_problem_depends_on_seed_split_and_index_alone(mixture):
    again, other = short_mixture(**SMALL), short_mixture(seed=77, **SMALL)
    forwards = [mixture.problem("train", index) for index in range(30)]
    assert forwards == [again.problem("train", index) for index in reversed(range(30))][::-1]
    assert forwards != [other.problem("train", index) for index in range(30)]


def test_members_get_equal_shares_in_training_and_are_evaluated_whole(mixture):
    names = [f"short/{generator}" for generator in FORMS]
    assert [mixture.problem("train", index).task for index in range(10)] == names * 2
    evaluated = [problem.task for problem in problems(mixture, "evaluation")]
    assert {name: evaluated.count(name) for name in names} == {name: member.size("evaluation") for name, member in mixture.members.items()}
    assert len({evaluated.count(name) for name in names}) > 1, "the case must have members of unequal size to say anything"
    with pytest.raises(IndexError, match="evaluation problems"):
        mixture.problem("evaluation", len(evaluated))


def test_the_right_answer_scores_one_and_only_when_it_is_closed(mixture):
    for problem in problems(mixture, "evaluation"):
        right = mixture_learner.answer(problem)
        assert [mixture.verify(text, problem) for text in (f"{right}!", f"9?{right}!", right, f"{right}!?", "!", "")] == [1, 1, 0, 0, 0, 0], problem


def test_partial_credit_reaches_the_reward_unless_it_is_to_be_binary(mixture):
    """Each slip of the demonstrator is nearly right: the package's scorer grades it, and the reward is that grade."""
    for generator in FORMS:
        member = mixture.members[f"short/{generator}"]
        asked = [member.problem("train", index) for index in range(100)]
        slips = [mixture_learner.SLIPS[member.name](mixture_learner.answer(p), p.meta["entry"]["metadata"], random.Random(0)) for p in asked]
        wrong = [(p, slip) for p, slip in zip(asked, slips) if slip != mixture_learner.answer(p)]
        partial, binary = (score(mixture, [p for p, _ in wrong], [f"{slip}!" for _, slip in wrong], binary=binary) for binary in (False, True))
        assert len(wrong) > 50 and partial.failures == 0
        assert sum(0 < reward < 1 for reward in partial.rewards) > 0.9 * len(wrong), generator
        assert partial.rewards == [float(member.generator.score_answer(slip, p.meta["entry"])) for p, slip in wrong]
        assert set(binary.rewards) <= {0.0, 1.0}


def test_evaluation_reports_the_mean_of_the_tasks_means(mixture, monkeypatch):
    model, tokenizer = learner.load_base()
    grades = {"short/spell_backward": 1.0, "short/word_sorting": 0.5, "short/complex_arithmetic": 0.25}
    monkeypatch.setattr(mixture, "verify", lambda response, problem: grades.get(problem.task, 0.0))
    config = RunConfig(evaluation_prompts=10_000, evaluation_samples=2, max_new_tokens=1, evaluation_top_p=0.95, verifier_seconds=10.0, evaluation_resamples=100)
    row = evaluate(sampler(model, tokenizer, config), mixture, config, 0)
    assert row["macro"] == pytest.approx(1.75 / 5) and row["macro"] != pytest.approx(row["score"])
    assert {name: row[f"score/{name}"] for name in mixture.members} == {name: grades.get(name, 0.0) for name in mixture.members}
    alone = evaluate(sampler(model, tokenizer, config), mixture.members["short/pool_matrix"], config, 0)
    assert "macro" not in alone, "one task has no macro average: its records keep their columns"


def test_a_member_without_end_and_members_of_any_kind_mix():
    mixed = Mixture([Sums(), ShortForm("pool_matrix", **SMALL)])
    assert mixed.size("train") is None and [mixed.problem("evaluation", index).task for index in range(3)] == ["sums", "short/pool_matrix", "sums"]
    assert mixed.verify("168", Problem("47+85+36=", "168", "sums", 0)) == 1.0
    with pytest.raises(ValueError, match="twice: sums"):
        Mixture([Sums(), Sums(3)])
    with pytest.raises(ValueError, match="no short form of 'chain_sum'"):
        ShortForm("chain_sum")


def test_demonstrations_never_hold_an_evaluation_prompt_and_are_cut_or_closed():
    recipe = mixture_learner.Recipe()
    pairs = [pair for step in range(16) for pair in recipe.demonstrations(step)]
    assert pairs[:64] == mixture_learner.Recipe().demonstrations(0) and len(pairs) == 16 * recipe.batch
    evaluation = {problem.prompt for problem in problems(short_mixture(), "evaluation")}
    assert not evaluation & {prompt for prompt, _ in pairs}
    assert all(response.endswith("!") or len(response) == recipe.cut for _, response in pairs)
    assert max(len(response) for _, response in pairs) == recipe.cut


def test_shipped_base_is_of_the_recipe_and_knows_part_of_every_task():
    recorded = json.loads((mixture_learner.BASE / "provenance.json").read_text())
    recipe = mixture_learner.Recipe(**recorded["recipe"])
    assert recipe == mixture_learner.Recipe() and recorded["recipe_sha256"] == recipe.sha256()
    demonstrations = json.dumps(recipe.demonstrations(0)).encode()
    assert recorded["first_demonstrations_sha256"] == learner.hashlib.sha256(demonstrations).hexdigest()
    assert sum(path.stat().st_size for path in mixture_learner.BASE.glob("*.safetensors")) <= 4_000_000
    model, tokenizer = learner.load_base(mixture_learner.BASE)
    assert tokenizer.get_vocab() == learner.tokenizer().get_vocab() and {p.dtype for p in model.parameters()} == {torch.float32}
    config = RunConfig(evaluation_prompts=10_000, evaluation_samples=1, max_new_tokens=24, evaluation_top_p=0.95, verifier_seconds=10.0, evaluation_resamples=100)
    row = evaluate(sampler(model, tokenizer, config), short_mixture(), config, 0)
    assert 0.25 < row["macro"] < 0.60 and 0.1 < row["truncated"] < 0.5      # the band in which the paper selected its tasks (C.2)
    assert min(value for name, value in row.items() if name.startswith("score/")) > 0.02


def test_a_shipped_record_is_used_until_the_reader_has_one(tmp_path, monkeypatch):
    config = RunConfig(updates=1, prompts=2, micro_batch=2, evaluation_prompts=1, max_new_tokens=2)
    monkeypatch.setattr(runs, "RECORDED", tmp_path / "shipped")
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path / "own"))
    monkeypatch.setenv("LOGRA_DRAW_ONLY", "1")
    shipped = train.run(config, tmp_path / "shipped" / f"run-{config.hash()}")
    (found,) = runs.ensure([config])
    assert found.recorded and found.folder == shipped and len(found.metrics) == 1
    with pytest.raises(MissingRecord):
        runs.ensure([config, config.model_copy(update={"seed": 2})])
    shutil.copytree(shipped, tmp_path / "own" / shipped.name)
    (found,) = runs.ensure([config])
    assert not found.recorded and found.folder == tmp_path / "own" / shipped.name


def test_the_shipped_long_run_is_whole_and_of_the_papers_settings():
    (folder,) = runs.RECORDED.glob("mixture-logra-*")
    config = RunConfig(**json.loads((folder / "config.json").read_text()))
    assert folder.name == f"{config.name}-{config.hash()}"
    assert (config.seed, config.probe, config.refresh, config.optimizer, config.binary_reward) == (42, "finite_difference", True, "rowadam", False)
    assert (config.budget, config.budget_end, config.budget_updates, config.evaluate_every) == (2e-4, 2e-5, 1000, 20)
    assert (config.temperature, config.evaluation_temperature, config.evaluation_top_p, config.evaluation_samples) == (1.0, 0.7, 0.95, 1)
    run = runs.Run(config, folder)
    assert list(run.metrics["update"]) == list(range(1, config.updates + 1)) and config.updates > 1100
    assert list(run.evaluations["update"]) == list(range(0, config.updates + 1, 20))
    tasks = [column for column in run.evaluations if column.startswith("score/")]
    assert len(tasks) >= 4 and (run.evaluations[tasks].mean(axis=1) - run.evaluations["macro"]).abs().max() < 1e-12
    made = json.loads((folder / "environment.json").read_text())
    assert made["command"] == f"python -m logra.rl.train data/recorded/{folder.name}/config.json" and made["seconds"] > 0
