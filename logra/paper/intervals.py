"""How far a mean can be trusted."""

import pandas as pd
from scipy import stats


def half_interval(values: pd.Series) -> float:
    """Half the 95 % interval of the values' mean, Student's t; NaN of a single value."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * values.std() / n ** 0.5) if n > 1 else float("nan")
