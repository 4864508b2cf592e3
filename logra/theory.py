"""Closed forms of Section 2.1: how well a sketch reconstructs a gradient, and what it costs. Shapes decide; no model is needed.

Notation: G is d × k, A is rank × k with E[AᵀA] = I, S = G Aᵀ (Eq. 2), Ĝ = S A (Eq. 3). ⟨G, Ĝ⟩ = ‖S‖² always, because
⟨G, G AᵀA⟩ = tr(A GᵀG Aᵀ). The derivations are in notebooks/derivations/01_sketches.ipynb.
"""

import math

from logra.projection import KINDS


def variance(kind: str, rank: int, k: int) -> float:
    """The constant c in E‖Ĝ − G‖² = c ‖G‖², equally E‖Ĝ‖² = (1 + c) ‖G‖². Exact, for every G with k columns (Eq. 3).

    kind         c              why
    rademacher   (k − 1)/rank   the diagonal of AᵀA is 1 without error; each entry off it has variance 1/rank
    gaussian     (k + 1)/rank   the diagonal has an error too, of variance 2/rank
    hadamard     k/rank − 1     the rows of A are orthogonal, so Ĝ is G projected and stretched by k/rank

    Raises ValueError for an unknown kind, a rank or k below 1, or a hadamard with rank > k.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown projection {kind!r}: it is one of {', '.join(KINDS)}")
    if rank < 1 or k < 1:
        raise ValueError(f"rank and k have to be at least 1, but rank is {rank} and k is {k}")
    if kind == "rademacher":
        return (k - 1) / rank
    if kind == "gaussian":
        return (k + 1) / rank
    if rank > k:
        raise ValueError(f"a hadamard projection has at most k rows, but rank is {rank} and k is {k}")
    return k / rank - 1


def expected_cosine(kind: str, rank: int, k: int) -> float:
    """cos(G, Ĝ) of Appendix D.3 as E⟨G, Ĝ⟩ / (‖G‖ √E‖Ĝ‖²) = 1/√(1 + c), with `variance`'s c. Neither d nor G enters.

    That is √(r/(r+k−1)) for signs, √(r/(r+k+1)) for Gaussians and √(r/k) for orthogonal rows. It is a ratio of means, not the
    mean of the ratio: `cosine_shortfall` says by how much less that is. Raises as `variance` does.
    """
    return 1.0 / math.sqrt(1.0 + variance(kind, rank, k))


def cosine_shortfall(kind: str, rank: int, effective_rank: float, diagonal: float = 0.0) -> float:
    """The relative amount by which the mean of cos(G, Ĝ) lies below `expected_cosine`: Var(X)/8 with X = ‖S‖²/‖G‖², for rank ≪ k.

    effective_rank   e = ‖G‖⁴ / ‖GᵀG‖²: 1 for one outer product, min(d, k) for equal singular values
    diagonal         Σⱼ (‖column j of G‖² / ‖G‖²)²: 1/k for equal columns, 1 when one column holds all

    With k ≫ rank, A Aᵀ ≈ (k/rank) I, so cos ≈ √(rank/k) √X, and E√X ≈ 1 − Var(X)/8. Var(X) = (2/rank)(1/e) for Gaussian entries
    and (2/rank)(1/e − diagonal) for signs, which a single column cannot surprise; rows of a Hadamard matrix do as signs do.
    It is at most 1/(4 · rank): shapes decide the cosine, and this is all that the gradient itself adds.
    """
    variance(kind, rank, max(rank, 1))                    # the same checks
    return (1.0 / effective_rank - (0.0 if kind == "gaussian" else diagonal)) / (4.0 * rank)


def step_flops(tokens: int, d: int, k: int, rank: int | None = None) -> int:
    """Multiply-adds ×2 of one matrix's forward and backward pass over some tokens; rank None is the dense gradient.

    Dense: 2tdk each for the output, the input's gradient and the weight's gradient, 6tdk in all. LoGRA: the first two, then the
    projected input P = X Aᵀ (2trk) and S += dYᵀ P (2trd): 4tdk + 2tr(d + k). What a step costs once, whatever the
    number of tokens (the optimizer, and adding U A to the weight), is in neither.
    """
    return 6 * tokens * d * k if rank is None else 4 * tokens * d * k + 2 * tokens * rank * (d + k)


def flops_ratio(d: int, k: int, rank: int) -> float:
    """LoGRA's step_flops over the dense one, 2/3 + rank (1/d + 1/k)/3. It is below 1 when rank < dk/(d + k)."""
    return step_flops(1, d, k, rank) / step_flops(1, d, k)


def accumulator_bytes(d: int, k: int, rank: int | None = None, element: int = 4) -> int:
    """Bytes of what one matrix's gradient is added up in (Section 2.2): G with d × k elements, or S with d × rank.

    `element` is the bytes of one, 4 for fp32. For d = k = 4096 and rank 64 these are the paper's 64 MiB and 1 MiB.
    """
    return element * d * (k if rank is None else rank)
