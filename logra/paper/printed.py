"""What the paper prints: its tables and the numbers in its text, from data/paper/. Read by the ledger and by notebooks that draw it beside ours."""
from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from logra.paper.provenance import ROOT, log_input

FOLDER = ROOT / "data" / "paper"


@dataclass(frozen=True)
class Finding:
    """What a check found. ours: the value, in the unit of the claim, or words; holds: None leaves it to the claim's tolerance."""
    ours: float | str
    holds: bool | None = None
    note: str = ""


class NotRecorded(LookupError):
    """A check needs a figure's data that does not exist yet; the message says which."""


def table(name: str) -> pd.DataFrame:
    """A file of data/paper by its name without the suffix, e.g. "table1". Raises FileNotFoundError for another."""
    return pd.read_csv(log_input(FOLDER / f"{name}.csv"), encoding="utf-8", na_values=["OOM"], keep_default_na=True)


def text(key: str) -> float:
    """A number of the running text, by its key in text.csv. Raises KeyError for one that is not there."""
    frame = table("text").set_index("key")
    if key not in frame.index:
        raise KeyError(f"data/paper/text.csv has no number {key!r}; it has {', '.join(frame.index)}")
    return float(frame.loc[key, "value"])


def main_result(model: str, method: str) -> pd.Series:
    """A row of Table 1, e.g. ("1.5B", "logra")."""
    return table("table1").set_index(["model", "method"]).loc[(model, method)]


def gains(column: str) -> dict[str, float]:
    """LoGRA minus Dense in a column of Table 1, by model, where both trained."""
    wide = table("table1").pivot(index="model", columns="method", values=column)
    return (wide["logra"] - wide["dense"]).dropna().to_dict()


def as_printed(column: str, name: str, difference: float, error: float) -> str:
    """Whether a difference LoGRA − dense (points, with its standard error) goes the way that Table 1 prints it: a sentence."""
    theirs = gains(column)
    model = max(theirs, key=lambda m: abs(theirs[m]))
    found = f"the paper has {name}, LoGRA − dense: " + ", ".join(f"{gain:+.2f} points at {m}" for m, gain in theirs.items())
    if not abs(difference) > 2 * error:
        return f"{found}; here the difference is within two standard errors of nothing"
    return f"{found}; " + ("here too LoGRA is " if difference * theirs[model] > 0 else f"here, AGAINST the paper's {model}, LoGRA is ") + ("above" if difference > 0 else "below")


def parameters(model: str, projections_only: bool = False) -> int:
    """Weights of one of the paper's models, "1.5B", "7B" or "27B", in its matrices alone (shapes.csv)."""
    shapes = table("shapes")
    shapes = shapes[shapes["model"] == model]
    if projections_only:
        shapes = shapes[shapes["role"] != "other"]
    return int((shapes["count"] * shapes["d"] * shapes["k"]).sum())
