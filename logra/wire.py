"""The wire format: a LowRankUpdate, or all selected weights, as bytes. No pickle; nothing read is believed before it is checked.

A message is

    8 bytes   "LoGRA" and the format's version in three digits
    8 bytes   length of the body, little-endian
    32 bytes  BLAKE2b of everything else
    body      a safetensors file, whose one metadata entry "logra" is JSON: the kind of message, run, base (the hash of the whole
              model, `logra.bits.base`), session, number and, for each matrix, its fingerprint after the update; an update also has its projection, rank and bits, and each
              matrix's key and k. Its tensors are `<name>:factor` (int8 or int16 [d, r]) and `<name>:exponents` (int16 [d]); those
              of full weights are `<name>:weight` (float32 or bfloat16 [d, k]).

The length in front makes a message readable from a stream: `write` and `read` take a file or a socket's makefile().
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch

from logra import projection
from logra.bits import fingerprint
from logra.update import LowRankUpdate, MatrixUpdate

MAGIC = b"LoGRA001"
HEAD = struct.Struct("<8sQ32s")
_FACTOR = {8: torch.int8, 16: torch.int16}
_HELD = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# a row's exponent: with the largest integer and rank, the sum stays a finite float32
_EXPONENTS = range(-126, 128)


class SyncError(RuntimeError):
    """A message, or a receiver's state, for which nothing was applied. `reason` is one of these words:

    truncated   bytes are missing at the end            format      another version of the wire format
    malformed   not a message, or a field out of range  digest      bytes were changed on the way
    run         of another run                          base        made for another model or other base weights
    session     of an earlier or unknown start of it    gap         an update before it is missing
    matrix      an unknown matrix, or one is missing    shape       a matrix of another shape
    hash        the weights would not be the trainer's  conflict    other content under a number that was applied
    stale       full weights older than the held ones   mode        a message that this mode does not take
    interrupted an update was cut off half-way
    """

    REASONS = ("truncated", "malformed", "format", "digest", "run", "base", "session", "gap", "matrix", "shape", "hash", "conflict",
               "stale", "mode", "interrupted")

    def __init__(self, reason: str, detail: str):
        if reason not in self.REASONS:
            raise ValueError(f"unknown reason {reason!r}")
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class FullWeights:
    """All selected weights after update `number` (0: the base): what any receiver can start from, or recover with.

    weights: float32 or bfloat16 [d, k] by name. after: their fingerprints. run, base, session: as in a LowRankUpdate.
    """

    number: int
    weights: dict[str, torch.Tensor]
    after: dict[str, int]
    run: str
    base: str
    session: int

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]], number: int, run: str, base: str, session: int = 0,
           dtype: torch.dtype = torch.float32) -> "FullWeights":
        """The trainer's float32 weights with their names, as they are or rounded to bfloat16 (which no `exact` receiver takes): one after the other
        rounded and fingerprinted on its own device, and kept on the CPU."""
        held, after = {}, {}
        for name, weight in weights:
            W_dk = weight.detach().to(dtype)
            held[name], after[name] = W_dk.cpu(), fingerprint(W_dk)
            del weight, W_dk                                # before the next is gathered
        return cls(number, held, after, run, base, session)

    def to_bytes(self) -> bytes:
        return encode(self)


def encode(message: LowRankUpdate | FullWeights) -> bytes:
    """The message's bytes. Raises ValueError for an update whose factor is not rounded, and for one that no `apply` has put into the
    trainer's weights: it has no fingerprints."""
    about = {"run": message.run, "base": message.base, "session": message.session, "number": message.number}
    if isinstance(message, FullWeights):
        about |= {"kind": "full", "matrices": {name: {"after": f"{message.after[name]:016x}"} for name in message.weights}}
        tensors = {f"{name}:weight": weight for name, weight in message.weights.items()}
    else:
        if message.bits is None:
            raise ValueError(f"the factor of update {message.number} is not rounded (bits=None): its sums depend on their order in a last bit, "
                             "so that no receiver could have the trainer's weights; round it to 8 or 16 bits to send it")
        if message.matrices.keys() != message.after.keys():
            raise ValueError(f"update {message.number} has no fingerprints of the weights after it: apply it to the trainer's weights first "
                             "(optimizer.step() does), since a receiver checks its own weights against them")
        about |= {"kind": "update", "projection": message.projection, "rank": message.rank, "bits": message.bits,
                  "matrices": {name: {"k": m.k, "key": m.key, "after": f"{message.after[name]:016x}"} for name, m in message.matrices.items()}}
        tensors = {}
        for name, matrix in message.matrices.items():
            tensors[f"{name}:factor"], tensors[f"{name}:exponents"] = matrix.integers_dr, matrix.exponent_d
    return seal(pack(tensors, about))


