"""Where the bytes of a training call go: tensors alive at the peak of one update, by category, measured while it runs.

    traced = trace(RunConfig(method="logra"), updates=200, every=20)     # one row a measured update

What is measured is the training call (backward of every micro-batch, KL probe, update), not the rollout, as in Section 3.4.2. A process's
resident memory says little on a CPU: allocators keep what was freed. So every tensor storage that an operator returns is followed until it is
freed, and the largest sum counts. That is exact for tensors, on any device; what an operator needs inside and frees before it returns
is not seen.

| category | what |
|---|---|
| weights | parameters and buffers, LoRA's adapters among them |
| gradients | `.grad` of every parameter; LoGRA's sketches S |
| optimizer | the optimizer's state |
| projections | LoGRA's A, where it is held between forwards |
| activations | what autograd saved in forward for backward, LoGRA's X Aᵀ among it |
| other | the rest: the batch, logits, temporaries, tangents of the probe, U |
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logra.rl.config import RunConfig

if TYPE_CHECKING:
    from logra.rl.train import Trainer

CATEGORIES = ("weights", "gradients", "optimizer", "projections", "activations", "other")
PARTS = ("train", "probe", "update")                      # of `Trainer.step`, that make up the training call


class Meter(TorchDispatchMode):
    """Follows storages while it is entered. `total`: bytes alive now; `peak`: the most so far; `at_peak()`: by category.

    Storages are known from the first operator that returns or takes them, or from `label`; they are forgotten when freed, inside or outside.
    """

    def __init__(self):
        super().__init__()
        self.total = self.peak = 0
        self._alive: dict[int, int] = {}                    # bytes, by serial number
        self._label: dict[int, str] = {}
        self._serial: dict[int, tuple[weakref.ref, int]] = {}
        self._count, self._snapshot = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        return out

    def label(self, tensors, category: str) -> None:
        for tensor in tensors:
            serial = self._follow(tensor)
            if serial is not None:
                self._label[serial] = category

    @contextmanager
    def measuring(self):
        """Follow operators, and what autograd saves."""
        def saved(tensor):
            serial = self._follow(tensor)
            if serial is not None:
                self._label.setdefault(serial, "activations")
            return tensor

        with self, saved_tensors_hooks(saved, lambda tensor: tensor):
            yield

    def restart(self) -> None:
        """Begin a new peak from what is alive."""
        self.peak, self._snapshot = 0, {}

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak; their sum is `peak`."""
        self._note()
        sums = dict.fromkeys(CATEGORIES, 0)
        for serial, size in self._snapshot.items():
            sums[self._label.get(serial, "other")] += size
        return sums

    def _follow(self, tensor) -> int | None:
        if tensor._is_zerotensor() or tensor.layout != torch.strided:
            return None                                     # forward AD's zeros own no memory, whatever their size says
        storage = tensor.untyped_storage()
        known = self._serial.get(id(storage))
        if known is not None and known[0]() is storage:
            return known[1]
        self._count = serial = self._count + 1
        reference = weakref.ref(storage, lambda _, serial=serial, key=id(storage): self._freed(serial, key))
        self._serial[id(storage)] = (reference, serial)
        self._alive[serial] = storage.nbytes()
        self.total += storage.nbytes()
        return serial

    def _freed(self, serial: int, key: int) -> None:
        self._note()
        self.total -= self._alive.pop(serial)
        if self._serial.get(key, (None, None))[1] == serial:
            del self._serial[key]

    def _note(self) -> None:
        """Called before anything is freed: a maximum lies just before a fall."""
        if self.total > self.peak:
            self.peak, self._snapshot = self.total, dict(self._alive)


def measure(trainer: Trainer) -> dict:
    """One update of a trainer, which moves as it would unmeasured. Returns bytes: `peak` of the training call; `peak_train`, `peak_probe`
    and `peak_update` of its parts, where there are such; and the categories at the peak, which sum to it. With them update, tokens, length."""
    meter, parts, timed = Meter(), {}, trainer._timed

    @contextmanager
    def measured(part: str):
        if part not in PARTS:                               # the rollout, the reward
            with timed(part):
                yield
            return
        _label(meter, trainer)
        meter.restart()
        with timed(part), meter.measuring():
            yield
        _label(meter, trainer)
        found = meter.at_peak()
        parts[part] = max(parts.get(part, {}), found, key=lambda bytes_: sum(bytes_.values()))

    trainer._timed = measured
    try:
        row = trainer.step()
    finally:
        trainer._timed = timed
    peaks = {part: sum(found.values()) for part, found in parts.items()}
    largest = max(peaks, key=peaks.get)
    return {"update": row["update"], "tokens": row["tokens"], "length": row["length"], "peak": peaks[largest],
            **{f"peak_{part}": peak for part, peak in peaks.items()}, **parts[largest]}


def _label(meter: Meter, trainer: Trainer) -> None:
    """Says what is alive between two parts of an update."""
    model, method = trainer.model, trainer.method
    optimizers = [method.adamw.optimizer] if hasattr(method, "adamw") else [method.optimizer, *([method.rest.optimizer] if method.rest else [])]
    meter.label([*model.parameters(), *model.buffers()], "weights")
    meter.label([p.grad for p in model.parameters() if p.grad is not None], "gradients")
    meter.label([x for o in optimizers for state in o.state.values() for x in state.values() if isinstance(x, torch.Tensor)], "optimizer")
    sketches = getattr(method, "sketches", {}).values()
    meter.label([s.S_dr for s in sketches], "gradients")
    meter.label([s.source.kept[1] for s in sketches if s.source.kept is not None], "projections")


def trace(config: RunConfig, updates: int, every: int) -> pd.DataFrame:
    """The first `updates` updates of a run, made again; update 1 and every `every`-th are measured, one row each (see `measure`).

    A run's draws are named, so these are the updates that its record holds, bit for bit.
    """
    from logra.rl.train import Trainer                     # the whole training loop: where nothing is made, nobody waits for it

    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    trainer, rows = Trainer(config), []
    try:
        for update in range(1, updates + 1):
            if update == 1 or update % every == 0:
                rows.append(measure(trainer))
            else:
                trainer.step()
    finally:
        trainer.rollout.close()
    return pd.DataFrame(rows)
