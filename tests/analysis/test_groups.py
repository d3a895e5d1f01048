"""Groups of trials, split by a further value."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.reading.groups import split


@pytest.mark.parametrize(
    "values", [[3.0, 1.0, np.nan, 1.0, np.nan], ["b", "a", None, "a", None]], ids=["numbers", "words"]
)
def test_groups_are_split_in_the_order_of_their_values_and_what_is_missing_is_one_value(values: list) -> None:
    assert split(np.array([0, 1, 0, 0, 0]), pd.Series(values)).tolist() == [1, 3, 2, 0, 2]


def test_of_no_trials_there_are_no_groups() -> None:
    assert split(np.zeros(0, dtype=int), np.array([])).tolist() == []
