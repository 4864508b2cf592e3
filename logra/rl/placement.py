"""Where responses are sampled: on the trainer's own weights, or by an engine whose weights are kept up with by `logra.sync`.

An engine has `generate`, `apply`, `compare` and `close`. `Copy` is a second Hugging Face model; `Process` is any engine in a process of
its own, spoken to through a socket: each call is one message of `logra.wire` (an update is sent as it is), and no pickle is involved.
`rollout: ray` is a `Process` too, which drives engines in Ray's actors (`rl.engines`).
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

import logra
from logra import sync, wire
from logra.rl.bases import BASES
from logra.rl.config import RunConfig
from logra.rl.learner import load_base
from logra.rl.models import SMOLLM2, load, smollm2
from logra.rl.rollout import Rollout, generate

ROOT = Path(logra.__file__).resolve().parent.parent
TENSORS = ("input_ids", "attention_mask", "response_mask", "logprobs", "complete")
# what torchrun tells its ranks: an engine's own process group would take it for its own
_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TRIES = 8                                                  # of a batch or a publication, should its engines be started anew so often


def base_model(name: str):
    """The model and tokenizer that a configuration's `model` names, in float32: a shipped base, or what `models.load` takes."""
    return load_base(BASES[name]) if name in BASES else load(name)


def model_folder(name: str) -> Path:
    """Where the files of the same model are."""
    return BASES.get(name) or (smollm2() if name == SMOLLM2 else Path(name).expanduser())


class OwnWeights:
    """The trainer's own model samples: nothing to keep up with."""

    def __init__(self, model, tokenizer, length: int | None = None):
        self.model, self.tokenizer, self.length = model, tokenizer, length

    def generate(self, prompts, seed, max_new_tokens, temperature) -> Rollout:
        self.model.eval()
        return generate(self.model, self.tokenizer, prompts, seed, max_new_tokens, temperature, length=self.length)

    def publish(self, update) -> dict:
        return {}

    def close(self) -> None:
        pass


class Copy:
    """A second model in this process, and its receiver."""

    def __init__(self, model: str, mode: str, dtype: str, length: int | None = None):
        self.model, self.tokenizer = base_model(model)
        self.length = length
        self.model.requires_grad_(False)                    # as the trainer's is: torch picks other kernels otherwise, with other last bits
        self.receiver = sync.Receiver(self.model, mode, dtype=getattr(torch, dtype))

    def generate(self, prompts, seed, max_new_tokens, temperature, version) -> Rollout:
        """Responses of the policy after update `version` (None: whichever it is). Raises SyncError if the weights are of another."""
        held = self.receiver
        if held.interrupted is not None:
            raise sync.SyncError("interrupted", f"update {held.interrupted} was cut off half-way in the rollout engine")
        if version is not None and (held.run is None or held.version != version):
            raise sync.SyncError("gap", f"the rollout engine holds version {held.version}{' of no run' if held.run is None else ''}, wanted {version}")
        return generate(self.model, self.tokenizer, prompts, seed, max_new_tokens, temperature, length=self.length)

    def apply(self, message: bytes) -> sync.Acknowledgement:
        return self.receiver.apply(message)

    def compare(self, message: bytes) -> tuple[int, int]:
        return self.receiver.compare(message)

    def close(self) -> None:
        pass


class Process:
    """An engine in a process of its own (`logra.rl.serve`). One that ended is started anew, with a SyncError: it needs full weights."""

    def __init__(self, python: str, **settings):
        self.python, self.settings = python, settings
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        threads = str(self.settings["threads"])
        own = {name: value for name, value in os.environ.items() if name not in _TORCHRUN and not name.startswith("TORCHELASTIC_")}
        environment = own | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        with theirs:
            self.process = subprocess.Popen([self.python, "-m", "logra.rl.serve", str(theirs.fileno())], env=environment, pass_fds=[theirs.fileno()],
                                            stdin=subprocess.DEVNULL, start_new_session=True)     # Ctrl-C is the trainer's to handle
        with ours:
            self.stream = ours.makefile("rwb")
        try:
            self._call("start", **self.settings)
        except BaseException:                               # an engine that does not start leaves no process behind
            self._hang_up()
            self.process.terminate()
            self.process.wait(timeout=60)
            raise

    def _call(self, name: str, message: bytes = b"", **arguments) -> tuple[dict, dict]:
        try:
            wire.write(self.stream, wire.seal(wire.pack({}, {"call": name, "arguments": arguments})))
            if message:
                wire.write(self.stream, message)
            answer = wire.read(self.stream)
        except (BrokenPipeError, ConnectionResetError):
            answer = None
        if answer is None:
            code = self.process.wait()
            self._hang_up()
            if name in ("start", "stop"):
                raise RuntimeError(f"the rollout process ended with exit code {code} while it was told to {name}; what it printed stands above")
            self._start()
            raise sync.SyncError("interrupted", f"the rollout process ended with exit code {code} and was started anew: full weights are needed")
        tensors, about = wire.unpack(wire.opened(answer))
        if "reason" in about:
            raise sync.SyncError(about["reason"], about["detail"])
        if "error" in about:
            raise RuntimeError(f"the rollout process failed: {about['error']}")
        return tensors, about

    def _hang_up(self) -> None:
        with suppress(OSError):                             # closing sends what is left over, to nobody
            self.stream.close()

    def generate(self, prompts, seed, max_new_tokens, temperature, version, **more) -> Rollout:
        tensors, about = self._call("generate", prompts=list(prompts), seed=seed, max_new_tokens=max_new_tokens, temperature=temperature, version=version, **more)
        return Rollout(*(tensors[name] for name in TENSORS), about["texts"])

    def apply(self, message: bytes) -> sync.Acknowledgement:
        return sync.Acknowledgement(**self._call("apply", message)[1])

    def compare(self, message: bytes) -> tuple[int, int]:
        return tuple(self._call("compare", message)[1]["counts"])

    def close(self) -> None:
        if not self.stream.closed:
            with suppress(RuntimeError, OSError):           # SyncError is one too
                self._call("stop")
            self._hang_up()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=60)


