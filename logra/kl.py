"""Predicted-KL step control (Section 2.3, Appendix A): q(D) of a proposal, the realised KL, budgets and the scale α.

The probe evaluates W + a·D without forming D: y = x Wᵀ + a · (x Aᵀ)(−ηU)ᵀ. With `a` a dual number (0, tangent 1) the
tangents of the logits are ż of Eq. 6 and the primal forward is unchanged to the bit; with `a` = ±1 the same forward gives
finite differences. Hidden states are kept, logits are made for a few tokens at a time: no [tokens, vocabulary] tensor.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra.attention import BlockwiseAttention
from logra.linear import attached
from logra.logprobs import linear_head, wide
from logra.projection import unit
from logra.update import LowRankUpdate

_CHUNK = 64                                                 # tokens whose logits exist at a time
_LINEAR_ATTENTION = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")   # in transformers' modules


@dataclass(frozen=True)
class Contexts:
    """The predictions that a probe examines (the set 𝒫 of Eq. 5).

    input_ids, attention_mask: int64 [b, t], right-padded. predictions: bool [b, t], True where the model's output at that
    place predicted a generated token: the place before each one.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    predictions: torch.Tensor

    @classmethod
    def of_responses(cls, input_ids, attention_mask, response_mask) -> "Contexts":
        """From a mask of the generated tokens themselves, [b, t]: it is shifted to the places that predict them."""
        predictions = torch.zeros_like(response_mask, dtype=torch.bool)
        predictions[:, :-1] = response_mask[:, 1:].bool()
        return cls(input_ids, attention_mask, predictions)

    def beginning(self, tokens: int | None) -> "Contexts":
        """Their first `tokens` tokens, and the predictions made there; None: all. It bounds what a probe of long responses holds, and what is found
        then stands for the beginnings of responses alone."""
        return self if tokens is None else Contexts(*(x[:, :tokens] for x in (self.input_ids, self.attention_mask, self.predictions)))

    def split(self, rows: int | None, every: bool = False) -> Iterator["Contexts"]:
        """A few responses at a time, cut to their longest; None: all, as they are. Those without predictions are left out, unless `every`."""
        if rows is None or rows >= len(self.input_ids):
            yield self
            return
        for start in range(0, len(self.input_ids), rows):
            mask = self.attention_mask[start:start + rows]
            length = max(1, int(mask.sum(1).max()))
            part = Contexts(*(x[start:start + rows, :length] for x in (self.input_ids, self.attention_mask, self.predictions)))
            if every or part.predictions.any():
                yield part


def predicted_kl(model, proposal, contexts: Contexts, method: str = "jvp", temperature: float = 1.0, micro_batch: int | None = None) -> float:
    """q(D) of Eq. 6, in nats a prediction: α²q(D) approximates the mean KL between the policies before and after αD.

    proposal: what `optimizer.propose()` returned, or a LowRankUpdate. method: "jvp" (forward-mode AD) or "finite_difference"
    (two forwards at ±D, and two at less if D is large; any attention; it needs a float32 forward, since in bfloat16 a small step is
    lost in rounding). micro_batch: responses in a forward; None for all together. The value is the mean over all predictions either way,
    and no response is cut (unless by `Contexts.beginning`): a sample of whole responses, chosen before they were known (the batch's first),
    stands for the batch. The model runs in eval mode and is restored, also after an exception.
    Over row shards or replicas (`Sketches.shards`, `.replicas`) each rank examines contexts of its own, and the mean is over those of all
    ranks, the same number on each; where FSDP needs every rank's forwards in step, all give as many responses, some of them perhaps without
    a prediction.
    Raises ValueError for no predictions, left padding, a temperature that is not positive, or an unknown method.
    """
    factors = _Factors(model, proposal)
    _check(contexts, temperature, factors.shards)
    if method == "jvp":
        return _mean_variance(_dual_logits(model, contexts, factors, micro_batch), contexts, temperature, factors.shards)
    if method != "finite_difference":
        raise ValueError(f"unknown method {method!r}: it is 'jvp' or 'finite_difference'")
    step = 1.0
    q = _mean_variance(_logit_differences(model, contexts, factors, step, micro_batch), contexts, temperature, factors.shards)
    while 1e-4 < step ** 2 * q < math.inf:                  # the differences left the quadratic's range: again, with a step that does not
        step = math.sqrt(1e-5 / q)
        q = _mean_variance(_logit_differences(model, contexts, factors, step, micro_batch), contexts, temperature, factors.shards)
    return q


