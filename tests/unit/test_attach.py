"""What attach takes, names and leaves as it was: coverage, detach, copies, saved models, and what it refuses."""

import copy
import subprocess
import sys

import models
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import logra


def test_import_logra_waits_for_torch_until_something_is_asked_for():
    asked = "import logra, sys; early = 'torch' in sys.modules; logra.linear.attach; [getattr(logra, name) for name in logra.__all__]; print(early, hasattr(logra, 'nothing'))"
    made = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert made.stdout == "False False\n"


def test_a_deep_copy_has_sketches_of_its_own():
    model = models.qwen2().requires_grad_(True)
    sketches = logra.attach(model, 16)
    models.loss(model, models.ids(1, 9)).backward()
    twin = copy.deepcopy(model)
    copies = twin.model.layers[0].mlp.up_proj.sketch.owner
    before = [sketch.S_dr.clone() for sketch in sketches.values()]
    models.loss(twin, models.ids(1, 9)).backward()
    assert copies is not sketches and copies.model is twin
    for name, S in zip(sketches, before):
        assert torch.equal(sketches[name].S_dr, S) and torch.equal(copies[name].S_dr, 2 * S) and copies[name].key == sketches[name].key
    logra.detach(twin)
    assert all(parameter.requires_grad for parameter in twin.parameters())
    assert isinstance(model.model.layers[0].mlp.up_proj, logra.linear.SketchedLinear)


def test_detach_restores_the_model():
    model = models.qwen2()
    model.model.norm.weight.requires_grad_(False)
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    batch = models.ids(2, 9)
    logits = model(input_ids=batch).logits
    logra.attach(model, 16)
    assert torch.equal(model(input_ids=batch).logits, logits) and not any(p.requires_grad for p in model.parameters())
    with pytest.raises(RuntimeError, match="attached already"):
        logra.attach(model, 8)
    logra.detach(model)
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert torch.equal(model(input_ids=batch).logits, logits)
    logra.attach(model, 8)                                  # and again


def test_a_saved_model_has_plain_names_and_reloads_to_the_same_logits(tmp_path):
    model, batch = models.llama(), models.ids(2, 9)
    names = set(model.state_dict())
    logra.attach(model, 16)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert set(model.state_dict()) == names == set(again.state_dict())
    assert torch.equal(again(input_ids=batch).logits, model(input_ids=batch).logits)


ATTENTION, MLP = [f"self_attn.{x}_proj" for x in "qkvo"], [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
LINEAR_ATTENTION = ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"]


def blocks(prefix, *layers):
    return {f"{prefix}.{i}.{name}" for i, names in enumerate(layers) for name in names}


@pytest.mark.parametrize("build,taken,left", [
    (models.qwen2, blocks("model.layers", *[ATTENTION + MLP] * 3), {"model.embed_tokens": "embedding", "lm_head": "output head"}),
    (models.llama, blocks("model.layers", *[ATTENTION + MLP] * 2), {"model.embed_tokens": "embedding", "lm_head": "output head"}),
    (models.qwen3_5, blocks("model.layers", LINEAR_ATTENTION + MLP, ATTENTION + MLP),
     {"model.layers.0.linear_attn.in_proj_a": "min(d, k) = 4 is not above the rank 16",
      "model.layers.0.linear_attn.conv1d": "not an nn.Linear (Conv1d)"}),
    (models.qwen3_5_with_vision, blocks("model.language_model.layers", LINEAR_ATTENTION + MLP, ATTENTION + MLP),
     {"model.visual.blocks.0.attn.qkv": "outside the decoder's blocks", "model.visual.merger.linear_fc1": "outside the decoder's blocks"}),
    (models.qwen3_moe, blocks("model.layers", ATTENTION),
     {"model.layers.0.mlp.gate": "not an nn.Linear (Qwen3MoeTopKRouter)",
      "model.layers.0.mlp.experts.down_proj": "not an nn.Linear (Qwen3MoeExperts)"}),
])
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: models.ValueHead(model, 40), nn.DataParallel])
def test_coverage(build, taken, left, wrap):
    model = wrap(build())
    prefix = "pretrained_model." if isinstance(model, models.ValueHead) else ""
    sketches = logra.attach(model, 16)
    assert set(sketches) == {prefix + name for name in taken}
    rows = {row.name: row for row in sketches.coverage()}
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    assert len(rows) >= len(matrices) and sum(row.sketched for row in rows.values()) == len(taken)    # a tied head is named twice
    assert {name: rows[prefix + name].why for name in left} == left
    assert all((row.why == "") == row.sketched and row.name in str(sketches.coverage()) for row in rows.values())
    if prefix:
        assert {row.why for name, row in rows.items() if name.startswith("v_head")} == {"outside the decoder's blocks"}


