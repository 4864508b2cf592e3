"""The ledger: every quantitative claim of the paper, ours beside it, and how ours was had.

    python -m logra.paper.claims                    the ledger as a table
    python -m logra.paper.claims ID [ID ...]        some claims, with everything that is known of them
    python -m logra.paper.claims --json
    python -m logra.paper.claims --markdown [FILE]  the summary; with FILE, put between its markers <!-- claims --> and <!-- /claims -->

data/paper/claims.csv lists the claims and says how each is checked; a check is a function of `checks_printed` (the paper against itself),
`checks_method` (its mathematics, on this code) or `checks_figures` (what the laptop profile drew). Verdicts:

| verdict | means |
|---|---|
| holds | ours lies within the tolerance, or what the claim says is so; at toy scale, in its direction only |
| fails | it does not: our check contradicts the claim |
| not checkable here | it takes the paper's hardware; the command that would make its runs there is given, where this project has such runs |
| not recorded yet | the figure whose data decides has not been drawn yet |
"""
from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from logra.paper import checks_figures, checks_method, checks_printed
from logra.paper.printed import FOLDER, Finding, NotRecorded

KINDS = ("exact", "closed form", "simulated", "toy scale", "needs eight GPUs")
VERDICTS = ("holds", "fails", "not checkable here", "not recorded yet")
CHECKS = {"printed": checks_printed, "method": checks_method, "figures": checks_figures}
MARKERS = "<!-- claims -->", "<!-- /claims -->"
_COLOURS = {"holds": "green", "fails": "bold red", "not checkable here": "dim", "not recorded yet": "yellow"}


@dataclass(frozen=True)
class Claim:
    """A row of the ledger. paper, ours, tolerance: numbers in `unit`, or words; ours is None where nothing was measured."""
    id: str
    section: str
    claim: str
    paper: float | str
    ours: float | str | None
    unit: str
    tolerance: float | None
    reason: str                  # of the tolerance
    kind: str                    # one of KINDS
    how: str
    verdict: str                 # one of VERDICTS
    note: str
    notebook: str                # that shows it; empty for none
    command: str                 # that checks it, or makes the runs that would; empty where there is none


def ledger(only: Sequence[str] | None = None) -> list[Claim]:
    """Every claim, checked now (about ten seconds), or those with the ids in `only`. Raises ValueError for an id that does not exist."""
    rows = listed()
    if unknown := [name for name in only or [] if name not in set(rows["id"])]:
        raise ValueError(f"no claim {', '.join(unknown)}; ids begin with {', '.join(sorted({i.split('-')[0] for i in rows['id']}))}")
    return [_checked(row) for row in rows.to_dict("records") if not only or row["id"] in only]


def listed() -> pd.DataFrame:
    """data/paper/claims.csv, all columns as text."""
    return pd.read_csv(FOLDER / "claims.csv", dtype=str, keep_default_na=False)


def _checked(row: dict[str, str]) -> Claim:
    tolerance = float(row["tolerance"]) if row["tolerance"] else None
    paper, note, ours = _number(row["paper"]), "", None
    if not row["check"]:
        verdict, note = "not checkable here", f"takes the paper's models on its hardware: {row['how']}"
    else:
        try:
            found = _call(row["check"], json.loads(row["arguments"] or "[]"))
            if not isinstance(found, Finding):
                found = Finding(float(f"{found:.6g}"), abs(found - paper) <= tolerance)
            verdict, ours, note = ("holds" if found.holds else "fails"), found.ours, found.note
        except NotRecorded as missing:
            verdict, note = "not recorded yet", str(missing)
    return Claim(row["id"], row["section"], row["claim"], paper, ours, row["unit"], tolerance, row["reason"], row["kind"], f"{row['kind']}: {row['how']}", verdict, note, row["notebook"], _command(row))


def _call(name: str, arguments: list) -> Finding | float:
    module, _, function = name.partition(".")
    return getattr(CHECKS[module], function)(*arguments)


