"""LowRankUpdate: the one object that a step makes, the trainer applies and the rollout receives (Eq. 4, Algorithm 1).

ΔW_dk = −αη U_dr A_rk. The factor is rounded once, row by row, to integers on a power-of-two scale. The entries of A without
their unit 1/√r are ±1, so that each element of ΔW is a power of two times a sum of at most r small integers: float32 holds it
exactly, in any order of summation, on any device, for any slice of rows or columns. (Gaussian entries, and 16 bits at a rank
above 511, are summed exactly in float64 and rounded once.) A factor may also be left as it is (bits=None), to see what the
rounding costs; its sums are then made in float64 and depend on their order in a last bit, so that it cannot be sent.
"""

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from logra import projection as projections
from logra.bits import fingerprint
from logra.shards import own_rows

_INTEGERS = {8: torch.int8, 16: torch.int16}
_CHUNK = 1 << 24                                            # elements of ΔW that are formed at a time (64 MiB)


@dataclass(frozen=True)
class MatrixUpdate:
    """ΔW_dk = 2^exponent_d · integers_dr · entries_rk, with the entries of `key` (see `logra.projection.entries`)."""

    integers_dr: torch.Tensor                               # int8 or int16; the float32 factor itself where it is not rounded
    exponent_d: torch.Tensor                                # int16; zeros where it is not
    k: int
    key: int

    def factor(self) -> torch.Tensor:
        """F_dr in float32, for which ΔW = F · entries."""
        return self.integers_dr.float() * _power_of_two(self.exponent_d)[:, None]


@dataclass(frozen=True)
class LowRankUpdate:
    """The update of every selected matrix at one step.

    number: the update's number, from 1. projection, rank: as given to `attach`. bits: 8 or 16 of the rounded factor, None if it is not.
    run, base, session: whose update it is (see `Sketches`; base as `logra.bits.base` makes it). after: the fingerprints of the weights after it, once it is applied.
    """

    number: int
    projection: str
    rank: int
    bits: int | None
    matrices: dict[str, MatrixUpdate]
    run: str = ""
    base: str = ""
    session: int = 0
    after: dict[str, int] = field(default_factory=dict)

    @classmethod
    def round(cls, sketches: Mapping, factors: Mapping[str, torch.Tensor], bits: int | None = 8) -> "LowRankUpdate":
        """Round ΔW_dk = F_dr A_rk, or keep it in float32 (bits=None). factors: float32 [d, r] by name.

        Raises ValueError for other bits, FloatingPointError for NaN or inf.
        """
        if bits is not None and bits not in _INTEGERS:
            raise ValueError(f"a factor is rounded to 8 or 16 bits, or not at all (None), but bits is {bits}")
        unit = projections.unit(sketches.rank)
        matrices = {name: MatrixUpdate(*_round_rows(F_dr.float() * unit, bits, name), sketches[name].k, sketches[name].key)
                    for name, F_dr in factors.items()}
        return cls(sketches.update, sketches.projection, sketches.rank, bits, matrices, sketches.run, sketches.base, sketches.session)

    def dense(self, name: str, rows=None, columns=None) -> torch.Tensor:
        """ΔW_dk in float32, or the given rows and columns of it (slices or 1-D integer tensors): the same bits in any slice."""
        matrix = self.matrices[name]
        device = matrix.integers_dr.device
        q_dr, exponent_d = matrix.integers_dr, matrix.exponent_d
        if rows is not None:
            q_dr, exponent_d = q_dr[rows], exponent_d[rows]
        # 2^24 is where float32 stops holding every integer.
        fits = self.bits is not None and self.projection != "gaussian" and (2 ** (self.bits - 1) - 1) * self.rank < 2 ** 24
        dtype = torch.float32 if fits else torch.float64
        E_rk = projections.entries(self.projection, self.rank, matrix.k, matrix.key, None, columns, dtype, device)
        with _full_precision():
            product = q_dr.to(dtype) @ E_rk
        return product.mul_(_power_of_two(exponent_d).to(dtype)[:, None]).float()

    def apply_to(self, name: str, weight: torch.Tensor, rows=None, columns=None) -> None:
        """weight += ΔW[rows, columns] in place, in float32, a band of columns at a time. rows, columns: None or slices."""
        if weight.dtype != torch.float32:
            raise TypeError(f"{name} is stored in {weight.dtype}: an update is applied to float32 weights, since at the paper's "
                            "step 99 % of a bfloat16 weight's entries would not move; load the model in float32 and compute under autocast")
        start, stop, _ = (columns or slice(None)).indices(self.matrices[name].k)
        band = max(64, _CHUNK // max(1, weight.shape[0]) // 64 * 64)
        with torch.no_grad():
            for first in range(start, stop, band):
                last = min(first + band, stop)
                weight[:, first - start:last - start] += self.dense(name, rows, slice(first, last)).to(weight.device)

    def apply(self, sketches: Mapping) -> None:
        """Add the update to the weights of all its matrices, in place (Eq. 4), and note their fingerprints: a receiver's must be the same.

        Of a weight that `fully_shard` splits, each rank changes its own rows; the fingerprints are of the whole.
        """
        split = {}
        for name in self.matrices:
            local, rows, shards = own_rows(sketches[name].weight.detach())
            self.apply_to(name, local, rows if shards else None)
            self.after[name] = fingerprint(local, first_row=rows.start)
            if shards:
                split.setdefault(shards.group, (shards, []))[1].append(name)
        for shards, names in split.values():
            totals = shards.exact_total([self.after[name] for name in names])
            self.after.update({name: total & (1 << 64) - 1 for name, total in zip(names, totals)})

    def to_bytes(self) -> bytes:
        """The update as one message (see `logra.wire`). Raises ValueError if it was not applied, for it carries the weights' fingerprints after it, or not rounded."""
        from logra import wire

        return wire.encode(self)

    @classmethod
    def from_bytes(cls, message: bytes) -> "LowRankUpdate":
        """The update of a message, on the CPU. Raises `logra.sync.SyncError` for one that is damaged or no update."""
        from logra import wire

        update = wire.decode(message)
        if not isinstance(update, cls):
            raise wire.SyncError("mode", "the message holds full weights, not an update")
        return update


def _round_rows(F_dr: torch.Tensor, bits: int | None, name: str):
    """Integers and exponents with F ≈ integers · 2^exponent, each row's exponent the least that fits; F and zeros for bits=None."""
    peak_d = F_dr.abs().amax(1)
    if not torch.isfinite(peak_d * (2 * F_dr.shape[1])).all():          # a sum of r entries has to be finite too
        raise FloatingPointError(f"the update of {name} is not finite: nothing was applied")
    if bits is None:
        return F_dr, torch.zeros_like(peak_d, dtype=torch.int16)
    largest = 2 ** (bits - 1) - 1
    mantissa_d, exponent_d = torch.frexp(peak_d / largest)              # mantissa in [1/2, 1)
    exponent_d = (exponent_d - (mantissa_d == 0.5).int()).clamp(-126, 127)
    integers_dr = (F_dr / _power_of_two(exponent_d)[:, None]).round_().clamp_(-largest, largest)
    return integers_dr.to(_INTEGERS[bits]), exponent_d.to(torch.int16)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float32, exact: the exponent is put into the bits, since pow and ldexp may round."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


@contextmanager
def _full_precision():
    """TF32 and its kin would drop bits of the integers: switched off inside, the caller's settings restored after."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before):
            backend.fp32_precision = precision
