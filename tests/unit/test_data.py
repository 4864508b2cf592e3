"""Problems from files: the paper's rule for its training set, what is refused, and that order and hash say what was trained on."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logra.rl import data, rewards, verifiers
from logra.rl.config import RunConfig
from logra.rl.tasks import Problem, task


def lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def release(texts):
    """Rows as the release has them: a prompt of messages with the template inside."""
    return [{"data_source": "m", "prompt": [{"content": data.BEFORE + text + data.AFTER, "role": "user"}], "ability": "MATH",
             "reward_model": {"ground_truth": str(number), "style": "rule"}, "extra_info": {"index": str(number)}} for number, text in enumerate(texts)]


@pytest.fixture(autouse=True)
def no_known_hash(monkeypatch):
    monkeypatch.setattr(data, "_known", lambda name, problems, found: problems)


def test_first_occurrences_in_release_order_until_there_are_enough(tmp_path):
    texts = ["b", "a", "b", "c", "a", "d", "e"]
    pq.write_table(pa.Table.from_pylist(release(texts)), tmp_path / "r.parquet", row_group_size=2)
    found = data.dapo(str(tmp_path / "r.parquet"), count=4)
    assert [(p.meta["problem"], p.answer, p.meta["row"]) for p in found] == [("b", "0", 0), ("a", "1", 1), ("c", "3", 3), ("d", "5", 5)], "an answer is the first row's"
    assert found[0].prompt == data.BEFORE + "b" + data.AFTER, "the template stays"
    bare = [{"problem": text, "answer": number} for number, text in enumerate(texts)]
    for path in (lines(tmp_path / "r.jsonl", release(texts)), lines(tmp_path / "r.jsonl.gz", release(texts)), lines(tmp_path / "bare.jsonl", bare)):
        assert data.content(data.dapo(path, count=4)) == data.content(found)
    with pytest.raises(ValueError, match="5 different prompts in 7 rows; DAPO-Math-7.5K needs 7,500"):
        data.dapo(str(tmp_path / "r.parquet"))


def test_the_stream_is_left_when_there_are_enough(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in release("abc")) + "no json")
    assert len(data.dapo(str(path), count=3)) == 3
    with pytest.raises(ValueError, match="line 4 is no JSON"):
        data.dapo(str(path), count=4)


def test_another_hash_than_the_known_one_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.undo()
    path = lines(tmp_path / "m.jsonl", [{"problem": "1+1?", "answer": "2", "unique_id": "a"}])
    assert data.math500(path, count=1)[0].prompt == "1+1?"
    assert "math500: these 1 problems hash to 53c234e5e847" in caplog.text and "tried on to 9e613c7e9abe" in caplog.text
    with pytest.raises(ValueError, match="has 1 problems, MATH-500 has 500"):
        data.math500(path)


def test_gsm8k_answers_are_what_stands_behind_the_marks(tmp_path):
    path = lines(tmp_path / "g.jsonl", [{"question": "How many?", "answer": "2 * 500 = <<2*500=1000>>1,000\n#### 1,000"}])
    (found,) = data.gsm8k(path)
    assert found.answer == "1000" and found.prompt.startswith("How many?") and verifiers.math(r"\boxed{1000}", found) == 1


def test_training_goes_round_in_another_order_each_time_and_evaluation_does_not(tmp_path):
    path = lines(tmp_path / "q.jsonl", [{"prompt": f"p{i}", "answer": i} for i in range(20)])
    one, two, other = (task("jsonl", train=path, evaluation=path, seed=seed) for seed in (1, 1, 2))
    forwards = [one.problem("train", i).prompt for i in range(60)]
    assert forwards == [two.problem("train", i).prompt for i in reversed(range(60))][::-1], "an index gives one problem, whenever it is asked for"
    rounds = [forwards[start:start + 20] for start in (0, 20, 40)]
    assert all(len(set(part)) == 20 for part in rounds) and len({tuple(part) for part in rounds}) == 3
    assert rounds[0] != [other.problem("train", i).prompt for i in range(20)]
    assert [one.problem("evaluation", i).prompt for i in range(20)] == [f"p{i}" for i in range(20)] and one.problem("train", 25).index == 25
    with pytest.raises(IndexError, match="has 20 evaluation problems, index 20"):
        one.problem("evaluation", 20)
    assert one.sha256() == other.sha256()


def half(response, answer):
    return 0.5 if response == answer else 0.0


def test_a_users_own_task_is_a_file_and_a_function(tmp_path):
    train = lines(tmp_path / "t.jsonl", [{"prompt": "p", "answer": "a"}])
    evaluation = lines(tmp_path / "e.jsonl", [{"prompt": "q", "answer": "b", "task": "letters"}, {"prompt": "r", "answer": "c"}])
    config = RunConfig(task="jsonl", task_config={"train": train, "evaluation": evaluation, "verifier": "test_data:half"})
    own = task(config.task, **config.task_config)
    problems = [own.problem("evaluation", i) for i in range(2)]
    assert [p.task for p in problems] == ["letters", "jsonl"]
    assert rewards.score(own, problems, ["b", "b"], binary=False).rewards == [0.5, 0.0]
    assert task("test_data:a_task").name == "mine"


def a_task():
    return data.Questions("mine", [Problem("p", "a", "mine", 0)], [Problem("q", "a", "mine", 0)])


@pytest.mark.parametrize("rows, settings, message", [
    ([{"prompt": "p"}], {}, "row 0: wanted the fields prompt and answer; it has prompt"), ([], {}, "has no train and no evaluation problems"),
    ([{"prompt": "p", "answer": "a"}], {"verifier": "maths"}, "verifier is 'maths': wanted math, exact, or module:function"),
])  # fmt: skip
def test_a_file_or_verifier_that_will_not_do(tmp_path, rows, settings, message):
    path = lines(tmp_path / "q.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        task("jsonl", train=path, evaluation=path, **settings)
    with pytest.raises(ValueError, match="wanted a file .jsonl"):
        task("jsonl", train="problems.csv", evaluation=path)
    with pytest.raises(ModuleNotFoundError):
        task("jsonl", train=path, evaluation=path, verifier="no_such_module:score")


def test_table_3s_mixture_is_refused_with_other_counts_than_its(monkeypatch):
    from logra.rl import table3

    def generated(train, evaluation):
        problem = Problem("p", "a", "codeio", 0, {}, verifiers.reasoning_gym)
        monkeypatch.setattr(table3, "problems", lambda: {"train": [problem] * train, "evaluation": [problem] * evaluation})

    generated(38_948, 193)
    assert task("reasoning_gym_hard").size("train") == 38_948
    for counts in ((38_947, 193), (38_948, 192)):
        generated(*counts)
        with pytest.raises(ValueError, match=rf"has {counts[0]:,} training and {counts[1]} evaluation problems here, Table 3's has 38,948 and 193"):
            task("reasoning_gym_hard")


def test_overlap_sees_through_template_and_typesetting():
    def of(*texts):
        return [Problem(data.BEFORE + text, "", "t", i, {"problem": text}) for i, text in enumerate(texts)]
    train = of("Find $x$ if $x^2=4$.", r"Compute $\left(1+2\right)\cdot 3$.", "Other")
    found = data.overlap(train, of("Find $x$ if $x^2=4$.", r"compute  $(1+2) \cdot 3$", "Find $x$ if $x^2=-4$.", "another"))
    assert found == {"exact": [0], "normalised": [0, 1]}
    assert data.overlap(of("X . O\n. . X"), of("X O .\n. . X", "x . O\n. . X")) == {"exact": [], "normalised": [1]}, "a board's dots are no punctuation"


def test_the_report_counts_tasks_and_names_hashes(tmp_path):
    path = lines(tmp_path / "q.jsonl", [{"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "b", "task": "z"}])
    found = data.report(task("jsonl", train=path, evaluation=path))
    assert found["problems"]["train"] == {"jsonl": 1, "z": 1} and len(found["sha256"]["train"]) == 64 and found["overlap"]["exact"] == [0, 1]
