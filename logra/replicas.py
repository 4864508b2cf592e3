"""Data parallelism: every rank has the whole model and batches of its own; sketches are averaged once an update, as DDP averages gradients.

    sketches = logra.attach(model, rank=256, seed=1)        # the same weights and the same seed on every rank
    sketches.replicas = logra.Replicas()                    # before the first step; DistributedDataParallel is not needed

A model whose other weights are frozen has no gradient that DDP could reduce (it refuses such a model, and accelerate leaves it as it is), so
that without this each rank would go its own way. Each rank sends d·r numbers a matrix and update in place of d·k, then makes the same step:
α, too, is the same, since the probe's mean is over all ranks' contexts.
"""

import warnings

import torch
import torch.distributed as dist

from logra.shards import RowShards, own_rows


class Replicas:
    """The ranks that average their sketches. group: None for the default process group."""

    def __init__(self, group=None):
        self.group, self.ranks = group, dist.get_world_size(group)
        self.total = RowShards(group).total
        self._checked = False

    def __deepcopy__(self, memo):
        return self                                         # a process group is not copied with a model

    def mean_(self, tensors: list[torch.Tensor]) -> None:
        """Each tensor ← its mean over the ranks, the same bits on all of them."""
        for work in [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]:
            work.wait()
        for tensor in tensors:
            tensor.div_(self.ranks)

    def check(self, same: tuple) -> None:
        """Raises RuntimeError on every rank unless all give the same: asked once, with what must not differ for the ranks to stay together."""
        if self._checked:
            return
        found = [None] * self.ranks
        dist.all_gather_object(found, same, group=self.group)
        others = [number for number, value in enumerate(found) if value != found[0]]
        if others:
            raise RuntimeError(f"ranks {others} do not have rank 0's weights or projections, so that the same update would make other models: load the same "
                               "weights, and give attach the same rank, projection and seed, on every rank")
        self._checked = True


def warn_if_forgotten(weight: torch.Tensor) -> None:
    """Warns where one of several processes makes a step of its own on a whole weight: their models would part without a word."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and own_rows(weight).shards is None:
        warnings.warn(f"one of {dist.get_world_size()} processes makes a step from its own sketches alone: set sketches.replicas = logra.Replicas(), or "
                      "sketches.shards where weights are sharded", stacklevel=4)
