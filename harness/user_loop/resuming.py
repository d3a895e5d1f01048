"""What a run has come to know, to go on from in another process beside the loop's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from harness.config import ConfigError
from harness.guards.playbook import goes_back
from harness.incidents.book import Book
from harness.user_loop.replays import LoopReplay

VERSION = 1


def state_of(replay: LoopReplay, step: int) -> dict[str, Any]:
    """Plain values and tensors, for torch.save; `step` is the next one of the run."""
    strikes, facts = replay.strikes, replay.strikes.facts
    return {
        "version": VERSION,
        "step": step,
        "steps": replay.steps,
        "detectors": replay.watch.names,
        "faults": [one.fault.name for one in strikes.faults],
        "series": {name: torch.from_numpy(values) for name, values in replay.series.arrays().items()},
        "memory": replay.watch.memory(),
        "agendas": [None if one.fault_schedule is None else one.fault_schedule.state() for one in strikes.faults],
        "taps": dict(facts.taps) if facts and "taps" in strikes.known else None,
        "tap_formats": dict(facts.formats.get("activation", {})) if facts else {},
        "remedies": replay.interventions.state(),
        "book": asdict(replay.session.book) if replay.session else None,
        "trained": list(replay.trained),
        "nonfinite_step": replay.nonfinite_step,
    }


def check(state: Any, replay: LoopReplay) -> None:
    """Raises ConfigError for a state that is none, or of a run with other faults, detectors or another playbook."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ConfigError("run.load_state_dict: no state of a run; allowed: what run.state_dict() has given")
    now = {
        "detectors": replay.watch.names,
        "faults": [one.fault.name for one in replay.strikes.faults],
        "a playbook": replay.session is not None,
    }
    before = {**state, "a playbook": state["book"] is not None}
    for what, value in now.items():
        if before[what] != value:
            why = f"the state has {what} {before[what]}, and this run has {value}"
            raise ConfigError(f"run.load_state_dict: {why}; allowed: the arguments of attach as they were")


def restore(replay: LoopReplay, state: Mapping[str, Any]) -> None:
    """The replay goes on from this state, whose faults are armed as far as they were."""
    step, strikes = state["step"], replay.strikes
    series = {name: values.numpy() for name, values in state["series"].items()}
    for number in range(step):
        replay.series.put(number, {name: float(values[number]) for name, values in series.items()})
    replay.watch.recall(state["memory"])
    replay.interventions.restore(state["remedies"])
    replay.trained = [(first, tuple(names)) for first, names in state["trained"]]
    replay.nonfinite_step = state["nonfinite_step"]
    for one, fault_schedule in zip(strikes.faults, state["agendas"], strict=True):
        one.resumed = fault_schedule
        if fault_schedule is not None and one.fault_schedule is not None:
            one.fault_schedule.restore(fault_schedule)
    if state["taps"] is not None:
        strikes.knows_taps({name: tuple(shape) for name, shape in state["taps"].items()}, state["tap_formats"])
    if replay.session:
        replay.session.book = Book(**state["book"])
        if goes_back(replay.session.trial):  # there is nothing yet to which the run could go back
            replay.session.book.waits = None
