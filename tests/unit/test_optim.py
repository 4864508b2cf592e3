"""SketchSGD (Eq. 3) and RowAdam (Eq. 15) against dense float64 algebra; their state, schedules and refusals."""

import copy
import io
import math

import models
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import logra

RANK = 16


def attach(rank=RANK, **settings):
    return logra.attach(models.qwen2(), rank, **settings)


def fill(sketches, seed):
    """Sketches whose rows differ in size by decades, one row and one matrix of them zero."""
    generator = torch.Generator().manual_seed(seed)
    for i, sketch in enumerate(sketches.values()):
        size_d = 10 ** (4 * torch.rand(sketch.d, 1, generator=generator) - 3)
        sketch.S_dr.copy_(torch.randn(sketch.S_dr.shape, generator=generator) * size_d).mul_(i != 2)
        sketch.S_dr[1] = 0
    return sketches


def dense(sketches, factors):
    """U_dr A_rk in float64, with A as the sketches have it now."""
    return {name: U_dr.double() @ sketches[name].A_rk(dtype=torch.float64) for name, U_dr in factors.items()}


def norm(matrices):
    return math.sqrt(sum(float(matrix.double().square().sum()) for matrix in matrices))


def weights(sketches):
    return {name: sketch.weight.clone() for name, sketch in sketches.items()}


@pytest.mark.parametrize("refresh", [True, False])
def test_sketch_sgd_takes_the_step_of_equation_3(refresh):
    sketches = attach(refresh=refresh)
    optimizer = logra.SketchSGD(sketches, lr=0.02, bits=16)
    for update in (1, 2):
        fill(sketches, update)
        before, expected = weights(sketches), dense(sketches, {name: s.S_dr.clone() for name, s in sketches.items()})
        optimizer.step(0.5)
        for name, sketch in sketches.items():
            moved, wanted = (sketch.weight - before[name]).double(), -0.5 * 0.02 * expected[name]
            assert float((moved - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-6
        assert sketches.update == update + 1
    keys = {sketches["model.layers.0.mlp.up_proj"].key_at(update) for update in (1, 2, 3)}
    assert len(keys) == (3 if refresh else 1)


@pytest.mark.parametrize("projection", logra.projection.KINDS)
@pytest.mark.parametrize("optimizer_class", [logra.SketchSGD, logra.RowAdam])
def test_a_nominal_step_has_the_relative_norm(projection, optimizer_class):
    sketches = fill(attach(projection=projection), 1)
    optimizer = optimizer_class(sketches, relative_step=6e-5, bits=16)
    proposal = optimizer.propose()
    whole = norm(weights(sketches).values())
    assert proposal.eta * norm(dense(sketches, proposal).values()) / whole == pytest.approx(6e-5, rel=1e-6)
    update = optimizer.step(2.0)                            # 16 bits: rounded to 1e-4 of a row's peak
    assert norm(update.dense(name) for name in sketches) / whole == pytest.approx(2 * 6e-5, rel=1e-3)


def test_row_adam_is_equation_15_over_refreshed_projections():
    sketches, beta2 = attach(), 0.9
    optimizer = logra.RowAdam(sketches, beta2=beta2, relative_step=1e-4)
    v = {name: torch.zeros(sketch.d, dtype=torch.float64) for name, sketch in sketches.items()}
    for t in range(1, 5):
        fill(sketches, seed=t)
        proposal = optimizer.propose()
        for name, sketch in sketches.items():
            S = sketch.S_dr.double()
            v[name] = beta2 * v[name] + (1 - beta2) * S.square().sum(1) / RANK
            root = (v[name] / (1 - beta2**t)).sqrt()
            U = S / (root + max(1e-8 * float(root.mean()), torch.finfo(torch.float32).tiny))[:, None]
            U *= S.norm() / U.norm() if S.norm() > 0 else 0
            torch.testing.assert_close(proposal[name].double(), U, rtol=1e-5, atol=1e-12)
            assert float(proposal[name].double().norm()) == pytest.approx(float(S.norm()), rel=1e-6)
        third = list(proposal.values())[2]
        assert not third.any() and not list(proposal.values())[0][1].any()                # zero sketches, zero updates
        optimizer.step()
        for name, sketch in sketches.items():
            torch.testing.assert_close(optimizer.state[sketch.weight]["v_d"], v[name])
            assert optimizer.state[sketch.weight]["step"] == t


def test_rows_of_any_size_are_scaled_without_loss():
    sketches = attach()
    S = list(sketches.values())[0].S_dr
    S.copy_(torch.randn(S.shape, generator=torch.Generator().manual_seed(0)))
    expected = logra.RowAdam(sketches, relative_step=1e-4).propose()["model.layers.0.self_attn.q_proj"]
    for power in (-110, -60, 60, 100):                      # their squares leave float32 on both sides
        S *= 2.0**power
        U = logra.RowAdam(sketches, relative_step=1e-4).propose()["model.layers.0.self_attn.q_proj"]
        torch.testing.assert_close(U * 2.0**-power, expected, rtol=1e-5, atol=0)
        S *= 2.0**-power


def saved(optimizer):
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("optimizer_class", [logra.SketchSGD, logra.RowAdam])
@pytest.mark.parametrize("done", [0, 3])
def test_a_resumed_optimizer_goes_on_bit_for_bit(optimizer_class, done):
    sketches = attach()
    optimizer = optimizer_class(sketches, relative_step=1e-3)
    for update in range(done):
        fill(sketches, update)
        optimizer.step()
    fill(sketches, done)
    optimizer.propose()                                     # a probe before the checkpoint leaves nothing behind
    state, model = saved(optimizer), copy.deepcopy(sketches.model)
    logra.detach(model)
    others = logra.attach(model, RANK)
    other = optimizer_class(others, relative_step=7.0)
    other.load_state_dict(state)
    assert others.update == sketches.update == done + 1
    for update in range(done, done + 2):
        fill(sketches, update), fill(others, update)
        optimizer.step(), other.step()
        assert all(torch.equal(others[name].weight, sketches[name].weight) for name in sketches)
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[field]), torch.as_tensor(b[field])) for field in a)
    if optimizer_class is logra.RowAdam:                    # d numbers a matrix, and never in a narrow type
        assert all(state["v_d"].dtype == torch.float64 and state["v_d"].shape == w.shape[:1] for w, state in other.state.items())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sketch_that_is_not_finite_moves_nothing(value):
    sketches = fill(attach(), 0)
    optimizer = logra.RowAdam(sketches, relative_step=1e-3)
    optimizer.step()
    fill(sketches, 1)["model.layers.2.mlp.down_proj"].S_dr[3, 5] = value
    before, state = weights(sketches), copy.deepcopy(optimizer.state_dict())
    for act in (optimizer.propose, optimizer.step):
        with pytest.raises(FloatingPointError, match="model.layers.2.mlp.down_proj"):
            act()
    fill(sketches, 1)
    for alpha in (math.nan, math.inf, 1e300):
        with pytest.raises(FloatingPointError, match="nothing was applied"):
            optimizer.step(alpha)
    assert all(torch.equal(sketches[name].weight, before[name]) for name in sketches) and sketches.update == 2
    assert str(optimizer.state_dict()) == str(state)


