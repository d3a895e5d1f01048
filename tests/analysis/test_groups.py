"""Groups of trials, split by a further value."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.reading.groups import split, splitting


@pytest.mark.parametrize(
    "values", [[3.0, 1.0, np.nan, 1.0, np.nan], ["b", "a", None, "a", None]], ids=["numbers", "words"]
)
def test_groups_are_split_in_the_order_of_their_values_and_what_is_missing_is_one_value(values: list) -> None:
    assert split(np.array([0, 1, 0, 0, 0]), pd.Series(values)).tolist() == [1, 3, 2, 0, 2]


def test_of_no_trials_there_are_no_groups() -> None:
    assert split(np.zeros(0, dtype=int), np.array([])).tolist() == []


def test_columns_that_say_the_same_are_one_and_the_first_is_kept() -> None:
    """Whether by name or by number; each alone splits, and what none of the others says stays."""
    columns = {"name": pd.Series(["b", "a", "b", "a"]), "twin": pd.Series([2, 1, 2, 1]), "own": pd.Series([1, 1, 2, 2])}
    names, number = splitting(np.zeros(4, int), columns)
    assert names == ["name", "own"] and len(set(number)) == 4
    assert splitting(np.zeros(4, int), {"same": pd.Series([1, 1, 1, 1])})[0] == []
    assert splitting(np.zeros(0, int), {"none": pd.Series([], dtype=float)})[0] == []
