"""Answers that a verifier must survive: what a policy can write that hangs, kills or fools one.

    python tests/unit/hostile.py [ANSWERS] [SECONDS] [--out FILE]     judges 1,000 under a limit of 1 s, an honest one after every tenth: counts, rate, longest call
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil

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


def _watch(folder: Path, ended: dict[str, float], stop: threading.Event) -> None:
    """Notes when the worker of a call that never wrote an end was gone, to about 0.02 s."""
    while not stop.wait(0.02):
        for path in folder.iterdir():
            if path.suffix or path.name in ended or path.with_suffix(".end").exists() or not (text := path.read_text()):
                continue
            begun, process = json.loads(text)
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
                    continue
            ended[path.name] = time.monotonic()


def main(count: int = 1000, limit: float = 1.0) -> dict:
    references = [r"\frac{1}{2}", "34", "x^2+1", "(1,2)"]
    honest = Problem("p", references[0], "honest", 0)
    with tempfile.TemporaryDirectory() as folder:
        given, calls = answers(count), []
        for number, (_, response) in enumerate(given):
            calls.append((timed, response, Problem("p", references[number % 4], "hostile", number, {"folder": folder})))
            calls += [(verifiers.math, r"\boxed{0.5}", honest)] * (number % 10 == 9)
        pool.verdicts([(verifiers.math, "", honest)], limit)             # starts the workers
        ended, stop = {}, threading.Event()
        watcher = threading.Thread(target=_watch, args=(Path(folder), ended, stop))
        watcher.start()
        start = time.perf_counter()
        found = pool.verdicts(calls, limit)
        seconds = time.perf_counter() - start
        time.sleep(0.2)
        stop.set()
        watcher.join()
        longest, unknown = (0.0, ""), []
        for number, (kind, _) in enumerate(given):
            own, end = Path(folder, str(number)), Path(folder, f"{number}.end")
            end = float(end.read_text()) if end.exists() else ended.get(str(number))
            if end is None or not own.exists():
                unknown.append(number)
            else:
                longest = max(longest, (round(end - json.loads(own.read_text())[0], 2), kind))
    hostile = [verdict for call, verdict in zip(calls, found) if call[0] is timed]
    return {"hostile": dict(Counter(verdict.kind for verdict in hostile)), "credited": [given[i][1][:60] for i, verdict in enumerate(hostile) if verdict.value],
            "honest right": sum(verdict.value for call, verdict in zip(calls, found) if call[0] is not timed), "honest": len(calls) - count,
            "seconds": round(seconds, 1), "per second": round(len(calls) / seconds, 2), "longest call": longest, "calls without a known end": unknown,
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
