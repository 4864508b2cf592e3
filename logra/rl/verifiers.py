"""Verifiers: functions (response, problem) -> score in [0, 1] that run in a worker process (`rl.pool`).

`math`: the final answer by a strict rule, compared by math-verify (C.1). It raises `Unparsable` for a response without an answer.

    The final answer is what the response's last \\boxed{…} or the rest of its last line "Answer: …" holds, whichever stands later;
    of a box on an "Answer:" line, the box. Nothing else counts: no number picked from running text, no earlier box when the last one
    is not closed (a response that was cut off), no set made of several boxes.

`exact`: the final answer by the same rule, equal to the reference as text. `reasoning_gym`: a generator's own scorer (C.2).
"""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from pkgutil import resolve_name

from logra.rl.pool import Unparsable

_LONGEST = 1000                                             # characters of a final answer; MATH-500's longest has 53
_LONGEST_TAGGED = 4000                                      # of an answer in tags: codeio's scorer takes minutes over a long one
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LINE = re.compile(r"\banswer[ \t*_]*:[ \t*_]*\n?([^\n]*)", re.IGNORECASE)
_DOLLARS = re.compile(r"\A(?:\$+|\\\()\s*([^$]*?)\s*(?:\$+|\\\))\.?\Z", re.DOTALL)
_THIN = re.compile(r"(?:\s|\\[,;:!])+\Z")                  # spaces at the end of mathematics
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DRESS = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|mbox|hbox|operatorname|rm|left|right)(?![A-Za-z])|\\[,;:! ]|[$~]")
# a number of its own, in brackets or not (the 2 of x^2_1, x_2 and x2_1 is none), and what stands below it or is called its base
_BASE = re.compile(r"(?:(?<![A-Za-z\d^_])(?<![\^_]\{)\d+|(?<![\^_])(?:\{[\d,. ]+\}|\([\d,. ]+\)))\s*(?:\{\}\s*)?"
                   r"(?:_+(?:[{(][{(\s]*(?:base[\s{}()-]*)?([^{}()]*)|(\d+|[a-z]+|\S?))|[\s{}()]*(?:in\s+)?base(?:[\s{}()-]+(\w+)|(\d+)))", re.IGNORECASE)
_SMALL = {ord(small): digit for small, digit in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789")}


def final_answer(response: str) -> str:
    """The text of the response's final answer by the rule above. Raises Unparsable where there is none."""
    boxes, lines = list(_BOX.finditer(response)), list(_LINE.finditer(response))
    box, line = boxes[-1] if boxes else None, lines[-1] if lines else None
    if box is None and line is None:
        raise Unparsable("no box and no line 'Answer:'")
    answer = _inside(response, box.end()) if box and (line is None or box.start() > line.start()) else line[1].rstrip(" \t\r*_.")
    answer = _DOLLARS.sub(r"\1", answer.strip())
    if not answer or len(answer) > _LONGEST:
        raise Unparsable(f"a final answer of {len(answer)} characters")
    return answer


def _inside(text: str, start: int) -> str:
    """From `start`, just behind an opening brace, up to the brace that closes it; escaped braces do not count."""
    depth = 1
    for found in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[start:start + found.start()]
    raise Unparsable("the last box is not closed")


def math(response: str, problem) -> float:
    """1 if the response's final answer equals the reference, as numbers or expressions; else 0. Raises Unparsable."""
    given, wanted = _THIN.sub("", final_answer(response)), problem.answer.strip()
    if given == wanted:
        return 1.0
    if all(_WHOLE.fullmatch(text) for text in (given, wanted)):
        return float(_plain(given) == _plain(wanted))
    if not _bases(given) <= (_bases(wanted) or {"10"}):     # math-verify drops bases; an answer may leave them out
        return 0.0
    return equal(wanted, given)


def _bases(answer: str) -> set[str]:
    """The bases that an answer says its numbers are in: 8 of 2516_8, 2516_{(8)}, 2516₈ and "2516 (base 8)"; of a letter's index, none."""
    plain = re.sub("[₀-₉]+", lambda found: "_" + found[0].translate(_SMALL), answer.replace(r"\textsubscript", "_"))
    plain = re.sub(r"\s*([_^])\s*", r"\1", _DRESS.sub("", plain))
    said = ("".join("".join(found.groups("")).lower().split()).rstrip(".") for found in _BASE.finditer(plain))
    return {base for base in said if base}


def _plain(number: str) -> str:
    """A whole number of any length in one writing: int() takes 4,300 digits at most."""
    digits = number.lstrip("+-").lstrip("0")
    return ("-" if number[0] == "-" and digits else "") + digits


def equal(wanted: str, given: str) -> float:
    """1 if math-verify holds `given` for the answer `wanted`, both LaTeX; else 0. Without a time limit. Raises Unparsable if `given` is no expression."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    target = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    parsed = [math_verify.parse(f"\\boxed{{{text}}}", target, parsing_timeout=None) for text in (wanted, given)]    # the pool has the time limit
    if not any(not isinstance(item, str) for item in parsed[1]):
        raise Unparsable("the final answer is no expression")
    return float(math_verify.verify(*parsed, timeout_seconds=None))


def exact(response: str, problem) -> float:
    """1 if the response's final answer is the reference's text, blanks at the ends aside; else 0. Raises Unparsable."""
    return float(final_answer(response) == problem.answer.strip())


def reasoning_gym(response: str, problem) -> float:
    """The score, partial credit included, of what stands in the response's last <answer>…</answer>, by the generator's own scorer.

    problem.meta: generator (its name), entry (question, answer, metadata) and config (the generator's fields). Raises Unparsable without the tags.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(response, "answer")
    if answer is None or (len(answer) > _LONGEST_TAGGED and answer != problem.answer.strip()):
        raise Unparsable("no <answer>…</answer>" if answer is None else f"an answer of {len(answer)} characters")
    return float(_scorer(problem.meta["generator"], json.dumps(problem.meta["config"], sort_keys=True))(answer, problem.meta["entry"]))


@cache
def _scorer(generator: str, config: str):
    import reasoning_gym

    return reasoning_gym.create_dataset(generator, size=1, seed=0, **json.loads(config)).score_answer


def _prepare(problem) -> None:
    _scorer(problem.meta["generator"], json.dumps(problem.meta["config"], sort_keys=True))


reasoning_gym.prepare = _prepare                            # importing the package and reading codeio's programs takes seconds


class Named:
    """A user's own function at `module:function`, called as function(response, problem.answer)."""

    def __init__(self, name: str):
        self.name = name

    def prepare(self, problem) -> None:
        resolve_name(self.name)

    def __call__(self, response: str, problem) -> float:
        return resolve_name(self.name)(response, problem.answer)