def test_proposing_twice_and_the_step_agree():
    sketches, others = fill(attach(), 0), fill(attach(), 0)
    optimizer, other = (logra.RowAdam(s, relative_step=1e-3) for s in (sketches, others))
    first, second = optimizer.propose(), optimizer.propose()
    assert first.eta == second.eta and first.number == 1 and all(torch.equal(first[name], second[name]) for name in first)
    optimizer.step(), other.step()
    assert all(torch.equal(sketches[name].weight, others[name].weight) for name in sketches)


def test_zero_sketches_make_a_step_of_zero():
    sketches = attach()
    before = weights(sketches)
    update = logra.RowAdam(sketches, relative_step=1e-3).step()
    assert update.number == 1 and all(torch.equal(sketches[name].weight, before[name]) for name in sketches)


@pytest.mark.parametrize("step", [dict(relative_step=1e-3), dict(lr=0.1)])
def test_a_scheduler_acts_on_the_step(step):
    sketches = attach()
    optimizer = logra.SketchSGD(sketches, bits=16, **step)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.25**epoch)
    moved = []
    for _ in range(3):
        fill(sketches, 0)
        sketched = dense(sketches, {name: sketch.S_dr for name, sketch in sketches.items()})
        whole = norm((weights(sketches) if "relative_step" in step else sketched).values())
        update = optimizer.step()
        moved.append(norm(update.dense(name) for name in sketches) / whole / list(step.values())[0])
        scheduler.step()
    assert moved == pytest.approx([1, 0.25, 0.0625], rel=1e-3)


def test_a_closure_is_called_for_its_backward_and_zero_grad_clears_the_sketches():
    sketches = attach()
    optimizer = logra.SketchSGD(sketches, relative_step=1e-2)
    before = float(models.loss(sketches.model, models.ids(2, 9)).detach())

    def closure():
        optimizer.zero_grad()
        loss = models.loss(sketches.model, models.ids(2, 9))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float(models.loss(sketches.model, models.ids(2, 9)).detach()) < before         # downhill
    assert all(sketch.S_dr.any() for sketch in sketches.values())
    optimizer.zero_grad()
    assert not any(sketch.S_dr.any() for sketch in sketches.values())


