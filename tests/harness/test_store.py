"""The store: what is written is what any Zarr reader finds, at any moment, and nothing is ever overwritten."""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from harness.config import Optim, Trial
from harness.storage.results_folder import ResultsPath
from harness.storage.store import ENDS, SIGNALS, PackStore, open_store
from harness.storage.stored import (
    FORMAT_VERSION,
    STORE,
    DamagedStore,
    complete_trials,
    pack_of,
    read_pack,
    read_packs,
    read_signal,
)

TRIALS = [Trial(optim=Optim(lr=rate)) for rate in (1e-3, 1e-2, 1e-1)]
STEPS, LAYERS, BLOCK = 25, 2, 10


def make_pack(out: Path, pack: str = "ab12", trials: list[Trial] = TRIALS, steps: int = STEPS) -> PackStore:
    return PackStore.create(
        open_store(out, "study"), pack, trials, steps, LAYERS, {"fingerprint": "f"}, {"torch": "2"}, BLOCK
    )


def values_for(store: PackStore) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=store.shape(name)).astype("f4") for name in SIGNALS}


def write_blocks(store: PackStore, values: dict[str, np.ndarray]) -> None:
    for first in range(0, store.steps, store.block):
        store.write(first, {name: array[:, first : first + store.block] for name, array in values.items()})


def finish(store: PackStore) -> None:
    n = store.trials
    nothing = dict.fromkeys(("nonfinite_step", "masked_step"), [None] * n)
    store.finish(outcome=["trained"] * n, **nothing, faults=[[]] * n, strikes=[0] * n, changes=[0] * n)


def attributes_of(out: Path, pack: str) -> dict[str, Any]:
    return pack_of(ResultsPath.at(out) / STORE / pack).attributes


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is written is what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize("consolidated", [True, False])
def test_xarray_reads_what_was_written(tmp_path: Path, consolidated: bool) -> None:
    store = make_pack(tmp_path)
    values = values_for(store)
    write_blocks(store, values)
    ds = xr.open_zarr(tmp_path / STORE / "ab12", consolidated=consolidated)
    assert set(ds.data_vars) == {*SIGNALS, *ENDS}
    for name, signal in SIGNALS.items():
        np.testing.assert_array_equal(ds[name].values, values[name])
        assert ds[name].dims == signal.dims
        assert ds[name].attrs == {"units": signal.units, "long_name": signal.long_name}
        assert ds[name].encoding["chunks"][:2] == (len(TRIALS), BLOCK)


def test_what_is_measured_once_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    values = np.random.default_rng(0).normal(size=store.shape("final_segment_loss"))
    store.write_ends({"final_segment_loss": values})
    ds = xr.open_zarr(tmp_path / STORE / "ab12")
    assert ds["final_segment_loss"].dims == ("trial", "segment") and values.shape == (3, 64)
    np.testing.assert_array_equal(ds["final_segment_loss"].values, values.astype("f4"))
    assert np.isnan(ds["initial_segment_loss"].values).all()
    assert (tmp_path / STORE / "ab12" / "initial_segment_loss" / "c.0.0").exists(), "one that is missing was lost"
    with pytest.raises(ValueError, match=r"final_segment_loss \(3, 63\): expected one of .*\(3, 64\)"):
        store.write_ends({"final_segment_loss": values[:, 1:]})


@pytest.mark.parametrize("name", ENDS)
def test_what_was_measured_once_and_is_damaged_is_named(tmp_path: Path, name: str) -> None:
    store = make_pack(tmp_path)
    write_blocks(store, values_for(store))
    assert store.damage() is not None, "of a complete pack it is there"
    finish(store)
    assert store.damage() is None
    file = tmp_path / STORE / "ab12" / name / "c.0.0"
    content = file.read_bytes()
    for damaged, words in ((content[:-1], "is damaged"), (bytes(len(content)), "checksum"), (None, "is missing")):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        step, found = store.damage()
        assert step == STEPS and str(file) in found and words in found
        with pytest.raises(DamagedStore, match=name):
            read_signal(next(read_packs(tmp_path)), name, 0, 64)


def test_zarr_opens_the_whole_store(tmp_path: Path) -> None:
    finish(make_pack(tmp_path))
    root = zarr.open_group(tmp_path / STORE, mode="r")
    assert {name: root.attrs[name] for name in ("format", "study")} == {"format": FORMAT_VERSION, "study": "study"}
    assert sorted(root.group_keys()) == ["ab12"]
    assert root["ab12"].attrs["ids"] == [trial.id for trial in TRIALS]


