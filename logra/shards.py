"""Row shards: each rank keeps some rows of every sketch, and a sketch is reduced to them as backward makes it.

    sketches = logra.attach(model, rank=256)
    sketches.shards = logra.shards.RowShards(group)         # before the first backward; every rank runs the same micro-batches' backwards

A rank's rows of a matrix are those of `torch.chunk`, as FSDP shards parameters: ⌈d/n⌉ a rank, the last ranks fewer or none. Each layer's
backward sends its d·r numbers once a micro-batch, and no rank ever holds more of S than its rows and one layer's sum.
"""

import sys
from typing import NamedTuple

import torch
import torch.distributed as dist


class RowShards:
    """The rows that this rank of a process group keeps. group: None for the default one."""

    def __init__(self, group=None):
        self.group, self.number, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo):
        return self                                         # a process group is not copied with a model

    def rows(self, d: int) -> slice:
        """This rank's rows of a matrix with d."""
        size = -(-d // self.ranks)
        return slice(min(self.number * size, d), min((self.number + 1) * size, d))

    def reduce(self, of_rank_dr: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of each one's [d, r]: this rank's rows of it."""
        d, rows = len(of_rank_dr), self.rows(len(of_rank_dr))
        size = -(-d // self.ranks)
        if d < size * self.ranks:
            of_rank_dr = torch.cat([of_rank_dr, of_rank_dr.new_zeros(size * self.ranks - d, *of_rank_dr.shape[1:])])
        out = of_rank_dr.new_empty(size, *of_rank_dr.shape[1:])
        dist.reduce_scatter_single(out, of_rank_dr, group=self.group)
        return out[:rows.stop - rows.start]

    def gather(self, rows_dr: torch.Tensor, d: int) -> torch.Tensor:
        """The whole [d, r] from every rank's rows."""
        size = -(-d // self.ranks)
        padded = torch.cat([rows_dr, rows_dr.new_zeros(size - len(rows_dr), *rows_dr.shape[1:])])
        out = padded.new_empty(size * self.ranks, *padded.shape[1:])
        dist.all_gather_single(out, padded, group=self.group)
        return out[:d]

    def total(self, values: list[float]) -> list[float]:
        """Each number's sum over the ranks, in float64."""
        sums = torch.tensor(values, dtype=torch.float64)
        if dist.get_backend(self.group) == "nccl":
            sums = sums.cuda()
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def exact_total(self, values: list[int]) -> list[int]:
        """Each integer's sum over the ranks, however large."""
        found = [None] * self.ranks
        dist.all_gather_object(found, values, group=self.group)
        return [sum(numbers) for numbers in zip(*found)]


class OwnRows(NamedTuple):
    """What a rank has of a parameter. shards: over whom the parameter is split; None where this rank has the whole."""

    local: torch.Tensor
    rows: slice
    shards: RowShards | None


def own_rows(weight: torch.Tensor) -> OwnRows:
    """This rank's part of a parameter that `fully_shard` splits by rows; all of any other parameter.

    Raises ValueError for a parameter that is split another way.
    """
    module = sys.modules.get("torch.distributed.tensor")    # a process without ranks has no need to import it
    if module is None or not isinstance(weight, module.DTensor):
        return OwnRows(weight, slice(0, len(weight)), None)
    placements = [placement for placement in weight.placements if placement.is_shard()]
    if weight.device_mesh.ndim != 1 or any(placement.dim != 0 for placement in placements):
        raise ValueError(f"a weight is sharded as {tuple(weight.placements)}: an update is applied to weights that are split by rows over one mesh dimension")
    if not placements:
        return OwnRows(weight.to_local(), slice(0, len(weight)), None)
    shards = RowShards(weight.device_mesh.get_group())
    return OwnRows(weight.to_local(), shards.rows(len(weight)), shards)
