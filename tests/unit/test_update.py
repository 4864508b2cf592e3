"""The low-rank update: the same bits in any order, slice, band and setting (Eq. 4), and how far rounding moves the factor."""

import math

import models
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logra
from logra import projection, update
from logra.update import LowRankUpdate

NAME, D, K = "up", 37, 384


def sketches(kind, rank):
    model = torch.nn.ModuleDict({NAME: torch.nn.Linear(K, D)})
    torch.nn.init.normal_(model[NAME].weight, generator=torch.Generator().manual_seed(2))
    return logra.attach(model, rank, kind, modules=[NAME])


def factor(rank, seed=0):
    """Rows that differ by decades, as an adaptive optimizer's do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(D, rank, generator=generator) * 10 ** (6 * torch.rand(D, 1, generator=generator) - 9)


def make(kind="rademacher", rank=16, bits=8, F_dr=None):
    owner = sketches(kind, rank)
    return LowRankUpdate.round(owner, {NAME: factor(rank) if F_dr is None else F_dr}, bits), owner


def exact(made, kind, rank):
    """The same ΔW by Python's and int64's own integers, in float64 at the end."""
    m = made.matrices[NAME]
    E_rk = projection.entries(kind, rank, K, m.key, dtype=torch.float64)
    scale = 2**24 if kind == "gaussian" else 1              # Gaussian entries are multiples of 2^-24
    whole = m.integers_dr.long() @ (E_rk * scale).long()
    assert torch.equal((E_rk * scale).long().double(), E_rk * scale)
    return whole.double() / scale * torch.tensor([2.0 ** int(e) for e in m.exponent_d], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("kind", projection.KINDS)
@pytest.mark.parametrize("rank", [16, 100, 256])
@pytest.mark.parametrize("bits", [8, 16])
def test_an_update_has_the_same_bits_however_it_is_formed(kind, rank, bits, monkeypatch):
    made, owner = make(kind, rank, bits)
    whole = made.dense(NAME)
    assert whole.dtype == torch.float32 and torch.equal(whole, exact(made, kind, rank).float())
    rows, columns = torch.randperm(D)[:9], torch.randperm(K)[:50]
    assert torch.equal(made.dense(NAME, rows, columns), whole[rows][:, columns])
    assert torch.equal(made.dense(NAME, slice(30, 37), slice(65, 190)), whole[30:37, 65:190])
    applied = owner[NAME].weight + whole
    threads = torch.get_num_threads()
    try:
        for precision, count, band in [("medium", 1, 1), ("high", 2, D * 128), ("highest", 2, 1 << 24)]:
            torch.set_float32_matmul_precision(precision), torch.set_num_threads(count)
            monkeypatch.setattr(update, "_CHUNK", band)
            weight = owner[NAME].weight.detach().clone()
            made.apply_to(NAME, weight)
            part = owner[NAME].weight.detach()[5:20, 100:300].clone()
            made.apply_to(NAME, part, slice(5, 20), slice(100, 300))
            assert torch.equal(made.dense(NAME), whole) and torch.equal(weight, applied) and torch.equal(part, applied[5:20, 100:300])
            assert torch.get_float32_matmul_precision() == precision                       # the caller's setting, as it was
    finally:
        torch.set_float32_matmul_precision("highest"), torch.set_num_threads(threads)
    made.apply(owner)
    assert torch.equal(owner[NAME].weight, applied)


@pytest.mark.parametrize("rank,bits", [(384, 8), (384, 16), (1024, 8), (1024, 16)])
def test_large_ranks_do_not_leave_the_exact_range(rank, bits):
    F_dr = factor(rank).abs()                               # one sign: the sums grow as large as they can
    made, _ = make("rademacher", rank, bits, F_dr)
    assert torch.equal(made.dense(NAME), exact(made, "rademacher", rank).float())


def test_the_order_of_summation_changes_nothing():
    made, _ = make(rank=256)
    m = made.matrices[NAME]
    E_rk = projection.entries("rademacher", 256, K, m.key)
    for seed in range(5):
        parts = torch.randperm(256, generator=torch.Generator().manual_seed(seed)).split(37)
        total = sum(m.factor()[:, part] @ E_rk[part] for part in parts)
        assert torch.equal(total, made.dense(NAME))


class Precisions(TorchDispatchMode):
    """The float32 precision that matrix products within it are made at."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen = [backend.fp32_precision for backend in (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)]
        return func(*args, **(kwargs or {}))


