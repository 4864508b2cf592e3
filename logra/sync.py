"""Keeping a rollout's weights those of the trainer, to the bit: receivers for the messages of `logra.wire` (Algorithm 1, lines 15-17).

    receiver = logra.sync.Receiver(rollout_model)                  # mode="exact"
    receiver.apply(logra.sync.full_weights(trainer_model))         # once, where the rollout did not load the same float32 base
    receiver.apply(update.to_bytes())                              # after each optimizer.step()

mode    what the receiver holds                          what it takes
exact   bfloat16 and the 16 bits that rounding lost, or  updates and float32 full weights; always bfloat16(trainer's master)
        float32
lossy   bfloat16 alone                                   updates, added and rounded (the paper's text as it reads), and full weights
full    bfloat16 alone                                   full weights only

A receiver follows a run only if its whole model is the run's base: the selected matrices, which full weights can mend, and all other
parameters (embeddings, norms, biases, what was not selected), which they cannot: those are compared as bfloat16 before the first
message is taken, and a model that differs in one is refused for good.

Update n + 1 is taken after n alone; a duplicate is acknowledged and ignored; whatever is wrong is refused whole with a SyncError,
nothing applied, and the trainer sends full weights (`Publisher` does). An exact receiver first computes the new weights' fingerprints
and writes only if they are the trainer's: what exceeds 64 MiB it computes again for that, and needs no second copy of the weights.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import nn

from logra import bits, projection, wire
from logra.linear import Sketches, attached
from logra.update import LowRankUpdate
from logra.wire import FullWeights, SyncError

__all__ = ["Acknowledgement", "FullWeights", "Publisher", "Receiver", "Slot", "SyncError", "full_weights"]
MODES = ("exact", "lossy", "full")
_KEPT = 1 << 26                                             # bytes of new weights that are kept from the check to the write


@dataclass(frozen=True)
class Acknowledgement:
    """What a receiver answers: "applied" or "duplicate", its version, the hash of its held bits, the message's size, its own seconds."""

    status: str
    version: int
    weights: str
    bytes: int
    seconds: float


@dataclass
class Slot:
    """Where a receiver holds a matrix, or its part of one. tensor: [rows, columns] of `part`, a view into the model's parameter; a vector is a column."""

    part: bits.Part
    shape: tuple[int, int]                                  # of the whole matrix
    tensor: torch.Tensor
    low: torch.Tensor | None = None                         # the lost 16 bits, where the tensor is bfloat16 and the mode exact
    ties: torch.Tensor | None = None

    def master(self) -> torch.Tensor:
        """The held value in float32: a copy, where it is not held so."""
        if self.tensor.dtype == torch.float32:
            return self.tensor.clone()
        if self.low is None:
            return self.tensor.float()
        return bits.join(bits.Halves(self.tensor, self.low.to(self.tensor.device, non_blocking=True), self.ties))

    def write(self, W: torch.Tensor, lost_on: str | None) -> None:
        """Hold a float32 value. lost_on: "device" or "host" for the lost bits, None to let them go."""
        if self.tensor.dtype == torch.float32 or lost_on is None:
            self.tensor.copy_(W)
            return
        halves = bits.split(W)
        self.tensor.copy_(halves.high)
        self.low, self.ties = halves.low.to("cpu" if lost_on == "host" else W.device), halves.ties

    def fingerprint(self, W: torch.Tensor, rounded: bool = False) -> int:
        """The slot's share of the matrix's fingerprint, for a float32 value of it; rounded: of the bfloat16 that it rounds to."""
        part = self.part
        return bits.fingerprint(W, part.rows.start, part.columns.start, self.shape[1], rounded) if part.counts else 0


