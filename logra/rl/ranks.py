"""Training over N ranks: FSDP2 shards the float32 weights, each rank has its part of an update's responses, rank 0 samples, scores and records.

    torchrun --nproc-per-node 4 -m logra.rl.train CONFIG.yaml

Every rank holds the whole batch and the whole LowRankUpdate; weights, sketches after backward, RowAdam's and AdamW's state are sharded by
rows. Each rank's backwards add to a whole float32 S, which is summed to row shards once an update (`sharded_sketches`: in each backward). A is hashed
where it is needed. Weights are gathered in float32 also where compute is bfloat16 (by autocast, as in one process), unless `gathered` says bfloat16:
finite differences on bfloat16 weights would measure their rounding.
FSDP's collectives need the same forwards on every rank: a rank with fewer responses runs one again that counts nothing.
`Alone` is the same for one process without FSDP.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from logra.coverage import decoder_blocks
from logra.linear import Sketches
from logra.rl.config import RunConfig
from logra.rl.placement import place
from logra.rl.rollout import Rollout
from logra.shards import RowShards, own_rows

_PATIENCE = timedelta(hours=4)                              # the others wait while rank 0 samples and scores


class Alone:
    """One process that holds everything: what `Ranks` does over several."""

    number, count = 0, 1

    def shard(self, model: nn.Module, config: RunConfig) -> None:
        for name in ("gathered", "sharded_sketches", "offload"):
            if getattr(config, name) != RunConfig.model_fields[name].default:
                raise ValueError(f"{name} is for ranks, and this process has none: start it by torchrun, or leave {name} at {RunConfig.model_fields[name].default}")

    def run(self, function: Callable, *arguments, **keywords):
        return function(*arguments, **keywords)

    led = run

    def place(self, config, model, tokenizer, method):
        return place(config, model, tokenizer, method)

    def micro_batches(self, batch: Rollout, size: int) -> Iterator[tuple[slice, Rollout]]:
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            yield rows, batch[rows]

    def joined(self, batch: Rollout, parts: list[tuple]) -> torch.Tensor:
        return torch.cat([logprob for _, _, logprob in parts])

    def probe(self, batch: Rollout, responses: int) -> Rollout:
        return batch[:responses]

    def total(self, value: float) -> float:
        return value

    most = total

    @contextmanager
    def reduced(self, sketches: Sketches):
        yield

    def square(self, x: torch.Tensor) -> float:
        return float(x.double().square().sum())

    def of_rows(self, x_d: torch.Tensor, d: int) -> torch.Tensor:
        return x_d

    rows_of = of_rows

    def empty(self, shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


class Ranks:
    """The ranks of the default process group, seen from one of them."""

    def __init__(self):
        self.shards = RowShards()
        self.number, self.count = self.shards.number, self.shards.ranks
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.root: _Root | None = None
        self.calls: dict[str, Callable] = {}                # what rank 0 may ask the others to do with it, see `call`

    # the model ------------------------------------------------------------------------------------------------------------

    def shard(self, model: nn.Module, config: RunConfig) -> None:
        """`fully_shard` each decoder block, an embedding that is not the head's, and what is left with the root. Before any optimizer is made: it changes
        the parameters."""
        self.mesh = mesh = init_device_mesh(self.device.type, (self.count,))
        policy = dict(mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if config.offload else OffloadPolicy())
        if config.gathered == "bfloat16":
            policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        apart = [] if head is None or head.weight is embedding.weight else [embedding]
        for module in [*decoder_blocks(model, model).values(), *apart]:
            fully_shard(module, **policy)
        self.root = fully_shard(_Root(model), **policy)
        for module in self.root.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)      # the loss is the whole batch's token mean already: shares add up
                module.set_force_sum_reduction_for_comms(True)

    def run(self, function: Callable, *arguments, **keywords):
        """The result of a function that calls the model or its parts, by all ranks in step: FSDP's hooks sit on the root's call."""
        result = self.root(lambda: function(*arguments, **keywords))
        if not (isinstance(result, tuple) and result[0].requires_grad):     # no backward will do it
            self.root.reshard()
        return result

    # rank 0 alone ---------------------------------------------------------------------------------------------------------

    def led(self, work: Callable):
        """The result of rank 0's work(), on every rank. The others take part in what it asks for by `call`. Where it fails, all raise."""
        if self.number == 0:
            try:
                result = work()
            except Exception as error:
                self._say("failed", repr(error))
                raise
            return self._say("done", result)[1]
        while True:
            what, value = self._say()
            if what == "done":
                return value
            if what == "failed":
                raise RuntimeError(f"rank 0 failed: {value}")
            name, arguments = value
            self.calls[name](*arguments)

    def call(self, name: str, *arguments):
        """Within rank 0's work: self.calls[name](*arguments) by all ranks together. Returns rank 0's result."""
        self._say("call", (name, arguments))
        return self.calls[name](*arguments)

    def _say(self, *message):
        box = [message]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def place(self, config, model, tokenizer, method):
        """The rollout: the sharded model itself, sampled in step by all; or rank 0's engine, kept up with from gathered weights."""
        if config.sync == "none":
            return _Rollout(self, place(config, model, tokenizer, method), in_step=True)
        self.calls["weight"] = lambda name: whole_tensor(method.sketches[name].weight)
        seen = SimpleNamespace(sketches=_Gathered(method.sketches, self))
        return _Rollout(self, place(config, model, tokenizer, seen) if self.number == 0 else None, in_step=False)

    # a batch's parts ------------------------------------------------------------------------------------------------------

    def micro_batches(self, batch: Rollout, size: int) -> Iterator[tuple[torch.Tensor, Rollout]]:
        """(rows of the batch, these responses), this rank's, a micro-batch at a time: as many on every rank, some empty (no generated token)."""
        mine = dealt(batch.attention_mask.sum(1).tolist(), self.count)[self.number]
        most = -(-len(batch) // self.count)
        for start in range(0, most, size):
            rows = mine[start:start + size]
            yield torch.tensor(rows or [0], device=batch.input_ids.device), taken(batch, rows or [0], empty=not rows)

    def joined(self, batch: Rollout, parts: list[tuple]) -> torch.Tensor:
        """log π of the batch's generated tokens, [n], on every rank. parts: (rows, micro-batch, log π of its tokens) of this one."""
        whole = torch.zeros_like(batch.logprobs)
        for rows, micro, logprob in parts:
            if len(logprob):
                width = micro.response_mask.shape[1]
                whole[rows, :width] = torch.zeros_like(micro.logprobs).masked_scatter(micro.response_mask, logprob)
        dist.all_reduce(whole)                              # each place is one rank's: exact
        return whole[batch.response_mask]

    def probe(self, batch: Rollout, responses: int) -> Rollout:
        """This rank's share of the batch's first responses, as many rows on every rank; what fills up has no generated token."""
        rows = list(range(min(responses, len(batch))))
        mine, most = rows[self.number::self.count], -(-len(rows) // self.count)
        if len(mine) == most:
            return taken(batch, mine)
        filled = taken(batch, mine + [0] * (most - len(mine)))
        mask = filled.response_mask.clone()
        mask[len(mine):] = False
        return replace(filled, response_mask=mask)

    # sums and state -------------------------------------------------------------------------------------------------------

    def total(self, value: float) -> float:
        return self.shards.total([value])[0]

    def most(self, value: float) -> float:
        """The largest over the ranks."""
        found = [None] * self.count
        dist.all_gather_object(found, value)
        return max(found)

    @contextmanager
    def reduced(self, sketches: Sketches):
        """Within it every sketch is its sum over the ranks, of which each holds its rows. After it S is zero."""
        if sketches.shards is not None:                     # made as such
            yield
            return
        for sketch in sketches.values():
            sketch._S_dr = self.shards.reduce(sketch.S_dr)
        sketches.shards = self.shards
        try:
            yield
        finally:
            sketches.shards = None
            for sketch in sketches.values():
                sketch._S_dr = None

    def square(self, x: torch.Tensor) -> float:
        """The squared norm of a whole from each rank's rows."""
        return self.total(float(own_rows(x).local.double().square().sum()))

    def of_rows(self, rows_d: torch.Tensor, d: int) -> DTensor:
        """The whole [d] of which each rank has its rows, for a checkpoint."""
        return DTensor.from_local(rows_d, self.mesh, [Shard(0)], run_check=False, shape=(d,), stride=(1,))

    def rows_of(self, x_d: DTensor, d: int) -> torch.Tensor:
        """This rank's rows of it."""
        return x_d.to_local()

    def empty(self, shape, dtype: torch.dtype) -> torch.Tensor:
        """Room for a checkpoint's tensor: this rank's rows of it, as FSDP would shard it; a number is whole on every rank."""
        if not shape:
            return torch.empty((), dtype=dtype)
        rows = self.shards.rows(shape[0])
        local = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=dtype, device=self.device)
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride())


