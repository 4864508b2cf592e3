"""Table 3 is counted anew from the package, whatever the caller's hash seed, and what stored programs do stays in their own folder."""
import json

import psutil
import pytest

from logra.paper import printed
from logra.rl import table3, tasks, verifiers
from logra.rl.records import MissingRecord


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Records in a folder of this test, and an empty working directory beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path / "records"))
    return tmp_path / "records"


def test_counts_are_the_papers_and_are_counted_once(records, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")               # codeio's count would move with it
    tasks = ("codeio",)                                     # the one that depends on everything
    paper = printed.table("table3").set_index("task")
    found = table3.ensure(tasks)
    assert {name: (counts["train"], counts["evaluation"]) for name, counts in found.items()} == {name: tuple(paper.loc[name, ["training", "evaluation"]]) for name in tasks}
    assert not list((tmp_path / "here").iterdir()), "codeio's programs wrote into the caller's folder"
    monkeypatch.setattr(table3.subprocess, "Popen", None)   # a second count would raise
    monkeypatch.setenv("LOGRA_INPUTS", str(tmp_path / "inputs"))
    assert table3.ensure(tasks) == found
    inputs = [json.loads(line)["path"] for line in (tmp_path / "inputs").read_text().splitlines()]
    assert inputs == [str(table3._folder(name)) for name in tasks], "what was read is named"


def test_the_mixtures_problems_are_generated_once_and_kept_with_their_hash(records, monkeypatch):
    found = table3.problems(["word_ladder"])
    printed_counts = printed.table("table3").set_index("task").loc["word_ladder"]
    assert [len(found[split]) for split in tasks.SPLITS] == [printed_counts["training"], printed_counts["evaluation"]]
    prompts = [{problem.meta["problem"] for problem in found[split]} for split in tasks.SPLITS]
    assert not prompts[0] & prompts[1] and len(prompts[0]) == len(found["train"])
    first = found["train"][0]
    assert "<answer>" in first.prompt and first.prompt.endswith(first.meta["problem"]) and first.task == "word_ladder"
    assert verifiers.reasoning_gym(f"<answer>{first.answer}</answer>", first) == 1
    monkeypatch.setattr(table3.subprocess, "Popen", None)   # a second generation would raise
    assert table3.problems(["word_ladder"]) == found
    kept = table3._folder("word_ladder", "problems") / "problems.jsonl"
    kept.write_text(kept.read_text().replace("word ladder", "word adder", 1))
    with pytest.raises(ValueError, match="does not hash to .*: remove the folder and generate it again"):
        table3.problems(["word_ladder"])


@pytest.mark.parametrize("name", [name for name in table3.TASKS if name != "codeio"])    # it runs stored programs; its scorer reads the answer alone
def test_what_is_kept_of_an_entry_is_all_that_its_scorer_reads(name, tmp_path, monkeypatch):
    monkeypatch.setattr(table3, "TRAINING", 4)
    monkeypatch.setattr(table3, "EVALUATION", 2)
    table3._generate("problems", name, tmp_path / "kept")
    source = tasks.ReasoningGym(name, table3.SEED, 4, 2)
    rows = [json.loads(line) for line in (tmp_path / "kept").read_text().splitlines()]
    assert [row["question"] for row in rows] == [entry["question"] for split in tasks.SPLITS for entry in source.entries()[split]]
    for row, entry in zip(rows, [entry for split in tasks.SPLITS for entry in source.entries()[split]]):
        for answer in (entry["answer"], entry["answer"] + " x", "C3", "7", entry["answer"].lower()[:-1] + "q"):
            assert source.generator.score_answer(answer, row) == source.generator.score_answer(answer, entry)
        assert source.generator.score_answer(row["answer"], row) == 1


def test_a_count_that_does_not_end_leaves_no_record_and_no_process(records, monkeypatch):
    monkeypatch.setattr(table3, "_LIMIT", 0.2)
    with pytest.raises(RuntimeError, match="generating tsumego ended with exit code none within 0.2 s"):
        table3.ensure(["tsumego"])
    assert not [path for path in records.iterdir() if path.is_dir()]
    assert not [child for child in psutil.Process().children(recursive=True) if "logra.rl.table3" in child.cmdline()]


def test_only_drawing_counts_nothing(records, monkeypatch):
    monkeypatch.setenv("LOGRA_DRAW_ONLY", "1")
    with pytest.raises(MissingRecord, match="table3-codeio-"):
        table3.ensure(["codeio"])


def test_a_task_outside_the_mixture(records):
    with pytest.raises(ValueError, match="chain_sum: not in Table 3; its tasks are codeio"):
        table3.ensure(["codeio", "chain_sum"])


def test_the_command_prints_json_of_pairs_alone(records, capsys):
    for number, name in enumerate(table3.TASKS):
        folder = table3._folder(name)
        folder.mkdir(parents=True)
        (folder / "environment.json").write_text('{"seconds": 1}')
        (folder / "counts.json").write_text(json.dumps({"train": 1000 + number, "evaluation": number}))
    assert table3.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: [1000 + number, number] for number, name in enumerate(table3.TASKS)}
    assert table3.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["total", "8,028", "28"]


def test_a_record_belongs_to_the_versions_that_made_it(monkeypatch):
    before = table3._folder("codeio")
    monkeypatch.setattr(table3.importlib.metadata, "version", lambda name: "2.4.0" if name == "numpy" else "1")
    assert table3._folder("codeio") != before
