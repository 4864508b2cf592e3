"""Worker processes in which verifiers run: each call ends within its wall-clock limit, whatever its code does.

A verifier parses what a policy wrote: it may loop without end inside sympy, ask for a number of a trillion digits, or recurse until
the C stack is gone. So each call is timed by its own worker: an alarm whose action is left to the system ends the process, in the
middle of C code too, and of a worker whose parent has died. The parent gave each worker its call and waits for its answer or
its end, so it always knows which call a dead worker had; it starts another worker and goes on. (A pool of the standard library
breaks when a worker dies; pebble's stood still when the parent had been slower than a worker's death, on a crowded machine.)
Workers are forked from a server that has imported the verifiers, never from the caller, which has threads and may hold a GPU.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from types import ModuleType
from typing import Literal

from logra.rl.records import cores

_WORKERS = 16                                               # at most: a batch of 128 needs no more
_GRACE = 2.0                                                # seconds after which the parent ends a worker that disarmed its alarm
_START = 120.0                                              # seconds to start a worker, or to import what a call needs, on a crowded machine
_MEMORY = 2 << 30                                           # bytes that a call may add to what a worker begins with


class Unparsable(ValueError):
    """Raised by a verifier: the response has no final answer, or one that cannot be read. No credit, and no fault of the verifier."""


@dataclass(frozen=True)
class Verdict:
    """What one call came to. value: the verifier's score, 0 unless `kind` is "scored". reason: why, for the other kinds."""

    kind: Literal["scored", "unparsable", "raised", "timed out", "crashed"]
    value: float = 0.0
    reason: str = ""


class Worker:
    """One process, and the parent's end of the pipe to it. `number`: the call that it has; None before it is ready, and between calls.
    `deadline`: when the parent ends it, should it still not have started, begun or answered."""

    def __init__(self, context):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")    # else each worker would run the caller's script again, guarded or not
        try:
            self.process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()
        self.ready, self.number, self.deadline = False, None, time.monotonic() + _START

    def give(self, number: int, call: tuple, limit: float) -> None:
        """Raises OSError if the process is gone, and what pickling raises."""
        self.pipe.send((*call, limit))
        self.number, self.deadline = number, time.monotonic() + _START

    def begun(self, limit: float) -> None:
        self.deadline = time.monotonic() + limit + _GRACE

    def end(self) -> Verdict:
        """Makes sure that the process is gone; what its call came to."""
        late = self.process.is_alive() and time.monotonic() > self.deadline
        if not late:
            self.process.join(5)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode
        return Verdict("timed out", 0.0, "ended by its alarm" if not late else "ended by the parent") if late or code == -signal.SIGALRM else Verdict("crashed", 0.0, f"exit code {code}")


_held: tuple[int, list[Worker]] | None = None               # (process, workers): a forked copy must leave its parent's alone


def verdicts(calls: Sequence[tuple[Callable, str, object]], limit: float) -> list[Verdict]:
    """judge(response, problem) for each (judge, response, problem), in worker processes; in the calls' order.

    limit: seconds of wall clock that one call may take. The judge, of an importable module, and the problem must be picklable; what a judge imports or reads once,
    its attribute prepare(problem) may do, where it has one, before the time runs. Raises ValueError for a judge of the caller's script
    or notebook, RuntimeError if workers die before they are ready, again and again.
    """
    if not calls:
        return []
    if own := {judge for judge, _, _ in calls if getattr(judge, "__module__", None) == "__main__"}:
        raise ValueError(f"{own.pop()!r} is of __main__, which workers do not run: put it into a module of its own and import it")
    workers, found, todo, stillborn = _workers(), [None] * len(calls), deque(range(len(calls))), 0
    try:
        while None in found:
            for worker in workers:
                while todo and worker.ready and worker.number is None:
                    number = todo.popleft()
                    try:
                        worker.give(number, calls[number], limit)
                    except OSError:                         # it died idle; the wait below sees it
                        todo.appendleft(number)
                        break
                    except Exception as error:              # the call could not be pickled
                        found[number] = Verdict("raised", 0.0, f"{type(error).__name__}: {error}"[:200])
            watched = {end: worker for worker in workers for end in (worker.pipe, worker.process.sentinel)}
            live = [worker for worker in workers if not worker.ready or worker.number is not None]
            first = min((worker.deadline for worker in live), default=0.0)
            ended = {watched[end] for end in connection.wait(watched, max(0.0, first - time.monotonic()))}
            for index, worker in enumerate(workers):
                answer = _answer(worker) if worker in ended else None
                if answer == ("begun",):
                    worker.begun(limit)
                elif answer is not None:
                    if worker.ready:
                        found[worker.number] = Verdict(*answer)
                    worker.ready, worker.number = True, None
                elif worker in ended or (worker in live and time.monotonic() > worker.deadline):
                    verdict = worker.end()
                    stillborn = 0 if worker.ready else stillborn + 1
                    if stillborn > 3 * len(workers):
                        raise RuntimeError(f"{stillborn} workers in a row died as they started ({verdict.reason}): try `python -c 'import logra.rl.warm'`")
                    if worker.number is not None:
                        found[worker.number] = verdict
                    workers[index] = Worker(_context())
    except BaseException:
        close()                                             # interrupted: workers may hold calls that nobody waits for
        raise
    return found


def close() -> None:
    """Ends the workers; the next call starts others."""
    global _held
    held, _held = _held, None
    if held is not None and held[0] == os.getpid():
        for worker in held[1]:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()


def _workers() -> list[Worker]:
    global _held
    if _held is None or _held[0] != os.getpid():
        _held = os.getpid(), [Worker(_context()) for _ in range(min(cores(), _WORKERS))]
    return _held[1]


def _context():
    context = get_context("forkserver")
    context.set_forkserver_preload(["logra.rl.warm"])
    return context


def _answer(worker: Worker) -> tuple | None:
    """What the worker sent; None if it is gone."""
    with suppress(EOFError, OSError):
        if worker.pipe.poll():
            return worker.pipe.recv()
    return None


def _serve(pipe) -> None:
    """A worker: silent, bounded in memory, past the cost of a first expression; then one call after another until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)            # Ctrl-C is the parent's
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):                                # parsers write their complaints there
        os.dup2(nowhere, stream)
    import logra.rl.warm  # noqa: F401
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as stream:
            size = int(stream.read().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    pipe.send(("ready",))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            try:
                call = pipe.recv()
            except (EOFError, OSError):
                raise
            except Exception as error:                      # what it names is not importable here
                pipe.send(("raised", 0.0, f"{type(error).__name__}: {error}"[:200]))
            else:
                pipe.send(_call(pipe, *call))


def _call(pipe, judge: Callable, response: str, problem, limit: float) -> tuple[str, float, str]:
    """In a worker: one call under an alarm."""
    try:
        getattr(judge, "prepare", lambda problem: None)(problem)
        pipe.send(("begun",))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit)
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
