"""How many rows pass through the model together on an accelerator: measured once, kept, and no matter of a plan."""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.basics import devices
from harness.config import Model, Train, Trial
from harness.data.corpus import Corpus
from harness.memory.footprint import footprint
from harness.storage.store import open_store
from harness.storage.stored import read_packs
from harness.testing import engine
from harness.testing.engine import Dying, Killed
from harness.training.pack import Pack
from harness.training.pack_sizes import rows_at_once, tried
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import make_plan
from sweeps.running import calibration
from sweeps.running.calibration import FILE, TIMED, WARM, fastest_rows
from sweeps.running.job import train_pack
from tests.jobs import job_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRIAL = engine.trial()
SPEEDS = {16: 100.0, 32: 180.0, 64: 300.0, 128: 305.0, 256: 250.0}  # of 64 rows and of 128 alike


class Meter:
    """Stands for the clock: says how fast packs of so many rows are, and was asked of."""

    def __init__(self, speeds: dict[int, float]):
        self.speeds, self.asked = speeds, list[int]()

    def __call__(self, trial: Trial, rows: int, device: torch.device, corpus: Corpus) -> float:
        self.asked.append(rows)
        if rows not in self.speeds:
            raise torch.OutOfMemoryError
        return self.speeds[rows]


@pytest.fixture
def accelerator_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data on the CPU take the ways of an accelerator."""
    monkeypatch.setattr(devices, "CPUS", ())


def chosen(folder: Path, meter: Meter, rows: int = 300, trial: Trial = TRIAL) -> int | None:
    return fastest_rows([trial] * rows, CPU, engine.corpus_of(trial), meter, folder)


# --- measured ----------------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_of_those_as_fast_the_smallest(accelerator_ways: None, tmp_path: Path) -> None:
    assert tried(TRIAL.model, TRIAL.train.sequences, CPU) == [16, 32, 64, 128, 256]
    meter = Meter(SPEEDS)
    assert chosen(tmp_path, meter) == 64
    assert meter.asked == [16, 32, 64, 128, 256]


def test_it_is_measured_once_for_each_device_torch_and_structure(
    accelerator_ways: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, asked = Meter(SPEEDS), [16, 32, 64, 128, 256]
    for trial in (TRIAL, replace(TRIAL, seed=3), engine.trial(lr=0.5), engine.trial(steps=99)):
        assert chosen(tmp_path, meter, trial=trial) == 64
    assert meter.asked == asked, "they differ in what takes no time"
    other = Meter({**SPEEDS, 16: 999.0})
    assert chosen(tmp_path, other, trial=engine.trial(depth=3)) == 16
    monkeypatch.setattr(calibration, "name_of", lambda device: "another accelerator")
    assert chosen(tmp_path, other) == 16
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert chosen(tmp_path, other) == 16
    assert other.asked == [16, 32] * 3, "32 rows are far slower than 16, so more are not tried"
    monkeypatch.undo()
    monkeypatch.setattr(devices, "CPUS", ())
    assert chosen(tmp_path, meter) == 64 and meter.asked == asked


@pytest.mark.parametrize("rows", [100, 300])
def test_only_what_fits_is_tried_and_taken(
    accelerator_ways: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The pack's rows count too, of which there may be more than pass at once."""
    found, meter = footprint(calibration.shortened(TRIAL)), Meter({16: 100.0, 32: 200.0, 64: 400.0, 128: 800.0})
    monkeypatch.setattr(
        calibration, "free_bytes", lambda device: max(found.bytes(128, 128), footprint(TRIAL).bytes(128, 128))
    )
    assert chosen(tmp_path, meter, rows) == {100: 128, 300: None}[rows]
    assert meter.asked == [16, 32, 64, 128]
    monkeypatch.setattr(calibration, "free_bytes", lambda device: math.inf)
    assert chosen(tmp_path, meter, rows) == 128, "on another day there is more room"