def answer(engine, call: str, arguments: dict, message: bytes) -> bytes:
    """An engine's answer to one call, as a message: what `Process` asks for and `serve` sends."""
    if call == "generate":
        rollout = engine.generate(**arguments)
        return wire.pack({name: getattr(rollout, name) for name in TENSORS}, {"texts": rollout.texts})
    if call == "apply":
        return wire.pack({}, asdict(engine.apply(message)))
    if call == "compare":
        return wire.pack({}, {"counts": engine.compare(message)})
    raise ValueError(f"unknown call {call!r}")


class Synchronised:
    """An engine that is kept at the trainer's weights: full weights before its first rollout, then each update."""

    def __init__(self, engine, sketches: logra.Sketches, mode: str):
        self.engine, self.sketches, self.mode = engine, sketches, mode
        self.publisher = sync.Publisher(sketches, engine.apply, mode)
        self.sampled: dict = {}                             # which weights the last rollout came from
        self._at: sync.Report | None = None

    def generate(self, prompts, seed, max_new_tokens, temperature, **more) -> Rollout:
        """more: top_p, for vLLM's engines alone, and for evaluation: sampled log-probabilities would not be the policy's."""
        arguments = (prompts, seed, max_new_tokens, temperature, self.sketches.update - 1)

        def made():
            if self._at is None:                            # a fresh start or a resume
                self._at = self.publisher.push()
            return self.engine.generate(*arguments, **more)

        batch = self._again(made)
        self.sampled = {"rollout_version": self._at.version, "rollout_weights": self._at.weights}
        return batch

    def publish(self, update) -> dict:
        """Send an update. Returns its row of the record; `sync_differing` is the share of bfloat16 entries that are not the trainer's."""
        def sent():
            report = self.publisher.publish(update)
            return report, self.engine.compare(sync.full_weights(self.sketches, torch.bfloat16)) if self.mode == "lossy" else (0, 1)

        report, (differing, entries) = self._again(sent)
        self._at = report
        return self.sampled | {"sync": report.kind, "sync_bytes": report.bytes, "sync_version": report.version, "sync_weights": report.weights,
                               "sync_equal": report.equal, "sync_refused": report.refused, "sync_differing": differing / entries}

    def _again(self, work):
        """Its result, also where the engine is started anew or cut off meanwhile: what was taken already is a duplicate then."""
        for left in reversed(range(_TRIES)):
            try:
                return work()
            except sync.SyncError as error:
                self._at = None                             # full weights first
                if not left or error.reason not in ("interrupted", "gap"):      # they mend nothing else
                    raise

    @property
    def seconds(self) -> float:
        """Of the last publication: encoding, carrying, applying, acknowledging; a comparison of the weights is not in it."""
        return self._at.seconds

    def close(self) -> None:
        self.engine.close()


def place(config: RunConfig, model, tokenizer, method):
    """The engine that a configuration asks for. Raises FileNotFoundError where the interpreter that has vLLM is missing."""
    if config.sync == "none":
        return OwnWeights(model, tokenizer, config.context)
    sketches = method.sketches
    sketches.run, sketches.session = config.hash(), time.time_ns()
    sketches.base                                           # of the base weights, before a resume replaces them
    settings = dict(model=config.model, mode=config.sync, dtype=config.rollout_dtype) | ({"length": config.context} if config.context else {})
    if config.rollout == "in_process":
        return Synchronised(Copy(**settings), sketches, config.sync)
    python = vllm_python() if config.rollout in ("vllm", "ray") else sys.executable
    if config.rollout == "ray":
        settings |= dict(engines=config.engines, ranks=config.engine_ranks, seconds=config.engine_seconds, restarts=config.engine_restarts,
                         cache_gib=config.engine_cache_gib)
    return Synchronised(Process(python, engine=config.rollout, threads=config.threads, **settings), sketches, config.sync)


def vllm_python() -> str:
    """The interpreter that has vLLM: LOGRA_VLLM_PYTHON, else that of .venv-vllm. Raises FileNotFoundError where there is none."""
    python = os.environ.get("LOGRA_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
    if not Path(python).is_file():
        raise FileNotFoundError(f"{python} does not exist: name an interpreter that has vLLM in LOGRA_VLLM_PYTHON; for GPUs, of a venv with vllm==0.32.0 and ray==2.60.0, "
                                "for the CPU, what ./reproduce.sh setup-vllm makes")
    return python
