"""How far a mean can be trusted."""

from collections.abc import Mapping

import pandas as pd
from scipy import stats


def half_interval(values: pd.Series) -> float:
    """Half the 95 % interval of the values' mean, Student's t; NaN of a single value."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * values.std() / n ** 0.5) if n > 1 else float("nan")


def paired(differences: Mapping[str, pd.Series], unit: str) -> pd.DataFrame:
    """One row a change: the mean of its paired differences, which are in `unit`, half its 95 % interval, the number of pairs, and what may be said of it."""
    rows = [{"change": change, unit: pairs.mean(), "±": half_interval(pairs), "pairs": len(pairs)} for change, pairs in differences.items()]
    said = ["no order is claimed" if not abs(row[unit]) > row["±"] else "better" if row[unit] > 0 else "worse" for row in rows]
    return pd.DataFrame(rows).assign(**{"": said})
