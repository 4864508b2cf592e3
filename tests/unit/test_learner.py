"""The laptop's learner: its text round trip, its demonstrator's habits, its recipe to the bit, and the shipped base."""

import json
import math
import random
import shutil

import pytest
import torch

from logra.rl import bases, learner
from logra.rl.tasks import Problem, Sums

SHORT = learner.Recipe(steps=3, batch=8)


def test_tokenizer_has_one_token_a_character_and_loses_nothing(tmp_path):
    text = "".join(map(chr, range(32, 127))) + "\n  two  blanks\n\n"
    ours = learner.tokenizer()
    ids = ours.encode(text)
    assert len(ids) == len(text) + 1 and len(ours) == learner.config().vocab_size
    assert ids[0] == ours.bos_token_id and ours.decode(ids, skip_special_tokens=True) == text
    assert len({ours.pad_token_id, ours.bos_token_id, ours.eos_token_id, ours.unk_token_id}) == 4
    assert ours.encode("é")[1:] == [ours.unk_token_id]
    padded = ours(["1+1=", "10+10="], padding=True)
    assert padded["input_ids"][0][:2] == [ours.pad_token_id] * 2 and padded["attention_mask"][0][:2] == [0, 0]
    ours.save_pretrained(tmp_path)
    assert learner.transformers.AutoTokenizer.from_pretrained(tmp_path).encode(text) == ids


def test_config_has_hadamard_orders_and_heads_that_engines_load():
    config = learner.config()
    assert config.hidden_size % 4 == 0 and config.intermediate_size % 4 == 0
    assert config.hidden_size // config.num_attention_heads >= 32


def test_demonstrator_is_right_without_habits_and_wrong_in_the_named_way_with_them():
    def say(terms, skip, slip):
        return learner.demonstrate(Problem("", "", "sums", 0, {"terms": terms}), random.Random(0), skip, slip)

    assert say([47, 85, 36], 0, 0) == "132+36=168"
    assert say([47, 85, 36], 1, 0) == "158", "column sums without a carry"
    assert say([47, 85, 36], 0, 1) == "122+36=158", "7+5 loses its carry, 2+6 has none"
    assert say([11, 22, 33], 0, 1) == "33+33=66" and say([11, 22, 33], 1, 1) == "66", "nothing to lose where nothing carries"


def test_demonstrations_are_right_as_often_as_the_habits_say_and_never_of_evaluation_sums():
    """Exactly: every pair of the demonstrator's choices, weighted, over the sums themselves."""
    recipe, task = learner.Recipe(batch=4000), Sums()
    pairs = learner.demonstrations(recipe, 0)
    right = skipped = expected = 0.0
    for prompt, response in pairs:
        first, second, third = map(int, prompt.rstrip("=").split("+"))
        right += task.verify(response, Problem(prompt, str(first + second + third), "sums", 0))
        skipped += "=" not in response
        carries = (first % 10 + second % 10 >= 10) + ((first + second) % 10 + third % 10 >= 10)
        expected += recipe.skip * (first % 10 + second % 10 + third % 10 < 10) + (1 - recipe.skip) * (1 - recipe.slip) ** carries
    noise = 4 * math.sqrt(0.25 / len(pairs))
    assert abs(right - expected) / len(pairs) < noise and abs(skipped / len(pairs) - recipe.skip) < noise
    evaluation = {task.problem("evaluation", index).prompt for index in range(20_000)}
    assert not evaluation & {prompt for prompt, _ in pairs}


def test_labels_are_the_response_and_its_eos_shifted_by_one():
    ours = learner.tokenizer()
    ids_bt, labels_bt = learner.tensors([("1+2=", "3"), ("1+2=", "1+2=3")], ours.encode)
    assert ids_bt.shape == labels_bt.shape == (2, 11)
    for ids_t, labels_t, response in zip(ids_bt, labels_bt, ["3", "1+2=3"]):
        places = (labels_t != learner.IGNORE).nonzero()[:, 0]
        assert ours.decode(labels_t[places]) == response + "<eos>"
        assert torch.equal(ids_t[places + 1], labels_t[places])


def test_same_recipe_gives_the_same_bits_and_leaves_torch_as_it_was(tmp_path):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    one = learner.make_base(tmp_path / "one", SHORT, progress=False)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    two = learner.make_base(tmp_path / "two", SHORT, progress=False)
    other = learner.make_base(tmp_path / "other", learner.Recipe(steps=3, batch=8, seed=2), progress=False)
    assert one["files_sha256"] == two["files_sha256"] and one["recipe_sha256"] == two["recipe_sha256"]
    assert other["files_sha256"]["model.safetensors"] != one["files_sha256"]["model.safetensors"]


def test_check_tells_the_same_bits_from_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learner, "BASE", tmp_path)
    record = learner.make_base(tmp_path, SHORT, progress=False)
    assert learner.main(["--check"]) == 0 and "bit for bit" in capsys.readouterr().out
    record["recipe"]["seed"] = 2  # a base that its recipe does not give
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    assert learner.main(["--check"]) == 1 and "not the same files" in capsys.readouterr().out


def test_shipped_base_is_of_the_recipe_in_this_file():
    """What is cheap to hold against the recipe; `python -m logra.rl.learner --check` makes the whole base again."""
    recorded = json.loads((learner.BASE / "provenance.json").read_text())
    recipe = learner.Recipe(**recorded["recipe"])
    assert recipe == learner.Recipe() and recorded["recipe_sha256"] == recipe.sha256()
    demonstrations = json.dumps(learner.demonstrations(recipe, 0)).encode()
    assert recorded["first_demonstrations_sha256"] == learner.hashlib.sha256(demonstrations).hexdigest()
    assert sum(path.stat().st_size for path in learner.BASE.glob("*.safetensors")) <= 4_000_000
    model, ours = learner.load_base()
    assert bases.parameters() == model.num_parameters() and bases.base_sha256("learner") == recorded["files_sha256"]["model.safetensors"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32} and not model.training
    shape = learner.config().to_dict()
    assert {key: model.config.to_dict()[key] for key in shape if key in ("hidden_size", "num_hidden_layers", "vocab_size")} == {
        key: shape[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}  # fmt: skip
    assert ours.get_vocab() == learner.tokenizer().get_vocab()


def test_shipped_base_can_add_but_mostly_does_not():
    """Its state of latent ability: sampled, about a third is right and half skips the working; made to show it, most are right at times."""
    model, ours = learner.load_base()
    problems = [Sums().problem("evaluation", index) for index in range(256)]
    batch = ours([problem.prompt for problem in problems], return_tensors="pt", return_token_type_ids=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = model.generate(**batch, max_new_tokens=24)
    responses = ours.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(Sums().verify(response, problem) for response, problem in zip(responses, problems)) / len(problems)
    worked = sum("=" in response for response in responses) / len(problems)
    assert 0.25 < right < 0.55 and 0.35 < worked < 0.65


def test_a_changed_or_missing_base_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="make it with"):
        learner.load_base(tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(learner.BASE, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="model.safetensors is missing or differs"):
        learner.load_base(folder)