def _dual_logits(model, contexts, factors, micro_batch):
    """(logits, their rates along D), a few tokens at a time, by one forward with dual numbers for each micro-batch."""
    for part in contexts.split(micro_batch, factors.shards is not None):
        device = part.input_ids.device
        with _evaluating(model), _differentiable_attention(model), forward_ad.dual_level():
            with warnings.catch_warnings():                 # torch's first dual number uses its own deprecated torch.jit.script
                warnings.simplefilter("ignore", DeprecationWarning)
                a = forward_ad.make_dual(torch.zeros((), device=device), torch.ones((), device=device))
            h, logits, rates = _hidden(model, part, factors, a)
            h, h_dot = forward_ad.unpack_dual(h)
        h_dot = torch.zeros_like(h) if h_dot is None else h_dot
        yield from ((logits(h[i:i + _CHUNK]), rates(h_dot[i:i + _CHUNK])) for i in range(0, len(h), _CHUNK))


def _logit_differences(model, contexts, factors, step, micro_batch):
    """The same from two forwards at ±step · D: central differences, of second order in the step."""
    for part in contexts.split(micro_batch, factors.shards is not None):
        with _evaluating(model):
            plus, logits, _ = _hidden(model, part, factors, step)
            minus, _, _ = _hidden(model, part, factors, -step)
        yield from (_mean_and_rate(logits(plus[i:i + _CHUNK]), logits(minus[i:i + _CHUNK]), step) for i in range(0, len(plus), _CHUNK))


def _mean_and_rate(up, down, step):
    """((up + down) / 2, (up − down) / 2·step), the latter in place of up."""
    mean = (up + down).div_(2)
    return mean, up.sub_(down).div_(2 * step)


def _mean_variance(pairs, contexts, temperature, shards) -> float:
    """Eq. 6 from (logits, rates)."""
    total = 0.0
    with torch.no_grad():
        for z_nv, rate_nv in pairs:
            p_nv = torch.softmax(z_nv if temperature == 1 else z_nv / temperature, -1)
            del z_nv
            rate_nv.sub_((p_nv * rate_nv).sum(-1, keepdim=True))
            total += float(rate_nv.square_().mul_(p_nv).sum(-1).double().sum())
            del rate_nv, p_nv
    total, count = _over_ranks(total, contexts, shards)
    return total / (2 * count * temperature ** 2)


def _over_ranks(total: float, contexts, shards) -> tuple[float, int]:
    """(A sum over predictions, their number), of all ranks where there are several."""
    count = int(contexts.predictions.sum())
    if shards is None:
        return total, count
    total, count = shards.total([total, count])
    return total, int(count)


def realised_kl(model, proposal, contexts: Contexts, alpha: float = 1.0, temperature: float = 1.0, applied: bool = False,
                micro_batch: int | None = None) -> float:
    """The mean KL(π_θ ‖ π_θ+αD) of Eq. 5 itself, over the full vocabulary, in nats a prediction.

    applied: the weights contain αD already, so that the policy before is found by taking it away again. The rest as for `predicted_kl`.
    """
    factors, total = _Factors(model, proposal), 0.0
    _check(contexts, temperature, factors.shards)
    for part in contexts.split(micro_batch, factors.shards is not None):
        with _evaluating(model):
            before, logits, _ = _hidden(model, part, factors, -alpha if applied else 0.0)
            after, _, _ = _hidden(model, part, factors, 0.0 if applied else alpha)
            for i in range(0, len(before), _CHUNK):
                log_p = torch.log_softmax(logits(before[i:i + _CHUNK]).double() / temperature, -1)
                log_q = torch.log_softmax(logits(after[i:i + _CHUNK]).double() / temperature, -1)
                total += float((log_p.exp() * (log_p - log_q)).sum())
    total, count = _over_ranks(total, contexts, factors.shards)
    return total / count


