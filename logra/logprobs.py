"""Log-probabilities and entropies of tokens from hidden states and the head's weight: no [tokens, vocabulary] tensor ever exists.

Logits are made for a few tokens at a time (64 MiB of them), and made again in backward. Values and gradients are those of the whole:

    z_nv = (h_nh W_vhᵀ + b_v) / T       log p_n = z_n,target − log Σ_v exp z_nv       H_n = −Σ_v p_nv log p_nv
    ∂ log p_n / ∂z_nv = 1[v = target] − p_nv       ∂H_n / ∂z_nv = −p_nv (log p_nv + H_n)
"""

import torch
from torch import nn
from torch.nn import functional as F

_BYTES = 64 << 20                                           # of float32 logits that exist at a time


def chunk_tokens(vocabulary: int) -> int:
    """How many tokens' logits exist at a time."""
    return max(1, min(1024, _BYTES // (4 * vocabulary)))


def token_logprobs(h_nh: torch.Tensor, weight_vh: torch.Tensor, targets_n: torch.Tensor, bias_v: torch.Tensor | None = None,
                   temperature: float = 1.0, *, entropy: bool = False):
    """log π of each target at its place, [n]; with `entropy`, also the policy's entropy there, [n], as a second value. Both in nats.

    h_nh: what the head sees, [n, h]. targets_n: int64 [n]. Logits are divided by the temperature in float32 (float64 for a float64 model),
    the type of what is returned. Gradients reach h, weight and bias, those of them that require one; forward-mode AD works too.
    """
    logp_n, entropy_n = _HeadLogprobs.apply(h_nh, weight_vh, bias_v, targets_n, temperature, entropy)
    return (logp_n, entropy_n) if entropy else logp_n


def linear_head(model) -> nn.Linear | None:
    """The head of a model whose logits are a fixed linear map of its last hidden states and nothing more; None for another."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    config = model.config.get_text_config() if hasattr(model, "config") else None
    scaled = any(getattr(config, field, None) for field in ("final_logit_softcapping", "logit_scale", "logits_scaling"))
    return head if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and not scaled else None    # FSDP makes a subclass


def wide(z: torch.Tensor) -> torch.Tensor:
    """Float32 at least: a narrower logit divided by the temperature would move by a tenth of a nat."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


class _HeadLogprobs(torch.autograd.Function):
    """Keeps h and the weight; in place of logits, [n] numbers, but for one chunk."""

    @staticmethod
    def forward(ctx, h, weight, bias, targets, temperature, entropy):
        ctx.temperature, ctx.entropy, ctx.only = temperature, entropy, None
        ctx.compute = torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else h.dtype
        ctx.save_for_backward(h, weight, bias, targets)
        ctx.save_for_forward(h, weight, bias, targets)
        parts, entropies = [], []
        for _, logp, target in _chunks(ctx, h, weight, bias, targets):
            parts.append(logp.gather(1, target[:, None])[:, 0])
            if entropy:
                entropies.append(_entropy(logp)[0])
            elif len(targets) == len(target) and any(ctx.needs_input_grad):
                ctx.only = logp                             # one chunk in all: at backward's start it would be made again anyway
            del logp                                        # before the next chunk's is there
        out = torch.promote_types(ctx.compute, torch.float32)
        empty = h.new_empty(0, dtype=out)
        return torch.cat([empty, *parts]), torch.cat([empty, *entropies])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlogp, dentropy):
        h, weight, bias, targets = ctx.saved_tensors
        W = weight.to(ctx.compute)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dW = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        db = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for rows, logp, target in _chunks(ctx, h, weight, bias, targets):
            dz = torch.zeros_like(logp).scatter_(1, target[:, None], dlogp[rows, None])
            torch.ops.aten._log_softmax_backward_data.out(dz, logp, -1, logp.dtype, out=dz)     # plain autograd's own kernel: its bits
            if ctx.entropy:
                H_n, p_nv = _entropy(logp)
                dz -= p_nv.mul_(logp.add_(H_n[:, None])).mul_(dentropy[rows, None])
                del p_nv
            del logp
            dz = (dz.div_(ctx.temperature) if ctx.temperature != 1 else dz).to(ctx.compute)
            if dh is not None:
                dh[rows] = dz @ W
            if dW is not None:
                dW += dz.T @ h[rows].to(ctx.compute)
            if db is not None:
                db += dz.sum(0)
            del dz
        return dh, dW, db, None, None, None

    @staticmethod
    def jvp(ctx, h_dot, weight_dot, bias_dot, *_):
        h, weight, bias, targets = ctx.saved_tensors
        rates, entropy_rates = [], []
        for rows, logp, target in _chunks(ctx, h, weight, bias, targets):
            z_dot = torch.zeros_like(logp)
            if h_dot is not None:
                z_dot += F.linear(h_dot[rows].to(ctx.compute), weight.to(ctx.compute))
            if weight_dot is not None:
                z_dot += F.linear(h[rows].to(ctx.compute), weight_dot.to(ctx.compute))
            if bias_dot is not None:
                z_dot += bias_dot
            z_dot /= ctx.temperature
            p_nv = logp.exp()
            rates.append(z_dot.gather(1, target[:, None])[:, 0] - (p_nv * z_dot).sum(-1))
            if ctx.entropy:
                H_n, p_nv = _entropy(logp)
                entropy_rates.append(-(p_nv * (logp + H_n[:, None]) * z_dot).sum(-1))
            del logp, z_dot, p_nv
        empty = h.new_empty(0, dtype=torch.promote_types(ctx.compute, torch.float32))
        return torch.cat([empty, *rates]), torch.cat([empty, *entropy_rates])


def _chunks(ctx, h, weight, bias, targets):
    """(which rows, their log-softmax [c, v], their targets), a chunk at a time."""
    if ctx.only is not None:
        yield slice(None), ctx.only, targets
        return
    W, b = weight.to(ctx.compute), None if bias is None else bias.to(ctx.compute)       # once, not at each chunk as autocast would
    size = chunk_tokens(len(weight))
    for start in range(0, len(h), size):
        rows = slice(start, start + size)
        yield rows, _log_softmax(F.linear(h[rows].to(ctx.compute), W, b), ctx.temperature), targets[rows]


def _log_softmax(z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of z / T, in the memory of z where it is wide enough."""
    z = wide(z)
    if temperature != 1:
        z /= temperature
    return torch.ops.aten._log_softmax.out(z, -1, False, out=z)


def _entropy(logp: torch.Tensor):
    """(H_n, p_nv). Makes log 0 the least finite number, in place: 0 · log 0 is 0."""
    p_nv = logp.exp()
    return -(p_nv * logp.clamp_(min=torch.finfo(logp.dtype).min)).sum(-1), p_nv
