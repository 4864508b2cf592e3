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


def parameters(model: str, projections_only: bool = False) -> int:
    """Weights of one of the paper's models, "1.5B", "7B" or "27B", in its matrices alone (shapes.csv)."""
    shapes = table("shapes")
    shapes = shapes[shapes["model"] == model]
    if projections_only:
        shapes = shapes[shapes["role"] != "other"]
    return int((shapes["count"] * shapes["d"] * shapes["k"]).sum())