def test_what_runs_out_of_memory_after_all_is_left_out(accelerator_ways: None, tmp_path: Path) -> None:
    meter = Meter({16: 100.0, 32: 200.0})
    assert chosen(tmp_path, meter) == 32 and meter.asked == [16, 32, 64]


def test_the_clock_runs_over_the_steps_after_the_first_ones(
    accelerator_ways: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real pack, by a clock that goes on by one at each look."""
    looks: list[int] = []

    def pack_step() -> float:
        looks.append(len(looks))
        return float(looks[-1])

    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=pack_step))
    begun: list[int] = []
    begin = Pack.know_weights
    monkeypatch.setattr(Pack, "know_weights", lambda pack, here: (begun.append(len(pack)), begin(pack, here))[1])
    short = calibration.shortened(TRIAL)
    speed = calibration.trial_steps_a_second(short, 5, CPU, engine.corpus_of(TRIAL))
    assert speed == 5 * TIMED and looks == [0, 1] and begun == [5] * (WARM + TIMED)


# --- or by the rule ----------------------------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_measured_and_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(SPEEDS)
    monkeypatch.setattr(devices, "CPUS", ())
    chosen(tmp_path, meter)
    meter.asked.clear()
    monkeypatch.undo()
    assert chosen(tmp_path, meter) is None and not meter.asked
    assert tried(TRIAL.model, 2, CPU) == [rows_at_once(TRIAL.model, 2, CPU)]


def test_too_few_rows_to_cut_are_not_worth_it(accelerator_ways: None, tmp_path: Path) -> None:
    meter = Meter(SPEEDS)
    assert chosen(tmp_path, meter, rows=16) is None
    assert not meter.asked and not list(tmp_path.iterdir())


ENTRY = {"device": "cpu", "torch": "2", "structure": "s", "speeds": {"16": 1.0}}
DAMAGED = {
    "nothing": b"",
    "cut off": b'{"measured": [{"device": "cp',
    "a list": b"[]",
    "no speeds": json.dumps({"measured": [{"device": "cpu"}]}).encode(),
    "a negative speed": json.dumps({"measured": [{**ENTRY, "speeds": {"16": -1.0}}]}).encode(),
    "no number of rows": json.dumps({"measured": [{**ENTRY, "speeds": {"many": 1.0}}]}).encode(),
    "no rows": json.dumps({"measured": [{**ENTRY, "speeds": {"0": 1.0}}]}).encode(),
    "a speed of NaN": b'{"measured": [{"device": "c", "torch": "2", "structure": "s", "speeds": {"16": NaN}}]}',
    "other bytes": bytes(range(256)),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_one_warning_and_the_rule(accelerator_ways: None, tmp_path: Path, kind: str) -> None:
    (tmp_path / FILE).write_bytes(DAMAGED[kind])
    meter = Meter(SPEEDS)
    with pytest.warns(RuntimeWarning, match=rf"{FILE}: .*; rows at once are those of the rule") as told:
        assert chosen(tmp_path, meter) is None
    assert len(told) == 1 and not meter.asked and (tmp_path / FILE).read_bytes() == DAMAGED[kind]


def test_no_file_is_waited_for_and_no_link_is_followed(accelerator_ways: None, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.warns(RuntimeWarning, match="is no regular file"):
        assert chosen(tmp_path, Meter(SPEEDS)) is None
    (tmp_path / FILE).unlink()
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / FILE).symlink_to(tmp_path / "mine")
    with pytest.warns(RuntimeWarning, match="is a symbolic link"):
        assert chosen(tmp_path, Meter(SPEEDS)) is None
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_cache_that_cannot_be_written_is_one_warning_and_the_rule(accelerator_ways: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="cannot write the cache .*STABILITY_HARNESS_CACHE") as told:
        assert chosen(tmp_path / "file" / "folder", Meter(SPEEDS)) is None
    assert len(told) == 1


def test_the_users_cache_is_where_it_is_kept(
    accelerator_ways: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path / "cache"))
    meter = Meter(SPEEDS)
    assert fastest_rows([TRIAL] * 300, CPU, engine.corpus_of(TRIAL), meter) == 64
    (entry,) = json.loads((tmp_path / "cache" / FILE).read_bytes())["measured"]
    assert entry["device"] == "cpu" and entry["torch"] == torch.__version__ and entry["speeds"]["128"] == 305.0


# --- plans and packs ---------------------------------------------------------------------------------------------


def test_a_plan_knows_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is the same where there is no accelerator, nor a file; a pack has room for the most that may be fast."""
    monkeypatch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path))
    trials = [Trial(Model(width=32), train=Train(steps=10), seed=seed) for seed in range(600)]
    before = make_plan(trials, (), None, "cuda", 1, memory=2.0**36)
    key = calibration.structure_of(calibration.shortened(trials[0]))
    entry = {"device": "cuda", "torch": torch.__version__, "structure": key, "speeds": {"16": 1.0}}
    (tmp_path / FILE).write_text(json.dumps({"measured": [entry]}))
    after = make_plan(trials, (), None, "cuda", 1, memory=2.0**36)
    assert before == after
    rule = rows_at_once(trials[0].model, trials[0].train.sequences, CUDA)
    assert rule == 64 and [len(pack.trials) for pack in before.packs] == [200] * 3
    unknown = make_plan(trials, (), None, "cuda", 1)
    assert max(len(pack.trials) for pack in unknown.packs) <= rule, "without knowing the memory, as the rule has it"


