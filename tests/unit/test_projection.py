"""Projections: every entry is the hash's, in any slice, and the rows have the statistics that Section 2.1 asks for."""

import hashlib
import math
from statistics import NormalDist

import pytest
import torch

from logra import projection

KEY = projection.key(1, 1, "model.layers.0.mlp.up_proj")


def word(key, row, number):
    """64 bits by Python's own integers: SplitMix64's finaliser, of the place and again of that with the key."""
    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31
    return mix((mix(((row << 32) + number) * 0x9E3779B97F4A7C15 % 2**64) + key) % 2**64)


def sign(key, row, column):
    return -1.0 if word(key, row, column // 64) >> column % 64 & 1 else 1.0


def normal(key, row, column):
    index = word(key, row, column // 4) >> 16 * (column % 4) & 0xFFFF
    value = QUANTILES[index % 2**15]
    return value if index < 2**15 else -value


def sylvester(key, row, column, k):
    order = sorted(range(k), key=lambda i: word(key, 2**31 - 2, i) - (word(key, 2**31 - 2, i) >> 63 << 64))
    return (-1.0) ** (order[row] & column).bit_count() * sign(key, 2**31 - 1, column)


QUANTILES = [NormalDist().inv_cdf(0.5 + (i + 0.5) / 2**16) for i in range(2**15)]
SCALE = math.sqrt(math.fsum(q * q for q in QUANTILES) / 2**15)
QUANTILES = torch.tensor([q / SCALE for q in QUANTILES]).bfloat16().tolist()


@pytest.mark.parametrize("kind,k,reference", [("rademacher", 200, sign), ("gaussian", 200, normal),
                                              ("hadamard", 128, lambda *place: sylvester(*place, 128))])
def test_each_entry_is_what_the_hash_says(kind, k, reference):
    expected = torch.tensor([[reference(KEY, row, column) for column in range(k)] for row in range(5)])
    assert torch.equal(projection.entries(kind, 5, k, KEY), expected)
    assert torch.equal(projection.matrix(kind, 5, k, KEY), expected * torch.tensor(1 / math.sqrt(5)))


@pytest.mark.parametrize("kind,rank,k,update,digest", [
    ("rademacher", 4, 64, 1, "80d4ac3e2169112a"), ("rademacher", 32, 100, 2, "6e2b530d791be8be"), ("rademacher", 256, 1536, 3, "f4c9c1ffe9042582"),
    ("gaussian", 4, 64, 1, "52ad38490fa136b2"), ("gaussian", 100, 101, 2, "88ecb771b908f56f"), ("gaussian", 16, 1536, 3, "66dc4d512a988478"),
    ("hadamard", 4, 64, 1, "735f4d78aafce28f"), ("hadamard", 32, 576, 2, "838587e817ddee6a"), ("hadamard", 256, 8960, 3, "a49c2f49a40e7967"),
])
def test_golden_checksums(kind, rank, k, update, digest):
    A_rk = projection.matrix(kind, rank, k, projection.key(42, update, "model.layers.3.self_attn.q_proj"))
    assert hashlib.sha256(A_rk.numpy().tobytes()).hexdigest()[:16] == digest


def test_golden_keys():
    assert projection.key(1, 2, "model.layers.0.mlp.up_proj") == 1810387176023342793
    keys = {projection.key(seed, update, name) for seed in range(20) for update in range(20) for name in ("a", "b", "a.b")}
    assert len(keys) == 20 * 20 * 3 and all(0 <= key < 2**63 for key in keys)


@pytest.mark.parametrize("name", ["model.layers.0.up", "module.model.layers.0.up", "_orig_mod.module.model.layers.0.up",
                                  "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.up", "module._orig_mod.model.layers.0.up"])
def test_wrappers_leave_the_key_alone(name):
    assert projection.key(1, 1, name) == projection.key(1, 1, "model.layers.0.up")


def places(index, size):
    if index is None or isinstance(index, slice):
        index = list(range(size)[index or slice(None)])
    return torch.as_tensor(index, dtype=torch.long)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", projection.KINDS)
def test_a_slice_is_the_slice_of_the_whole(kind, dtype):
    rank, k = 37, 576
    whole = projection.matrix(kind, rank, k, KEY, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    spans = [None, slice(5, 21), slice(17, 18), slice(30, 2, -5), slice(-9, None), slice(3, 3), slice(9, 4)]
    rows = spans + [torch.randperm(rank, generator=generator)[:11], torch.tensor([0, 36, 0]), [2, 1]]
    columns = [torch.randperm(k, generator=generator)[:200], *spans, slice(63, 65), torch.tensor([575])]
    for r, c in zip(rows, columns):
        part = projection.matrix(kind, rank, k, KEY, r, c, dtype)
        assert part.dtype == dtype and part.is_contiguous() and torch.equal(part, whole[places(r, rank)][:, places(c, k)])
    parts = [projection.matrix(kind, rank, k, KEY, None, slice(i, i + 41), dtype) for i in range(0, k, 41)]
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("kind", projection.KINDS)
@pytest.mark.parametrize("rank", [16, 32, 100, 256])
def test_entries_are_exact_in_bfloat16_also_where_their_unit_is_not(kind, rank):
    E_rk = projection.entries(kind, rank, 384, KEY)
    assert torch.equal(projection.entries(kind, rank, 384, KEY, dtype=torch.bfloat16).float(), E_rk)
    assert torch.equal(projection.matrix(kind, rank, 384, KEY), E_rk * projection.unit(rank))
    if kind != "gaussian":
        assert torch.equal(E_rk.abs(), torch.ones_like(E_rk))


@pytest.mark.parametrize("kind", projection.KINDS)
def test_the_expectation_of_AᵀA_is_the_identity(kind):
    rank, k, draws = 6, 24, 1500
    total, square, mean = torch.zeros(k, k), torch.zeros(k, k), torch.zeros(rank, k)
    for update in range(draws):
        A_rk = projection.matrix(kind, rank, k, projection.key(0, update, "w"))
        gram = A_rk.T @ A_rk
        total, square, mean = total + gram, square + gram.square(), mean + A_rk
    error = (total / draws - torch.eye(k)).abs()
    deviation = (square / draws - (total / draws).square()).clamp(min=0).sqrt()
    assert (error <= 5 * deviation / math.sqrt(draws) + 1e-5).all()
    assert (mean.abs() / draws <= 5 / math.sqrt(rank * draws)).all()
    if kind == "rademacher":                                # the variance that the closed forms start from: 1/r off the diagonal
        assert abs(float(square.sum() - total.diag().sum()) / (draws * k * (k - 1)) - 1 / rank) < 0.01 / rank


@pytest.mark.parametrize("kind", projection.KINDS)
def test_neighbouring_keys_rows_and_columns_share_nothing(kind):
    rank, k = 64, 1536
    def draw(seed=0, update=1, name="w.0"):
        return projection.matrix(kind, rank, k, projection.key(seed, update, name)) * math.sqrt(rank)
    A = draw()
    others = [draw(seed=1), draw(update=2), draw(name="w.1"), projection.entries(kind, rank, k, projection.key(0, 1, "w.0") + 1)]
    pairs = [(A, other) for other in others] + [(A[1:], A[:-1]), (A[:, 1:], A[:, :-1]), (A[:, 64:], A[:, :-64])]
    for left, right in pairs:
        assert abs(float((left * right).sum())) < 5 * math.sqrt(left.numel())


@pytest.mark.parametrize("k", [1, 2, 64, 128, 384, 576, 896, 1536, 3584, 5120, 6144, 8960, 18944])
def test_hadamard_rows_are_exactly_orthogonal(k):
    rank = min(k, 256)
    E_rk = projection.entries("hadamard", rank, k, KEY)
    assert torch.equal(E_rk @ E_rk.T, k * torch.eye(rank))  # sums of ±1 below 2^24: exact, and the rows are distinct


@pytest.mark.parametrize("kwargs,error,words", [
    (dict(kind="ternary", rank=4, k=8), ValueError, "rademacher, gaussian, hadamard"), (dict(kind="gaussian", rank=0, k=8), ValueError, "rank is 0"),
    (dict(kind="hadamard", rank=9, k=8), ValueError, "at most k rows"), (dict(kind="hadamard", rank=4, k=92), ValueError, "order 92"),
    (dict(kind="hadamard", rank=4, k=6), ValueError, "order 6"), (dict(kind="rademacher", rank=4, k=8, columns=[8]), ValueError, "outside 0..7"),
    (dict(kind="rademacher", rank=4, k=8, rows=[-1]), ValueError, "outside 0..3"),
    (dict(kind="rademacher", rank=4, k=8, rows=torch.tensor([True] * 4)), TypeError, "bool"),
])
def test_what_does_not_exist_is_refused(kwargs, error, words):
    with pytest.raises(error, match=words):
        projection.matrix(key=KEY, **kwargs)
