"""Activation checkpointing that makes no projection and no attention a second time.

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": logra.checkpointing.keep_projections})

Plain checkpointing keeps a block's input and makes the rest again in backward. A sketched matrix needs its X Aᵀ alone there, r numbers a token,
so that keeping it, and attention's output, saves the second hash of A, the second X Aᵀ and the second attention. It costs, a token and block,
4·r bytes for each projection (seven, or four where `attach` shares inputs) and attention's width; matrix products of X and W are still made again,
but for a block's last one, which no backward needs.
"""

import sys
import threading

import torch
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy, create_selective_checkpoint_contexts

_ATTENTION = {getattr(torch.ops.aten, name).default for name in (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu")}

held = threading.local()                                    # .writing and .reading, while a block runs: see `logra.linear.Source.projected`


def keep_projections():
    """A `context_fn` of torch.utils.checkpoint: the contexts of a block's forward and of its making again in backward."""
    kept = {}
    forward, again = create_selective_checkpoint_contexts(
        lambda context, operator, *args, **kwargs: CheckpointPolicy.MUST_SAVE if operator in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE)
    return _Within(forward, "writing", lambda: kept), _Within(again, "reading", lambda: {source: iter(made) for source, made in kept.items()})


class _Within:
    """One of torch's two contexts, and the projections beside it."""

    def __init__(self, selective, field, value):
        self.selective, self.field, self.value = selective, field, value

    def __enter__(self):
        self.selective.__enter__()
        setattr(held, self.field, self.value())

    def __exit__(self, *exception):
        setattr(held, self.field, None)
        return self.selective.__exit__(*exception)


def under_reentrant() -> bool:
    """Whether the caller runs in the forward of torch's reentrant checkpointing."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False
