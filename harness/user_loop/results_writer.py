"""Runs of the user's own loop as ordinary results folders: what `analysis` reads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.basics.environment import environment_of
from harness.config import NO_FAULT
from harness.config.names import OWN
from harness.detectors.loop_signals import BEGAN, JUDGED
from harness.faults.fault import InjectableFault
from harness.readings.at_rest import AtRest
from harness.storage.store import PackStore, Signal, check_store, open_store
from harness.training.sites import Event
from harness.user_loop.loop_driver import LoopDriver
from harness.user_loop.presets import looks_at_rest
from harness.user_loop.replays import LoopReplay

STUDY = "attach"
BLOCK = 50  # steps in a chunk
UNKNOWN = {"kind": "a loader of one's own", "fingerprint": ""}


OF_THE_LOOP = {
    BEGAN: Signal(("trial", "step"), "1", "whether detectors began anew, because the loop loaded a state"),
    JUDGED: Signal(("trial", "step"), "1", "whether detectors judge the step, whose gradients did not overflow"),
}
"""What is stored of a user's loop in addition to the harness's own signals: detectors are replayed with it."""


@dataclass(frozen=True)
class OwnTrial:
    """A run of the user's loop as stores describe trials: sections of plain values, without what our GPT alone has.

    Runs of equal models, weights, optimizers, settings, lengths, seeds and faults are the same trial.
    """

    values: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def golden(self) -> OwnTrial:
        return OwnTrial({**self.values, "fault": dict(vars(NO_FAULT))})


class Describing:
    """What is the same of all trials of a driver; it is told before the first step."""

    def __init__(self, driver: LoopDriver):
        asked, places = driver.asked, driver.places
        group = places.groups[0]
        numbers = {name: value for name, value in group.items() if isinstance(value, int | float | bool)}
        numbers |= {"lr": float(group["lr"])} if "lr" in group else {}
        numbers |= dict(zip(("beta1", "beta2"), map(float, group.get("betas", ())), strict=False))
        count = sum(weight.numel() for weight in places.weights.values())
        self._values: dict[str, Any] = {
            "model": {"kind": type(places.model).__name__, "parameters": count},
            "optim": {"name": "+".join(type(one).__name__ for one in places.optimizers), **numbers},
            "schedule": {},
            "train": {"steps": driver.total, "ranks": 1},
            "data": {},
            **{name: dict(vars(section)) for name, section in asked.settings.extras},
            OWN: {"start": places.digest(), "shape": dict(places.shape_key)},
            "recipe": "own",
            "mitigation": "none",
            "seed": asked.seed,
        }

    def trial(self, faults: Sequence[InjectableFault], steps: int) -> OwnTrial:
        """The trial with these faults; of several, their names, and where the first one begins."""
        fault = NO_FAULT if not faults else faults[0]
        if len(faults) > 1:
            name, start = "+".join(fault.name for fault in faults), min(fault.start for fault in faults)
            fault = dataclasses.replace(NO_FAULT, kind="several", name=name, start=start)
        train = {**self._values["train"], "steps": steps}
        return OwnTrial({**self._values, "train": train, "fault": dict(vars(fault))})


def signals_of(driver: LoopDriver) -> dict[str, Signal]:
    """What is stored beside the harness's own signals: what the detectors say."""
    words = {"alarm": "alarm of the detector", "score": "score of the detector"}
    pairs = [(kind, text, name) for name in driver.replay.watch.names for kind, text in words.items()]
    shown = {f"{kind}_{name}": Signal(("trial", "step"), "1", f"{text} {name}") for kind, text, name in pairs}
    if looks_at_rest(driver.asked.settings):
        shown |= {name: Signal(("trial", "step"), of.units, of.long_name) for name, of in AtRest.signals.items()}
    return {**OF_THE_LOOP, **shown}


def write(pack: PackStore, replays: Sequence[LoopReplay | None], first: int, stop: int) -> None:
    """The steps from `first`, where a chunk begins, up to `stop`, a row a replay; NaN where one has none."""
    if stop <= first:
        return
    values: dict[str, np.ndarray] = {}
    for name in pack.signals:
        if len(pack.shape(name)) != 2:
            continue
        found = np.full((len(replays), stop - first), np.nan, np.float32)
        for row, replay in enumerate(replays):
            if replay is not None:
                part = replay.series.get(name)[first:stop]
                found[row, : len(part)] = part
        values[name] = found
    pack.write(first, values)


