"""Files that appear whole or not at all, and JSON as its standard has it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.zarr_files import strict_json, whole_file, write_atomically


@pytest.mark.parametrize("is_synced", [True, False])
def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path, is_synced: bool) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with whole_file(path, is_synced) as aside:
        aside.write_text("ne")
        assert path.read_text() == "old" and aside.parent == tmp_path and aside.name.startswith(".")
        aside.write_text("new")
    assert path.read_text() == "new" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("is_synced", [True, False])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, is_synced: bool) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(path, is_synced) as aside:
        aside.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


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
