"""The bits of a weight: its float32 master as bfloat16 plus what rounding lost, its fingerprint, and slices of it on several ranks.

A rollout engine computes with hi = bfloat16(master), rounded to nearest, ties to even. The difference of the bit patterns,
master − hi·2¹⁶, lies in [−2¹⁵, 2¹⁵]: one value too many for 16 bits, since an even hi is the rounding of 65,537 masters and
an odd one of 65,535. The one that does not fit, +2¹⁵ (a tie rounded down, one entry in 131,072), is kept as a list of places.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from logra.projection import _mix


BAND = {"cpu": 1 << 16, "cuda": 1 << 24}                   # entries that a fingerprint takes at once: what a core's cache holds, and enough for a GPU


class Halves(NamedTuple):
    """A float32 tensor without loss: `high` bfloat16, `low` int16, both of its shape; `ties` int64 [n], flat places of the ties rounded down."""

    high: torch.Tensor
    low: torch.Tensor
    ties: torch.Tensor


def split(W_dk: torch.Tensor) -> Halves:
    """Float32 -> its two halves. Raises FloatingPointError for NaN or inf, which have no such halves."""
    if not torch.isfinite(W_dk).all():
        raise FloatingPointError("a weight is NaN or inf: it cannot be split, and a policy with it is of no use")
    high = W_dk.to(torch.bfloat16)
    lost = W_dk.contiguous().view(torch.int32) - (high.view(torch.int16).to(torch.int32) << 16)
    return Halves(high, lost.to(torch.int16), (lost.flatten() == 1 << 15).nonzero().flatten())


def join(halves: Halves) -> torch.Tensor:
    """The two halves -> the float32 tensor that `split` was given, to the bit."""
    high, low, ties = halves
    pattern = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + low
    pattern.view(-1)[ties] += 1 << 16                       # +2¹⁵ was stored as −2¹⁵
    return pattern.view(torch.float32)


def fingerprint(W_dk: torch.Tensor, first_row: int = 0, first_column: int = 0, k: int | None = None, rounded: bool = False) -> int:
    """64 bits that stand for a matrix: the wrapping sum of a mix of (place, float32 bits) over its entries.

    The mix is a bijection of the pair, so that exchanged, negated or compensating entries do not cancel as in a plain sum; and
    as a sum it is the same in any order and on any device, and those of disjoint slices add up, modulo 2^64, to the whole's.
    W_dk: float32, or bfloat16, which stands for the float32 of the same value. first_row, first_column, k: where a slice
    begins, and how many columns the whole has (its own, by default). rounded: of the bfloat16 that a float32 matrix rounds to.
    """
    d, width = W_dk.shape
    k = width if k is None else k
    if (first_row + d) * k > 1 << 32:
        raise ValueError(f"a matrix of {first_row + d}×{k} has more entries than a fingerprint can number (2^32)")
    total = torch.zeros((), dtype=torch.int64, device=W_dk.device)
    column = torch.arange(first_column, first_column + width, device=W_dk.device)
    band = max(1, BAND.get(W_dk.device.type, BAND["cpu"]) // max(1, width))
    for start in range(0, d, band):
        x = W_dk[start:start + band].to(torch.bfloat16 if rounded else torch.float32).float().contiguous().view(torch.int32).to(torch.int64)
        x &= 0xFFFFFFFF
        row = torch.arange(first_row + start, first_row + start + len(x), device=W_dk.device)
        x += (row[:, None] * k + column) << 32
        total += _mix(x).sum()
    return int(total) & (1 << 64) - 1


def combined(fingerprints: Mapping[str, int]) -> str:
    """One hash (32 hex digits) of several matrices' fingerprints, by name, in any order."""
    lines = "".join(f"{name}\0{fingerprints[name]:016x}\n" for name in sorted(fingerprints))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def base(selected: Mapping[str, torch.Tensor], rest: Mapping[str, torch.Tensor]) -> str:
    """The hash of a whole model before a run: "<of the selected float32 matrices>/<of all other parameters>", each as `combined`.

    The others count as the bfloat16 that they round to, which is what a rollout may hold of them. Nothing is copied but a band of rows.
    """
    rest = {name: fingerprint(as_matrix(parameter), rounded=True) for name, parameter in rest.items()}
    return f"{combined({name: fingerprint(W_dk) for name, W_dk in selected.items()})}/{combined(rest)}"


def as_matrix(parameter: torch.Tensor) -> torch.Tensor:
    """A view of any parameter with two dimensions: a vector is a column."""
    parameter = parameter.detach()
    return parameter.reshape(parameter.shape[0] if parameter.dim() else 1, -1)


class Part(NamedTuple):
    """Which part of a whole matrix W_dk a rank holds: rows × columns of the whole, at row `at` of the rank's own parameter.

    counts: False where another rank holds the same rows and is the one that counts in a fingerprint (replicated KV heads).
    """

    name: str
    rows: slice
    columns: slice
    at: int = 0
    counts: bool = True


def column_parallel(names: list[str], rows: list[int], k: int, rank: int, ranks: int) -> list[Part]:
    """Matrices [rows, k] that are fused along their rows (gate_up_proj; a list of one for a plain layer), each split by rows: rows of U."""
    parts, at = [], 0
    for name, d in zip(names, rows, strict=True):
        size = _share(d, ranks, f"the rows of {name}")
        parts.append(Part(name, slice(rank * size, (rank + 1) * size), slice(0, k), at))
        at += size
    return parts


def row_parallel(name: str, d: int, k: int, rank: int, ranks: int) -> list[Part]:
    """A matrix [d, k] that is split by columns (o_proj, down_proj): columns of A."""
    size = _share(k, ranks, f"the columns of {name}")
    return [Part(name, slice(0, d), slice(rank * size, (rank + 1) * size))]


def fused_attention(names: list[str], heads: int, kv_heads: int, head_dim: int, k: int, rank: int, ranks: int) -> list[Part]:
    """q, k and v of one attention layer, fused along their rows (qkv_proj) and split by heads.

    Where there are more ranks than KV heads, each KV head is held by ranks / kv_heads neighbouring ranks.
    """
    q, key, value = names
    own = _share(heads, ranks, "the attention heads") * head_dim
    if ranks <= kv_heads:
        copies, size = 1, _share(kv_heads, ranks, "the KV heads") * head_dim
    else:
        copies, size = _share(ranks, kv_heads, "the ranks over the KV heads"), head_dim
    rows = slice(rank // copies * size, (rank // copies + 1) * size)
    return [Part(q, slice(rank * own, (rank + 1) * own), slice(0, k)),
            Part(key, rows, slice(0, k), own, rank % copies == 0),
            Part(value, rows, slice(0, k), own + size, rank % copies == 0)]


def _share(size: int, ranks: int, what: str) -> int:
    if size % ranks:
        raise ValueError(f"{what} ({size}) cannot be split evenly over {ranks}")
    return size // ranks
