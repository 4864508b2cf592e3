"""Worker processes in which verifiers run: each call ends within its wall-clock limit, whatever its code does.

A verifier parses what a policy wrote: it may loop without end inside sympy, ask for a number of a trillion digits, or recurse until
the C stack is gone. So each call is timed by its own worker: an alarm whose action is left to the system ends the process, in the
middle of C code too, and of a worker whose parent has died. pebble's pool sees the end, starts another worker and goes on.
Workers are forked from a server that has imported the verifiers (never from the caller, which has threads and may hold a GPU).
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

from logra.rl.records import cores

_WORKERS = 16                                               # at most: a batch of 128 needs no more
_GRACE = 2.0                                                # seconds after which pebble ends a worker that disarmed its alarm
_START = 120.0                                              # seconds that starting the workers may take, on a crowded machine
_MEMORY = 2 << 30                                           # bytes that a call may add to what a worker begins with
_held: tuple[int, object] | None = None                     # (process, pool): a forked copy of a pool has no threads


class Unparsable(ValueError):
    """Raised by a verifier: the response has no final answer, or one that cannot be read. No credit, and no fault of the verifier."""


@dataclass(frozen=True)
class Verdict:
    """What one call came to. value: the verifier's score, 0 unless `kind` is "scored". reason: why, for the other kinds."""

    kind: Literal["scored", "unparsable", "raised", "timed out", "crashed"]
    value: float = 0.0
    reason: str = ""


def verdicts(calls: Sequence[tuple[Callable, str, object]], limit: float) -> list[Verdict]:
    """judge(response, problem) for each (judge, response, problem), in worker processes; in the calls' order.

    limit: seconds of wall clock that one call may take. The judge and the problem must be picklable.
    """
    found: list[Verdict | None] = [None] * len(calls)
    for attempt in (1, 2, 3):                               # a pool that broke (its idle workers were killed) is replaced
        left = [number for number, verdict in enumerate(found) if verdict is None]
        if not left:
            break
        pool = _pool()
        futures = {number: pool.schedule(_call, (*calls[number], limit), timeout=limit + _GRACE) for number in left}
        rounds = -(-len(left) // min(cores(), _WORKERS))
        standing = wait(futures.values(), _START + rounds * (limit + _GRACE)).not_done
        for number, future in futures.items():
            found[number] = Verdict("crashed", 0.0, "the pool of workers stood still") if future in standing else _outcome(future)
        if standing or None in found:
            close()
    return [verdict or Verdict("crashed", 0.0, "the pool of workers broke three times") for verdict in found]


def close() -> None:
    """Ends the workers; the next call starts others."""
    global _held
    if _held is not None and _held[0] == os.getpid():
        _held[1].stop()
        with suppress(TimeoutError):
            _held[1].join(timeout=10)
    _held = None


def _pool():
    global _held
    if _held is None or _held[0] != os.getpid() or not _held[1].active:
        from pebble import ProcessPool                      # what needs no workers does not need pebble

        close()
        context = get_context("forkserver")
        main = getattr(sys.modules["__main__"], "__spec__", None)      # a worker imports the caller's main module: let the server have its imports
        context.set_forkserver_preload(["logra.rl.warm", *([main.name] if main and not main.name.endswith("__main__") else [])])
        _held = os.getpid(), ProcessPool(min(cores(), _WORKERS), initializer=_begin, context=context)
    return _held[1]


def _outcome(future) -> Verdict | None:
    """The verdict of a finished call; None if it has to be made again."""
    from pebble import ProcessExpired

    try:
        return Verdict(*future.result())
    except TimeoutError:
        return Verdict("timed out", 0.0, "ended by the pool")
    except ProcessExpired as error:
        return Verdict("timed out", 0.0, "ended by its alarm") if error.exitcode == -signal.SIGALRM else Verdict("crashed", 0.0, f"exit code {error.exitcode}")
    except BrokenProcessPool:
        return None
    except Exception as error:                              # it could not be pickled
        return Verdict("raised", 0.0, repr(error)[:200])


def _begin() -> None:
    """In a worker, once: silent, easy to end, bounded in memory, and past the cost of a first expression if its server was not."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)           # a handler in Python would wait for C code to return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):                                # parsers write their complaints there
        os.dup2(nowhere, stream)
    import logra.rl.warm  # noqa: F401
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as stream:
            size = int(stream.read().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _call(judge: Callable, response: str, problem, limit: float) -> tuple[str, float, str]:
    """In a worker: one call under an alarm."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        value = float(judge(response, problem))
        if not 0.0 <= value <= 1.0 or math.isnan(value):
            return "raised", 0.0, f"scored {value}, outside [0, 1]"
        return "scored", value, ""
    except Unparsable as error:
        return "unparsable", 0.0, str(error)[:200]
    except BaseException as error:                          # some libraries' time-outs are no Exception
        return "raised", 0.0, f"{type(error).__name__}: {error}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