class _Root(nn.Module):
    """What FSDP takes for the model's forward: any function that uses the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable):
        return function()


class _Rollout:
    """A rollout of `rl.placement` on N ranks: all get rank 0's responses, the same for any number of ranks."""

    def __init__(self, ranks: Ranks, engine, in_step: bool):
        self.ranks, self.engine, self.in_step, self.seconds = ranks, engine, in_step, 0.0

    def generate(self, *arguments, **more) -> Rollout:
        ranks = self.ranks
        if self.in_step:
            made = moved(ranks.run(self.engine.generate, *arguments, **more), torch.device("cpu"))
            return moved(ranks.led(lambda: made), ranks.device)
        return moved(ranks.led(lambda: moved(self.engine.generate(*arguments, **more), torch.device("cpu"))), ranks.device)

    def publish(self, update) -> dict:
        row, self.seconds = self.ranks.led(lambda: (self.engine.publish(update), self.engine.seconds))
        return row

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class _Gathered(Sketches):
    """The trainer's sketches as rank 0's publisher sees them: a weight is gathered whole when it is asked for."""

    def __init__(self, sketches: Sketches, ranks: Ranks):
        self.__dict__ = sketches.__dict__                   # the same run, session and update, now and later
        self._ranks = ranks

    def __getitem__(self, name: str):
        return SimpleNamespace(weight=self._ranks.call("weight", name))


