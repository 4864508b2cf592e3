"""Section 2.1's closed forms against simulation with the real projections, and the costs that the paper prints."""

import pytest
import torch

from logra import projection, theory

KINDS = projection.KINDS
DRAWS = 400


def draws(kind, rank, k, n=DRAWS):
    """n projections, float64 [n, rank, k]."""
    return torch.stack([projection.matrix(kind, rank, k, projection.key(seed, 0, "test"), dtype=torch.float64) for seed in range(n)])


def gradient(d=24, k=96):
    generator = torch.Generator().manual_seed(5)
    scales_k = torch.linspace(0.2, 2.0, k, dtype=torch.float64)          # columns of unequal size, as activations make them
    return torch.randn(d, k, generator=generator, dtype=torch.float64) * scales_k


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_is_unbiased_and_its_reconstruction_has_the_stated_variance_and_rank(kind):
    rank, G_dk = 6, gradient()
    A_nrk = draws(kind, rank, G_dk.shape[1])
    Ghat_ndk = G_dk @ A_nrk.mT @ A_nrk
    relative_n = (Ghat_ndk - G_dk).square().sum((1, 2)) / G_dk.square().sum()
    c = theory.variance(kind, rank, G_dk.shape[1])
    assert abs(relative_n.mean() - c) < 4 * relative_n.std() / DRAWS**0.5
    bias = (Ghat_ndk.mean(0) - G_dk).norm() / G_dk.norm()
    assert bias < 1.5 * (c / DRAWS) ** 0.5                                  # √(c/n) is what chance alone leaves
    assert torch.linalg.matrix_rank(Ghat_ndk[0]) == rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [4, 32])
def test_the_expected_cosine_and_the_gradients_own_share_of_it_agree_with_simulation(kind, rank):
    k = 512
    outer = torch.ones(4, 1, dtype=torch.float64) @ torch.randn(1, k, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    A_nrk = draws(kind, rank, k, n := 8000 // rank)
    Ghat_ndk = outer @ A_nrk.mT @ A_nrk
    cosine_n = (outer * Ghat_ndk).sum((1, 2)) / (outer.norm() * Ghat_ndk.flatten(1).norm(dim=1))
    error = cosine_n.std() / n**0.5
    form = theory.expected_cosine(kind, rank, k)
    diagonal = ((outer.square().sum(0) / outer.square().sum()) ** 2).sum().item()
    wanted = form * (1 - theory.cosine_shortfall(kind, rank, 1.0, diagonal))
    assert abs(cosine_n.mean() - wanted) < 4 * error + 0.05 * (form - wanted)
    if rank == 4:
        assert form - cosine_n.mean() > 4 * error                          # one outer product: the shortfall is really there


@pytest.mark.parametrize("kind, k", [("rademacher", 13), ("gaussian", 11), ("hadamard", 16)])
def test_the_cosine_is_one_half_where_four_rows_say_so_by_hand(kind, k):
    assert theory.variance(kind, 4, k) == 3.0 and theory.expected_cosine(kind, 4, k) == 0.5


def test_orthogonal_rows_never_do_worse_and_are_exact_at_full_rank():
    for rank in range(1, 65):
        signs, rows = theory.expected_cosine("rademacher", rank, 64), theory.expected_cosine("hadamard", rank, 64)
        assert rows >= signs and (rows > signs or rank == 1)
    assert theory.expected_cosine("hadamard", 64, 64) == 1.0


def test_the_papers_storage_example_and_where_the_flops_break_even():
    assert theory.accumulator_bytes(4096, 4096) == 64 * 2**20
    assert theory.accumulator_bytes(4096, 4096, rank=64) == 2**20
    assert theory.step_flops(10, 30, 20) == 6 * 10 * 30 * 20
    assert theory.flops_ratio(4096, 4096, 64) == pytest.approx(2 / 3 + 64 * 2 / 4096 / 3)
    assert theory.flops_ratio(600, 600, 300) == pytest.approx(1.0)         # rank = dk / (d + k)


@pytest.mark.parametrize("kind, rank, k, message", [
    ("cauchy", 4, 16, "cauchy"), ("rademacher", 0, 16, "rank is 0"), ("hadamard", 17, 16, "rank is 17 and k is 16"),
])  # fmt: skip
def test_what_has_no_closed_form_is_refused_with_the_reason(kind, rank, k, message):
    for function in (theory.variance, theory.expected_cosine):
        with pytest.raises(ValueError, match=message):
            function(kind, rank, k)