def test_steps_not_written_are_nan(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    values = values_for(store)
    store.write(0, {name: array[:, :13] for name, array in values.items()})
    loss = xr.open_zarr(tmp_path / STORE / "ab12")["loss"].values
    np.testing.assert_array_equal(loss[:, :13], values["loss"][:, :13])
    assert loss.shape == (len(TRIALS), STEPS) and np.isnan(loss[:, 13:]).all()
    assert attributes_of(tmp_path, "ab12")["steps_done"] == 13


def test_a_block_can_be_written_again_longer(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    values = values_for(store)["loss"]
    store.write(10, {"loss": values[:, 10:12]})
    store.write(10, {"loss": values[:, 10:20]})
    loss = xr.open_zarr(tmp_path / STORE / "ab12")["loss"].values
    np.testing.assert_array_equal(loss[:, 10:20], values[:, 10:20])


def test_double_precision_becomes_single_and_too_large_becomes_infinite(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    store.write(0, {"loss": np.full((3, 10), [[0.1], [1e300], [np.nan]])})
    loss = xr.open_zarr(tmp_path / STORE / "ab12")["loss"].values[:, 0]
    np.testing.assert_array_equal(loss, np.array([0.1, np.inf, np.nan], "f4"))


def test_a_pack_has_few_files(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    values = values_for(store)
    values["validation_loss"][:, : STEPS - 1] = np.nan
    write_blocks(store, values)
    finish(store)
    files = tree(tmp_path / STORE / "ab12")
    blocks = -(-STEPS // BLOCK)
    of_steps, of_ends = len(SIGNALS) * (1 + blocks), len(ENDS) * 2
    assert len(files) == 1 + of_steps + of_ends, "one chunk a block, also where all is NaN"


@pytest.mark.parametrize(
    ("first", "signals", "message"),
    [
        (0, {"losss": np.ones((3, 10))}, "losss: unknown"),
        (0, {"loss": np.ones((2, 10))}, r"shape \(2, 10\); expected \(3, 10\)"),
        (0, {"activation_rms": np.ones((3, 10, 3))}, r"expected \(3, 10, 2\)"),
        (0, {"loss": np.ones((3, 10)), "grad_norm": np.ones((3, 9))}, "expected one length"),
        (5, {"loss": np.ones((3, 10))}, "from a multiple of 10"),
        (20, {"loss": np.ones((3, 6))}, r"expected \(3, 5\)"),
        (0, {}, "expected one length"),
    ],
)
def test_write_refuses_what_does_not_fit(tmp_path: Path, first: int, signals: dict, message: str) -> None:
    store = make_pack(tmp_path)
    with pytest.raises(ValueError, match=message):
        store.write(first, signals)
    assert attributes_of(tmp_path, "ab12")["steps_done"] == 0


# --- attributes --------------------------------------------------------------------------------------------------


def test_attributes_are_strict_json(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    events = [{"before": np.float32(0.5), "after": float("nan"), "index": np.int64(3), "changed": np.bool_(True)}]
    store.finish(
        outcome=["trained"] * 3,
        nonfinite_step=[None, np.int64(4), None],
        masked_step=[None, None, np.int64(7)],
        faults=[events, [], [{"after": float("-inf")}]],
        strikes=[np.int64(90), 0, 1],
        changes=[80, 0, 1],
        dropped=[[], [{"step": np.int64(3), "score": np.float64(8.5)}], []],
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for path in tmp_path.rglob("zarr.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    attributes = attributes_of(tmp_path, "ab12")
    assert attributes["faults"] == [
        [{"before": 0.5, "after": "NaN", "index": 3, "changed": True}],
        [],
        [{"after": "-Infinity"}],
    ]
    assert attributes["nonfinite_step"] == [None, 4, None] and attributes["masked_step"] == [None, None, 7]
    assert attributes["strikes"] == [90, 0, 1] and attributes["changes"] == [80, 0, 1]
    assert attributes["dropped"] == [[], [{"step": 3, "score": 8.5}], []]


def test_attributes_say_what_was_trained(tmp_path: Path) -> None:
    make_pack(tmp_path)
    attributes = attributes_of(tmp_path, "ab12")
    assert attributes["trials"] == [json.loads(json.dumps(trial.to_dict())) for trial in TRIALS]
    assert attributes["golden"] == [trial.golden.id for trial in TRIALS]
    assert attributes["corpus"] == {"fingerprint": "f"} and attributes["environment"] == {"torch": "2"}
    assert attributes["complete"] is False and attributes["steps_done"] == 0
    assert read_pack(ResultsPath.at(tmp_path) / STORE / "cd34") is None


@pytest.mark.parametrize("name, value", [("data_type", "float64"), ("fill_value", 0), ("codecs", [])])
def test_an_array_that_no_sweep_has_written_is_refused(tmp_path: Path, name: str, value: object) -> None:
    make_pack(tmp_path)
    file = tmp_path / STORE / "ab12" / "zarr.json"
    group = json.loads(file.read_text())
    group["consolidated_metadata"]["metadata"]["loss"][name] = value
    file.write_text(json.dumps(group))
    with pytest.raises(DamagedStore, match=r"array loss is not of shape \(3, 25\), in chunks of 10 steps"):
        attributes_of(tmp_path, "ab12")


def test_only_finished_packs_are_complete(tmp_path: Path) -> None:
    first, second = make_pack(tmp_path, "aa", TRIALS[:2]), make_pack(tmp_path, "bb", TRIALS[2:])
    write_blocks(first, values_for(first))
    write_blocks(second, values_for(second))
    assert complete_trials(tmp_path) == set()
    finish(first)
    assert complete_trials(tmp_path) == {trial.id for trial in TRIALS[:2]}
    assert attributes_of(tmp_path, "aa")["dropped"] == [[], []]


RESULTS = ("outcome", "nonfinite_step", "masked_step", "faults", "strikes", "changes", "dropped")


@pytest.mark.parametrize("short", RESULTS)
def test_finish_wants_one_of_each_for_every_trial(tmp_path: Path, short: str) -> None:
    store = make_pack(tmp_path)
    values = {name: [[]] if name == short else [[]] * 3 for name in RESULTS}
    with pytest.raises(ValueError, match=f"{short}: 1 values; expected one for each of 3 trials"):
        store.finish(**values)
    assert complete_trials(tmp_path) == set()


def test_finish_wants_the_columns_of_a_complete_pack_and_no_others(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    values = {name: [[]] * 3 for name in RESULTS}
    with pytest.raises(TypeError, match="ends, events: unknown; expected some of outcome, .*, digest"):
        store.finish(**values, events=[[]] * 3, ends=[[]] * 3)
    with pytest.raises(KeyError, match="strikes"):
        store.finish(**{name: column for name, column in values.items() if name != "strikes"})
    assert complete_trials(tmp_path) == set()


def test_an_unfinished_pack_is_replaced_and_a_complete_one_is_not(tmp_path: Path) -> None:
    store = make_pack(tmp_path)
    store.write(0, {"loss": np.ones((3, 10))})
    again = make_pack(tmp_path)
    assert np.isnan(xr.open_zarr(tmp_path / STORE / "ab12")["loss"].values).all()
    finish(again)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="complete already"):
        make_pack(tmp_path)
    assert tree(tmp_path) == before


def test_what_a_killed_writer_left_is_no_pack_and_goes_away(tmp_path: Path) -> None:
    make_pack(tmp_path)
    stray = tmp_path / STORE / ".ab12.0123"
    (stray / "loss").mkdir(parents=True)
    assert [pack.id for pack in read_packs(tmp_path)] == ["ab12"]
    make_pack(tmp_path)
    assert sorted(path.name for path in (tmp_path / STORE).iterdir()) == ["ab12", "zarr.json"]


def test_a_pack_that_cannot_be_read_is_named_and_left_out(tmp_path: Path) -> None:
    make_pack(tmp_path, "aa")
    make_pack(tmp_path, "bb")
    (tmp_path / STORE / "aa" / "zarr.json").write_text('{"attributes": ')
    (tmp_path / STORE / "being_created").mkdir()
    with pytest.warns(UserWarning, match="aa: not a pack, left out"):
        assert [pack.id for pack in read_packs(tmp_path)] == ["bb"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_pack(tmp_path)
    before = tree(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        store.write(0, {"loss": np.ones((3, 10))})
    assert tree(tmp_path) == before


# --- a reader beside the writer ----------------------------------------------------------------------------------


def test_a_reader_never_sees_half_of_anything(tmp_path: Path) -> None:
    open_store(tmp_path, "study")
    done = threading.Event()
    failures: list[BaseException] = []
    seen: set[tuple[bool, int]] = set()
    finished: set[Path] = set()

    def read() -> None:
        try:
            is_last = False
            while not is_last:
                is_last = done.is_set()
                for pack in read_packs(tmp_path):
                    if pack.path in finished:
                        continue
                    steps_done = pack.attributes["steps_done"]
                    loss = zarr.open_array(pack.path / "loss", mode="r")[:]
                    assert np.isfinite(loss[:, :steps_done]).all() and loss.shape == (3, STEPS)
                    assert len(pack.arrays) == len(SIGNALS) + len(ENDS)
                    seen.add((pack.complete, steps_done))
                    if pack.complete:
                        finished.add(pack.path)
        except (FileNotFoundError, zarr.errors.ArrayNotFoundError):
            failures.append(AssertionError("a pack was listed before its arrays were there"))
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.start()
        for number in range(30):
            store = make_pack(tmp_path, f"{number:04x}")
            write_blocks(store, values_for(store))
            finish(store)
        done.set()
        reader.join()
    assert not failures, failures
    assert seen >= {(True, STEPS)} and len(finished) == 30
