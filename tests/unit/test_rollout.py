"""What ends a response, and what is promised of bits on which machine."""

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from logra.rl import learner, models
from logra.rl.rollout import deterministic, stop_tokens


def test_a_chat_template_that_ends_a_turn_with_im_end_ends_a_response_there_as_well():
    tokenizer, own = learner.tokenizer(), GenerationConfig()
    eos = tokenizer.eos_token_id
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_tokens(tokenizer, own) == [eos]             # a token that no template uses
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    assert stop_tokens(tokenizer, own) == sorted([eos, turn]) == stop_tokens(tokenizer, GenerationConfig(eos_token_id=[turn, eos]))
    without = learner.tokenizer()
    without.chat_template = tokenizer.chat_template         # a token that the tokenizer has not
    assert stop_tokens(without, GenerationConfig(eos_token_id=3)) == sorted({eos, 3})


@pytest.mark.parametrize("folder", [learner.BASE, models.smollm2])
def test_the_models_that_are_here_stop_where_they_did(folder):
    folder = folder() if callable(folder) else folder
    tokenizer, own = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert stop_tokens(tokenizer, own) == [tokenizer.eos_token_id] == [own.eos_token_id]


def test_what_has_no_deterministic_kernel_on_a_gpu_warns_there_and_raises_on_the_cpu(monkeypatch):
    def state():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    before = state()
    try:
        with monkeypatch.context() as gpu:
            gpu.setattr(torch.cuda, "is_available", lambda: True)
            deterministic()
        assert state() == (True, True, False)
        deterministic()
        assert state() == (True, torch.cuda.is_available(), not torch.cuda.is_available())
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
