"""Where the first value that is not finite came from, for each trial that freezes: found afterwards, from its row.

A row that freezes keeps what it had before that step until the pack lets it go, so it is its own snapshot, and a
healthy step pays nothing. At the end of a block of steps each such row is run once more (harness/nonfinite/rerun.py).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import dataclass
from typing import Any

from harness.config import Trial
from harness.model.formats import FORMAT_OF
from harness.nonfinite.attribution import Blame, RowState, blame
from harness.nonfinite.rerun import UPDATE, Place, Rerun, RerunResult
from harness.nonfinite.trace import INVALID, OVERFLOW, Origin
from harness.training.pack import Pack
from harness.training.signals import Recorder
from harness.training.sites import FaultSchedule, Site

STRIKE, UNKNOWN = "strike", "unknown"


@dataclass(frozen=True)
class Provenance:
    """The first value of a trial that was not finite, and the tensor that is to blame for it.

    `direction` is forward, backward, or update: it was made by the optimizer at the end of `step`. `tensor` is one of
    the model at the sites of weights, gradients and moments, and a tap at those of activations; `index` is in its
    shape, `head` that of attention, `rank` whose pass it was. `cause` is `strike` (changed where it stood: no operation
    made it), `overflow` of the `format` (without an operation, where that is narrower than the tensor's), `0/0`,
    `inf - inf`, `invalid` (another operation without a result), or `unknown`, where the step was finite when it ran
    once more. `evidence` for the blame: `re-execution`, `state`, `setting`, `outlier`, or `unknown`, where nothing is
    blamed.
    """

    step: int
    direction: str = ""
    site: str = ""
    tensor: str = ""
    layer: int | None = None
    head: int | None = None
    index: tuple[int, ...] | None = None
    rank: int = 0
    value: str = ""
    operation: str = ""
    cause: str = UNKNOWN
    format: str = ""
    blamed: str = ""
    blamed_site: str = ""
    blamed_index: tuple[int, ...] | None = None
    evidence: str = UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class Provenances:
    """Finds them for the rows of a pack, if they are `wanted`, and leaves them with the recorder, by planned trial."""

    def __init__(self, pack: Pack, fault_schedule: FaultSchedule, recorder: Recorder, wanted: bool = True):
        self._pack, self._agenda, self._recorder, self._wanted = pack, fault_schedule, recorder, wanted

    def look(self) -> None:
        """Find that of each row that has frozen since the last call; here the host waits for the device."""
        if not self._wanted:
            return
        found, pack = self._recorder.provenance, self._pack
        active = pack.active.tolist()
        frozen = [row for row, trial in enumerate(pack.rows) if not active[row] and trial not in found]
        if not frozen:
            return
        steps = self._recorder.frozen()
        for row in frozen:
            if (trial := pack.rows[row]) in steps:
                found[trial] = self._of_safely(row, steps[trial]).to_dict()

    def explain(self, row: int, step: int) -> None:
        """Find that of a row whose step was not finite and is not taken, before it goes back, if it is the first."""
        trial = self._pack.rows[row]
        if self._wanted and trial not in self._recorder.provenance:
            self._recorder.provenance[trial] = self._of_safely(row, step).to_dict()

    def _of_safely(self, row: int, step: int) -> Provenance:
        """What is only to be explained must not cost the pack: a part that cannot run again, or too little memory."""
        try:
            return self.of(row, step)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(f"step {step} could not run once more, its provenance is unknown ({reason})", stacklevel=2)
            return Provenance(step)

    def of(self, row: int, step: int) -> Provenance:
        """That of a row as it was before a step that is not finite."""
        pack, trial = self._pack, self._pack.planned[self._pack.rows[row]]
        rerun = Rerun(pack, self._agenda, row, step)
        readings, slots = rerun.run(), pack.optimizer.slots
        state = RowState(
            pack.tensors(pack.weights, row),
            {name: pack.slot(name, row) for name in slots},
            float(rerun.copies.loss_scale.scale[0]),
        )
        if readings.first is None:
            return Provenance(step)
        return _described(readings, step, state, blame(readings.difference, readings.spared, state, trial), trial)


def _described(readings: RerunResult, step: int, state: RowState, blamed: Blame, trial: Trial) -> Provenance:
    place, origin = readings.first, readings.origin
    assert place is not None
    cause = STRIKE if origin is None else origin.cause
    source = state.source(place.tensor, place.index) if place.site == Site.WEIGHT else Site.WEIGHT
    if source != Site.WEIGHT:
        # It was finite when the step before read it: the optimizer made it of what it keeps.
        step, place = step - 1, dataclasses.replace(place, direction=UPDATE, site=str(source))
        moment = state.slots[source][place.tensor][place.index] if source in state.slots else None
        cause = INVALID if moment is not None and bool(moment.isfinite()) else STRIKE
    elif place.site == Site.WEIGHT and blamed.tensor != place.tensor and step > 0:
        # Of many weights at once: the update was beyond what they can be.
        step, place = step - 1, dataclasses.replace(place, direction=UPDATE, site=str(Site.UPDATE))
        origin = Origin("", OVERFLOW, FORMAT_OF[state.weights[place.tensor].dtype])
        cause = OVERFLOW
    return Provenance(
        step=step,
        direction=place.direction,
        site=str(place.site),
        tensor=place.tensor,
        layer=_layer(place.tensor),
        head=_head(place, trial),
        index=place.index,
        rank=place.rank,
        value=repr(readings.value),
        operation="" if origin is None else origin.operation,
        cause=cause,
        format="" if origin is None else origin.format,
        blamed=blamed.tensor,
        blamed_site=blamed.site,
        blamed_index=blamed.index,
        evidence=blamed.evidence,
    )


def _layer(tensor: str) -> int | None:
    match = re.match(r"blocks\.(\d+)\.", tensor)
    return int(match[1]) if match else None


def _head(place: Place, trial: Trial) -> int | None:
    """The head of attention to which an element belongs, where it belongs to one."""
    _, _, name = place.tensor.rpartition(".attention.")
    if name == place.tensor:
        return None
    if place.site in (Site.ACTIVATION, Site.ACTIVATION_GRADIENT):
        return place.index[1] if name in ("query", "key", "value", "scores") else None
    if name.removesuffix("_bias") in ("query", "key", "value"):
        return place.index[0] // trial.model.head_dim
    return place.index[1] // trial.model.head_dim if name == "projection" else None
