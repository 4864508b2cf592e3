"""Rollouts by vLLM engines that are Ray actors, all kept at one version of the weights: what `rollout: ray` places.

The trainer stays outside Ray, in its own environment; `placement.Process` starts the driver (`logra.rl.serve`, vLLM's interpreter), which
holds an `Engines` and is itself started anew when it dies. Each engine has a bundle of one placement group: `ranks` GPUs of one node, or
`threads * ranks` cores where there are no GPUs.

RAY_ADDRESS, where it is set, names the cluster that the driver joins: its nodes see the same files as this one, it has the GPUs that generate
alone, and where it asks for a token RAY_AUTH_MODE=token is set too. Else the driver starts Ray on this machine, where the training ranks
have the first GPUs and the engines those after them, or the ones that LOGRA_ENGINE_GPUS names ("4,5,6,7").

A batch is dealt over the engines by tokens, the same way each time. An engine that dies, fails or hangs is killed and started
anew, which a SyncError tells the trainer; after its full weights the batch is asked for again, and the parts that are made already are kept. A
response's draws are named by its place in the batch, so that no engine's end changes a bit of it.
"""

import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping

if "RAY_ADDRESS" not in os.environ:                         # Ray on this machine answers to this run alone; read when ray is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from logra import sync, wire
from logra.rl.placement import ROOT, TENSORS, answer, model_folder
from logra.rl.ranks import dealt
from logra.rl.rollout import Rollout, encode

_START = 1800.0                                             # seconds that engines may take to start: the largest load for minutes


class Engine:
    """In the actor's process: a `vllm_rollout.VLLM`, its answers as bytes of `logra.wire`."""

    def __init__(self, settings: dict):
        from logra.rl.serve import start

        self.engine = start("vllm", **settings)

    def call(self, name: str, arguments: dict, message: bytes) -> bytes:
        try:
            return answer(self.engine, name, arguments, message)
        except sync.SyncError as error:
            return wire.pack({}, {"reason": error.reason, "detail": error.detail})


class Engines:
    """`engines` vLLM engines of `ranks` tensor-parallel workers each, as one engine of `rl.placement`.

    seconds: without an answer, after which an engine is taken to hang. restarts: how often in a row, without a batch that it
    completed, an engine is started anew. Raises RuntimeError where the resources are missing, an engine does not start, or fails more often.
    """

    def __init__(self, engines: int, ranks: int, threads: int, seconds: float, restarts: int, **settings):
        self.seconds, self.restarts, self.trainer = seconds, restarts, os.getppid()
        self.settings = settings | {"threads": threads, "ranks": ranks}
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder(settings["model"]))
        self.options = _resources(engines, ranks, threads)
        bundle = {"GPU" if "num_gpus" in self.options else "CPU": self.options.get("num_gpus", self.options["num_cpus"])}
        self.group = placement_group([bundle] * engines, strategy="PACK")
        if not self.group.wait(60):
            raise RuntimeError(f"{engines} engines need {bundle} each, on one node, but Ray has {ray.cluster_resources()}, of which {ray.available_resources()} is free")
        self.actors = [self._actor(i) for i in range(engines)]
        self.failures, self.parts, self.asked = [0] * engines, {}, None
        if failed := self._ask({i: ("ready",) for i in range(engines)}, _START)[1]:
            i, cause = next(iter(failed.items()))
            raise RuntimeError(f"engine {i} of {engines} does not start: {cause}")

    def _actor(self, i: int):
        environment = {"OMP_NUM_THREADS": str(self.settings["threads"]), "MKL_NUM_THREADS": str(self.settings["threads"]), "PYTHONPATH": str(ROOT)}
        placed = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i)
        own = {"env_vars": environment, "py_executable": shlex.quote(sys.executable)}     # Ray puts it into a shell's line as it is: a path may have a space
        return ray.remote(Engine).options(**self.options, scheduling_strategy=placed, runtime_env=own).remote(self.settings)

    def _ask(self, calls: dict[int, tuple], seconds: float) -> tuple[dict[int, bytes], dict[int, Exception]]:
        """Answers by engine; and why those without one have none: they died, raised something or took too long."""
        pending = {(self.actors[i].__ray_ready__.remote() if call == ("ready",) else self.actors[i].call.remote(*call)): i for i, call in calls.items()}
        answers, failed, until = {}, {}, time.monotonic() + seconds
        while pending:
            for reference in ray.wait(list(pending), num_returns=1, timeout=1.0)[0]:
                i = pending.pop(reference)
                try:
                    answers[i] = ray.get(reference)
                except RayError as error:
                    failed[i] = error
            if os.getppid() != self.trainer:                # it was killed: nobody waits for the answers
                raise SystemExit("the trainer is gone")
            if time.monotonic() > until:
                failed |= {i: GetTimeoutError(f"no answer within {seconds:g} s") for i in pending.values()}
                break
        return answers, failed

    def _replace(self, failed: dict[int, Exception]) -> None:
        """Start engines anew, on the base weights. Raises RuntimeError for one that has failed too often."""
        while failed:
            for i, cause in failed.items():
                ray.kill(self.actors[i])
                self.failures[i] += 1
                if self.failures[i] > self.restarts:
                    raise RuntimeError(f"engine {i} of {len(self.actors)} failed {self.failures[i]} times without completing a batch, and {self.restarts} restarts "
                                       f"are allowed (engine_restarts); the last failure: {cause}")
                print(f"engine {i} of {len(self.actors)} is started anew ({self.failures[i]} of {self.restarts}): {_short(cause)}", flush=True)
                self.actors[i] = self._actor(i)
            failed = self._ask({i: ("ready",) for i in failed}, _START)[1]

    def generate(self, prompts, seed, max_new_tokens, temperature, version, top_p=1.0) -> Rollout:
        """As `vllm_rollout.VLLM.generate`, in the order of the prompts. Raises SyncError ("interrupted") where an engine was started anew:
        push full weights and ask for the same again."""
        asked = (tuple(prompts), seed, max_new_tokens, temperature, version, top_p)
        if asked != self.asked:
            self.asked, self.parts = asked, {}
        tokens = encode(self.tokenizer, prompts).attention_mask.sum(1).tolist()
        hands = {i: rows for i, rows in enumerate(dealt(tokens, len(self.actors))) if rows}
        calls = {i: ("generate", dict(prompts=[prompts[row] for row in rows], seed=seed, max_new_tokens=max_new_tokens, temperature=temperature,
                                      version=version, places=rows, top_p=top_p), b"") for i, rows in hands.items() if i not in self.parts}
        answers, failed = self._ask(calls, self.seconds)
        refused = None
        for i, (tensors, about) in ((i, wire.unpack(body)) for i, body in answers.items()):
            if "reason" in about:
                refused = about
            else:
                self.parts[i] = Rollout(*(tensors[name] for name in TENSORS), about["texts"])
                self.failures[i] = 0
        if failed:
            self._replace(failed)
            raise sync.SyncError("interrupted", f"engines {sorted(failed)} of {len(self.actors)} were started anew: full weights are needed")
        if refused:
            raise sync.SyncError(refused["reason"], refused["detail"])
        parts, self.asked, self.parts = self.parts, None, {}
        return ordered([(hands[i], parts[i]) for i in hands], self.tokenizer.pad_token_id)

    def apply(self, message: bytes) -> sync.Acknowledgement:
        """Give one message to every engine. One that dies over it gets it again when it is started anew. Raises SyncError if one refuses."""
        reference, left, found = ray.put(message), set(range(len(self.actors))), {}
        while left:
            answers, failed = self._ask({i: ("apply", {}, reference) for i in left}, self.seconds)
            found |= {i: wire.unpack(body)[1] for i, body in answers.items()}
            self._replace(failed)
            left = set(failed)
        for i in sorted(found):
            if "reason" in found[i]:
                raise sync.SyncError(found[i]["reason"], f"engine {i} of {len(self.actors)}: {found[i]['detail']}")
        if len({(about["version"], about["weights"]) for about in found.values()}) > 1:
            raise RuntimeError(f"the engines disagree about a message: {found}")
        return sync.Acknowledgement(**max(found.values(), key=lambda about: about["seconds"]))

    def compare(self, message: bytes) -> tuple[int, int]:
        """Of the engine that differs most."""
        reference = ray.put(message)
        answers, failed = self._ask({i: ("compare", {}, reference) for i in range(len(self.actors))}, self.seconds)
        if failed:
            self._replace(failed)
            raise sync.SyncError("interrupted", f"engines {sorted(failed)} were started anew: full weights are needed")
        found = [wire.unpack(body)[1] for body in answers.values()]
        for about in found:
            if "reason" in about:
                raise sync.SyncError(about["reason"], about["detail"])
        return max(tuple(about["counts"]) for about in found)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self.group)
        ray.shutdown()


