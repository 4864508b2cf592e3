"""The verifier on a benchmark's reference answers: each is right for itself, and its neighbour's is wrong.

    python benchmarks/reference_answers.py FILE [--out JSON]

FILE has a field `answer` in each row (.jsonl or .parquet, as `logra.rl.data` reads them). Each answer is put into a box and judged by the workers that judge
a run's responses: against itself, as it is (equal text is right unread) and behind \\displaystyle (which is read by math-verify), and against the answer of the row
after it (of the last, the first). Two neighbours with one text are no test of that.
"""

import argparse
import os
import platform
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import timing

from logra.rl import data, pool, verifiers
from logra.rl.config import RunConfig
from logra.rl.tasks import Problem

LIMIT = RunConfig.model_fields["verifier_seconds"].default


def judged(problems: list[Problem], given: list[str]) -> tuple[list[pool.Verdict], dict]:
    """Verdicts, and how they ended, in what time."""
    start = time.perf_counter()
    found = pool.verdicts([(verifiers.math, rf"\boxed{{{text}}}", problem) for problem, text in zip(problems, given, strict=True)], LIMIT)
    seconds = time.perf_counter() - start
    return found, {"credited": sum(verdict.value == 1 for verdict in found), "ended": dict(Counter(verdict.kind for verdict in found)),
                   "seconds": round(seconds, 2), "answers a second": round(len(found) / seconds, 1)}


def measure(file: Path) -> dict:
    problems = [Problem("", str(row["answer"]), "reference", number) for number, row in enumerate(data.rows(file))]
    own = [problem.answer for problem in problems]
    after = own[1:] + own[:1]
    pool.verdicts([(verifiers.math, r"\boxed{1}", problems[0])] * pool.cores(), LIMIT)      # starts the workers
    right, itself = judged(problems, own)
    read, displayed = judged(problems, [rf"\displaystyle {text}" for text in own])
    other, neighbour = judged(problems, after)
    wrong = [{"row": i, "reference": own[i], "given": after[i]} for i, verdict in enumerate(other) if verdict.value == 1 and own[i].strip() != after[i].strip()]
    return {"answers": len(own), "sha256 of the answers": data.answers(problems),
            "against itself": itself | {"rows not credited": [i for i, verdict in enumerate(right) if verdict.value != 1]},
            "against itself, displayed": displayed | {"rows not credited": [i for i, verdict in enumerate(read) if verdict.value != 1]},
            "against its neighbour": neighbour | {"of one text": sum(a.strip() == b.strip() for a, b in zip(own, after)), "credited though of another text": wrong}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = f" --out {options.out}" if options.out else ""
    result = {"command": f"python benchmarks/reference_answers.py {options.file.name}{out}", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "hardware": timing.environment("cpu")["hardware"], "machine": platform.machine(), "workers": min(pool.cores(), pool._WORKERS), "load": round(os.getloadavg()[0], 1),
              "python": platform.python_version(), "versions": {name: version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy")}, "limit": LIMIT, **measure(options.file)}
    for kind in ("against itself", "against itself, displayed", "against its neighbour"):
        print(kind, result[kind])
    timing.write(result, options.out)
