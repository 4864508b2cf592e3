"""The random projection A_rk of one weight matrix (Section 2.1), from an integer hash of (key, row, column).

No generator is involved: an entry depends on its key and its place alone, so any slice of A, in any order, on the CPU or
any GPU, has the same bits. Every kind is `entries · unit`, where the entries are exact in bfloat16 and the unit is one
float for the whole matrix; products with A can therefore be made in bfloat16 and scaled once in float32.

kind         entries                                          E[AᵀA] = I, rows
rademacher   ±1, independent (the paper's default)            nearly orthogonal
gaussian     N(0, 1) in 65,536 steps, rounded to bfloat16     nearly orthogonal
hadamard     ±1: r distinct rows of a Hadamard matrix of      exactly orthogonal
             order k whose columns carry random signs
"""

import functools
import hashlib
import math

import torch

KINDS = ("rademacher", "gaussian", "hadamard")
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_COLUMN_SIGNS, _ROW_ORDER = (1 << 31) - 1, (1 << 31) - 2      # rows of the hash that no matrix reaches


def canonical_name(name: str) -> str:
    """A module's name without the prefixes that FSDP, torch.compile, checkpointing and DDP put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def key(seed: int, update: int, name: str) -> int:
    """The key (63 bits) of one matrix at one update: a hash of the run's seed, the update's number and the module's name.

    A projection that is never refreshed has update 0. The name is made canonical first, so that wrapping changes nothing.
    """
    digest = hashlib.blake2b(f"{seed}/{update}/{canonical_name(name)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def matrix(kind, rank, k, key, rows=None, columns=None, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """The projection A_rk, [rank, k], or the given rows and columns of it (slices or 1-D integer tensors).

    Raises ValueError for an unknown kind, a rank below 1, an index outside the matrix, or a `hadamard` that does not exist
    (rank > k, or no known order k); TypeError for an index of another type.
    """
    A_rk = entries(kind, rank, k, key, rows, columns, torch.float32, device).mul_(unit(rank))
    return A_rk.to(dtype)


def unit(rank: int) -> float:
    """A_rk = entries · unit: 1/√r for every kind."""
    return 1.0 / math.sqrt(rank)


def entries(kind, rank, k, key, rows=None, columns=None, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """A_rk · √r without rounding: ±1, or normal variates that are exact in bfloat16. Arguments as for `matrix`."""
    if rank < 1 or k < 1:
        raise ValueError(f"a projection needs rank >= 1 and k >= 1, but rank is {rank} and k is {k}")
    row, _, _ = _span(rows, rank, device)
    column, start, stop = _span(columns, k, device)
    if kind == "rademacher":
        out = _rademacher(row, start, stop, key, dtype)
    elif kind == "gaussian":
        out = _gaussian(row, start, stop, key, dtype)
    elif kind == "hadamard":
        out = _hadamard(row, rank, k, start, stop, key, dtype)
    else:
        raise ValueError(f"unknown projection {kind!r}: it is one of {', '.join(KINDS)}")
    return out if columns is None else out.index_select(1, column - start)


def _span(index, size, device):
    """An index as (its elements, the first, the last + 1); a slice, None for all, or a 1-D integer tensor."""
    if index is None or isinstance(index, slice):
        span = range(size)[index or slice(None)]              # as Python reads a slice, the empty ones too
        index = torch.arange(len(span)) * span.step + span.start
    index = torch.as_tensor(index)
    if index.dim() != 1 or index.dtype == torch.bool or index.is_floating_point():
        raise TypeError(f"rows and columns are slices or 1-D integer tensors, but one is {tuple(index.shape)} of {index.dtype}")
    index = index.to(torch.int64)
    if not index.numel():
        return index.to(device), 0, 0
    first, last = int(index.min()), int(index.max())
    if first < 0 or last >= size:
        raise ValueError(f"an index of a projection lies outside 0..{size - 1}: it runs from {first} to {last}")
    return index.to(device), first, last + 1


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), in place on int64, whose products wrap everywhere."""
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _signed(0xBF58476D1CE4E5B9)
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _signed(0x94D049BB133111EB)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _words(row: torch.Tensor, first: int, last: int, key: int) -> torch.Tensor:
    """64 random bits for each of the given rows and each word number in [first, last): int64 [rows, last - first]."""
    word = torch.arange(first, last, device=row.device)
    x = (row[:, None] << 32) + word
    x *= _signed(0x9E3779B97F4A7C15)
    return _mix(_mix(x).add_(key))                            # two rounds, so that neighbouring keys share nothing