def ordered(parts: list[tuple[list[int], Rollout]], pad: int) -> Rollout:
    """The batch, from (rows of it, these responses): each part right-padded to its own longest."""
    found = {}
    for rows, part in parts:
        for at, row in enumerate(rows):
            n = int(part.attention_mask[at].sum())
            found[row] = ([x[at, :n] for x in (part.input_ids, part.attention_mask, part.response_mask, part.logprobs)], part.complete[at], part.texts[at])
    in_order = [found[row] for row in sorted(found)]
    tensors = [pad_sequence(list(column), batch_first=True, padding_value=value)
               for column, value in zip(zip(*(row[0] for row in in_order)), (pad, 0, False, 0.0))]
    return Rollout(*tensors, torch.stack([row[1] for row in in_order]), [row[2] for row in in_order])


def _resources(engines: int, ranks: int, threads: int) -> dict:
    """Join or start Ray. What one engine takes of it: num_gpus, or num_cpus where there are no GPUs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, logging_level="ERROR")
    else:
        if gpus := torch.cuda.device_count():
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_left(gpus, engines * ranks, os.environ))
        # as many as are wanted, whatever the machine has: more engines than cores are slow, not wrong
        ray.init(address="local", num_cpus=max(engines * ranks * threads, os.cpu_count()), include_dashboard=False, logging_level="ERROR")
    if ray.cluster_resources().get("GPU", 0):
        return {"num_gpus": ranks, "num_cpus": 0}
    return {"num_cpus": threads * ranks}


def gpus_left(gpus: int, wanted: int, environment: Mapping[str, str]) -> list[str]:
    """The engines' GPUs on this machine, of `gpus` visible ones: those that LOGRA_ENGINE_GPUS names, or all but the training ranks'. Raises
    RuntimeError for fewer than `wanted`."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    named = environment.get("LOGRA_ENGINE_GPUS")
    found = named.split(",") if named else visible[int(environment.get("LOCAL_WORLD_SIZE", "1")):]
    if len(found) < wanted:
        raise RuntimeError(f"the engines need {wanted} GPUs, but have {', '.join(found) or 'none'} of {', '.join(visible)}, of which the first are the training ranks': "
                           "ask for fewer or smaller engines, or name their GPUs in LOGRA_ENGINE_GPUS")
    return found


def _short(cause: Exception) -> str:
    return " ".join(str(cause).split())[:200]
