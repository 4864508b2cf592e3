"""The bits of a weight: nothing is lost in the halves, nothing cancels in a fingerprint, and slices are the whole's."""

import pytest
import torch

from logra import bits


def _every_low_half(tops):
    pattern = (torch.tensor(tops)[:, None] << 16) + torch.arange(1 << 16)
    return torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)


def test_halves_give_back_every_float32_and_the_high_one_is_bfloat16_rounded_to_nearest_even():
    W = _every_low_half([0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0xBF80, 0xFF7F])   # with denormals, −0, overflow
    halves = bits.split(W)
    assert torch.equal(halves.high, W.to(torch.bfloat16)) and halves.low.dtype == torch.int16
    assert torch.equal(bits.join(halves).view(torch.int32), W.view(torch.int32))
    ties = W.view(torch.int32).flatten()[halves.ties] & 0x1FFFF
    assert (ties == 0x8000).all() and len(ties) == 6        # the ties that go down: one for each even top


def test_halves_of_a_slice_that_is_not_contiguous():
    W = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))[::2, 1::3]
    assert torch.equal(bits.join(bits.split(W)), W)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    with pytest.raises(FloatingPointError):
        bits.split(torch.tensor([1.0, value]))


def test_a_fingerprint_tells_apart_what_a_plain_sum_does_not():
    W = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    bumped = W.clone().view(torch.int32)
    bumped[3, 4] += 1
    bumped[7, 9] -= 1
    negated, exchanged, zero = W.clone(), W.clone(), W.clone()
    negated[0, 0].neg_()
    exchanged[0, 0], exchanged[5, 5] = W[5, 5], W[0, 0]
    zero[2, 2] = 0.0
    minus_zero = zero.clone()
    minus_zero[2, 2] = -0.0
    variants = [W, bumped.view(torch.float32), negated, exchanged, zero, minus_zero, W.T, W.flip(0), W.roll(1, 1), -W]
    assert len({bits.fingerprint(V) for V in variants}) == len(variants)


def test_a_fingerprint_is_pinned_and_is_the_sum_of_its_slices():
    W = torch.arange(-300, 300, dtype=torch.float32).reshape(20, 30) / 7
    whole = bits.fingerprint(W)
    assert whole == 0x692797c0fe212bd7
    parts = [bits.fingerprint(W[i:j, m:n], i, m, 30) for i, j in ((0, 7), (7, 20)) for m, n in ((0, 11), (11, 30))]
    assert sum(parts) % (1 << 64) == whole
    assert bits.fingerprint(W.bfloat16()) == bits.fingerprint(W.bfloat16().float()) != whole


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_ranks_parts_make_the_whole_and_replicated_heads_count_once(ranks):
    heads, kv_heads, head_dim, k = 8, 2, 4, 24
    whole = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "gate": 48, "up": 48, "down": 24}
    width = {"down": 48}
    seen = {name: torch.zeros(d, width.get(name, k), dtype=torch.int64) for name, d in whole.items()}
    for rank in range(ranks):
        fused = bits.fused_attention(["q", "k", "v"], heads, kv_heads, head_dim, k, rank, ranks)
        assert [part.at for part in fused] == [0, fused[0].rows.stop - fused[0].rows.start, fused[1].at + fused[1].rows.stop - fused[1].rows.start]
        for part in fused + bits.column_parallel(["gate", "up"], [48, 48], k, rank, ranks) + bits.row_parallel("down", 24, 48, rank, ranks):
            seen[part.name][part.rows, part.columns] += part.counts
    assert all((count == 1).all() for count in seen.values())


def test_an_uneven_split_is_refused():
    with pytest.raises(ValueError, match="cannot be split evenly"):
        bits.fused_attention(["q", "k", "v"], 9, 3, 64, 576, 0, 2)
