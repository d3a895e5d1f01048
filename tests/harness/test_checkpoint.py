"""A pack that was killed goes on where it was, and damaged checkpoints are found out."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harness.config import NO_FAULT
from harness.storage.checkpoint import KEPT, VERSION, Checkpoints, Stopped, about
from harness.storage.results_folder import ResultsPath
from harness.storage.sealed import write_sealed
from harness.testing import engine
from injectors.value import Value

STEPS = 12
TENSORS = {"weights": torch.arange(6.0).reshape(2, 3), "active": torch.tensor([True, False])}


@pytest.mark.parametrize("block", [1, 4, 5, 100])
def test_it_goes_on_bit_for_bit(tmp_path, block):
    engine.assert_resumes(engine.different(4, steps=STEPS), tmp_path, [3, 4, 10], block)


def test_with_trials_that_freeze(tmp_path):
    trials = [engine.trial(seed=r, lr=1e30 if r % 2 else 1e-3, warmup=0, steps=STEPS) for r in range(6)]
    engine.assert_resumes(trials, tmp_path, [3, 7], block=4)


def test_a_trial_that_is_not_there_yet_comes_later(tmp_path):
    """Before its fault it has no row; killed before, at and after the fork."""
    trials = [engine.trial(seed=s, steps=STEPS, fault=f) for s in range(2) for f in (NO_FAULT, Value(start=5, bit=22))]
    engine.assert_resumes(trials, tmp_path, [4, 5, 6], block=4, forks=True)


# --- the files ------------------------------------------------------------------------------------------------------


def filled(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(ResultsPath.at(folder.parent) / folder.name, about={"pack": "abc"})
    for step in steps:
        checkpoints.save(step, TENSORS, {"step again": step})
    return checkpoints


def test_what_is_saved_is_read(tmp_path):
    saved = filled(tmp_path / "folder", 7).newest()
    assert saved is not None and (saved.step, saved.values) == (7, {"step again": 7})
    assert all(torch.equal(saved.tensors[name], x) for name, x in TENSORS.items())
    assert about(ResultsPath.at(tmp_path) / "folder") == {"pack": "abc"}


def test_nothing_saved(tmp_path):
    assert Checkpoints(ResultsPath.at(tmp_path)).newest() is None
    assert about(ResultsPath.at(tmp_path)) is about(ResultsPath.at(tmp_path) / "nowhere") is None


def test_the_newest_are_kept(tmp_path):
    checkpoints = filled(tmp_path, 2, 4, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10.safetensors", "4.safetensors"]
    assert KEPT == 2
    checkpoints.remove()
    assert not tmp_path.exists()


@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "gone"])
def test_a_damaged_one_is_passed_over(tmp_path, damage):
    checkpoints = filled(tmp_path, 4, 10)
    path = tmp_path / "10.safetensors"
    content = path.read_bytes()
    for place in range(0, len(content), 3) if damage == "byte" else [0]:
        if damage == "byte":
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        elif damage == "cut":
            path.write_bytes(content[:-1])
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            saved = checkpoints.newest()
        assert saved is not None and saved.step == 4, place
        silent = damage == "gone"  # as if it had never been
        assert [str(path) in str(one.message) for one in told] == ([] if silent else [True])


def test_all_damaged(tmp_path):
    checkpoints = filled(tmp_path, 4, 10)
    for step in (4, 10):
        (tmp_path / f"{step}.safetensors").write_bytes(b"{}")
    with pytest.warns(UserWarning) as warned:
        assert checkpoints.newest() is None
    for step, warning in zip((10, 4), warned, strict=True):
        words = rf"{step}\.safetensors: is damaged \(SafetensorError: .*before it is used"
        assert re.search(words, str(warning.message)), warning


@pytest.mark.parametrize("changed", ["tensors", "type", "body"])
def test_a_sound_file_with_other_content_is_found_out(tmp_path, changed):
    """What the checksums are there for, and the format does not see by itself."""
    checkpoints = filled(tmp_path, 4)
    path = tmp_path / "4.safetensors"
    with safe_open(path, "pt") as file:
        sealed = file.metadata()
    tensors = load_file(path)
    if changed == "tensors":
        tensors["weights"][1, 2] += 1
    elif changed == "type":
        tensors["active"] = tensors["active"].view(torch.uint8)
    else:
        sealed = {name: text.replace("again", "aside") for name, text in sealed.items()}
    save_file(tensors, path, sealed)
    with pytest.warns(UserWarning, match="is damaged: its checksum is another"):
        assert checkpoints.newest() is None


def test_another_version(tmp_path):
    checkpoints = filled(tmp_path, 4)
    write_sealed(tmp_path / "4.safetensors", TENSORS, {}, version=99)
    with pytest.warns(UserWarning, match=f"is of version 99, and {VERSION} is read"):
        assert checkpoints.newest() is None


def test_the_first_version_is_not_read(tmp_path):
    """Its tensors stood beside a file of JSON, and had nothing else in theirs."""
    save_file(TENSORS, tmp_path / "4.safetensors")
    (tmp_path / "4.json").write_text('{"version": 1, "tensors": "", "body": "{}", "sha256": ""}')
    with pytest.warns(UserWarning, match="4.safetensors: has no checksum: no file of this version"):
        assert filled(tmp_path).newest() is None
    assert about(ResultsPath.at(tmp_path)) is None


@pytest.mark.parametrize("values", [{}, [], "text", None, 1, {"step": 4}, {"about": [], "values": {}}])
def test_what_no_checkpoint_says_is_damage(tmp_path, values):
    """With the right checksum: somebody else's."""
    checkpoints = filled(tmp_path, 4)
    write_sealed(tmp_path / "4.safetensors", TENSORS, values, VERSION)
    with pytest.warns(UserWarning, match="4.safetensors: is damaged"):
        assert checkpoints.newest() is None
    assert about(ResultsPath.at(tmp_path)) is None


