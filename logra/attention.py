"""Attention for forward-mode AD over long contexts: F.scaled_dot_product_attention in plain operators, a block of queries at a time.

Fused kernels have no forward AD, and the plain one makes all [heads, tokens, tokens] scores at once, with their tangents: at 4,096 tokens
gigabytes for one layer. Here 32 MiB of scores exist at a time, and no later keys are looked at where attention is causal.
"""

import math

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SCORES = 1 << 23                                           # that exist at a time


class BlockwiseAttention(TorchFunctionMode):
    """Within it, scaled_dot_product_attention with more scores than these goes block by block; with fewer it is left as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key = args[:2] if len(args) > 1 else (*args, *(kwargs[name] for name in ("query", "key")[len(args):]))
            if query.numel() // query.shape[-1] * key.shape[-2] > _SCORES:
                return blockwise(*args, **kwargs)
        return func(*args, **kwargs)


def blockwise(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> torch.Tensor:
    """What F.scaled_dot_product_attention computes without dropout, for the same arguments: query [..., heads, t, c], key and value
    [..., heads, s, c] (with enable_gqa fewer heads). A query that the mask lets see nothing gets a finite value of no meaning."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    t, s = query.shape[-2], key.shape[-2]
    block = max(1, _SCORES // (query.numel() // (query.shape[-1] * t) * s))
    out = []
    for start in range(0, t, block):
        part = query[..., start:start + block, :]
        stop = min(s, start + block) if is_causal else s
        scores = (part * scale) @ key[..., :stop, :].transpose(-2, -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if is_causal:
            seen = torch.ones(part.shape[-2], stop, dtype=torch.bool, device=query.device).tril(start)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., start:start + block, :]
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
        out.append(torch.softmax(scores, -1).to(value.dtype) @ value[..., :stop, :])
    return torch.cat(out, -2)
