"""What the supervised examples show: sums with their working, 47+85+36=132+36=168, which the shipped learner leaves out half the time."""

from logra.rl.tasks import Sums


def demonstration(tokenizer, index: int) -> dict[str, list[int]]:
    """Token ids, and labels that leave the prompt out."""
    prompt = Sums().problem("train", index).prompt
    a, b, c = map(int, prompt.rstrip("=").split("+"))
    asked, answer = tokenizer(prompt).input_ids, tokenizer(f"{a + b}+{c}={a + b + c}<eos>", add_special_tokens=False).input_ids
    return {"input_ids": asked + answer, "attention_mask": [1] * len(asked + answer), "labels": [-100] * len(asked) + answer}
