"""Sketches in backward: S = G Aᵀ (Eq. 2) against plain autograd in float64, whatever surrounds the layer; and what is never allocated."""

import copy
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import models
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import logra

NON_REENTRANT = dict(gradient_checkpointing_kwargs={"use_reentrant": False})


def relative(S, expected):
    """The error over all matrices together."""
    S, expected = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (S, expected))
    return float((S - expected).norm() / expected.norm())


class Layer(nn.Module):
    def __init__(self, d, k, bias, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.proj = nn.Linear(k, d, bias, dtype=dtype)


@pytest.mark.parametrize("kind", logra.projection.KINDS)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0,), ()])
@pytest.mark.parametrize("mode", ["float32", "autocast", "bfloat16"])
def test_a_layer_adds_dYᵀ_X_Aᵀ_and_is_otherwise_nn_linear(kind, shape, mode):
    d, k, rank = 48, 80, 20
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    plain, layer = Layer(d, k, True, dtype), Layer(d, k, True, dtype)
    sketch = logra.attach(layer, rank, kind, modules=["proj"], freeze_rest=False)["proj"]
    autocast = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext()
    expected = torch.zeros(d, rank, dtype=torch.float64)
    for micro in range(3):
        x = torch.randn(*shape, k, dtype=dtype, generator=torch.Generator().manual_seed(micro))
        x, x_plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        with autocast:
            y, y_plain = layer.proj(x), plain.proj(x_plain)
        assert torch.equal(y, y_plain) and y.dtype == y_plain.dtype
        dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(9 + micro))
        y.backward(dy)
        y_plain.backward(dy)
        torch.testing.assert_close(x.grad, x_plain.grad)
        X_tk = x.detach().to(y.dtype).double().reshape(-1, k)
        A_rk = logra.projection.entries(kind, rank, k, sketch.key, dtype=torch.float64) / rank**0.5
        expected += (dy.double().reshape(-1, d).T @ X_tk) @ A_rk.T
    assert sketch.S_dr.dtype == torch.float32 and layer.proj.weight.grad is None
    assert float((sketch.S_dr - expected).norm()) <= 1e-6 * float(expected.norm())
    torch.testing.assert_close(layer.proj.bias.grad, plain.proj.bias.grad)


def test_without_bias_and_under_a_frozen_input_the_layer_still_sketches():
    layer = Layer(48, 80, bias=False)
    sketch = logra.attach(layer, 8, modules=["proj"])["proj"]
    x = torch.randn(5, 80)
    y = layer.proj(x)
    y.sum().backward()
    assert relative([sketch.S_dr], [torch.ones(48, 5).double() @ x.double() @ sketch.A_rk(dtype=torch.float64).T]) < 1e-6


@pytest.mark.parametrize("build", [models.qwen2, models.llama, models.qwen3_5, models.qwen3_5_with_vision])
def test_a_model_sketches_the_gradient_of_plain_autograd(build):
    model = build()
    exact = copy.deepcopy(model).double()
    plain = copy.deepcopy(model)
    sketches = logra.attach(model, 16, seed=3)
    for micro in range(2):
        for m in (model, plain, exact):
            models.loss(m, models.ids(2, 9, seed=micro)).backward()
    A = {name: sketch.A_rk(dtype=torch.float64) for name, sketch in sketches.items()}
    expected = [exact.get_submodule(name).weight.grad @ A[name].T for name in sketches]
    rounded = [plain.get_submodule(name).weight.grad.double() @ A[name].T for name in sketches]
    # the float32 forward itself rounds: the sketch is no worse than what plain float32 autograd gives
    assert relative([s.S_dr for s in sketches.values()], expected) < max(1e-6, 2 * relative(rounded, expected))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(float(sketch.S_dr.norm()) > 0 for sketch in sketches.values())


def sketches_of(model, batches, rank=16, **settings):
    sketches = logra.attach(model, rank, **settings)
    for batch in batches:
        models.loss(model, batch).backward()
    return [sketch.S_dr.clone() for sketch in sketches.values()]


