"""The real model's runs: lines differ in their method alone, a run's first updates come out again as recorded, its ledger is what is held, and shipped derived records are used."""

import pytest
from models import small_smollm2

from logra.paper import provenance, real_runs
from logra.rl import runs, train


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A model of SmolLM2's kind with one narrow layer, in its place; records in a folder of their own."""
    shape = dict(hidden_size=320, intermediate_size=576, num_hidden_layers=1, num_attention_heads=5, num_key_value_heads=1)
    monkeypatch.setattr(real_runs, "SMOLLM2", str(small_smollm2(tmp_path / "small", **shape)))
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path / "records"))


def test_first_updates_come_out_again_and_the_ledger_is_what_is_held(small):
    sizes = real_runs.sizes(updates=2, prompts=4, evaluate_every=2, evaluation_prompts=4, max_new_tokens=4) | {"incorrect_reward": -0.5, "relative_step": 0.3}
    config = real_runs.config("logra-64", 1, 10.0, sizes, keep_weights_at=(2,))
    run = runs.Run(config, runs.folder_of(config))
    train.run(config, run.folder)
    again = real_runs._again(config, 2)
    recorded = run.metrics
    assert again[list(recorded.columns)].equals(recorded) and (recorded["alpha"] > 0).all() and (recorded["realised_kl"] > 0).all()
    ledger, buffers = real_runs.ledger("logra-64"), 256     # inverse frequencies of the rotary embedding, which count as weights
    held = again.iloc[-1]
    assert {name: held[name] for name in ledger} == ledger | {"weights": ledger["weights"] + buffers}
    assert 0 < held["peak"] < held["process_mib"] * 2**20
    answers = real_runs.responses(run, 3)
    assert list(answers["task"]) == ["chat/sums", "chat/products", "chat/sums"] and (answers["before"] != answers["after"]).any()


def test_a_shipped_derived_record_is_used_where_the_reader_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path / "own"))
    monkeypatch.setattr(provenance, "RECORDED", tmp_path / "data/recorded")

    def write(text):
        return lambda folder: (folder / "text").write_text(text)

    made = provenance.cached("thing", {"a": 1}, write("shipped"))
    made.rename((tmp_path / "data/recorded").mkdir(parents=True) or tmp_path / "data/recorded" / made.name)
    monkeypatch.setenv("LOGRA_DRAW_ONLY", "1")              # drawing alone, too
    assert (provenance.cached("thing", {"a": 1}, write("made")) / "text").read_text() == "shipped"
    monkeypatch.delenv("LOGRA_DRAW_ONLY")
    own = tmp_path / "own" / made.name
    own.mkdir()
    (own / "text").write_text("own")
    assert (provenance.cached("thing", {"a": 1}, write("made")) / "text").read_text() == "own"


def test_a_measured_result_comes_back_to_the_bit_and_a_figure_says_which_records_were_shipped(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path / "own"))
    monkeypatch.setattr(provenance, "RECORDED", tmp_path / "shipped")
    monkeypatch.setattr(provenance, "used", used := set())
    values = [{"q": 0.1 + 0.2, "of": [1e-300, 1 / 3]}, {"q": 0.0}]
    assert [provenance.measured("thing", {"a": 1}, lambda: values.pop(0)) for _ in range(2)] == [{"q": 0.1 + 0.2, "of": [1e-300, 1 / 3]}] * 2 and len(values) == 1
    used |= {tmp_path / "own" / "a", tmp_path / "shipped" / "b", tmp_path / "shipped" / "c"}
    assert provenance.stamp("toy scale", "n = 3") == "toy scale · 2 of 3 records from data/recorded · n = 3"
    assert provenance.stamp("simulated") == "simulated" and provenance.stamp("recorded run", "n = 1") == "recorded run · n = 1"
    used -= {tmp_path / "shipped" / "b", tmp_path / "shipped" / "c"}
    assert provenance.stamp("recomputed here") == "recomputed here"


def test_lines_share_all_but_their_method(monkeypatch):
    asked = []
    monkeypatch.setattr(real_runs.runs, "ensure", lambda configs: asked.extend(configs) or list(configs))
    sizes = real_runs.sizes(updates=100, prompts=32, evaluate_every=10, evaluation_prompts=80, max_new_tokens=12)
    made = real_runs.make({"logra": 2e-3, "dense": 1e-5, "lora": 3e-4}, [1, 2], sizes)
    assert {line: [config.seed for config in group] for line, group in made.items()} == dict.fromkeys(real_runs.VARIANTS, [1, 2])
    assert [config.seed for config in asked] == [1] * 4 + [2] * 4                # a seed of all lines before the next
    assert [(config.method, config.rank) for config in asked[:4]] == list(real_runs.VARIANTS.values())
    own = {"name", "method", "rank", "seed", "budget", "budget_end", "learning_rate", "learning_rate_end", "keep_weights_at"}
    assert len({str(config.model_dump(exclude=own)) for config in asked}) == 1
    assert [config.keep_weights_at for config in asked] == [(50, 100), (50, 100), (), (), (), (), (), ()]
    swept, best = real_runs.sweep({"dense": [1e-5]}, 15, 7, sizes)
    assert swept.empty and best == {"dense": 1e-5} and len(asked) == 8             # a single value is not swept