class Receiver:
    """The rollout's side. It takes messages for a model that it holds, changes the weights in place, and never believes a message.

    model: its selected nn.Linear modules need the trainer's names. Its parameters become `dtype`, rounded to nearest: bfloat16,
    or float32, which is exact by itself. lost_on: "device" or "host", where the 16 lost bits of `exact` are kept.
    slots, rest, add_up: for a model that is fused or split over ranks: what of each nn.Linear weight it holds, by the module's name, what
    of each other parameter, by its own (see `whole`), and a sum over the ranks of an int64 tensor; the parameters are left as they are.
    """

    def __init__(self, model: nn.Module | None, mode: str = "exact", *, dtype: torch.dtype = torch.bfloat16, lost_on: str = "device",
                 slots: Mapping[str, list[Slot]] | None = None, rest: Mapping[str, list[Slot]] | None = None, add_up: Callable[[torch.Tensor], torch.Tensor] = lambda total: total):
        if mode not in MODES or lost_on not in ("device", "host"):
            raise ValueError(f"mode is one of {', '.join(MODES)} and lost_on 'device' or 'host', but they are {mode!r} and {lost_on!r}")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"a receiver holds bfloat16 or float32 weights, not {dtype}")
        self.mode, self.lost_on, self._add_up = mode, lost_on if mode == "exact" else None, add_up
        self.version, self.run, self.base, self.session = 0, None, None, None
        self.names: set[str] | None = None                  # of the run's matrices, known from its first message
        self.interrupted: int | None = None                 # the update that was being written when something broke off
        self._digest, self._hash = b"", None
        given = slots is not None
        self.slots, self.rest = (dict(slots), dict(rest)) if given else whole(model)
        # what the base was before any rounding here
        self._at_start = self.fingerprints()
        if not given:
            self._hold(model, dtype)
        elif mode == "exact":
            for slot in self._each():
                slot.write(slot.master(), self.lost_on)

    def apply(self, message: bytes) -> Acknowledgement:
        """Take one message. Raises SyncError, with nothing applied, for anything that is wrong with it or with the receiver's own state."""
        start = time.perf_counter()
        read = wire.decode(message)
        digest = message[:wire.HEAD.size]
        applied = self._take_full(read, digest) if isinstance(read, FullWeights) else self._take_update(read, digest)
        return Acknowledgement("applied" if applied else "duplicate", self.version, self.hash(), len(message), time.perf_counter() - start)

    def fingerprints(self) -> dict[str, int]:
        """The fingerprint of each matrix's held bits, as `logra.bits.fingerprint` makes it: equal to the trainer's where exact."""
        return self._sums({name: self.slots[name] for name in (self.slots if self.names is None else self.names)}, Slot.master)

    def hash(self) -> str:
        """One hash of all held bits: `logra.bits.combined` of the fingerprints."""
        if self._hash is None:
            self._hash = bits.combined(self.fingerprints())
        return self._hash

    def compare(self, message: bytes) -> tuple[int, int]:
        """How many held entries differ from these full weights, both as bfloat16, and of how many. Changes nothing. Raises SyncError."""
        full = wire.decode(message)
        if not isinstance(full, FullWeights):
            raise SyncError("mode", "only full weights can be compared with")
        self._check_matrices({name: tuple(W.shape) for name, W in full.weights.items()})
        counts = torch.zeros(2, dtype=torch.int64)
        for name, W_dk in full.weights.items():
            for slot in self.slots[name]:
                if slot.part.counts:
                    held = slot.tensor.to(torch.bfloat16)
                    wanted = W_dk[slot.part.rows, slot.part.columns].to(held.device, torch.bfloat16)
                    counts += torch.tensor([int((held.view(torch.int16) != wanted.view(torch.int16)).sum()), held.numel()])
        differing, entries = self._add_up(counts).tolist()
        return differing, entries

    def release(self) -> None:
        """Forget the run: the next message has to be full weights, which may be those of another one."""
        self.run = self.base = self.session = self.names = self._at_start = None

    # ---- what a message must satisfy

    def _take_update(self, update: LowRankUpdate, digest: bytes) -> bool:
        if self.mode == "full":
            raise SyncError("mode", "this receiver takes full weights only")
        if self.interrupted is not None:
            raise SyncError("interrupted", f"update {self.interrupted} was cut off half-way here: full weights are needed")
        shapes = {name: (m.integers_dr.shape[0], m.k) for name, m in update.matrices.items()}
        if self.run is None:
            self._check_matrices(shapes)
            self._check_rest(update)
            own = self._at_start and bits.combined({name: self._at_start[name] for name in shapes})
            if update.base.partition("/")[0] != own:
                raise SyncError("base", f"the update is for base weights {update.base}, these are {own}: full weights are needed")
        else:
            self._check_identity(update)
            if update.session != self.session:
                raise SyncError("session", f"the update is of start {update.session} of the run, this receiver follows start {self.session}: full weights are needed")
            self._check_matrices(shapes)
        if update.number <= self.version and self.run is not None:
            if update.number == self.version and self._digest and digest != self._digest:
                raise SyncError("conflict", f"update {update.number} was applied already with other content")
            return False
        if update.number != self.version + 1:
            raise SyncError("gap", f"update {update.number} does not follow on version {self.version}: full weights are needed")
        self._check_projections(update)
        names = list(update.matrices)
        on = {name: self._moved(update, name) for name in names}
        kept: dict[int, torch.Tensor] = {}
        if self.mode == "exact":
            sums = self._sums({name: self.slots[name] for name in names}, lambda slot: self._after(on[slot.part.name], slot, kept))
            wrong = [name for name in names if sums[name] != update.after[name]]
            if wrong:
                raise SyncError("hash", f"{len(wrong)} of {len(names)} matrices would not be the trainer's after update {update.number}, {wrong[0]} for one: "
                                        "full weights are needed")
        self.interrupted = update.number
        for name in names:
            for slot in self.slots[name]:
                # lossy: one float32 sum a weight, rounded once; the loss is what bfloat16 itself costs
                slot.write(kept.pop(id(slot)) if id(slot) in kept else self._after(on[name], slot, {}), self.lost_on)
        self._done(update, digest)
        return True

    def _take_full(self, full: FullWeights, digest: bytes) -> bool:
        shapes = {name: tuple(W.shape) for name, W in full.weights.items()}
        if self.run is not None:
            self._check_identity(full)
            if full.session < self.session or full.session == self.session and full.number < self.version:
                raise SyncError("stale", f"full weights of start {full.session}, version {full.number}, but start {self.session}, version {self.version} is held")
        self._check_matrices(shapes)
        if self.run is None:
            self._check_rest(full)
        if self.mode == "exact" and any(W.dtype != torch.float32 for W in full.weights.values()):
            raise SyncError("mode", "an exact receiver needs float32 full weights: bfloat16 lacks the bits that later updates add to")
        wrong = [name for name, W in full.weights.items() if not self._as_announced(W.to(self.slots[name][0].tensor.device), full.after[name])]
        if wrong:
            raise SyncError("hash", f"{len(wrong)} of {len(shapes)} full weights have another fingerprint than announced, {wrong[0]} for one")
        self.interrupted = full.number
        for name, W_dk in full.weights.items():
            for slot in self.slots[name]:
                slot.write(W_dk[slot.part.rows, slot.part.columns].to(slot.tensor.device).float(), self.lost_on)
        self._done(full, b"")
        return True

    def _check_identity(self, message) -> None:
        if message.run != self.run:
            raise SyncError("run", f"the message is of run {message.run!r}, this receiver follows {self.run!r}")
        if message.base != self.base:
            raise SyncError("base", f"the message is for base weights {message.base}, this receiver's run began from {self.base}")

    def _check_rest(self, message) -> None:
        """Raises SyncError where the model is another one in what no message changes."""
        names = message.after.keys()
        held = self.rest | {f"{name}.weight": slots for name, slots in self.slots.items() if name not in names}
        own = bits.combined(self._sums(held, lambda slot: slot.tensor, rounded=True))
        if message.base.partition("/")[2] != own:
            raise SyncError("base", f"this is another model than the run's: {len(held)} parameters that no message changes have the hash {own}, "
                                    f"wanted that of {message.base}; load the model that the trainer began from")

    def _check_matrices(self, shapes: dict[str, tuple[int, int]]) -> None:
        unknown = sorted(shapes.keys() - self.slots.keys())
        if unknown:
            raise SyncError("matrix", f"{len(unknown)} matrices of the message are not in the model, {unknown[0]} for one")
        if self.names is not None and shapes.keys() != self.names:
            raise SyncError("matrix", f"the message names {len(shapes)} matrices, and the run has {len(self.names)}")
        for name, shape in shapes.items():
            if shape != self.slots[name][0].shape:
                raise SyncError("shape", f"{name} is {shape} in the message and {self.slots[name][0].shape} in the model")

    def _check_projections(self, update: LowRankUpdate) -> None:
        for k in {m.k for m in update.matrices.values()}:
            try:
                projection.entries(update.projection, update.rank, k, 0, slice(0, 1), slice(0, 1))
            except ValueError as error:
                raise SyncError("malformed", f"no such projection: {error}") from None

    # ---- arithmetic

    @staticmethod
    def _as_announced(W_dk: torch.Tensor, fingerprint: int) -> bool:
        return bool(torch.isfinite(W_dk).all()) and bits.fingerprint(W_dk) == fingerprint

    def _moved(self, update: LowRankUpdate, name: str) -> LowRankUpdate:
        """The part of an update that is about one matrix, on that matrix's device."""
        matrix, device = update.matrices[name], self.slots[name][0].tensor.device
        here = type(matrix)(matrix.integers_dr.to(device), matrix.exponent_d.to(device), matrix.k, matrix.key)
        return LowRankUpdate(update.number, update.projection, update.rank, update.bits, {name: here})

    def _after(self, update: LowRankUpdate, slot: Slot, kept: dict[int, torch.Tensor]) -> torch.Tensor:
        """The slot's float32 value after the update, rounded where its exact sum is, and nowhere else: as in the trainer. Kept, if there is room."""
        W = slot.master()
        update.apply_to(slot.part.name, W, slot.part.rows, slot.part.columns)
        if sum(held.nbytes for held in kept.values()) + W.nbytes <= _KEPT:
            kept[id(slot)] = W
        return W

    def _sums(self, held: Mapping[str, list[Slot]], value: Callable[[Slot], torch.Tensor], rounded: bool = False) -> dict[str, int]:
        """Fingerprints by name, over all ranks, of a value for each slot: one slot's at a time is made."""
        names = sorted(held)
        own = [sum(slot.fingerprint(value(slot), rounded) for slot in held[name]) for name in names]
        total = self._add_up(torch.tensor([(x + (1 << 63)) % (1 << 64) - (1 << 63) for x in own], dtype=torch.int64))
        return {name: x & (1 << 64) - 1 for name, x in zip(names, total.tolist())}

    def _done(self, message, digest: bytes) -> None:
        self.run, self.base, self.session = message.run, message.base, message.session
        self.names, self.version, self._digest, self.interrupted = set(message.after), message.number, digest, None
        self._hash = bits.combined(message.after) if self.mode == "exact" else None         # verified just before the write

    def _each(self):
        return (slot for held in self.slots.values() for slot in held)

    @torch.no_grad()
    def _hold(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Turn the model's parameters into `dtype`, keeping the lost bits of the slots where exact; buffers are left as they are."""
        masters = {id(slot): slot.master() for slot in self._each()} if self.mode == "exact" and dtype == torch.bfloat16 else {}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for current, held in zip(whole(model), (self.slots, self.rest)):
            for name, slots in current.items():
                held[name][0].tensor = slots[0].tensor
        for slot in self._each():
            if id(slot) in masters:
                slot.write(masters[id(slot)], self.lost_on)


def whole(model: nn.Module) -> tuple[dict[str, list[Slot]], dict[str, list[Slot]]]:
    """Slots of a model that is neither fused nor split: every nn.Linear weight but the output head's, by its module's name, and the rest."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    slots, rest = {}, {}
    for full, parameter in model.named_parameters():
        name, W_dk = projection.canonical_name(full), bits.as_matrix(parameter)
        found, name = (slots, name.removesuffix(".weight")) if full in linear else (rest, name)
        d, k = W_dk.shape
        found[name] = [Slot(bits.Part(name, slice(0, d), slice(0, k)), (d, k), W_dk)]
    return slots, rest


def full_weights(trainer: nn.Module | Sketches, dtype: torch.dtype = torch.float32) -> bytes:
    """All selected weights of a model that `logra.attach` was called on, as one message: the version after its last update.

    dtype: float32, which every receiver takes, or bfloat16, half the size, which none in mode `exact` does.
    """
    sketches = trainer if isinstance(trainer, Sketches) else attached(trainer)
    return _full(sketches, dtype).to_bytes()


def _full(sketches: Sketches, dtype: torch.dtype) -> FullWeights:
    weights = ((name, sketch.weight) for name, sketch in sketches.items())      # over ranks each is gathered when it is asked for
    return FullWeights.of(weights, sketches.update - 1, sketches.run, sketches.base, sketches.session, dtype)


@dataclass(frozen=True)
class Report:
    """One publication: what was sent (kind "update" or "full"), bytes and seconds in all, and the receiver's state after it.

    refused: the reason for which an update was refused, after which full weights went; empty otherwise.
    equal: whether the receiver's held bits are those that were sent, or for an update those of the trainer's float32 weights after it.
    """

    kind: str
    bytes: int
    seconds: float
    receiver_seconds: float
    version: int
    weights: str
    equal: bool
    refused: str = ""

    def as_row(self) -> dict:
        return asdict(self)


class Publisher:
    """The trainer's side: sends each update, and full weights where the receiver refuses it.

    apply: a receiver's `apply`, or what carries the bytes to one and its Acknowledgement (or SyncError) back.
    mode: "exact" and "lossy" send updates, "full" all weights in bfloat16 each time.
    """

    def __init__(self, sketches: Sketches, apply: Callable[[bytes], Acknowledgement], mode: str = "exact"):
        if mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}, but it is {mode!r}")
        self.sketches, self.apply, self.mode = sketches, apply, mode

    def push(self) -> Report:
        """Full weights, now: before the first rollout, after a resume, after a refusal."""
        start = time.perf_counter()
        full = _full(self.sketches, torch.bfloat16 if self.mode == "full" else torch.float32)
        message = full.to_bytes()
        acknowledged = self.apply(message)
        return self._report("full", len(message), start, acknowledged, full.after)

    def publish(self, update: LowRankUpdate) -> Report:
        """Bring the receiver to the weights after `update`. Raises SyncError if even full weights are refused, or the receiver's are not the trainer's."""
        if self.mode == "full":
            return self.push()
        start = time.perf_counter()
        message = update.to_bytes()
        try:
            acknowledged = self.apply(message)
        except SyncError as error:
            pushed = self.push()
            return Report("full", len(message) + pushed.bytes, time.perf_counter() - start, pushed.receiver_seconds, pushed.version, pushed.weights,
                          pushed.equal, error.reason)
        return self._report("update", len(message), start, acknowledged, update.after)

    def _report(self, kind: str, size: int, start: float, acknowledged: Acknowledgement, sent: Mapping[str, int]) -> Report:
        seconds, own = time.perf_counter() - start, bits.combined(sent)
        equal = acknowledged.weights == own
        if acknowledged.version != self.sketches.update - 1 or self.mode == "exact" and not equal:
            raise SyncError("hash", f"after version {acknowledged.version} the receiver holds {acknowledged.weights}, the trainer {own} at {self.sketches.update - 1}")
        return Report(kind, size, seconds, acknowledged.seconds, acknowledged.version, acknowledged.weights, equal)