def test_a_link_is_not_followed(tmp_path):
    checkpoints = filled(tmp_path / "own", 4)
    (tmp_path / "own" / "4.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "own" / "4.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="4.safetensors is a link"):
        assert checkpoints.newest() is None


def test_one_that_cannot_be_written_is_a_warning(tmp_path):
    """And what a killed writer left is removed with the next."""
    checkpoints = filled(tmp_path, 4)
    (tmp_path / ".5.safetensors.0123456789abcdef0123456789abcdef").write_bytes(b"half")
    (tmp_path / "5.safetensors").mkdir()
    with pytest.warns(UserWarning, match="no checkpoint at step 5 .*training goes on"):
        checkpoints.save(5, TENSORS, {})
    with pytest.warns(UserWarning, match=r"5\.safetensors is not what belongs there.*before it is used"):
        saved = checkpoints.newest()
    assert saved is not None and saved.step == 4
    assert not list(tmp_path.glob(".*"))


def test_when_one_is_due(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("harness.storage.checkpoint.time.monotonic", lambda: now)
    assert not any(Checkpoints(ResultsPath.at(tmp_path)).is_due(step) for step in range(1, 50))
    assert [s for s in range(1, 10) if Checkpoints(ResultsPath.at(tmp_path), every=4).is_due(s)] == [4, 8]
    timed = Checkpoints(ResultsPath.at(tmp_path), seconds=60)
    assert not timed.is_due(5)
    now = 160.0
    assert timed.is_due(6)
    timed.save(6, TENSORS, {})
    assert not timed.is_due(7)


def test_a_process_that_is_to_stop_saves_first(tmp_path):
    checkpoints = Checkpoints(ResultsPath.at(tmp_path))
    checkpoints.is_stopping = True
    assert checkpoints.is_due(3)
    with pytest.raises(Stopped):
        checkpoints.save(3, TENSORS, {})
    saved = Checkpoints(ResultsPath.at(tmp_path)).newest()
    assert saved is not None and saved.step == 3
