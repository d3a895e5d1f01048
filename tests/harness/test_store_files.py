"""JSON as its standard has it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.storage.zarr_files import strict_json


def test_what_json_has_no_word_for(tmp_path: Path) -> None:
    values = {"a": np.float32(np.nan), "b": [np.inf, -np.inf], "c": np.arange(2), 3: (True, None)}
    assert json.loads(strict_json(values)) == {
        "a": "NaN",
        "b": ["Infinity", "-Infinity"],
        "c": [0, 1],
        "3": [True, None],
    }
    with pytest.raises(TypeError):
        strict_json({"path": tmp_path})
