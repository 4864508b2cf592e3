"""Checks of the paper's mathematics on the code that implements it: shapes and bytes in closed form, identities on small matrices
and a small softmax, the KL's behaviour on a small language model. Seconds in all; every draw is seeded.

Each function is named by a row of data/paper/claims.csv and returns a number in the claim's unit, or a `Finding`.
"""
from __future__ import annotations

import functools
import json
import logging
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import logra
from logra import projection, theory
from logra.paper.printed import Finding, parameters, table, text
from logra.rl import data

GIB, MIB = 2**30, 2**20
CAPACITY_GIB = 80e9 / GIB           # what an H100 of "80 GB" holds at the least


# Bytes and counts

def weights_gb(model: str) -> float:
    """BF16 weights, from the model's true shapes, in 10⁹ bytes."""
    return 2 * parameters(model) / 1e9


def moments_gb(model: str) -> float:
    """Adam's two moments in fp32, in 10⁹ bytes."""
    return 8 * parameters(model) / 1e9


def states_over_weights() -> Finding:
    """fp32 gradient and moments over BF16 weights."""
    return Finding(f"moments {8 / 2:g} times, with the gradient {12 / 2:g} times", True)


def accumulator_mib(sketched: bool) -> float:
    """The accumulator of Section 2.2's example, with G or with S."""
    d = int(text("example_d"))
    return theory.accumulator_bytes(d, d, int(text("example_rank")) if sketched else None) / MIB


def adam_at_27b() -> Finding:
    """A GPU's share of the 27B model's fp32 weights, gradients and moments (projections alone) over four GPUs: a lower bound."""
    weights, gradients = 4 * parameters("27B") / 4 / GIB, 4 * parameters("27B", projections_only=True) / 4 / GIB
    before, after = weights + gradients, weights + 3 * gradients
    return Finding(f"{before:.1f} GiB before Adam's first step, {after:.1f} GiB with its moments; the GPU has {CAPACITY_GIB:.1f}", before < CAPACITY_GIB < after, "fp32 storage; activations and buffers come on top")


def sketched_matrices(rank: int) -> float:
    """How many matrices `logra.attach` takes in a model with Qwen2.5-Math-1.5B's shapes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936))
    return float(len(logra.attach(model, rank)))


def rank_below_shapes() -> Finding:
    """2.1's r ≪ min(d, k) at the main runs' rank 256."""
    shapes = table("shapes").query("model == '1.5B' and role == 'projection'")
    flat = shapes[shapes[["d", "k"]].min(axis=1) <= text("rank")]["count"].sum()
    return Finding(f"r = min(d, k) in {flat} of {shapes['count'].sum()} matrices at 1.5B", bool(flat == 0), "k_proj and v_proj have d = 256: their sketch is as tall as it is wide, and 7B's have d = 512")


def rowadam_state() -> Finding:
    """Second-moment numbers of RowAdam and of Adam on the 1.5B model."""
    shapes = table("shapes").query("model == '1.5B' and role == 'projection'")
    rows, weights = int((shapes["count"] * shapes["d"]).sum()), parameters("1.5B", projections_only=True)
    optimizer, sketches = _layer()[2:]
    optimizer.step()
    held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.numel() > 1)
    return Finding(f"{held} numbers for a matrix with d = {sketches['layer'].d}; at 1.5B {rows:,} against Adam's {weights:,}", held == sketches["layer"].d)


def unique_prompts() -> float:
    """Prompts that `rl.data.dapo` (C.1) keeps of a made release in which every third row repeats an earlier one."""
    log = logging.getLogger(data.__name__)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "release.jsonl"
        path.write_text("".join(json.dumps({"problem": f"{n - (n % 3 == 1)}", "answer": "0"}) + "\n" for n in range(12000)))
        log.disabled = True                                 # that its hash is not the release's goes without saying
        try:
            return float(len({problem.prompt for problem in data.dapo(str(path))}))
        finally:
            log.disabled = False


# Sketches and updates, on one layer

def _layer(optimizer=logra.RowAdam, d: int = 48, k: int = 80, rank: int = 8, **settings):
    """A sketched layer after four micro-batches: the model, what it saw [(X_tk, dY_td)], the optimizer, the sketches."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(k, d)})
    sketches = logra.attach(model, rank, seed=1, modules=["layer"], **settings)
    made, seen = optimizer(sketches, relative_step=6e-5), []
    for _ in range(4):
        X_tk, dY_td = torch.randn(32, k), torch.randn(32, d) * torch.logspace(-2, 1, d)      # rows of unlike size
        model["layer"](X_tk).backward(dY_td)
        seen.append((X_tk, dY_td))
    return model, seen, made, sketches