def _signs(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack int64 [n, w] to ±1 [n, 64 w]: each bit is shifted into the sign of a float that is 1."""
    if dtype == torch.bfloat16:
        parts, width, one, view = words.view(torch.int16), 16, 0x3F80, torch.bfloat16
    else:
        parts, width, one, view = words.view(torch.int32), 32, 0x3F800000, torch.float32
    bits = parts.unsqueeze(-1) << torch.arange(width - 1, -1, -1, dtype=parts.dtype, device=words.device)
    bits &= -(1 << width - 1)
    bits |= one
    return bits.view(view).flatten(1).to(dtype)


def _rademacher(row, start, stop, key, dtype):
    first = start // 64
    signs = _signs(_words(row, first, -(-stop // 64), key), dtype)
    return signs[:, start - 64 * first:stop - 64 * first].contiguous()


@functools.lru_cache(maxsize=8)
def _normal_table(device: str) -> torch.Tensor:
    """65,536 quantiles of N(0, 1), mirrored about 0, with mean square 1, in bfloat16."""
    upper = torch.special.ndtri(0.5 + (torch.arange(1 << 15, dtype=torch.float64) + 0.5) / (1 << 16))
    upper /= upper.square().mean().sqrt()
    return torch.cat([upper, -upper]).to(torch.bfloat16).to(device)


def _gaussian(row, start, stop, key, dtype):
    first = start // 4
    index = _words(row, first, -(-stop // 4), key).view(torch.int16)[:, start - 4 * first:stop - 4 * first]
    table = _normal_table(str(row.device))
    return table[(index.to(torch.int32) & 0xFFFF)].to(dtype)


def _hadamard(row, rank, k, start, stop, key, dtype):
    if rank > k:
        raise ValueError(f"a hadamard projection has at most k rows, but rank is {rank} and k is {k}")
    core = hadamard_core(k)
    m = core.shape[0]
    one = torch.tensor([_ROW_ORDER], device=row.device)
    # Distinct hashes (the mix is a bijection of the place) put the k rows into one order on every device.
    chosen = _words(one, 0, k, key)[0].argsort()[:rank][row]
    first, last = start // m, -(-stop // m)
    parity = (chosen // m)[:, None] & torch.arange(first, last, device=row.device)
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    sylvester = (1 - 2 * (parity & 1)).to(torch.int8)
    block = sylvester[:, :, None] * core.to(row.device)[chosen % m][:, None, :]
    signs = _rademacher(torch.tensor([_COLUMN_SIGNS], device=row.device), start, stop, key, dtype)
    return block.flatten(1)[:, start - m * first:stop - m * first].to(dtype) * signs


@functools.lru_cache(maxsize=32)
def hadamard_core(k: int) -> torch.Tensor:
    """The factor of order m in a Hadamard matrix of order k = 2^a · m (Sylvester ⊗ Paley), int8 ±1, m × m.

    Raises ValueError where neither of Paley's constructions over a prime field gives an order that divides k so.
    """
    odd = k
    while odd % 2 == 0:
        odd //= 2
    if odd == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    m = 4 * odd
    while k % m == 0:
        for q, copies in ((m - 1, 1), (m // 2 - 1, 2)):
            if q % 4 == (3 if copies == 1 else 1) and _prime(q):
                return _paley(q)
        m *= 2
    raise ValueError(f"no Hadamard matrix of order {k} by Sylvester's and Paley's constructions: "
                     "use projection='rademacher' for a layer with this many inputs")


def _prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, math.isqrt(q) + 1))


def _paley(q: int) -> torch.Tensor:
    """Paley's first (q ≡ 3 mod 4, order q + 1) or second (q ≡ 1 mod 4, order 2q + 2) Hadamard matrix, q prime."""
    character = torch.full((q,), -1, dtype=torch.int8)
    character[(torch.arange(q) ** 2) % q] = 1
    character[0] = 0
    place = torch.arange(q)
    C = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    C[0, 1:] = 1
    C[1:, 0] = -1 if q % 4 == 3 else 1
    C[1:, 1:] = character[(place[:, None] - place) % q]
    eye = torch.eye(q + 1, dtype=torch.int8)
    if q % 4 == 3:
        return C + eye
    return (torch.kron(C, torch.tensor([[1, 1], [1, -1]], dtype=torch.int8))
            + torch.kron(eye, torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)))