def test_a_backward_through_a_graph_from_before_the_step_is_an_error():
    sketches = attach()
    optimizer = logra.SketchSGD(sketches, relative_step=1e-3)
    loss = models.loss(sketches.model, models.ids(2, 9))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class ReducedPrecision(TorchDispatchMode):
    """Float32 matrix products of operands rounded to bfloat16, as a GPU or a newer CPU makes them when it is allowed to."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype == torch.float32:
            args = [operand.bfloat16().float() for operand in args]
        return func(*args, **(kwargs or {}))


def test_the_step_is_the_same_under_any_matmul_precision():
    optimizer = logra.RowAdam(fill(attach(rank=20), 0), relative_step=1e-3)               # 1/√20 is exact in no type
    with ReducedPrecision():
        reduced = optimizer.propose().eta
    assert optimizer.propose().eta == reduced


@pytest.mark.parametrize("settings,error,words", [
    (dict(), ValueError, "give one of relative_step"), (dict(relative_step=1e-4, lr=1e-4), ValueError, "give one of relative_step"),
    (dict(lr=-1.0), ValueError, "finite number that is not negative"), (dict(relative_step=math.nan), ValueError, "nan"),
    (dict(lr=0.1, beta2=1.0), ValueError, "beta2 lies in"),
])
def test_settings_that_make_no_sense_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        logra.RowAdam(attach(), **settings)


def test_weights_that_are_not_float32_are_refused():
    layer = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    with pytest.raises(TypeError, match="0 .torch.bfloat16. for one: a step would be lost in rounding"):
        logra.SketchSGD(logra.attach(layer, 8, modules=["0"]), lr=0.1)


def test_a_step_holds_the_sketches_and_the_message_and_little_more():
    from logra.rl.footprint import Meter

    layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(96)])
    sketches = fill(logra.attach(layers, 64, modules=[str(i) for i in range(96)]), 0)
    optimizer = logra.RowAdam(sketches, relative_step=1e-3)
    optimizer.step(), sketches.base
    fill(sketches, 1)
    meter, layer = Meter(), 4 * 256 * 64
    meter.label([*layers.parameters(), *(sketch.S_dr for sketch in sketches.values()), *(x["v_d"] for x in optimizer.state.values())], "weights")
    before = meter.total
    with meter.measuring():
        proposal = optimizer.propose()
    meter.at_peak()
    assert len(proposal) == 96 and meter.peak - before < 16 * layer
    meter.restart()
    with meter.measuring():
        update = optimizer.step(0.5)                        # int8: a quarter of S; one matrix of 256 × 256 and its fingerprint besides
    meter.at_peak()
    assert update.bits == 8 and meter.peak - before < 96 * layer / 4 + 36 * layer < 96 * layer


def test_a_proposal_of_sketches_that_have_changed_is_refused():
    sketches = fill(attach(), 0)
    optimizer = logra.RowAdam(sketches, relative_step=1e-3)
    proposal, name = optimizer.propose(), list(sketches)[0]
    kept = proposal[name].clone()
    update = optimizer.step()
    assert torch.equal(proposal[name], kept) and update.number == proposal.number            # S is still there
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="has changed since this proposal was made"):
        proposal[name]


@pytest.mark.parametrize("change", [None, "sketch", "weight", "schedule", "state"])
def test_the_step_takes_the_probes_proposal_unless_something_changed(change):
    sketches, others = fill(attach(), 0), fill(attach(), 0)
    optimizer, other = (logra.RowAdam(s, relative_step=1e-3) for s in (sketches, others))
    optimizer.step(), other.step()
    for o in (optimizer, other):
        fill(o.sketches, 1)
    optimizer.propose()
    for o in (optimizer, other):
        if change == "sketch":
            fill(o.sketches, 2)
        elif change == "weight":
            with torch.no_grad():
                list(o.sketches.values())[0].weight.mul_(2)
        elif change == "schedule":
            o.param_groups[0]["lr"] = 0.5
        elif change == "state":
            state = saved(o)
            for row in state["state"].values():
                row["v_d"] *= 2
            o.load_state_dict(state)
    made = []
    scales = optimizer._scales
    optimizer._scales = lambda: made.append(1) or scales()
    optimizer.step(), other.step()
    assert all(torch.equal(sketches[name].weight, others[name].weight) for name in sketches)
    assert len(made) == (change is not None)