def sketch_error() -> float:
    """‖S − G Aᵀ‖ / ‖G Aᵀ‖ with S from four micro-batches and G in float64."""
    _, seen, _, sketches = _layer()
    G_dk = sum(dY.double().T @ X.double() for X, dY in seen)
    wanted = G_dk @ sketches["layer"].A_rk().double().T
    return float((sketches["layer"].S_dr - wanted).norm() / wanted.norm())


def forward_unchanged() -> Finding:
    torch.manual_seed(0)
    layer, X = nn.Linear(80, 48), torch.randn(32, 80)
    model = nn.ModuleDict({"layer": layer})
    before = layer(X)
    logra.attach(model, 8, modules=["layer"])
    return Finding("the same bits", bool(torch.equal(before, model["layer"](X))))


def no_gradient_matrix() -> Finding:
    """Tensors with d × k elements that a backward makes."""
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            made.extend(t for t in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(t) and t.numel() >= 48 * 80)
            return out

    model, *_ = _layer()
    y = model["layer"](torch.randn(4, 80, requires_grad=True))
    with Watch():
        y.sum().backward()
    weight = {t.untyped_storage().data_ptr() for t in (model["layer"].weight,)}
    new = [t for t in made if t.untyped_storage().data_ptr() not in weight]
    return Finding(f"{len(new)} tensors of d × k elements; weight.grad is {model['layer'].weight.grad}", not new and model["layer"].weight.grad is None)


def signs() -> Finding:
    """The default projection's entries, against independent signs times 1/√r."""
    A_rk = projection.matrix("rademacher", 64, 4096, projection.key(1, 1, "layer"))
    values = {float(v) for v in A_rk.unique()}
    products = (A_rk[:, :512].T.double() @ A_rk[:, :512].double()).fill_diagonal_(0.0)
    spread = float(products.std()) * math.sqrt(64)          # 1 for independent signs
    return Finding(f"entries {', '.join(f'{v:+g}' for v in sorted(values))}; mean {float(A_rk.mean()) * 8:+.4f}; columns' products scatter as {spread:.3f} of independent signs'",
                   values == {-0.125, 0.125} and abs(float(A_rk.mean())) * 8 < 4 / math.sqrt(64 * 4096) and abs(spread - 1) < 0.02)


def ranks_of_updates() -> Finding:
    """Rank of one update, and of the sum of three with refreshed projections, at r = 8."""
    model, seen, optimizer, sketches = _layer()
    total, single = 0.0, 0
    for number in range(3):
        update = optimizer.step().dense("layer").double()
        single, total = max(single, int(torch.linalg.matrix_rank(update))), total + update
        X, dY = seen[number]
        optimizer.zero_grad()
        model["layer"](X).backward(dY)
    return Finding(f"one update: rank {single}; the sum of three: rank {int(torch.linalg.matrix_rank(total))}", single <= 8 < int(torch.linalg.matrix_rank(total)))


def payload() -> Finding:
    """Numbers in an update against d·r and d·k, for d = k = 512, r = 16."""
    *_, optimizer, _ = _layer(d=512, k=512, rank=16)
    matrix = optimizer.step().matrices["layer"]
    numbers = matrix.integers_dr.numel() + matrix.exponent_d.numel() + 1
    return Finding(f"{numbers:,} numbers (d·r = {512 * 16:,}, d scales, a key) in place of {512 * 512:,}", numbers == 512 * 16 + 512 + 1)


def rollout_regenerates() -> Finding:
    """A second copy of the weights, given the update alone."""
    model, _, optimizer, _ = _layer()
    rollout = model["layer"].weight.detach().clone()
    update = optimizer.step(0.7)
    update.apply_to("layer", rollout)
    return Finding("the same bits", bool(torch.equal(rollout, model["layer"].weight)))


def basic_state() -> float:
    """Numbers of optimizer state that SketchSGD keeps."""
    *_, optimizer, _ = _layer(logra.SketchSGD)
    optimizer.step()
    return float(sum(v.numel() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)))


def row_adam() -> Finding:
    """Appendix B's properties of U against S."""
    model, seen, optimizer, sketches = _layer()
    S, U = sketches["layer"].S_dr.double(), optimizer.propose()["layer"].double()
    norm = float(U.norm() / S.norm())
    multiplier, size = (U.norm(dim=1) / S.norm(dim=1)), S.norm(dim=1)
    falls = bool((multiplier[size.argsort()].diff() < 0).all())
    optimizer.step()
    v, steps = (optimizer.state[sketches["layer"].weight][key] for key in ("v_d", "step"))
    optimizer.zero_grad()
    zero = optimizer.propose()["layer"].abs().max()
    kept = bool(torch.equal(optimizer.state[sketches["layer"].weight]["v_d"], v)) and steps == 1
    return Finding(f"‖U‖/‖S‖ = {norm:.7f}; larger rows get smaller multipliers: {falls}; zero sketch: largest entry {float(zero):g}; state kept when A is refreshed: {kept}",
                   abs(norm - 1) < 1e-6 and falls and float(zero) == 0 and kept)


