"""`open_sweep` on stores whose contents are known: what is read, what is padded, what is left unread."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from dask import is_dask_collection

from analysis import fault_events, open_sweep
from analysis.reading.finals import FINALS
from analysis.reading.open_sweep import short_names
from harness.config import ConfigError, Data, Model, Train, Trial
from harness.storage.store import ENDS, SIGNALS, open_store
from harness.storage.stored import FORMAT_VERSION, STORE
from tests.analysis import synthetic
from tests.analysis.reads import count_reads

# --- values and coordinates --------------------------------------------------------------------------------------


def test_values_of_several_packs(tmp_path: Path) -> None:
    packs = [[synthetic.make_trial(32, lr) for lr in (1e-3, 1e-2)], [synthetic.make_trial(64, lr) for lr in (1e-3, 1)]]
    for trials in packs:
        synthetic.write_pack(tmp_path, trials)
    ds = open_sweep(str(tmp_path))
    assert dict(ds.sizes) == {"trial": 4, "step": 40, "layer": 2, "segment": 64}
    assert set(ds.data_vars) == {*SIGNALS, *ENDS, *FINALS}
    for trial in packs[0] + packs[1]:
        one = ds.sel(trial=trial.id)
        np.testing.assert_array_equal(one["loss"].values, synthetic.flat_loss(trial).astype("f4"))
        assert (int(one["width"]), float(one["lr"])) == (trial.model.width, trial.optim.lr)
        assert one["golden"] == trial.id and one["outcome"] == "trained" and bool(one["complete"])
    assert ds.attrs["study"] == "test" and json.loads(ds.attrs["corpus"]) == [synthetic.CORPUS]
    assert json.loads(ds.attrs["environment"]) == [synthetic.ENVIRONMENT]


def test_units_and_long_names_everywhere(realistic: Path) -> None:
    ds = open_sweep(realistic)
    for name, variable in ds.variables.items():
        assert variable.attrs["long_name"], name
        if variable.dtype.kind in "if":
            assert variable.attrs["units"], name
    assert ds["loss"].attrs == {"units": "nat/token", "long_name": "training loss"}
    assert ds["lr"].attrs["path"] == "optim.lr" and ds["fault_start"].attrs == {
        "path": "fault.start",
        "long_name": "step of the (first) strike",
        "units": "step",
    }


def test_shorter_and_shallower_packs_are_padded(tmp_path: Path) -> None:
    long, deep = synthetic.make_trial(steps=50), synthetic.make_trial(steps=20, depth=4)
    synthetic.write_pack(tmp_path, [long])
    synthetic.write_pack(tmp_path, [deep])
    ds = open_sweep(tmp_path)
    assert dict(ds.sizes) == {"trial": 2, "step": 50, "layer": 4, "segment": 64}
    rms = ds["activation_rms"].load()
    written = {long.id: (50, 2), deep.id: (20, 4)}
    for trial, (steps, layers) in written.items():
        values = rms.sel(trial=trial).values
        assert (values[:steps, :layers] == 1).all()
        assert np.isnan(values[steps:]).all() and np.isnan(values[:, layers:]).all()
    assert np.isnan(ds["loss"].sel(trial=deep.id).isel(step=slice(30, 40)).values).all()
    assert list(ds["steps"].sel(trial=[long.id, deep.id]).values) == [50, 20]


def test_an_older_store_is_read_with_the_names_of_now(tmp_path: Path) -> None:
    trial = synthetic.make_trial(fault=synthetic.WeightBit(start=3, bit=7))
    synthetic.write_pack(tmp_path, synthetic.with_golden([trial]))
    (tmp_path / STORE / "zarr.json").write_text(json.dumps({"attributes": {"format": 4, "study": "test"}}))
    ds = open_sweep(tmp_path)
    assert float(ds["fault_bit"].sel(trial=trial.id)) == 7 and np.isfinite(ds["final_loss"].values).all()


def test_each_trial_has_its_own_last_losses(tmp_path: Path) -> None:
    """The last step of the longest trial is none of a shorter one's. Nothing is read before it is asked for."""
    long, short, lost = (synthetic.make_trial(steps=steps) for steps in (50, 20, 30))

    def validation_loss(trial: Trial) -> np.ndarray:
        steps = np.arange(trial.train.steps)
        return np.where(steps % 10 == 9, steps + 0.5 if trial is not lost else np.inf, np.nan)

    for trial in (long, short, lost):
        signals = {"validation_loss": validation_loss}
        synthetic.write_pack(tmp_path, [trial], lambda trial: np.arange(trial.train.steps), signals=signals)
    ds = open_sweep(tmp_path).sel(trial=[long.id, short.id, lost.id])
    assert np.isnan(ds["loss"].isel(step=-1).values).tolist() == [False, True, True]
    assert ds["final_loss"].values.tolist() == [np.arange(45, 50).mean(), np.arange(15, 20).mean(), 27]
    np.testing.assert_array_equal(ds["final_validation_loss"].values, [49.5, 19.5, np.nan])
    assert float(ds["final_loss"].sel(trial=short.id)) == 17
    assert ds["final_loss"].dims == ("trial",) and is_dask_collection(ds["final_loss"].data)


