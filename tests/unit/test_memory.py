"""Simulated bytes: those of a real step, of what is known in closed form, and the same whether depth is run or extrapolated."""

import json
from dataclasses import replace
from unittest.mock import patch

import models
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from transformers import Qwen2Config, Qwen3_5TextConfig

from logra import bits, memory
from logra.memory import Category, Setting, configuration, measure, simulate
from logra.paper import simulated


def small(layers=2, **changes):
    return Qwen2Config(**(dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
                               vocab_size=4000, max_position_embeddings=1024, tie_word_embeddings=True) | changes))


def setting(**changes):
    return Setting(**(dict(rank=32, gpus=1, context=512, probe_tokens=512) | changes))


def as_on_a_gpu(config, each):
    """A step measured with the one thing that it does otherwise there: fingerprints in wider bands."""
    with patch.dict(bits.BAND, cpu=bits.BAND["cuda"]):
        return measure(config, each)


@pytest.mark.parametrize("changes", [dict(method="logra", probe="finite_difference"), dict(method="logra", probe="finite_difference", checkpointing=False),
                                     dict(method="dense", loss="whole"), dict(method="dense", loss="in_place", checkpointing=False), dict(method="lora")])
def test_a_simulated_step_is_what_the_allocator_saw(changes):
    predicted, measured = (make(small(), setting(**changes)) for make in (simulate, as_on_a_gpu))
    assert predicted.peak() == pytest.approx(measured.allocated, rel=0.03)
    assert predicted.peaks == measured.peaks                # and to the byte what real tensors take, category by category


def test_a_simulated_probe_by_forward_differentiation_is_an_upper_bound():
    """Under any dispatch mode forward AD's formulas make a temporary more, where else they work in place."""
    predicted, measured = (make(small(), setting(probe="jvp")) for make in (simulate, measure))
    assert predicted.peak() == predicted.peak("probe") == measured.peak("probe")
    assert 1 <= predicted.peak() / measured.allocated < 1.15


def hybrid(layers):
    """Three layers of linear attention before each of full attention."""
    return Qwen3_5TextConfig(**models.qwen3_5_settings(hidden_size=128, intermediate_size=256, head_dim=64, vocab_size=4000, num_hidden_layers=layers,
                                                       layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)))


@pytest.mark.parametrize("config, changes, run", [
    (small(layers=8), dict(method="logra", probe="jvp", keep_projections=True), [5, 6]), (small(layers=8), dict(method="dense", checkpointing=False), [5, 6]),
    (hybrid(16), dict(method="logra", context=64, probe="none", sharded_sketches=True, share_inputs=True), [8, 12]),
    (hybrid(20), dict(method="dense", context=64, checkpointing=False), [8, 12, 16]),      # its first layer of full attention saves what all of them share: a wider edge
])  # fmt: skip
def test_extrapolated_depth_is_the_whole_depth(config, changes, run, monkeypatch):
    shortened, seen = memory._shortened, []
    monkeypatch.setattr(memory, "_shortened", lambda config, layers: seen.append(layers) or shortened(config, layers))
    sharded = setting(gpus=4, **changes)
    assert simulate(config, sharded).peaks == simulate(config, sharded, whole=True).peaks
    assert seen == run


def test_what_is_sharded_is_sharded_and_what_is_not_is_whole():
    config = small()
    matrices = [*[(256, 256)] * 4, (1024, 256), (1024, 256), (256, 1024)]            # d, k of a layer's selected ones
    entries, rows = 2 * sum(d * k for d, k in matrices), 2 * sum(d for d, _ in matrices)
    dense, logra = (simulate(config, setting(gpus=4, method=method, keep_projections=True, probe="none", loss="in_place")).at_peak("train") for method in ("dense", "logra"))
    whole = entries + 4000 * 256 + 2 * (2 * 256 + 3 * 256) + 256                      # with embedding, norms and biases
    for found in (dense, logra):
        assert 4 * whole / 4 <= found["weights"] < 4 * whole / 4 + 1000               # and the rotary frequencies
        assert found["gathered"] >= 2 * (4000 * 256 + 256)                            # the embedding, in bfloat16, through all of the step
    assert dense["optimizer"] == 2 * 4 * entries / 4 and dense["gradients"] == 4 * entries / 4 and dense["sketches"] == dense["projections"] == 0
    assert logra["sketches"] == 4 * 32 * rows and logra["gradients"] == 0
    assert logra["projections"] >= 4 * 32 * 2 * (6 * 256 + 1024)
    assert not dist.is_initialized()


