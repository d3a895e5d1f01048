"""What of a pack in training a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from harness.incidents.guard_runner import GuardRunner
from harness.storage.checkpoint import Saved
from harness.training.pack import Pack
from harness.training.signals import Recorder
from harness.training.sites import FaultSchedule

TENSOR = "__tensor__"  # in the JSON, instead of a tensor: its name


def steps_done(saved: Saved) -> int:
    """The steps that all rows of a checkpoint have done: the store has those."""
    return int(saved.tensors["pack.step"].min())


def state_of(
    pack: Pack, fault_schedule: FaultSchedule, recorder: Recorder, answers: GuardRunner
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that the next steps depend on: tensors by name, and the rest as JSON has it."""
    state = pack.whole_state() | {
        "agenda": fault_schedule.state(),
        "recorder": recorder.state(),
        "answers": answers.state(),
    }
    tensors: dict[str, Tensor] = {}
    return tensors, {part: _without_tensors(value, part, tensors) for part, value in state.items()}


def restore(saved: Saved, pack: Pack, fault_schedule: FaultSchedule, recorder: Recorder, answers: GuardRunner) -> None:
    """Go on from what `state_of` has given, with parts that were made anew for the same trials."""
    state = _with_tensors(saved.values, saved.tensors)
    pack.restore(state)
    pack.row_steps.number = saved.step
    fault_schedule.restore(state["agenda"])
    recorder.restore(state["recorder"])
    answers.restore(state["answers"])


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON has it; the tensors in it go to `tensors`, each under the name of its place."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    return tensors[value[TENSOR]] if TENSOR in value else {key: _with_tensors(x, tensors) for key, x in value.items()}
