"""Paired differences: the interval is Student's t of the differences, and an order is claimed only where it leaves out 0."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from logra.paper.intervals import half_interval, paired


def test_paired_differences_have_students_interval_and_no_order_is_claimed_where_it_holds_zero():
    draws = np.random.default_rng(0)
    differences = {"up": pd.Series(draws.normal(2.0, 1.0, 9)), "down": pd.Series(draws.normal(-2.0, 1.0, 9)), "nothing": pd.Series(draws.normal(0.1, 1.0, 9))}
    table = paired(differences, "points").set_index("change")
    for change, values in differences.items():
        low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        row = table.loc[change]
        assert [row["points"] - row["±"], row["points"] + row["±"]] == pytest.approx([low, high])
    assert list(table[""]) == ["better", "worse", "no order is claimed"] and list(table["pairs"]) == [9, 9, 9]


def test_a_single_pair_claims_nothing():
    (row,) = paired({"once": pd.Series([5.0])}, "points").to_dict("records")
    assert np.isnan(half_interval(pd.Series([5.0]))) and np.isnan(row["±"]) and row[""] == "no order is claimed"