class OldMixture(nn.Module):
    """A mixture of experts as nn.Linear modules, its router one too."""

    def __init__(self):
        super().__init__()
        mlp = nn.Module()
        mlp.gate, mlp.experts = nn.Linear(32, 20), nn.ModuleList([nn.ModuleDict({"up": nn.Linear(32, 24)}) for _ in range(2)])
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": mlp, "mix": nn.Linear(32, 32)})])


def test_a_router_and_what_lies_beside_attention_and_mlp_are_left_out():
    sketches = logra.attach(OldMixture(), 8)
    assert set(sketches) == {"layers.0.mlp.experts.0.up", "layers.0.mlp.experts.1.up"}
    why = {row.name: row.why for row in sketches.coverage()}
    assert why["layers.0.mlp.gate"] == "a router of experts" and why["layers.0.mix"] == "not part of an attention or MLP module"


@pytest.mark.parametrize("build,settings,words", [
    (models.gpt2, dict(rank=8), r"no module of this GPT2LMHeadModel(.|\n)*h.0.attn.c_attn +Conv1D +32×96 +not an nn.Linear \(Conv1D\)"),
    (models.qwen2, dict(rank=64), r"no module(.|\n)*min\(d, k\) = 64 is not above the rank 64"),
    (models.qwen2, dict(rank=8, modules=["layers.0.mlp.up_proj"]), "which are no nn.Linear modules"),
    (models.qwen2, dict(rank=8, modules=["model.embed_tokens"]), r"not an nn.Linear \(Embedding\)"),
    (models.qwen2, dict(rank=8, projection="ternary"), "unknown projection 'ternary'"),
    (models.qwen2, dict(rank=0), "rank must be a positive integer, but it is 0"),
    (lambda: models.qwen2(intermediate_size=92), dict(rank=8, projection="hadamard"), "no Hadamard matrix of order 92"),
])
def test_what_cannot_be_attached_is_refused_and_changes_nothing(build, settings, words):
    model = build()
    with pytest.raises(ValueError, match=words):
        logra.attach(model, **settings)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(module, logra.linear.SketchedLinear) for module in model.modules())


def test_names_and_keys_are_those_of_the_model_without_its_wrappers():
    plain = logra.attach(models.qwen2(), 16, seed=5)
    model = models.qwen2()
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    wrapped = logra.attach(nn.DataParallel(torch.compile(model, backend="eager")), 16, seed=5)
    assert [(name, sketch.key) for name, sketch in wrapped.items()] == [(name, sketch.key) for name, sketch in plain.items()]
    some = logra.attach(models.qwen2(), 16, seed=5, modules=["module.model.layers.2.mlp.up_proj"])
    assert [sketch.key for sketch in some.values()] == [plain["model.layers.2.mlp.up_proj"].key]


def test_a_step_moves_the_sketched_matrices_alone():
    model = models.llama()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    sketches = logra.attach(model, 16)
    models.loss(model, models.ids(2, 9)).backward()
    logra.SketchSGD(sketches, relative_step=1e-3).step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {f"{name}.weight" for name in sketches} and model.lm_head.weight is model.model.embed_tokens.weight
