"""The chat tasks' promises: held-out problems are not trained on, partial credit is the package's, and a task's own system message reaches the model."""

import pytest
import transformers

from logra.rl import learner, models, rollout
from logra.rl.chat import ChatProducts, ChatSums, chat_mixture, conversation


def question(problem) -> str:
    return problem.prompt[-1]["content"]


def test_no_held_out_sum_is_trained_in_either_order():
    task = ChatSums()
    pairs = {split: {frozenset(pair) for pair in task.pairs[split]} for split in ("train", "evaluation")}
    assert pairs["evaluation"] and not pairs["train"] & pairs["evaluation"]
    asked = [question(task.problem("evaluation", i)) for i in range(task.size("evaluation"))]
    assert len(set(asked)) == len(asked) >= 40
    assert not {question(task.problem("train", i)) for i in range(2000)} & set(asked)
    assert [task.problem("train", i) for i in range(20)] == [ChatSums().problem("train", i) for i in range(20)]
    with pytest.raises(IndexError, match="43 evaluation problems"):
        task.problem("evaluation", task.size("evaluation"))


def test_no_held_out_product_is_trained():
    task = ChatProducts()
    asked = {split: {question(task.problem(split, i)) for i in range(task.size(split))} for split in ("train", "evaluation")}
    assert len(asked["train"]) >= 40 and len(asked["evaluation"]) >= 30 and not asked["train"] & asked["evaluation"]


@pytest.mark.parametrize("response, sums, products", [("{}", 1, 1), ("a = {}.", 1, 1), ("The answer is {}.", 1, None), ("{} or 99", 0, None), ("", 0, 0), ("I do not know", 0, 0)])
def test_scores(response, sums, products):
    mixture = chat_mixture()
    for index, expected in enumerate((sums, products)):
        problem = mixture.problem("evaluation", index)
        text = response.format(problem.answer)
        if expected is None:                                # the package's partial credit: the answer's share of the letters
            expected = len(problem.answer) / len(text.removesuffix("."))
        assert mixture.verify(text, problem) == pytest.approx(expected)


def test_the_mixture_alternates_and_evaluates_both_in_equal_shares():
    mixture = chat_mixture()
    assert [mixture.problem("train", i).task for i in range(4)] == ["chat/sums", "chat/products"] * 2
    assert [mixture.problem("evaluation", i).task for i in range(80)].count("chat/sums") == 40


def test_a_tasks_own_system_message_stands_in_the_place_of_the_templates():
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.smollm2())
    text, ours = ([tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(batch.input_ids, batch.attention_mask)][0]
                  for batch in (rollout.encode(tokenizer, ["What?"]), rollout.encode(tokenizer, [conversation("What?"), "a longer prompt, so that padding is met"])))
    assert "You are a helpful AI assistant" in text
    assert ours == "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"


def test_messages_need_a_template():
    with pytest.raises(ValueError, match="list of chat messages.*no chat template"):
        rollout.encode(learner.tokenizer(), ["1+1=", conversation("1+1=")])