def test_reduced_precision_is_set_aside_and_comes_back():
    backends = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    made, _ = make(bits=16)
    try:
        backends[0].fp32_precision, backends[1].fp32_precision = "bf16", "tf32"          # torch's newer way to ask for it
        with Precisions() as products:
            whole = made.dense(NAME)
        assert torch.equal(whole, exact(made, "rademacher", 16).float()) and products.seen == ["ieee", "ieee"]
        assert [backend.fp32_precision for backend in backends] == ["bf16", "tf32"]
    finally:
        backends[0].fp32_precision = backends[1].fp32_precision = "none"


@pytest.mark.parametrize("bits", [8, 16])
def test_rounding_moves_an_entry_by_half_a_step_of_its_rows_peak(bits):
    F_dr, largest = factor(64), 2 ** (bits - 1) - 1
    made, _ = make(rank=64, bits=bits, F_dr=F_dr)
    m = made.matrices[NAME]
    wanted = F_dr * projection.unit(64)
    step_d = torch.tensor([2.0 ** int(e) for e in m.exponent_d])
    assert ((m.factor() - wanted).abs() <= 0.5 * step_d[:, None]).all()
    peak_d = m.integers_dr.abs().amax(1)
    assert (peak_d >= largest // 2).all() and (peak_d <= largest).all()                   # the exponent is the least that fits
    integers_dr = torch.randint(-largest, largest, (D, 64), generator=torch.Generator().manual_seed(1)).float()
    integers_dr[:, 5] = largest
    again, _ = make(rank=64, bits=bits, F_dr=integers_dr * 2.0**-20 * math.sqrt(64))      # what is rounded already stays as it is
    assert torch.equal(again.matrices[NAME].integers_dr.float(), integers_dr)


def test_rows_of_zero_of_subnormals_and_near_overflow():
    F_dr = torch.ones(D, 16)
    for row, size in enumerate([0.0, 1e-45, 1e-40, 2.0**-126, 3e-38, 127.0, 128.0, 2.0**120]):
        F_dr[row] *= size
    made, _ = make(F_dr=F_dr * 4)                           # unit(16) = 1/4: the factor is F_dr itself
    error = (made.matrices[NAME].factor() - F_dr).abs()
    assert (error <= torch.maximum(F_dr / 127, torch.tensor(2.0**-127))).all() and made.dense(NAME).isfinite().all()
    assert torch.equal(made.dense(NAME), exact(made, "rademacher", 16).float())


@pytest.mark.parametrize("bits", [8, None])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_is_refused_before_anything_is_applied(value, bits):
    F_dr = factor(16)
    F_dr[3, 5] = value
    with pytest.raises(FloatingPointError, match="the update of up is not finite: nothing was applied"):
        make(F_dr=F_dr, bits=bits)                          # 3e38: the factor itself is finite, its sums are not


def test_other_types_and_bits_are_refused():
    made, owner = make()
    with pytest.raises(TypeError, match="up is stored in torch.bfloat16.*load the model in float32"):
        made.apply_to(NAME, owner[NAME].weight.detach().bfloat16())
    with pytest.raises(ValueError, match="8 or 16 bits, or not at all \\(None\\), but bits is 4"):
        make(bits=4)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_a_factor_that_is_not_rounded_makes_the_step_that_was_meant_and_has_no_message(kind):
    F_dr = factor(16)
    made, owner = make(kind, bits=None, F_dr=F_dr)
    A_rk = projection.matrix(kind, 16, K, owner[NAME].key, dtype=torch.float64)
    wanted = F_dr.double() @ A_rk
    assert torch.allclose(made.dense(NAME).double(), wanted, rtol=1e-6, atol=1e-12 * float(wanted.abs().max()))
    rounded, _ = make(kind, bits=8, F_dr=F_dr)
    assert not torch.allclose(rounded.dense(NAME).double(), wanted, rtol=1e-4)
    before = owner[NAME].weight.detach().clone()
    made.apply(owner)
    assert torch.equal(owner[NAME].weight, before + made.dense(NAME))
    with pytest.raises(ValueError, match="is not rounded .*round it to 8 or 16 bits to send it"):
        made.to_bytes()


def test_a_model_moved_by_its_optimizer_and_one_moved_by_the_update_are_equal():
    trainer, rollout = models.qwen2(), models.qwen2()
    sketches = logra.attach(trainer, 16, seed=4)
    optimizer = logra.RowAdam(sketches, relative_step=1e-3)
    for number in (1, 2, 3):
        models.loss(trainer, models.ids(2, 9, seed=number)).backward()
        made = optimizer.step(1.5)
        optimizer.zero_grad()
        assert made.number == number
        for name in made.matrices:
            made.apply_to(name, rollout.get_submodule(name).weight)
        assert all(torch.equal(a, b) for a, b in zip(trainer.state_dict().values(), rollout.state_dict().values(), strict=True))
