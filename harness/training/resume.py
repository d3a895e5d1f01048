"""What of a pack in training a checkpoint holds."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from harness.storage.checkpoint import Saved
from harness.training.answers import Answers
from harness.training.pack import Pack, Snapshot
from harness.training.signals import Recorder
from harness.training.sites import Agenda


def steps_done(saved: Saved) -> int:
    """The steps that all rows of a checkpoint have done: the store has those."""
    return int(saved.tensors["pack.step"].min())


def state_of(
    pack: Pack, agenda: Agenda, recorder: Recorder, answers: Answers
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that the next steps depend on: tensors by name, and the rest as JSON has it."""
    snapshot = pack.snapshot(copy=False)
    parts = {"agenda": agenda.state(), "recorder": recorder.state(), "answers": answers.state()}
    tensors = {f"pack.{name}": values for name, values in snapshot.values.items()}
    tensors |= {f"acts.{name}": counts for name, counts in snapshot.acts.items()}
    tensors |= {f"{part}.{name}": values for part, (own, _) in parts.items() for name, values in own.items()}
    own = {
        "rows": snapshot.rows,
        "begins": [None if math.isinf(begin) else begin for begin in snapshot.begins],
        "forked": sorted(snapshot.forked),
        "masked": list(snapshot.masked.items()),
        "dropped": snapshot.dropped,
    }
    return tensors, {"pack": own, **{part: values for part, (_, values) in parts.items()}}


def restore(saved: Saved, pack: Pack, agenda: Agenda, recorder: Recorder, answers: Answers) -> None:
    """Go on from what `state_of` has given, with parts that were made anew for the same trials."""

    def of(part: str) -> dict[str, Tensor]:
        return {name.removeprefix(f"{part}."): x for name, x in saved.tensors.items() if name.startswith(f"{part}.")}

    own = saved.values["pack"]
    begins = tuple(math.inf if begin is None else begin for begin in own["begins"])
    rows, masked, dropped = tuple(own["rows"]), dict(own["masked"]), tuple(own["dropped"])
    pack.restore(Snapshot(rows, begins, tuple(own["forked"]), masked, dropped, of("pack"), of("acts")))
    pack.clock.number = saved.step
    agenda.restore(of("agenda"), saved.values["agenda"])
    recorder.restore(of("recorder"), saved.values["recorder"])
    answers.restore(of("answers"), saved.values["answers"])