def step_scale(q: float, budget: float, alpha_max: float) -> float:
    """α = min(α_max, √(δ/q)) (Eq. 7); 1 for q = 0, where nothing is known to limit the step.

    Raises FloatingPointError for a q that is NaN, infinite or negative, ValueError for a budget or α_max that is not positive.
    """
    if not (budget > 0 and alpha_max > 0):
        raise ValueError(f"budget and alpha_max must be positive, but they are {budget} and {alpha_max}")
    if not math.isfinite(q) or q < 0:
        raise FloatingPointError(f"the predicted KL is {q}: no step can be scaled by it; skip the update and look at the proposal")
    return min(alpha_max, math.sqrt(budget / q) if q > 0 else 1.0)


@dataclass(frozen=True)
class ConstantBudget:
    """δ_u = delta, in nats a prediction."""

    delta: float

    def __call__(self, update: int) -> float:
        return self.delta


@dataclass(frozen=True)
class CosineBudget:
    """δ_u from `start` at update 1 to `end` at update `updates`, along half a cosine (Eq. 16); `end` from there on."""

    start: float
    end: float
    updates: int

    def __call__(self, update: int) -> float:
        if self.updates < 2 or update >= self.updates:
            return self.end
        return self.end + (self.start - self.end) / 2 * (1 + math.cos(math.pi * (update - 1) / (self.updates - 1)))


class KLControl:
    """Chooses α for each proposal, and remembers what it was chosen from.

    budget: a function of the update's number, from 1. alpha_max: the limit of Eq. 7. mismatch: subtract κ (Eq. 17).
    method, temperature, micro_batch: as for `predicted_kl`. After `scale`: `q`, `budget_now` (δ_eff), `kappa`, `alpha`.
    """

    def __init__(self, budget, alpha_max: float = 3.0, mismatch: bool = False, method: str = "jvp", temperature: float = 1.0,
                 micro_batch: int | None = None):
        self.budget, self.alpha_max, self.mismatch, self.method, self.temperature = budget, alpha_max, mismatch, method, temperature
        self.micro_batch = micro_batch
        self.update, self.kappa = 1, 0.0
        self.q = self.alpha = self.budget_now = math.nan
        self._measured = False

    def observe(self, rollout_logprobs, trainer_logprobs, mask) -> None:
        """Take the mismatch of this update's batch (Eq. 17): rollout minus trainer log-probabilities, [b, t], over `mask`,
        the generated tokens of responses that ended by themselves. No such token: nothing is subtracted this time."""
        mask = mask.bool()
        self._measured = bool(mask.any())
        if self._measured:
            mean = float((rollout_logprobs - trainer_logprobs)[mask].double().mean())
            if not math.isfinite(mean):
                raise FloatingPointError(f"the mean of rollout minus trainer log-probabilities is {mean}: look for a token that one side "
                                         "gives no probability, as top-p < 1 does")
            self.kappa = 0.7 * self.kappa + 0.3 * max(mean, 0.0)

    def scale(self, model, proposal, contexts: Contexts) -> float:
        """α of Eq. 7 for the budget of Eq. 17 (δ_eff = max(δ − κ, δ/2)), and on to the next update's budget.

        Raises as `predicted_kl` and `step_scale` do, with nothing changed.
        """
        q = predicted_kl(model, proposal, contexts, self.method, self.temperature, self.micro_batch)
        delta = self.budget(self.update)
        effective = max(delta - self.kappa, 0.5 * delta) if self.mismatch and self._measured else delta
        alpha = step_scale(q, effective, self.alpha_max)
        self.q, self.budget_now, self.alpha, self._measured = q, effective, alpha, False
        self.update += 1
        return alpha

    def state_dict(self) -> dict:
        return {"update": self.update, "kappa": self.kappa}

    def load_state_dict(self, state: dict) -> None:
        self.update, self.kappa = state["update"], state["kappa"]


