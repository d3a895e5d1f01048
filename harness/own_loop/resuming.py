"""What a run has come to know, to go on from in another process beside the loop's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from harness.config import ConfigError
from harness.guards.playbook import goes_back
from harness.own_loop.legs import Leg
from harness.training.ladders import Book

VERSION = 1


def state_of(leg: Leg, step: int) -> dict[str, Any]:
    """Plain values and tensors, for torch.save; `step` is the next one of the run."""
    strikes, facts = leg.strikes, leg.strikes.facts
    return {
        "version": VERSION,
        "step": step,
        "steps": leg.steps,
        "detectors": leg.watch.names,
        "faults": [one.fault.name for one in strikes.faults],
        "series": {name: torch.from_numpy(values) for name, values in leg.series.arrays().items()},
        "memory": leg.watch.memory(),
        "agendas": [None if one.agenda is None else one.agenda.state() for one in strikes.faults],
        "taps": dict(facts.taps) if facts and "taps" in strikes.known else None,
        "tap_formats": dict(facts.formats.get("activation", {})) if facts else {},
        "remedies": leg.remedies.state(),
        "book": asdict(leg.treatment.book) if leg.treatment else None,
        "trained": list(leg.trained),
        "nonfinite_step": leg.nonfinite_step,
    }


def check(state: Any, leg: Leg) -> None:
    """Raises ConfigError for a state that is none, or of a run with other faults, detectors or another playbook."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ConfigError("run.load_state_dict: no state of a run; allowed: what run.state_dict() has given")
    now = {
        "detectors": leg.watch.names,
        "faults": [one.fault.name for one in leg.strikes.faults],
        "a playbook": leg.treatment is not None,
    }
    before = {**state, "a playbook": state["book"] is not None}
    for what, value in now.items():
        if before[what] != value:
            why = f"the state has {what} {before[what]}, and this run has {value}"
            raise ConfigError(f"run.load_state_dict: {why}; allowed: the arguments of attach as they were")


def restore(leg: Leg, state: Mapping[str, Any]) -> None:
    """The leg goes on from this state, whose faults are armed as far as they were."""
    step, strikes = state["step"], leg.strikes
    series = {name: values.numpy() for name, values in state["series"].items()}
    for number in range(step):
        leg.series.put(number, {name: float(values[number]) for name, values in series.items()})
    leg.watch.recall(state["memory"])
    leg.remedies.restore(state["remedies"])
    leg.trained = [(first, tuple(names)) for first, names in state["trained"]]
    leg.nonfinite_step = state["nonfinite_step"]
    for one, agenda in zip(strikes.faults, state["agendas"], strict=True):
        one.resumed = agenda
        if agenda is not None and one.agenda is not None:
            one.agenda.restore(agenda)
    if state["taps"] is not None:
        strikes.knows_taps({name: tuple(shape) for name, shape in state["taps"].items()}, state["tap_formats"])
    if leg.treatment:
        leg.treatment.book = Book(**state["book"])
        if goes_back(leg.treatment.trial):  # there is nothing yet to which the run could go back
            leg.treatment.book.waits = None