def test_a_coordinate_for_each_field_that_varies(tmp_path: Path) -> None:
    trials = [
        synthetic.make_trial(beta2=0.95, clip=1.0),
        synthetic.make_trial(beta2=0.999, clip=None, fault=synthetic.WeightBit(start=3, bit=7, tensor="head")),
        synthetic.make_trial(beta2=0.999, clip=None, mitigation="qk_norm"),
    ]
    synthetic.write_pack(tmp_path, trials)
    ds = open_sweep(tmp_path)
    expected = {
        "beta2": [0.95, 0.999, 0.999],
        "clip": [1.0, "none", "none"],
        "fault_bit": [np.nan, 7, np.nan],
        "fault_start": [np.nan, 3, np.nan],
        "fault_tensor": ["", "head", ""],
        "fault": ["none", "weight_bit", "none"],
        "fault_kind": ["", "value", ""],
        "mitigation": ["none", "none", "qk_norm"],
        "qk_norm": [False, False, True],
        "seed": [0, 0, 0],
        "nonfinite_step": [np.nan] * 3,
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(ds[name].values, np.array(values, ds[name].dtype), err_msg=name)
    assert ds["width"].dtype.kind == "i" and ds["qk_norm"].dtype == bool
    assert not {"weight_decay", "batch", "source", "path"} & set(ds.coords), "these do not vary"
    assert ds["golden"].values[1] == trials[1].golden.id != trials[1].id


def test_what_the_fault_did_lies_along_trial(tmp_path: Path) -> None:
    """Strikes are counted beyond the events that are kept, and an address is one only if all events have it."""
    kinds = ["idle", "once", "permanent", "two tensors"]
    trials = {kind: synthetic.make_trial(fault=synthetic.WeightBit(start=3, bit=n)) for n, kind in enumerate(kinds)}
    event = {"site": "weight", "tensor": "head", "bit": 7, "changed": True}
    events = {
        trials["once"].id: [event],
        trials["permanent"].id: [event] * 50 + [event | {"changed": False}] * 50,
        trials["two tensors"].id: [event, event | {"tensor": "embedding", "bit": 8}],
    }
    running = synthetic.make_trial(fault=synthetic.WeightBit(start=3, bit=9))
    synthetic.write_pack(
        tmp_path,
        synthetic.with_golden(trials.values()),
        faults=lambda trial: events.get(trial.id, []),
        masked_step=lambda trial: 12 if trial is trials["once"] else None,
    )
    synthetic.write_pack(tmp_path, [running], finish=False)
    ds = open_sweep(tmp_path)
    ds = ds.sel(trial=[trials["idle"].golden.id, *(trials[kind].id for kind in kinds), running.id])
    expected = {
        "strikes": [0, 0, 1, 100, 2, 0],
        "changes": [0, 0, 1, 50, 2, 0],
        "masked_step": [np.nan, np.nan, 12, np.nan, np.nan, np.nan],
        "struck_site": ["", "", "weight", "weight", "weight", ""],
        "struck_tensor": ["", "", "head", "head", "several", ""],
        "struck_bit": [np.nan, np.nan, 7, 7, np.nan, np.nan],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(ds[name].values, np.array(values), err_msg=name)
    assert ds["masked_step"].attrs["units"] == "step" and ds["strikes"].attrs["units"] == "1"
    assert len(fault_events(tmp_path)) == 1 + 64 + 2


def test_a_permanent_fault_has_the_duration_null(tmp_path: Path) -> None:
    faults = [synthetic.WeightBit(start=3, duration=duration) for duration in (None, 4)]
    synthetic.write_pack(tmp_path, [synthetic.make_trial(fault=fault) for fault in faults])
    assert open_sweep(tmp_path)["fault_duration"].values.tolist() == ["none", 4]


def test_fields_of_one_name_are_told_apart(tmp_path: Path) -> None:
    faults = [synthetic.RareTokens(seed=seed) for seed in (5, 6)]
    trials = [
        Trial(model=Model(seed=n), data=Data(seed=n + 2), train=Train(steps=10), fault=faults[n], seed=n + 8)
        for n in (0, 1)
    ]
    synthetic.write_pack(tmp_path, trials)
    ds = open_sweep(tmp_path)
    found = {name: (list(ds[name].values), ds[name].attrs["path"]) for name in ds.coords if "seed" in name}
    assert found == {
        "seed": ([8, 9], "seed"),
        "model_seed": ([0, 1], "model.seed"),
        "data_seed": ([2, 3], "data.seed"),
        "fault_seed": ([5, 6], "fault.seed"),
    }


def test_a_fault_cannot_hide_a_name_that_is_taken() -> None:
    names = short_names(
        ["model.width", "mitigation", "fault.kind", "fault.name", "fault.width", "fault.step", "fault.loss", "fault.x"]
    )
    assert names == {
        "model.width": "width",
        "mitigation": "mitigation",
        "fault.name": "fault",
        "fault.kind": "fault_kind",
        "fault.width": "fault_width",
        "fault.step": "fault_step",
        "fault.loss": "fault_loss",
        "fault.x": "fault_x",
    }


# --- trials in several packs, and sweeps that are not done -------------------------------------------------------


@pytest.mark.parametrize(("finished", "pack", "value"), [("b0", "b0", 2), (None, "c0", 3)])
def test_of_a_trial_in_several_packs_the_complete_one_is_taken_or_the_newest(
    tmp_path: Path, finished: str | None, pack: str, value: float
) -> None:
    trial = synthetic.make_trial()
    for name, loss in (("d0", 1), ("b0", 2), ("c0", 3)):
        curve = np.full(40, loss)
        synthetic.write_pack(tmp_path, [trial], lambda _, c=curve: c, pack=name, finish=name == finished)
    ds = open_sweep(tmp_path)
    assert ds["pack"].values.tolist() == [pack] and float(ds["loss"][0, 0]) == value


def test_a_live_sweep(tmp_path: Path) -> None:
    done, running, begun = (synthetic.make_trial(seed=seed) for seed in range(3))
    synthetic.write_pack(tmp_path, [done])
    synthetic.write_pack(tmp_path, [running], steps_done=20, finish=False)
    synthetic.write_pack(tmp_path, [begun], steps_done=0, finish=False)
    ds = open_sweep(tmp_path).sel(trial=[done.id, running.id, begun.id])
    assert ds["outcome"].values.tolist() == ["trained", "unfinished", "unfinished"]
    assert ds["complete"].values.tolist() == [True, False, False]
    np.testing.assert_array_equal(np.isfinite(ds["loss"].values).sum(axis=1), [40, 20, 0])


def test_a_sweep_without_packs_yet(tmp_path: Path) -> None:
    open_store(tmp_path, "study")
    ds = open_sweep(tmp_path)
    assert dict(ds.sizes) == {"trial": 0, "step": 0, "layer": 0, "segment": 0}
    assert set(ds.data_vars) == {*SIGNALS, *ENDS, *FINALS}
    assert ds["loss"].values.shape == (0, 0)
    assert {"width", "lr", "fault", "outcome"} <= set(ds.coords)
    assert len(fault_events(tmp_path)) == 0


# --- laziness ----------------------------------------------------------------------------------------------------


def test_opening_reads_one_file_a_pack_and_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        synthetic.write_pack(tmp_path, [synthetic.make_trial(seed=seed)])
    read = count_reads(monkeypatch)
    ds = open_sweep(tmp_path)
    assert {path.name for path in read} == {"zarr.json"}
    assert sum(path.parent.parent == tmp_path / STORE for path in read) == len(read) - 1 == 4, "and the root's"
    read.clear()
    ds["loss"].isel(trial=0, step=slice(0, 12)).compute()
    assert [path.name for path in read] == ["c.0.0", "c.0.1"], "two of the four blocks of one of the four packs"


KEYS = [
    {"trial": 3},
    {"trial": slice(1, 6), "step": 7},
    {"trial": [5, 0, 5], "step": slice(3, 38, 5)},
    {"step": [30, 2]},
    {"trial": slice(None, None, -1), "step": slice(25, 5, -3)},
    {"trial": [], "step": slice(4, 4)},
    {"trial": -1, "step": -1},
]


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_a_part_read_lazily_is_that_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: dict, chunk_bytes: int
) -> None:
    # The function open_sweep hides the module of that name.
    monkeypatch.setattr("analysis.reading.stored_variables.CHUNK_BYTES", chunk_bytes)
    rng = np.random.default_rng(0)
    for number, (steps, depth) in enumerate([(40, 2), (20, 3), (30, 1)]):
        pair = [synthetic.make_trial(seed=2 * number + n, steps=steps, depth=depth) for n in (0, 1)]
        synthetic.write_pack(tmp_path, pair, lambda t: rng.normal(size=t.train.steps))
    ds = open_sweep(tmp_path)
    whole = ds.compute()
    xr.testing.assert_identical(ds.isel(key).compute(), whole.isel(key))
    layer = {**key, "layer": [2, 0]}
    xr.testing.assert_identical(ds["activation_rms"].isel(layer).compute(), whole["activation_rms"].isel(layer))


# --- selecting, and the grid -------------------------------------------------------------------------------------


def test_unstacks_into_a_grid_and_selects_by_coordinate(tmp_path: Path) -> None:
    axes = {"width": [32, 64], "lr": [1e-3, 1e-2, 1e-1], "seed": [0, 1]}
    for width in axes["width"]:
        trials = [synthetic.make_trial(width, lr, seed) for lr in axes["lr"] for seed in axes["seed"]]
        synthetic.write_pack(tmp_path, trials)
    ds = open_sweep(tmp_path)[["loss", "activation_rms"]]
    indexed = ds.set_index(trial=list(axes))
    assert indexed.sel(width=64, lr=1e-2).sizes["seed"] == 2
    grid = indexed.unstack("trial")
    assert {name: grid[name].values.tolist() for name in axes} == axes
    assert grid["activation_rms"].sizes == {"step": 40, "layer": 2, "width": 2, "lr": 3, "seed": 2}
    one = synthetic.make_trial(32, 1e-1, 1)
    np.testing.assert_array_equal(
        grid["loss"].sel(width=32, lr=1e-1, seed=1).values, synthetic.flat_loss(one).astype("f4")
    )
    np.testing.assert_array_equal(ds["loss"].isel(trial=(ds["width"] == 64).values).sizes["trial"], 6)


# --- fault events ------------------------------------------------------------------------------------------------


def test_fault_events_one_row_each(tmp_path: Path) -> None:
    clean = synthetic.make_trial()
    flip = synthetic.make_trial(fault=synthetic.WeightBit(start=3))
    rare = synthetic.make_trial(fault=synthetic.RareTokens(start=5))
    digest = "1" * 64
    events = {
        flip.id: [
            {"site": "weight", "tensor": "head", "index": [1, 2], "bit": 30, "step": 3}
            | {"before": "0.5", "after": "inf", "changed": True, "rank": 1, "mask": "c0000000"},
            {"site": "weight", "tensor": "head", "index": [1, 2], "bit": 30, "step": 4}
            | {"before": float("nan"), "after": float("-inf"), "changed": False, "extra": "x"},
        ],
        rare.id: [
            {"site": "batch", "tensor": "batch", "index": None, "bit": None, "step": 5}
            | {"before": digest, "after": "ab" + digest[2:], "changed": True}
        ],
    }
    synthetic.write_pack(tmp_path, [clean, flip, rare], faults=lambda trial: events.get(trial.id, []))
    synthetic.write_pack(tmp_path, [flip], pack="ffff", finish=False)
    table = fault_events(tmp_path)
    assert table["trial"].tolist() == [flip.id, flip.id, rare.id]
    np.testing.assert_array_equal(table["before"].tolist()[:2], [0.5, np.nan])
    np.testing.assert_array_equal(table["after"].tolist()[:2], [np.inf, -np.inf])
    assert table["before"][2] == digest, "no number, though it is all digits"
    assert table["changed"].tolist() == [True, False, True] and table["extra"].tolist()[1] == "x"
    assert (
        table["rank"][0] == 1 and table["mask"][0] == "c0000000" and table["mask"].isna().tolist()[1:] == [True, True]
    )
    assert set(table["pack"]) == set(open_sweep(tmp_path)["pack"].values)


def test_no_events_is_a_table_with_columns(tmp_path: Path) -> None:
    synthetic.write_pack(tmp_path, [synthetic.make_trial()])
    table = fault_events(tmp_path)
    assert len(table) == 0
    fields = {"site", "tensor", "index", "bit", "mask", "format", "step", "rank", "before", "after", "changed"}
    fields |= {"was_zero"}
    assert {"trial", "pack", *fields} == set(table.columns)


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [open_sweep, fault_events])
def test_a_folder_without_a_store(tmp_path: Path, function) -> None:
    with pytest.raises(ConfigError, match="does not exist|holds no results") as caught:
        function(tmp_path / "missing")
    assert "\n" not in str(caught.value) and str(tmp_path / "missing") in str(caught.value)


def test_a_store_of_another_version(tmp_path: Path) -> None:
    (tmp_path / STORE).mkdir()
    (tmp_path / STORE / "zarr.json").write_text(json.dumps({"attributes": {"format": 1, "study": "s"}}))
    with pytest.raises(ValueError, match=f"format 1; allowed: format 4, 5, 6 or {FORMAT_VERSION}"):
        open_sweep(tmp_path)