def _row_adam(sizes_d: torch.Tensor, updates: int):
    """For each update, a sketch with rows of these sizes and the U that RowAdam proposed of it, both float64 [d, 8]."""
    *_, optimizer, sketches = _layer(d=len(sizes_d))
    draws, seen = torch.Generator().manual_seed(2), []
    for _ in range(updates):
        sketches["layer"].S_dr.copy_(torch.randn(len(sizes_d), 8, generator=draws) * sizes_d[:, None])
        seen.append((sketches["layer"].S_dr.double(), optimizer.propose()["layer"].double()))
        optimizer.step()
    return seen


def row_adam_equation() -> float:
    """Largest difference of U from Eq. 15 written out, over three updates, relative to U's largest entry."""
    v_d, worst = torch.zeros(12, dtype=torch.float64), 0.0
    for t, (S, U) in enumerate(_row_adam(torch.logspace(-3, 2, 12), updates=3), 1):
        v_d = text("beta2") * v_d + (1 - text("beta2")) * S.square().mean(1)
        root_d = (v_d / (1 - text("beta2") ** t)).sqrt()
        wanted = S / (root_d + text("epsilon") * root_d.mean())[:, None]
        worst = max(worst, float((U - wanted * (S.norm() / wanted.norm())).abs().max() / U.abs().max()))
    return worst


def epsilon() -> float:
    """ε_t over the mean of √v̂, read off a row so small that ε alone divides it."""
    [(S, U)] = _row_adam(torch.tensor([1.0] * 11 + [1e-12]), updates=1)
    multiplier_d, root_d = U.norm(dim=1) / S.norm(dim=1), S.square().mean(1).sqrt()
    return float((multiplier_d[0] * root_d[0] / multiplier_d[-1] - root_d[-1]) / root_d.mean())


def direction_kept() -> float:
    """1 − cosine between a step at α = 0.31 and the nominal proposal −ηUA; the factor is rounded to 8 bits."""
    *_, optimizer, sketches = _layer()
    proposal, A = optimizer.propose(), sketches["layer"].A_rk().double()
    nominal = -proposal.eta * proposal["layer"].double() @ A
    step = optimizer.step(0.31).dense("layer").double()
    return 1 - float((nominal * step).sum() / nominal.norm() / step.norm())


# Reconstruction (Figure 5): closed forms over the seven matrices of a layer of the 1.5B model

def cosine(rank: int, kind: str = "rademacher") -> float:
    shapes = table("shapes").query("model == '1.5B' and role == 'projection'")
    return float(np.mean([theory.expected_cosine(kind, rank, k) for k in shapes["k"]]))


def gaussian_drop() -> Finding:
    drops = {rank: cosine(rank) - cosine(rank, "gaussian") for rank in (64, 256)}
    return Finding(", ".join(f"{drop:.1e} at rank {rank}" for rank, drop in drops.items()), all(0 < drop < text("cosine_gaussian_drop") for drop in drops.values()))


def rank_over_kind() -> Finding:
    by_rank, by_kind = cosine(256) - cosine(4), max(cosine(r) - cosine(r, "gaussian") for r in (4, 16, 64, 256))
    return Finding(f"{by_rank:.3f} by rank, {by_kind:.1e} by distribution, 0 by refreshing in the mean", by_rank > 100 * by_kind)


# Predicted KL (Section 2.3, Appendix A)

def _softmax_kl():
    """K_s(a) of Eq. 8 for logits that move along a curve, its rate ż, p, and T: 50 tokens, float64."""
    draws = torch.Generator().manual_seed(0)
    z, rate, bend = (torch.randn(50, generator=draws, dtype=torch.float64) for _ in range(3))
    T = 0.7

    def K(a):
        p = torch.log_softmax(z / T, 0)
        return (p.exp() * (p - torch.log_softmax((z + a * rate + a**2 * bend) / T, 0))).sum()

    return K, rate, torch.softmax(z / T, 0), T


def _derivatives():
    K, *_ = _softmax_kl()
    a = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(K(a), a, create_graph=True)
    (second,) = torch.autograd.grad(first, a)
    return float(first.detach()), float(second.detach())


def slope_at_zero() -> float:
    """K′(0) (Eq. 9), by automatic differentiation."""
    return abs(_derivatives()[0])


def curvature_error() -> float:
    """Relative difference of K″(0) and Var[ż]/T² (Eq. 10, 13)."""
    _, rate, p, T = _softmax_kl()
    variance = float((p * (rate - (p * rate).sum()) ** 2).sum()) / T**2
    return abs(_derivatives()[1] / variance - 1)