def _check(contexts, temperature, shards):
    mask = contexts.attention_mask.bool()
    if not _over_ranks(0.0, contexts, shards)[1]:
        raise ValueError("no predictions to examine: contexts.predictions has no True place")
    if (mask[:, 1:] & ~mask[:, :-1]).any() or (contexts.predictions & ~mask).any():
        raise ValueError("contexts are padded on the right, and no prediction lies in the padding: positions count from the first column")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, but it is {temperature}")


class _Factors(Mapping):
    """(F_dr, key of A) by name with D_W = F · entries of A, made when asked for. A step moves the sketches on to the next A: a proposal
    knows its own."""

    def __init__(self, model, proposal):
        self.sketches, self.proposal = attached(model), proposal
        self.shards = self.sketches.shards or self.sketches.replicas
        self._rounded = isinstance(proposal, LowRankUpdate)
        self._names = proposal.matrices if self._rounded else proposal
        unknown = set(self._names) - set(self.sketches)
        if unknown:
            raise ValueError(f"the proposal names {sorted(unknown)[:3]}, which the model's sketches do not")
        self._scale = -getattr(proposal, "eta", 1.0) * unit(self.sketches.rank)
        self._number = getattr(proposal, "number", self.sketches.update)

    def __getitem__(self, name: str) -> tuple[torch.Tensor, int]:
        if self._rounded:
            matrix = self.proposal.matrices[name]
            return matrix.factor(), matrix.key
        return self.proposal[name] * self._scale, self.sketches[name].key_at(self._number)

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _hidden(model, contexts, factors: Mapping, a):
    """What the output head sees at the examined places, [n, h], and how to make wide logits and their rates from it.

    A model whose logits are more than a fixed linear head of its last hidden states gives its logits, whole, instead.
    """
    inputs = dict(input_ids=contexts.input_ids, attention_mask=contexts.attention_mask)
    head = linear_head(model)
    with attached(model).perturbed(factors, a):
        if head is not None:
            out = model.base_model(**inputs, use_cache=False).last_hidden_state
            logits, rates = (lambda h: wide(head(h))), (lambda h: wide(F.linear(h, head.weight)))
        else:
            out = model(**inputs).logits
            logits = rates = wide
    return out[contexts.predictions], logits, rates


@contextmanager
def _evaluating(model):
    """Eval mode, uncompiled, without gradients; each module's own mode is restored. Weights that FSDP gathered are its shards again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():                      # no backward follows that would do it, and a step on gathered weights is lost
            if hasattr(module, "reshard"):
                module.reshard()


@contextmanager
def _differentiable_attention(model):
    """Forward AD has no kernel for fused attention, and flex attention drops tangents silently: plain attention inside, in blocks if long.
    Nor have the packages' kernels of linear attention (fla, causal_conv1d) one: transformers' own code, which its choice of a kernel wraps."""
    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    switch = before not in (None, "eager", "sdpa")
    homes = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()} & sys.modules.keys()]
    chosen = [(home, name, vars(home)[name]) for home in homes for name in _LINEAR_ATTENTION if name in vars(home)]
    with sdpa_kernel(SDPBackend.MATH), BlockwiseAttention():
        try:
            for home, name, kernel in chosen:
                setattr(home, name, inspect.unwrap(kernel))
            if switch:
                model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
            yield
        finally:
            for home, name, kernel in chosen:
                setattr(home, name, kernel)
            if switch:
                model.set_attn_implementation(before)