def test_how_many_pass_at_once_changes_no_bit() -> None:
    trials = engine.different(6)
    parts = []

    def at_once(rows: int) -> engine.Run:
        def prepare(pack: Pack) -> None:
            pack.slots._at_once = rows
            pack.slots.arrange(pack.rows)
            pack.refresh()
            parts.append(len(pack.parts))

        return engine.run(trials, prepare=prepare)

    engine.assert_same_trials(at_once(6), at_once(2))
    assert parts == [1, 3]


@pytest.mark.filterwarnings("ignore:pack .* trained with cpu.kernels")  # its environment, made here, has none
def test_a_pack_goes_on_with_the_rows_with_which_it_began(
    accelerator_ways: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is measured since; and where the size of packs is given, nothing is measured."""
    monkeypatch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "tried", lambda *_: [2, 4, 8])
    meter = Meter({2: 10.0, 4: 99.0, 8: 10.0})
    monkeypatch.setattr(calibration, "trial_steps_a_second", meter)
    seen: list[int] = []
    begin = Pack.know_weights

    def noted(pack: Pack, *rest: Any) -> None:
        if pack.device == CPU:  # and is not one whose memory is counted
            seen.append(pack.at_once)
        begin(pack, *rest)

    monkeypatch.setattr(Pack, "know_weights", noted)
    job = job_of(PackPlan(tuple(engine.different(6)), frozenset()), tmp_path / "out", block=2, every=1)
    open_store(job.out, "grid")
    own = job.checkpoints
    with pytest.raises(Killed):
        train_pack(job, Dying(own.folder, every=1, about=own.about, dies_at=3))
    assert set(seen) == {4} and meter.asked == [2, 4, 8]
    (tmp_path / "cache" / FILE).unlink()
    train_pack(job)
    assert set(seen) == {4} and meter.asked == [2, 4, 8]
    (pack,) = read_packs(job.out)
    assert pack.complete and pack.attributes["environment"]["rows_at_once"] == 4

    seen.clear()
    given = job_of(job.pack, tmp_path / "given", block=2, **{"pack.size": 6})
    open_store(given.out, "grid")
    train_pack(given)
    assert set(seen) == {rows_at_once(TRIAL.model, TRIAL.train.sequences, CPU)} and meter.asked == [2, 4, 8]


def test_packs_of_a_cpu_say_nothing_of_it(tmp_path: Path) -> None:
    job = job_of(PackPlan(tuple(engine.different(3)), frozenset()), tmp_path)
    open_store(job.out, "grid")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_pack(job)
    (pack,) = read_packs(job.out)
    assert "rows_at_once" not in pack.attributes["environment"]