def remainder_order() -> float:
    """The power of α with which K(α) − α² K″(0)/2 vanishes (Eq. 11)."""
    K, second = _softmax_kl()[0], _derivatives()[1]
    errors = [abs(float(K(torch.tensor(a, dtype=torch.float64))) - a**2 * second / 2) for a in (1e-2, 1e-3)]
    return math.log10(errors[0] / errors[1])


def shift_has_no_curvature() -> float:
    """Var[ż]/T² when every score changes at the same rate."""
    _, _, p, T = _softmax_kl()
    rate = torch.full_like(p, 1.7)
    return float((p * (rate - (p * rate).sum()) ** 2).sum()) / T**2


@functools.cache
def _language_model():
    """A two-layer Qwen2 with random weights after one backward: model, optimizer, contexts. Not to be stepped."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=97, initializer_range=0.2)
    model = Qwen2ForCausalLM(config).eval()
    sketches = logra.attach(model, 8, seed=1)
    ids = torch.randint(0, 97, (8, 24))
    model(input_ids=ids, labels=ids).loss.backward()
    responses = torch.zeros_like(ids, dtype=torch.bool)
    responses[:, 8:] = True
    return model, logra.RowAdam(sketches, relative_step=1e-2), logra.Contexts.of_responses(ids, torch.ones_like(ids), responses)


def predicted_against_realised() -> float:
    """Realised KL over α²q (Eq. 5) on a small language model, at a predicted KL of the paper's first budget."""
    model, optimizer, contexts = _language_model()
    proposal = optimizer.propose()
    q = logra.predicted_kl(model, proposal, contexts)
    alpha = math.sqrt(text("budget_start") / q)
    return logra.realised_kl(model, proposal, contexts, alpha) / (alpha**2 * q)


def halving() -> float:
    """Realised KL at α over that at α/2, on a small language model."""
    model, optimizer, contexts = _language_model()
    proposal = optimizer.propose()
    alpha = math.sqrt(text("budget_start") / logra.predicted_kl(model, proposal, contexts))
    return logra.realised_kl(model, proposal, contexts, alpha) / logra.realised_kl(model, proposal, contexts, alpha / 2)


def probe_agrees() -> float:
    """q by finite differences (3.3) over q by forward-mode AD (Eq. 6), for a proposal of the first budget's size."""
    model, optimizer, contexts = _language_model()
    scale = math.sqrt(text("budget_start") / logra.predicted_kl(model, optimizer.propose(), contexts))
    optimizer.param_groups[0]["lr"] *= scale
    small = optimizer.propose()
    return logra.predicted_kl(model, small, contexts, "finite_difference") / logra.predicted_kl(model, small, contexts)


def scale(q_over_budget: float) -> float:
    """α of Eq. 7 for this q/δ, at α_max = 3."""
    return logra.step_scale(q_over_budget * text("budget_start"), text("budget_start"), 3.0)


def scale_is_capped() -> Finding:
    values = [logra.step_scale(text("budget_start") * 10.0**-n, text("budget_start"), 3.0) for n in range(1, 13)]
    return Finding(f"α ≤ {max(values):g} for q down to 1e-12 δ, at α_max = 3", max(values) == 3.0)


def budget(update: int) -> float:
    """δ_u of Eq. 16 with the main runs' values."""
    return logra.CosineBudget(text("budget_start"), text("budget_end"), int(text("horizon")))(update)


def budget_at_200() -> Finding:
    """Where the 27B runs stop on a schedule that is not shortened."""
    value = budget(int(text("updates_27b")))
    return Finding(f"δ_200 = {value:.2e}, {value / text('budget_end'):.1f} times δ_min", value > text("budget_end"))


def _observed(mismatch: float, valid: bool = True) -> logra.KLControl:
    model, optimizer, contexts = _language_model()
    control = logra.KLControl(logra.ConstantBudget(text("budget_start")), mismatch=True)
    mask = torch.full((2, 4), valid)
    control.observe(torch.full((2, 4), mismatch), torch.zeros(2, 4), mask)
    control.scale(model, optimizer.propose(), contexts)
    return control


def mismatch_floor() -> float:
    """δ_eff/δ of Eq. 17 under a mismatch far above the budget."""
    return _observed(10.0).budget_now / text("budget_start")


def mismatch_weight() -> float:
    """κ after one batch whose mean mismatch is 1."""
    return _observed(1.0).kappa


def mismatch_clamped() -> Finding:
    below, absent = _observed(-1.0), _observed(1.0, valid=False)
    return Finding(f"mean mismatch −1: κ = {below.kappa:g}; no valid measurement: δ_eff/δ = {absent.budget_now / text('budget_start'):g}", below.kappa == 0 and absent.budget_now == text("budget_start"))