def _command(row: dict[str, str]) -> str:
    """What checks this claim. Of one that takes the paper's hardware: what makes its runs there, none where the project has no such run."""
    if row["kind"] == "needs eight GPUs":
        return f"./reproduce.sh --profile h100 --only {' '.join(json.loads(row['arguments']))}" if row["arguments"] else ""
    if row["check"].startswith("figures."):
        return f"./reproduce.sh --only {row['notebook']}"
    return f"python -m logra.paper.claims {row['id']}"


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def shown(value: float | str | None, unit: str = "") -> str:
    """A value as a reader wants it: four digits, its unit after a number."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    whole = value == int(value) and 1 <= abs(value) < 1e6
    text = f"{value:,.0f}" if whole or value == 0 else f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{text} {unit}".strip()


def markdown(claims: Sequence[Claim]) -> str:
    """The summary: counts by kind and verdict, then every claim that fails, contradictions of the paper with itself apart."""
    counts = Counter((claim.kind, claim.verdict) for claim in claims)
    lines = [f"{len(claims)} claims of the paper, each with ours beside it: `python -m logra.paper.claims` (`--json`; one in detail: add its id).", "",
             "| how it is checked | " + " | ".join(VERDICTS) + " |", "|---|" + "--:|" * len(VERDICTS)]
    for kind in KINDS:
        lines.append(f"| {kind} | " + " | ".join(str(counts[kind, verdict] or "") for verdict in VERDICTS) + " |")
    failing = [claim for claim in claims if claim.verdict == "fails"]
    for title, inner in (("What fails here:", False), ("Where the paper contradicts itself:", True)):
        chosen = [claim for claim in failing if claim.id.startswith("contradiction-") == inner]
        if chosen:
            lines += ["", title, "", "| | section | the paper | found | |", "|---|---|---|---|---|"]
            lines += ["| " + " | ".join(_cell(text) for text in (f"`{c.id}`", c.section, f"{c.claim.removeprefix('contradiction: ')}: {shown(c.paper, c.unit)}", shown(c.ours, c.unit), c.note)) + " |" for c in chosen]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def put(text: str, summary: str, where: str = "the file") -> str:
    """`text` with `summary` between the markers. Raises ValueError unless each marker stands there once, in order."""
    first, last = MARKERS
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise ValueError(f"{where}: wanted {first} and, after it, {last}, each once")
    return f"{text[: text.index(first)]}{first}\n{summary}{text[text.index(last) :]}"


def _print(claims: Sequence[Claim], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("claim", "section", "paper", "ours", "kind", "verdict"):
        table.add_column(name, overflow="fold", ratio={"claim": 4, "paper": 2, "ours": 3}.get(name))
    for c in claims:
        ours = shown(c.ours, c.unit) + (f" ({c.note})" if c.note and c.verdict == "fails" else "")
        table.add_row(Text.assemble((c.id, "bold"), "\n", c.claim), c.section, Text(shown(c.paper, c.unit)), Text(ours), c.kind, Text(c.verdict, _COLOURS[c.verdict]))
    console.print(table)
    counts = Counter(c.verdict for c in claims)
    console.print(Text(f"{len(claims)} claims: " + ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])))


def _print_details(claims: Sequence[Claim], console: Console) -> None:
    for claim in claims:
        for name, value in asdict(claim).items():
            if value not in ("", None) and name != "unit":
                text = shown(value, claim.unit if name in ("paper", "ours", "tolerance") else "")
                console.print(Text.assemble((f"{name:<10}", "dim"), (text, _COLOURS.get(text, ""))))
        console.print()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0, or 2 for a request that cannot be met. A claim that fails is a result, not an error."""
    parser = argparse.ArgumentParser(prog="python -m logra.paper.claims", description="Every number of the paper, ours, and how it was had.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="only these claims, in detail")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of all fields")
    form.add_argument("--markdown", nargs="?", const="-", metavar="FILE", help="the summary; with FILE, written between its markers")
    options = parser.parse_args(arguments)
    if options.ids and options.markdown:
        parser.error("the summary is of all claims: give no ids with --markdown")
    try:
        claims = ledger(options.ids)
        if options.json:
            print(json.dumps([asdict(claim) for claim in claims], indent=1, ensure_ascii=False))
        elif options.markdown == "-":
            print(markdown(claims), end="")
        elif options.markdown:
            path = Path(options.markdown)
            path.write_text(put(path.read_text(encoding="utf-8"), markdown(claims), options.markdown), encoding="utf-8")
        else:
            console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
            (_print_details if options.ids else _print)(claims, console)
    except (ValueError, OSError) as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