def launched() -> bool:
    """Whether torchrun started this process: then the process group is made, on the GPU of its local rank if there is one."""
    if not dist.is_torchelastic_launched():
        return False
    if sys.platform == "linux":                             # PR_SET_PDEATHSIG: a rank that outlived a killed torchrun would write into the record that a resume goes on with
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)
    return True


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter that may be sharded: a collective, if it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dealt(tokens: list[int], ranks: int) -> list[list[int]]:
    """Which responses each rank has, in the batch's order: numbers that differ by one at most, and much the same tokens."""
    longest = sorted(range(len(tokens)), key=lambda row: -tokens[row])
    hands = [[] for _ in range(ranks)]
    for position, row in enumerate(longest):                # to and fro
        turn, seat = divmod(position, ranks)
        hands[ranks - 1 - seat if turn % 2 else seat].append(row)
    return [sorted(hand) for hand in hands]


def taken(batch: Rollout, rows: list[int], empty: bool = False) -> Rollout:
    """These responses, cut to their longest; with `empty`, without a generated token."""
    length = int(batch.attention_mask[rows].sum(1).max())
    parts = [x[rows, :length] for x in (batch.input_ids, batch.attention_mask, batch.response_mask, batch.logprobs)]
    if empty:
        parts[2] = torch.zeros_like(parts[2])
    return Rollout(*parts, batch.complete[rows], [batch.texts[row] for row in rows])


def moved(batch: Rollout, device: torch.device) -> Rollout:
    values = [getattr(batch, field.name) for field in fields(batch)]
    return Rollout(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in values))