def test_four_micro_batches_of_one_are_one_of_four():
    whole = models.ids(4, 12)
    assert relative(sketches_of(models.qwen2(), whole.split(1)), sketches_of(models.qwen2(), [whole])) < 1e-6


@pytest.mark.parametrize("keep_projections", [False, True])
@pytest.mark.parametrize("build", [models.qwen2, models.qwen3_5])
def test_checkpointing_leaves_the_sketch_alone_with_frozen_embeddings_too(build, keep_projections):
    batches = [models.ids(2, 12, seed=i) for i in range(3)]
    plain, model = build().train(), build().train()
    model.gradient_checkpointing_enable(**NON_REENTRANT)
    expected, S = sketches_of(plain, batches), sketches_of(model, batches, keep_projections=keep_projections)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(S, expected)) and float(S[0].norm()) > 0


def test_projections_that_are_kept_are_those_of_each_update():
    def train(**settings):
        model = models.qwen2()
        sketches = logra.attach(model, 16, **settings)
        optimizer = logra.RowAdam(sketches, relative_step=1e-2)
        for update in range(3):
            models.loss(model, models.ids(1, 9, seed=update)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [sketch.weight for sketch in sketches.values()]

    assert all(torch.equal(a, b) for a, b in zip(train(keep_projections=True), train()))


def test_checkpointing_by_hand_leaves_the_sketch_alone():
    x, layer = torch.randn(5, 80), Layer(48, 80, True).train()
    sketch = logra.attach(layer, 8, modules=["proj"])["proj"]
    layer.proj(x).square().sum().backward()
    expected = sketch.S_dr.clone()
    sketch.owner.zero()
    checkpoint(layer.proj, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(sketch.S_dr, expected) and float(expected.norm()) > 0


def test_reentrant_checkpointing_is_refused():
    model = models.qwen2().train()
    logra.attach(model, 16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match="reentrant.*use_reentrant': False"):
        models.loss(model, models.ids(2, 12))
    layer = Layer(48, 80, True).train()
    logra.attach(layer, 8, modules=["proj"])
    with pytest.raises(RuntimeError, match="proj runs under reentrant"):
        checkpoint(layer.proj, torch.randn(5, 80, requires_grad=True), use_reentrant=True)


class NewStorages(TorchDispatchMode):
    """The tensors that come to be within it, views of older ones left out."""

    def __init__(self, known):
        super().__init__()
        self.seen, self.made = {t.untyped_storage().data_ptr() for t in known}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.seen:
                self.seen.add(tensor.untyped_storage().data_ptr())
                self.made.append(tensor)
        return out


@pytest.mark.parametrize("autocast", [False, True])
def test_backward_makes_nothing_of_the_gradients_size_and_forward_keeps_no_input(autocast):
    t, d, k, rank = 6, 48, 80, 8
    layer = Layer(d, k, bias=True)
    sketch = logra.attach(layer, rank, modules=["proj"])["proj"]
    x, kept = torch.randn(t, k, requires_grad=True), []
    temporary = x * 2
    gone, output = weakref.ref(temporary), layer.proj(temporary)
    del temporary
    assert gone() is None and output.requires_grad          # no graph, context or sketch holds the input
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer.proj(x)
    assert sorted(tuple(tensor.shape) for tensor in kept) == [(t, rank), (d, k)] and any(tensor is layer.proj.weight for tensor in kept)
    dy = torch.randn_like(y)
    with NewStorages([sketch.S_dr, layer.proj.weight, x, y, dy, *kept]) as storages:
        y.backward(dy)
    large = [tensor for tensor in storages.made if tensor.untyped_storage().nbytes() >= d * k]
    # under autocast the input's gradient needs the weight in the narrow type, as plain autograd does; nothing else is that large
    assert [tuple(tensor.shape) for tensor in large] == ([(d, k)] if autocast else []), large
    assert all(tensor.dtype == torch.bfloat16 for tensor in large) and float(sketch.S_dr.norm()) > 0


def test_the_sketch_is_the_same_when_backward_runs_within_autocast():
    S = []
    for inside in (False, True):
        layer, x = Layer(48, 80, True), torch.ones(5, 80) / 3
        sketch = logra.attach(layer, 8, modules=["proj"])["proj"]
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer.proj(x).square().sum()
            loss.backward() if inside else None
        None if inside else loss.backward()
        S.append(sketch.S_dr)
    assert torch.equal(*S)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")             # torch's tracer itself looks at .grad
def test_a_compiled_model_trains_to_the_same_sketch():
    batches = [models.ids(2, 12, seed=i) for i in range(2)]
    expected = sketches_of(models.llama(num_hidden_layers=1), batches)
    compiled = torch.compile(models.llama(num_hidden_layers=1), backend="aot_eager")
    sketches = logra.attach(compiled, 16)
    for batch in batches:
        models.loss(compiled, batch).backward()
    assert list(sketches) == list(logra.attach(models.llama(num_hidden_layers=1), 16))
    assert relative([s.S_dr for s in sketches.values()], expected) < 1e-6


@pytest.mark.parametrize("build, groups", [(models.qwen2, 4), (models.llama, 4), (models.qwen3_5, 4)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_matrices_that_read_the_same_input_may_share_a_projection_and_what_it_makes(build, groups, checkpointing):
    model = build().train()
    exact = copy.deepcopy(model).double()
    sketches = logra.attach(model, 16, seed=3, share_inputs=True)
    if checkpointing:
        model.gradient_checkpointing_enable(**NON_REENTRANT)
    kept = []
    for micro in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            loss = models.loss(model, models.ids(2, 9, seed=micro))
        loss.backward()
        models.loss(exact, models.ids(2, 9, seed=micro)).backward()
    expected = [exact.get_submodule(name).weight.grad @ sketch.A_rk(dtype=torch.float64).T for name, sketch in sketches.items()]
    assert relative([s.S_dr for s in sketches.values()], expected) < 2e-6
    blocks = model.config.num_hidden_layers
    keys = {name: sketch.key for name, sketch in sketches.items()}
    assert len(set(keys.values())) == groups * blocks < len(keys)
    assert keys["model.layers.0.mlp.gate_proj"] == keys["model.layers.0.mlp.up_proj"] != keys["model.layers.0.mlp.down_proj"]
    assert keys["model.layers.0.mlp.gate_proj"] != keys["model.layers.1.mlp.gate_proj"]
    if not checkpointing:
        projections = {tensor.data_ptr() for tensor in kept if tensor.shape == (18, 16) and tensor.dtype == torch.float32}
        assert len(projections) == 2 * groups * blocks
    one = logra.attach(build(), 16, seed=3, share_inputs=True, modules=["model.layers.1.mlp.up_proj"])
    assert one["model.layers.1.mlp.up_proj"].key == keys["model.layers.1.mlp.up_proj"]         # whatever else is sketched
    assert copy.deepcopy(model) is not None


def test_a_shared_projection_is_not_taken_for_another_input():
    block = nn.ModuleDict({"gate_proj": nn.Linear(40, 24), "up_proj": nn.Linear(40, 32)})
    sketches = logra.attach(block, 8, modules=list(block), share_inputs=True)
    x = torch.randn(5, 40)
    for change in (lambda: None, lambda: x.mul_(2), lambda: setattr(sketches, "update", 2)):
        sketches.zero()
        block["gate_proj"](x).sum().backward()
        change()
        y = block["up_proj"](x)
        y.sum().backward()
        expected = torch.ones(32, 5).double() @ x.double() @ sketches["up_proj"].A_rk(dtype=torch.float64).T
        assert relative([sketches["up_proj"].S_dr], [expected]) < 1e-6


def test_an_update_with_shared_projections_reaches_a_receiver_to_the_bit():
    twin = models.qwen2()
    receiver = logra.sync.Receiver(twin, dtype=torch.float32)
    sketches = logra.attach(models.qwen2(), 16, share_inputs=True)
    optimizer = logra.RowAdam(sketches, relative_step=1e-2)
    for update in range(2):
        models.loss(sketches.model, models.ids(1, 9, seed=update)).backward()
        receiver.apply(optimizer.step().to_bytes())
        optimizer.zero_grad()
    assert all(torch.equal(twin.get_submodule(name).weight, sketch.weight) for name, sketch in sketches.items())


@pytest.mark.parametrize("what", ["backward", "probe"])
def test_one_layers_projection_is_held_at_a_time(what, monkeypatch):
    model = models.qwen2()
    sketches = logra.attach(model, 16)
    ids, entries, alive, most = models.ids(2, 9), logra.projection.entries, [], []

    def counted(*arguments, **keywords):
        made = entries(*arguments, **keywords)
        alive.append(weakref.ref(made.untyped_storage()))
        most.append(sum(reference() is not None for reference in alive))
        return made

    models.loss(model, ids).backward()
    monkeypatch.setattr(logra.projection, "entries", counted)
    if what == "backward":
        models.loss(model, ids).backward()
    else:
        proposal = logra.RowAdam(sketches, relative_step=1e-3).propose()
        logra.predicted_kl(model, proposal, logra.Contexts(ids, torch.ones_like(ids), ids >= 0))
    assert len(most) >= len(sketches) and max(most) == 1


def test_narrow_tensors_are_widened_a_band_at_a_time(monkeypatch):
    S = []
    for band in (1 << 22, 200):
        monkeypatch.setattr(logra.linear, "_BAND", band)
        layer, x = Layer(48, 80, True), torch.randn(11, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
        sketch = logra.attach(layer.bfloat16(), 8, modules=["proj"])["proj"]
        y = layer.proj(x)
        with NewStorages([sketch.S_dr, layer.proj.weight, x, y]) as storages:
            y.square().sum().backward()
        S.append(sketch.S_dr)
    assert relative(S[:1], S[1:]) < 1e-6
    assert max(tensor.untyped_storage().nbytes() for tensor in storages.made if tensor.dtype == torch.float32) <= 4 * 200


def test_a_perturbed_forward_is_that_of_the_dense_weights_in_bands_of_tokens_too(monkeypatch):
    layer, x = Layer(48, 80, True).double(), torch.randn(2, 11, 80, generator=torch.Generator().manual_seed(0)).double()
    sketches = logra.attach(layer, 8, modules=["proj"])
    F_dr, key = torch.randn(48, 8, dtype=torch.float64), sketches["proj"].key
    D_dk = F_dr @ logra.projection.entries("rademacher", 8, 80, key, dtype=torch.float64)
    for band in (1 << 22, 200):
        monkeypatch.setattr(logra.linear, "_BAND", band)
        with torch.no_grad(), forward_ad.dual_level():
            a = forward_ad.make_dual(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
            with sketches.perturbed({"proj": (F_dr, key)}, a):
                y, rate = forward_ad.unpack_dual(layer.proj(forward_ad.make_dual(x, 3 * x)))
            torch.testing.assert_close(y, layer.proj(x))
            torch.testing.assert_close(rate, 3 * x @ layer.proj.weight.T + x @ D_dk.T)
            with sketches.perturbed({"proj": (F_dr, key)}, -0.5):
                torch.testing.assert_close(layer.proj(x), nn.functional.linear(x, layer.proj.weight - 0.5 * D_dk, layer.proj.bias))


def test_row_shards_of_a_sketch_do_not_follow_a_weight_that_is_gathered_on_another_device(monkeypatch):
    layer = Layer(48, 80, False)
    sketches = logra.attach(layer, 8, modules=["proj"])
    sketches.shards = SimpleNamespace(rows=lambda d: slice(0, d // 2))
    S_dr = sketches["proj"].S_dr
    # what FSDP does to an offloaded weight within a forward: it lies on the GPU then
    monkeypatch.setattr(logra.linear.Sketch, "weight", SimpleNamespace(device=torch.device("cuda", 0)))
    assert sketches["proj"].S_dr is S_dr and S_dr.shape == (24, 8)