def finish(pack: PackStore, replays: Sequence[LoopReplay], events: Sequence[Sequence[Any]]) -> None:
    """Everything is known of these replays, a row each."""
    pack.finish(
        outcome=[replay.outcome for replay in replays],
        nonfinite_step=[replay.nonfinite_step for replay in replays],
        masked_step=[replay.masked_step for replay in replays],
        faults=[[event.to_dict() for event in of_replay] for of_replay in events],
        strikes=[replay.strikes.total("strikes") for replay in replays],
        changes=[replay.strikes.total("changes") for replay in replays],
        incidents=[replay.incidents for replay in replays],
        digest=[hashlib.sha256(replay.losses.tobytes()).hexdigest()[:16] for replay in replays],
    )


def _is_alarm(replay: LoopReplay) -> bool:
    """Whether some detector has raised an alarm at the last step, or one before that the run has gone back to."""
    alarms = (replay.series.get(f"alarm_{name}")[-1:] for name in replay.watch.names)
    return bool(replay.incidents) or any(alarm.any() for alarm in alarms)


class Keeping:
    """Writes the run while it trains, and its twin when that does; chunks are written again where a run went back.

    With `waits` nothing is written before the first alarm, and of a run without any nothing at all. Raises ConfigError
    for a folder that holds something else.
    """

    def __init__(self, out: Path, waits: bool = False):
        check_store(out, STUDY)
        self._out, self._waits = out, waits
        self._pack: PackStore | None = None
        self._run: LoopReplay | None = None

    def begin(self, driver: LoopDriver, wants_twin: bool) -> None:
        """The run begins; with a twin, its row stands before that of the run."""
        self._driver = driver
        if driver.ranks.rank == 0:
            self._describing, self._run = Describing(driver), driver.replay
            self._twin: LoopReplay | None = None
            self._has_twin = wants_twin and bool(driver.replay.strikes.faults)
            if not self._waits:
                self._open()

    def _open(self) -> None:
        """Make the pack, and write what there is by now."""
        assert self._run is not None
        self._folder = open_store(self._out, STUDY)
        self._create(self._has_twin, self._run.steps)
        assert self._pack is not None
        write(self._pack, self._replays, 0, self._run.series.length // self._pack.block * self._pack.block)

    def _create(self, has_twin: bool, steps: int) -> None:
        driver = self._driver
        trial = self._describing.trial([one.fault for one in driver.run_replay.strikes.faults], steps)
        self._made = (has_twin, trial)
        trials = [trial.golden] * has_twin + [trial]
        about = UNKNOWN, environment_of(driver.places.device, driver.ranks.size), BLOCK, signals_of(driver)
        self._pack = PackStore.create(self._folder, uuid.uuid4().hex[:16], trials, steps, 1, *about)

    def lengthened(self, driver: LoopDriver) -> None:
        """The run has become longer, by another loader: what was written is written again, into a longer pack."""
        if self._pack is None or self._run is None:
            return
        self._pack.place.remove_tree()
        self._pack.place.unlink()
        self._create(self._made[0], driver.replay.steps)
        write(self._pack, self._replays, 0, self._run.series.length // self._pack.block * self._pack.block)

    @property
    def _replays(self) -> list[LoopReplay | None]:
        return [*([self._twin] if self._made[0] else []), self._run]

    def stepped(self, replay: LoopReplay) -> None:
        """A step of a replay is over; a chunk is written when it is full."""
        if self._pack is None:
            if self._run is replay and self._waits and _is_alarm(replay):
                self._open()
            return
        self._twin = replay if replay is not self._run else self._twin
        done = replay.series.length
        if done and done % self._pack.block == 0 and (replay is self._run or self._made[0]):
            write(self._pack, self._replays, done - self._pack.block, self._stop(done))

    def _stop(self, done: int) -> int:
        """Where a chunk ends that other replays may have filled further."""
        return min(done, self._pack.steps if self._pack else done)

    def stop(self) -> None:
        """The run ended with an error: what was measured is kept, and its pack stays unfinished."""
        if self._pack is not None and self._run is not None:
            first = self._run.series.length // self._pack.block * self._pack.block
            write(self._pack, self._replays, first, self._run.series.length)

    def finish(self, twin: LoopReplay | None, events: Sequence[Event]) -> None:
        """All is done; perhaps once more, with a twin that was trained late.

        A run that was shorter than planned, or has a twin that was not planned, takes the place of what was written.
        """
        if self._pack is None or self._run is None:
            return
        run, old = self._run, self._pack
        steps = max(run.series.length, twin.series.length if twin else 0)
        has_twin = twin is not None and bool(run.strikes.faults)
        trial = self._describing.trial([one.fault for one in run.strikes.faults], steps)
        if not steps or (has_twin, trial) != self._made:
            old.remove()
        if not steps:
            return
        if (has_twin, trial) != self._made:
            self._create(has_twin, steps)
        replays = [twin, run] if has_twin and twin else [run]
        write(self._pack, replays, 0, steps)
        finish(self._pack, replays, [[]] * (len(replays) - 1) + [events])
