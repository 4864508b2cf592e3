"""Shared by the tests of training runs."""

import pytest
import torch

from logra.rl import learner


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small random Qwen2 with the learner's tokenizer."""
    from transformers import Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = learner.config()
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    learner.tokenizer().save_pretrained(folder)
    return folder