def test_weights_gathered_in_float32_take_twice_as_much():
    narrow, wide = (simulate(small(), setting(gpus=4, probe="finite_difference", gathered=kind)) for kind in ("bfloat16", "float32"))
    for phase in ("train", "probe"):
        assert wide.at_peak(phase)["gathered"] == pytest.approx(2 * narrow.at_peak(phase)["gathered"], rel=0.1)
    assert wide.at_peak("train")["logits"] == narrow.at_peak("train")["logits"]      # backward is in bfloat16 either way
    with pytest.raises(ValueError, match="gathered is one of"):
        setting(gathered="float16")


def test_logits_that_stay_referenced_are_there_at_the_peak():
    whole, kept = (simulate(small(), setting(gpus=4, method="lora", loss=loss)).at_peak("train")["logits"] for loss in ("whole", "kept"))
    assert kept - whole == (2 + 4) * 511 * 4000


SHARDED = [setting(gpus=2, probe="finite_difference", gathered="float32"), setting(gpus=2, probe="none", sharded_sketches=True), setting(gpus=2, method="dense")]


def _measured(number, ranks):
    return [as_on_a_gpu(small(), each).peaks for each in SHARDED]


def test_a_simulated_rank_is_a_real_one(tmp_path):
    """Two processes that shard a model between them, each followed tensor by tensor; what gloo itself allocates is not seen."""
    for each, *measured in zip(SHARDED, *on_ranks(_measured, 2, tmp_path)):
        for phase, sizes in simulate(small(), each).peaks.items():
            for peaks in measured:
                assert sum(peaks[phase].values()) == pytest.approx(sum(sizes.values()), rel=0.03), (each, phase)


def test_a_long_context_is_simulated_though_its_masks_are_real():
    short, long = (simulate(small(), setting(context=context, probe="none")).peak("train") for context in (50_000, 100_000))
    assert 1.8 < long / short < 2.0


