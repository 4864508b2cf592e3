"""Answers that a verifier must survive: what a policy can write that hangs, kills or fools one.

    python tests/unit/hostile.py [ANSWERS] [SECONDS] [--out FILE]     judges 1,000 under a limit of 1 s, an honest one after every tenth: counts, rate, longest call

A call that its alarm ends has run its last instruction when the kernel marks its process as exiting: that is its end here. What comes after is told apart: the
memory is given back (a gigabyte takes a fifth of a second), the parent notices, another worker takes a call.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from logra.rl import pool, verifiers
from logra.rl.tasks import Problem

MEGABYTE = 1 << 20


def _nest(before: str, inner: str, after: str, depth: int) -> str:
    return before * depth + inner + after * depth


# kind -> the final answer of its i-th variant, put into a box
BOXED: dict[str, Callable[[int], str]] = {
    "tower of powers": lambda i: f"{2 + i % 8}^{{9^{{9^{{{2 + i}}}}}}}",
    "power of a power": lambda i: "^{".join(["2"] * (5 + i % 10)) + "}" * (4 + i % 10),
    "factorial of a factorial": lambda i: _nest("(", f"{5 + i % 9}", ")!", 2 + i % 5),
    "large factorial": lambda i: f"{10 ** (5 + i % 5)}!",
    "binomial": lambda i: rf"\binom{{10^{{{6 + i % 9}}}}}{{5 \cdot 10^{{{5 + i % 9}}}}}",
    "many digits": lambda i: "9" * (400 + i) + "x",
    "digits alone": lambda i: "9" * (700 + i % 200),
    "exponent of a decimal": lambda i: f"10^{{-10^{{{5 + i % 9}}}}}",
    "nested brackets": lambda i: _nest("(", "1", ")", 50 + i),
    "nested fractions": lambda i: _nest(r"\frac{1}{1+", "x", "}", 10 + i % 60),
    "nested roots": lambda i: _nest(r"\sqrt{2+", "x", "}", 10 + i % 80),
    "long sum": lambda i: rf"\sum_{{n=1}}^{{10^{{{6 + i % 9}}}}} \frac{{1}}{{n^{{{2 + i}}}}}",
    "long product": lambda i: rf"\prod_{{n=1}}^{{10^{{{5 + i % 9}}}}} (1+\frac{{x}}{{n}})",
    "integral": lambda i: rf"\int_0^{{{1 + i}}} \sin(x^x) e^{{-x^{{{i}}}}} dx",
    "limit": lambda i: rf"\lim_{{n \to \infty}} \frac{{n^{{{i}}}!}}{{n^n}}",
    "expansion": lambda i: f"(x+y+z+w)^{{{40 + 20 * i}}} - (x+y)^{{{30 + i}}}",
    "trigonometry": lambda i: rf"\sin(\cos(\tan(10^{{10^{{{3 + i % 6}}}}})))",
    "matrix": lambda i: r"\begin{pmatrix}" + r"\\".join(["x+1 & y & 1"] * (5 + i % 25)) + r"\end{pmatrix}",
    "set of many": lambda i: ",".join(f"{n}x" for n in range(20 + i)),
    "union of intervals": lambda i: r" \cup ".join(f"({n},{n}.5)" for n in range(5 + i % 40)),
    "open braces": lambda i: r"\frac{" * (2 + i),
    "chain of equals": lambda i: "=".join(["x^2"] * (3 + i % 100)),
    "code": lambda i: ["__import__('os')._exit(3)", r"\text{__import__('os').kill(1, 9)}", "lambda: 0", "exit()", "$(kill 1)"][i % 5],
    "unicode": lambda i: ["３４", "٣٤", "½", "三十四", "3\u20344", "\u202e43", "3\u0338", "🧮", "∞", "−", "\x00", "\ud800", "\u200b", "e\u0301"][i % 14] * (1 + i // 14),
    "blank": lambda i: [" ", "\n", "\t", "{}", r"\ ", r"\,", "$", "$$", r"\text{}", r"\\"][i % 10] * (1 + i // 10),
}
# kind -> a whole response
WHOLE: dict[str, Callable[[int], str]] = {
    "empty": lambda i: " " * i,
    "megabyte before": lambda i: "x " * (MEGABYTE // 2) + r"\boxed{1}",
    "megabyte inside": lambda i: r"\boxed{" + "1+" * (MEGABYTE // 2) + "1}",
    "megabyte of boxes": lambda i: r"\boxed{" * (MEGABYTE // 7),
    "megabyte of braces": lambda i: r"\boxed{" + "{" * MEGABYTE,
    "megabyte of lines": lambda i: "Answer: " * (MEGABYTE // 8),
    "megabyte of blanks": lambda i: "Answer" + " " * MEGABYTE + "1",
    "not closed": lambda i: r"so \boxed{12" + "3" * i,
}


def answers(count: int) -> list[tuple[str, str]]:
    """(kind, response): `count` of them, going round the kinds; of those of a megabyte, few."""
    found, i = [], 0
    while len(found) < count:
        found += [(kind, rf"so \boxed{{{make(i)}}}") for kind, make in BOXED.items()]
        found += [(kind, make(i)) for kind, make in WHOLE.items() if i < 3 or "megabyte" not in kind]
        i += 1
    return found[:count]


def timed(response: str, problem: Problem) -> float:
    """`verifiers.math`, which writes down when it begins and ends, and in which process."""
    own = Path(problem.meta["folder"], str(problem.index))
    own.write_text(json.dumps([time.monotonic(), os.getpid()]))
    try:
        return verifiers.math(response, problem)
    finally:
        own.with_suffix(".end").write_text(str(time.monotonic()))


class Watch(threading.Thread):
    """Looks at the pool's workers every millisecond or two. For each process that ended: `alive`, when it was last seen to run, `exiting`, when it first was not,
    and `gone`, when nothing was left of it but its exit code. Its end lies between the first two."""

    def __init__(self):
        super().__init__()
        self.alive, self.exiting, self.gone, self.stop = {}, {}, {}, threading.Event()

    def run(self):
        while not self.stop.wait(0.001):
            now = {worker.process.pid for worker in list(pool._held[1])} | self.alive.keys()
            for pid in now - self.gone.keys():
                before = time.monotonic()
                try:
                    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except OSError:                             # its parent was faster
                    state = ["Z"]
                if state[0] != "Z" and not int(state[6]) & 4:       # PF_EXITING, which the kernel sets before it gives the memory back
                    self.alive[pid] = before
                    continue
                self.exiting.setdefault(pid, time.monotonic())
                if state[0] == "Z":
                    self.gone[pid] = time.monotonic()


class Timed(pool.Worker):
    """A worker that notes when the parent noticed its end, and when a call is given to the one in its place."""

    noticed: dict[int, float] = {}
    replaced: dict[int, float] = {}
    last: int | None = None                                 # whose place the next one takes

    def __init__(self, context):
        super().__init__(context)
        self.place, Timed.last = Timed.last, None

    def end(self):
        Timed.last = self.process.pid
        self.noticed[Timed.last] = time.monotonic()
        return super().end()

    def give(self, *arguments):
        if self.place is not None:
            self.replaced.setdefault(self.place, time.monotonic())
        super().give(*arguments)


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "at most": round(max(values), 3)} if values else {}


def main(count: int = 1000, limit: float = 1.0) -> dict:
    references = [r"\frac{1}{2}", "34", "x^2+1", "(1,2)"]
    honest = Problem("p", references[0], "honest", 0)
    with tempfile.TemporaryDirectory() as folder:
        given, calls = answers(count), []
        for number, (_, response) in enumerate(given):
            calls.append((timed, response, Problem("p", references[number % 4], "hostile", number, {"folder": folder})))
            calls += [(verifiers.math, r"\boxed{0.5}", honest)] * (number % 10 == 9)
        pool.close()
        plain, pool.Worker = pool.Worker, Timed
        pool.verdicts([(verifiers.math, "", honest)], limit)             # starts the workers
        watch = Watch()
        watch.start()
        start = time.perf_counter()
        found = pool.verdicts(calls, limit)
        seconds = time.perf_counter() - start
        time.sleep(0.2)
        watch.stop.set()
        watch.join()
        pool.Worker = plain
        longest, unknown, ended = (0.0, ""), [], []
        for number, (kind, _) in enumerate(given):
            own, end = Path(folder, str(number)), Path(folder, f"{number}.end")
            begun, pid = json.loads(own.read_text()) if own.exists() else (None, None)
            if begun is None or not end.exists() and pid not in watch.exiting:
                unknown.append(number)
                continue
            if not end.exists():
                ended.append((begun, pid))
            longest = max(longest, (round((float(end.read_text()) if end.exists() else watch.exiting[pid]) - begun, 3), kind))
    hostile = [verdict for call, verdict in zip(calls, found) if call[0] is timed]
    return {"hostile": dict(Counter(verdict.kind for verdict in hostile)), "credited": [given[i][1][:60] for i, verdict in enumerate(hostile) if verdict.value],
            "honest right": sum(verdict.value for call, verdict in zip(calls, found) if call[0] is not timed), "honest": len(calls) - count,
            "seconds": round(seconds, 1), "per second": round(len(calls) / seconds, 2), "longest call": longest, "calls without a known end": unknown,
            "calls ended by their alarm": len(ended),
            "seconds from the limit to the end": _spread([watch.exiting[pid] - begun - limit for begun, pid in ended]),
            "seconds in which that end was not seen": _spread([watch.exiting[pid] - watch.alive[pid] for _, pid in ended if pid in watch.alive]),
            "seconds from the end until the memory was back": _spread([watch.gone[pid] - watch.exiting[pid] for _, pid in ended if pid in watch.gone]),
            "seconds from the end until the parent noticed": _spread([Timed.noticed[pid] - watch.exiting[pid] for _, pid in ended if pid in Timed.noticed]),
            "seconds from there until another worker had a call": _spread([Timed.replaced[pid] - Timed.noticed[pid] for _, pid in ended if pid in Timed.replaced]),
            "workers alive": sum(worker.process.is_alive() for worker in pool._held[1]), "limit": limit}


if __name__ == "__main__":
    from hostile import main as imported                    # workers import what they run: not from a script

    parser = argparse.ArgumentParser()
    parser.add_argument("answers", type=int, nargs="?", default=1000)
    parser.add_argument("limit", type=float, nargs="?", default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {"command": "python " + " ".join(["tests/unit/hostile.py", *sys.argv[1:]]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": platform.machine(),
             "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1), "python": platform.python_version(), "math-verify": version("math-verify"),
             **imported(options.answers, options.limit)}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
