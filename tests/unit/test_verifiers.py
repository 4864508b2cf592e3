"""A verifier credits the final answer alone, and knows equal answers in other writings from unequal ones."""

import json
import os
import subprocess
import sys

import pytest

from logra.rl import verifiers
from logra.rl.pool import Unparsable
from logra.rl.records import ROOT
from logra.rl.tasks import Problem, task


def problem(answer):
    return Problem("p", answer, "mathematics", 0, {}, verifiers.math)


@pytest.mark.parametrize("response, answer", [
    (r"so \boxed{34}.", "34"), (r"\boxed{1} and \boxed{2}", "2"), ("Answer: 34", "34"), ("**Answer:** 34.", "34"), ("Answer:\n34", "34"),
    ("Answer: $34$.", "34"), (r"Answer: \(\frac12\)", r"\frac12"), ("first Answer: 1\nAnswer: 2\n", "2"),
    (r"Answer: \boxed{34} apples", "34"), ("\\boxed{1}\nAnswer: 2", "2"), ("Answer: 2\n\\boxed{1}", "1"), ("FINAL ANSWER : 7", "7"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\fbox{5}", "5"), (r"\boxed{$3$ or $4$}", "$3$ or $4$"),
    (r"\boxed{\text{a\}b}}", r"\text{a\}b}"),
])  # fmt: skip
def test_the_final_answer_is_the_last_box_or_answer_line(response, answer):
    assert verifiers.final_answer(response) == answer


@pytest.mark.parametrize("response", [
    "", "34", "the result is 34", "= 34", r"\boxed{34", r"\boxed{34} and then \boxed{35", r"\boxed{}", r"\boxed{ }", "Answer:", "Answer: \n \n34",
    "Answer 34", "answers: 34", r"\boxed 34", r"\boxed{" + "1" * 1001 + "}",
])  # fmt: skip
def test_nothing_else_is_an_answer(response):
    with pytest.raises(Unparsable):
        verifiers.final_answer(response)


@pytest.mark.parametrize("reference, given", [
    ("34", "034"), ("34", "+34"), ("34", "34.0"), ("1" * 5000, None), ("0", "-0"), (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", r"\tfrac12"), ("0.15", ".15"),
    ("x=5", "5"), ("1,-2", "-2, 1"), (r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "C"), (r"90^\circ", "90"), ("10,\\!080", "10080"), ("p - q", "-q+p"),
    (r"3\sqrt{13}", r"\sqrt{117}"), ("6 - 5i", "-5i+6"), (r"(3,4]", r"\left(3, 4\right]"), ("2516_8", "2516_{8}"), ("2516_8", "2516"), ("2516_8", "2516_{(8)}"), ("2516_8", r"2516_{8}\text{ apples}"), ("2516", "2516_{10}"),
    ("x_1+a_n", "a_n + x_{1}"), ("x_1^2", "x^2_1"), ("x^{2}_{1}", "x_1^2"), ("3x_2", "x_2 \\cdot 3"),
    (r"\$18.90", "18.90"), ("58,500", "58,500\\,"), (r"x^2", "x^2 \\; "), ("10", r"10\text{ baseballs}"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}"), (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
])  # fmt: skip
def test_equal_answers_in_another_writing(reference, given):
    assert verifiers.math(rf"\boxed{{{given}}}" if given else f"Answer: {reference[:900]}", problem(reference if given else reference[:900])) == 1


@pytest.mark.parametrize("reference, given", [
    ("34", "35"), ("34", "-34"), ("34", "340"), ("1" * 900, "1" * 899 + "2"), ("2516_8", "2516_9"), ("4210_{5}", "4210_6"), ("2516_8", r"2516_9\text{}"), ("2516_8", r"2516_9 \text{ apples}"),
    ("2516_8", "2516_{(9)}"), ("2516_8", "2516_{nine}"), ("2516", "2516_9"), ("2516_8", "2516_{10}"), ("2516_8", r"2516_\mathbf9"), ("2516_8", r"2516_{\text{base }9}"),
    ("2516_8", r"\left(2516\right)_9"), ("2516_8", r"2516\,_9"), ("2516_8", "2516_9 = 2516_8"), ("2516_8", r"2516 \text{ (base 9)}"), ("2516_8", r"2516\text{ base9}"), ("2516_8", "2516_{{{9}}}"), ("2516_8", "2516_{8+1}"),
    ("2516_8", "2516₉"), ("x_1", "x_2"), ("x^2_1", "x^2_2"),
    (r"\text{(C)}", r"\text{(B)}"), (r"\text{(C)}", "B"),
    ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"), ("5", "5 or 6"), ("5", r"\{5,6\}"), (r"\frac{1}{3}", "0.333"), ("p - q", "q - p"), (r"\text{even}", r"\text{odd}"), ("x+1", "y+1"),
])  # fmt: skip
def test_unequal_answers(reference, given):
    assert verifiers.math(rf"\boxed{{{given}}}", problem(reference)) == 0


def test_two_boxes_are_no_set_and_only_the_last_counts():
    assert verifiers.math(r"\boxed{1} or \boxed{2}", problem("1,2")) == 0
    assert verifiers.math(r"\boxed{2} no, \boxed{1}", problem("2")) == 0


def test_exact_compares_text():
    assert verifiers.exact("Answer: blue", problem("blue ")) == 1 and verifiers.exact("Answer: Blue", problem("blue")) == 0


def test_a_scorer_has_the_configuration_that_made_the_problem():
    config = dict(min_board_size=5, max_board_size=5, max_stones=5)
    gym = task("reasoning_gym/tsumego", training=3, evaluation=3, **config)
    found = gym.problem("train", 0)
    assert found.meta["config"] == config and verifiers.reasoning_gym(f"<answer>{found.answer}</answer>", found) == 1
    for response in ("C3", "<answer>" + "C3" * 2001 + "</answer>"):
        with pytest.raises(Unparsable):
            verifiers.reasoning_gym(response, found)


def test_reference_answers_are_judged_against_themselves_and_their_neighbours(tmp_path):
    given = ["2516_8", "34", "34", r"\frac{1}{2}", "0.5", r"\text{"]      # of the last the box is never closed
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in given))
    command = [sys.executable, ROOT / "benchmarks" / "reference_answers.py", tmp_path / "a.jsonl", "--out", tmp_path / "out.json"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["answers"] == 6 and found["command"] == f"python benchmarks/reference_answers.py a.jsonl --out {tmp_path / 'out.json'}"
    for kind in ("against itself", "against itself, displayed"):
        assert (found[kind]["credited"], found[kind]["rows not credited"], found[kind]["ended"]) == (5, [5], {"scored": 5, "unparsable": 1})
    neighbour = found["against its neighbour"]
    assert (neighbour["credited"], neighbour["of one text"]) == (2, 1)
    assert neighbour["credited though of another text"] == [{"row": 3, "reference": r"\frac{1}{2}", "given": "0.5"}]