def decode(message: bytes) -> LowRankUpdate | FullWeights:
    """The message that these bytes are, on the CPU, with every field checked for kind, shape and range. Raises SyncError."""
    tensors, about = unpack(opened(message))
    try:
        matrices = _mapping(about["matrices"])
        common = {"number": _integer(about["number"], 0, 1 << 62), "run": _text(about["run"]), "base": _text(about["base"]),
                  "session": _integer(about["session"], 0, (1 << 63) - 1),
                  "after": {name: _fingerprint(_mapping(row)["after"]) for name, row in matrices.items()}}
        if about["kind"] == "full":
            weights = {name: _take(tensors, f"{name}:weight", tuple(_HELD.values()), 2) for name in matrices}
            read = FullWeights(weights=weights, **common)
        elif about["kind"] == "update":
            rank, bits = _integer(about["rank"], 1, 1 << 20), _integer(about["bits"], 8, 16)
            if about["projection"] not in projection.KINDS or bits not in _FACTOR or common["number"] < 1:
                raise ValueError(f"projection {about['projection']!r}, {bits} bits, number {common['number']}")
            read = LowRankUpdate(projection=about["projection"], rank=rank, bits=bits, **common,
                                 matrices={name: _matrix(tensors, name, row, rank, bits) for name, row in matrices.items()})
        else:
            raise ValueError(f"kind {about['kind']!r}")
        if tensors:
            raise ValueError(f"a tensor that belongs to no matrix: {next(iter(tensors))!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise SyncError("malformed", f"a field of the message is missing or out of range: {error!s:.200}") from None
    if not matrices:
        raise SyncError("malformed", "the message names no matrix")
    return read


def seal(body: bytes) -> bytes:
    """A body with its head: version, length, digest."""
    return b"".join((HEAD.pack(MAGIC, len(body), _digest(body)), body))


def opened(message: bytes) -> bytes:
    """The body of a message whose head is right. Raises SyncError."""
    if len(message) < HEAD.size:
        raise SyncError("truncated", f"{len(message)} bytes were given, and the head alone takes {HEAD.size}")
    magic, length, digest = HEAD.unpack_from(message)
    if magic != MAGIC:
        known = magic[:5] == MAGIC[:5] and magic[5:].isdigit()
        raise SyncError("format" if known else "malformed", f"the message begins with {magic!r}, wanted {MAGIC!r}")
    body = message[HEAD.size:]
    if len(body) < length:
        raise SyncError("truncated", f"{length} bytes of body were announced, {len(body)} are there")
    if len(body) > length:
        raise SyncError("malformed", f"{length} bytes of body were announced, {len(body)} are there")
    if _digest(body) != digest:
        raise SyncError("digest", "the message's digest is not that of its bytes: they were changed on the way")
    return body


def write(stream: BinaryIO, message: bytes) -> None:
    """Send one message into a stream."""
    stream.write(message)
    stream.flush()


def read(stream: BinaryIO, limit: int = 1 << 40) -> bytes | None:
    """The next message of a stream, not yet checked beyond its length; None where the stream ends between two messages.

    Raises SyncError for a stream that ends inside a message, does not begin with one, or announces more than `limit` bytes.
    """
    head = stream.read(HEAD.size)
    if not head:
        return None
    if len(head) < HEAD.size:
        raise SyncError("truncated", f"the stream ended after {len(head)} of {HEAD.size} bytes of a message's head")
    magic, length, _ = HEAD.unpack(head)
    if magic[:5] != MAGIC[:5] or length > limit:
        raise SyncError("malformed", f"the stream goes on with {magic!r} and a length of {length}, which is no message")
    body = stream.read(length)
    if len(body) < length:
        raise SyncError("truncated", f"the stream ended after {len(body)} of {length} bytes of a message's body")
    return head + body


def pack(tensors: Mapping[str, torch.Tensor], about: dict) -> bytes:
    """A safetensors file with `about` as JSON in its one metadata entry (one, for its own order of several varies)."""
    from safetensors.torch import save                      # needed here alone: the method itself needs torch alone

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(whole, {"logra": json.dumps(about, sort_keys=True)})


def unpack(body: bytes) -> tuple[dict[str, torch.Tensor], dict]:
    """What `pack` was given. Raises SyncError ("malformed")."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(body)
        end = 8 + int.from_bytes(body[:8], "little")
        about = json.loads(json.loads(body[8:end])["__metadata__"]["logra"])
        return tensors, _mapping(about)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise SyncError("malformed", f"the body is not a safetensors file of this format: {error!s:.200}") from None


def _digest(body: bytes) -> bytes:
    digest = hashlib.blake2b(HEAD.pack(MAGIC, len(body), bytes(32)), digest_size=32)
    digest.update(body)
    return digest.digest()


def _matrix(tensors, name, row, rank, bits) -> MatrixUpdate:
    factor_dr = _take(tensors, f"{name}:factor", (_FACTOR[bits],), 2)
    exponent_d = _take(tensors, f"{name}:exponents", (torch.int16,), 1)
    if factor_dr.shape != (len(exponent_d), rank):
        raise ValueError(f"{name}: a factor of {tuple(factor_dr.shape)} and {len(exponent_d)} exponents at rank {rank}")
    if int(exponent_d.min()) < _EXPONENTS.start or int(exponent_d.max()) >= _EXPONENTS.stop:
        raise ValueError(f"{name}: an exponent outside {_EXPONENTS.start}..{_EXPONENTS.stop - 1}")
    if int(factor_dr.min()) == torch.iinfo(factor_dr.dtype).min:
        raise ValueError(f"{name}: an integer that no rounding makes")
    return MatrixUpdate(factor_dr, exponent_d, _integer(row["k"], 1, 1 << 31), _integer(row["key"], 0, (1 << 63) - 1))


def _take(tensors, name, dtypes, dimensions) -> torch.Tensor:
    tensor = tensors.pop(name)
    if tensor.dtype not in dtypes or tensor.dim() != dimensions or not tensor.numel():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


def _mapping(value) -> dict:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.50} is no mapping")
    return value


def _text(value) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise TypeError(f"{value!r:.50} is no short text")
    return value


def _integer(value, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r:.50} is no integer from {low} to {high}")
    return value


def _fingerprint(value) -> int:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
        raise ValueError(f"{value!r:.50} is no fingerprint")
    return int(value, 16)