def test_the_command_says_whether_it_fits(capsys, tmp_path):
    small().save_pretrained(tmp_path)
    common = [str(tmp_path), "--rank", "32", "--context", "128", "--probe", "none"]
    assert memory.main([*common, "--card", "0.001"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in said and "gathered in bfloat16 (a run gathers them in float32 unless it says gathered: bfloat16" in said and "--split-embedding" in said
    assert memory.main([*common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["peak_gib"] == max(found["step_peak_gib"], found["probe_peak_gib"]) > 0
    assert sum(found["phases"]["train"].values()) == pytest.approx(found["step_peak_gib"], rel=0.5)
    with pytest.raises(SystemExit):
        memory.main(["no-such-model"])


@pytest.mark.parametrize("name, parameters", [("SmolLM2-135M", 134_515_008), ("Qwen2.5-Math-1.5B", 1_543_714_304), ("Qwen2.5-Math-7B", 7_615_616_512), ("Qwen3.5-27B", 26_895_998_464)])
def test_shipped_configurations_are_those_models(name, parameters):
    import transformers

    with torch.device("meta"):
        assert transformers.AutoModelForCausalLM.from_config(configuration(name)).num_parameters() == parameters


def test_each_switch_takes_away_what_it_says():
    config = small()
    paper = setting(gpus=4, loss="in_place", keep_projections=True, resident_factor=True, probe="none")
    found = {name: simulate(config, replace(paper, **change)).at_peak("train") for name, change in
             {"paper": {}, "no factor": dict(resident_factor=False), "hashed": dict(keep_projections=False), "shards": dict(sharded_sketches=True)}.items()}
    rows, columns = 2 * (5 * 256 + 2 * 1024), 2 * (6 * 256 + 1024)
    assert found["paper"]["optimizer"] - found["no factor"]["optimizer"] == 4 * 32 * rows == found["paper"]["sketches"]
    assert found["paper"]["projections"] >= 4 * 32 * columns and found["hashed"]["projections"] < 4 * 32 * columns
    assert found["paper"]["logits"] >= 6 * 511 * 4000       # bfloat16 and float32 beside each other
    assert found["shards"]["sketches"] == found["paper"]["sketches"] / 4
    together, split = (simulate(small(tie_word_embeddings=False), setting(gpus=4, split_embedding=split)) for split in (False, True))
    for phase in ("train", "probe"):
        assert together.at_peak(phase)["gathered"] - split.at_peak(phase)["gathered"] >= 2 * 4000 * 256 * 0.99


def test_between_the_points_of_a_grid_lies_the_line():
    categories = [category.value for category in Category]
    points = pd.DataFrame([{"rank": r, "context": c, "phase": "train", **{name: 3 * r + 2 * c for name in categories}} for r in (8, 16) for c in (100, 200)])
    assert simulated.between(points, 12, 150)["train"].tolist() == [336] * len(categories)
    alone = points[(points["rank"] == 16) & (points["context"] == 200)]
    assert simulated.between(alone, 16, 200)["train"].tolist() == [448] * len(categories)


NEEDS = [lambda c: max(11.5, 3 + c / 4000), lambda c: 2 + c / 1000, lambda c: 9.0, lambda c: max(9.0, c / 4000), lambda c: 99.0]


@pytest.mark.parametrize("need", NEEDS)
def test_the_longest_context_fits_and_256_tokens_more_do_not(need, monkeypatch):
    """Also where what a context needs is flat at first, as long as gathered weights decide: a line through two short ones says millions of tokens."""
    asked = []
    monkeypatch.setattr(simulated, "ledger", lambda model, setting: asked.append(setting) or {"peak_gib": need(setting.context)})
    found = simulated.fits({"1.5B": [2048, 4096, 40_960, 65_536]}, ["4 x 24"], 256, {"1.5B": 100_000}).iloc[0]
    context, room = found["longest_context"], found["room_gib"]
    assert all(setting.probe_tokens == min(setting.context, simulated.PROBED) and setting.gpus == 4 for setting in asked)
    if context == 0:
        assert found["gib"] == need(2048) > room and len(asked) == 1
    else:
        assert found["gib"] == pytest.approx(need(context)) and need(context) <= room
        assert context == 99_840 or need(context + 256) > room
        assert simulated.off_line({"1.5B": [2048, 4096, 40_960, 65_536]}, [("1.5B", 4, 200_000), ("1.5B", 2, 40_960)], 256).eval("gib - line_gib").abs().max() < 1e-9


def test_a_context_needs_what_its_line_says_on_any_number_of_gpus():
    """Attention in blocks: beyond the knee every token adds the same, whether two GPUs share the weights or four."""
    peaks = {(gpus, context): simulate(small(tie_word_embeddings=False), setting(gpus=gpus, context=context, sharded_sketches=True)).peak()
             for gpus, context in [(4, 8192), (4, 16_384), (4, 40_960), (2, 8192), (2, 16_384)]}
    line = simulated.on_line({8192: peaks[4, 8192], 16_384: peaks[4, 16_384]}, 40_960)
    assert line == pytest.approx(peaks[4, 40_960], rel=0.005)
    assert peaks[2, 16_384] - peaks[2, 8192] == pytest.approx(peaks[4, 16_384] - peaks[4, 8192], rel=0.005)


def test_between_two_lengths_the_line_says_too_much_never_too_little(monkeypatch):
    knee = lambda c: max(5.0, c / 300, c / 100 - 300)
    monkeypatch.setattr(simulated, "ledger", lambda model, setting: {"peak_gib": knee(setting.context)})
    needed = simulated.needs("1.5B", Setting(), [2048, 8192, 65_536])
    assert all(simulated.on_line(needed, context) >= knee(context) - 1e-9 for context in range(2048, 65_536, 256))
    assert knee(simulated.longest(needed, 100.0, 65_536)) <= 100


def test_shipped_ledgers_are_what_this_code_gives():
    keys = [simulated.key("Qwen2.5-Math-1.5B", setting) for setting in (Setting(), replace(memory.PAPER, method="dense"), replace(memory.LEAST, gpus=1, context=2048, probe_tokens=2048))]
    assert simulated.differing(keys) == []


def test_the_switches_reach_their_targets():
    for model, target in simulated.TARGETS.items():
        assert simulated.ledger(simulated.MODELS[model], memory.LEAST)["peak_gib"] <= target
