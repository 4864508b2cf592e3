"""Shared by the tests of training runs."""

import pytest
import torch

from logra.rl import learner


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small random Qwen2 with the learner's tokenizer."""
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """The same with a head that is not the embedding."""
    return saved(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


def saved(folder, **changes):
    from transformers import Qwen2ForCausalLM

    config = learner.config()
    config.update({"num_hidden_layers": 2} | changes)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    learner.tokenizer().save_pretrained(folder)
    return folder
