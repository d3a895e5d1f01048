"""What every action shares: what it is shown of the trial that it acts on, and what it may do to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from harness.config import Trial

Tensors = Mapping[str, Tensor]  # of one trial, by name
Detail = Mapping[str, Any]  # what the log says of an action, as JSON has it
GROWN = 10.0  # largest weight over that of the snapshot before, from which on it is not sound
STANDS = "stands"  # in a detail: whether the alarm is still one, and the next rung is asked


@dataclass(frozen=True)
class Alarm:
    """What was seen of a step: the detectors that raised an alarm with their scores (NaN: none), loss and norm.

    `is_taken`: the step was. `is_late`: it is also of what is known after a step, and so of the step before. `scores`
    are those of all that watch, `usual` those of the last step without an alarm. Without any detector it is a step that
    an action wanted to see again.
    """

    step: int
    detectors: Mapping[str, float]
    loss: float
    grad_norm: float
    is_taken: bool = False
    is_late: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)


class Row(Protocol):
    """The row of a trial at an alarm: it stands before its update (after it, where the action `takes` the step).

    Without more it goes on at the next step. What is done to its rate, data and settings stays when it goes back.
    """

    trial: Trial
    alarm: Alarm
    used: int  # how many times this rung was used before in this incident

    @property
    def reached(self) -> int | None:
        """The earliest step to which it went back in this incident; None: it did not."""

    @property
    def is_spared(self) -> bool:
        """Whether it trains on another device than at first."""

    def go_back(self, latest: int) -> int | None:
        """To the newest sound snapshot of a step up to `latest`: it goes on there, and its step is returned.

        The detectors' memory goes back as well, and a transient fault that has struck does not strike again. None, and
        nothing is done, where there is no such snapshot.
        """

    def newest(self, latest: int) -> int | None:
        """The step of the snapshot to which it would go back."""

    def redo(self) -> None:
        """The step is taken once more, with weights and optimizer as they are before it."""

    def sound(self, latest: int) -> int | None:
        """The same, but of those whose weights are of the size of the ones before it."""

    def odd_batches(self, step: int, most: int) -> int:
        """How many batches from that of a step on are unlike those before, by their tokens alone.

        0: it is an ordinary one, or there are more than `most`.
        """

    def read_on(self, batches: int) -> None:
        """From here on it reads the batches that come so many later than the planned ones."""

    @property
    def reads_since(self) -> int:
        """The step from which on it has read the batches that it would read now."""

    def scale_rate(self, factor: float, steps: int | None) -> None:
        """Its rate is multiplied by a factor for so many steps from here on; None: for good."""

    def route_stale(self, steps: int | None) -> None:
        """Tokens go to the experts of older weights for so many steps from here on; None: for good."""

    def raise_penalty(self, factor: float, least: float) -> float:
        """The constant of a policy's penalty is multiplied, and at least so much, from here on; what it is then."""

    def reset_reference(self) -> None:
        """The reference of a policy is the model as it is at this step; where it goes back, the one of then."""

    def scale_embedding(self, factor: float) -> None:
        """The embedding's gradient is multiplied by a factor from here on."""

    def amend(self, changes: Mapping[str, Any]) -> None:
        """Fields of its configuration, by key, are others from here on."""

    def moments(self) -> Mapping[str, Tensors]:
        """What its optimizer keeps: views by array and tensor, to be changed in place."""

    def earlier_moments(self) -> Mapping[str, Tensors] | None:
        """The same in the oldest sound snapshot; None: there is none."""

    def forget_moments(self) -> None:
        """All that its optimizer keeps is zero, and corrected as in a first step."""

    def forget_signals(self) -> None:
        """Its detectors begin anew: what was before is no measure of what comes."""

    def on_spare(self, is_on: bool) -> None:
        """It trains on another device, where no fault of the first one strikes; one of the data does."""

    def disarm(self) -> None:
        """Its fault is over."""

    def fault_step(self) -> int | None:
        """The step of the first strike that changed something; for the oracle alone."""

    def wait(self, step: int, memory: Detail, takes: bool) -> None:
        """The action is asked again at that step (`resume`), whether or not it is an alarm, and given its memory.

        `takes`: an alarm that it finds to be right there is no other's to answer, so if no rung comes after it the step
        is taken before it is asked; a step without an alarm always is.
        """


class Action:
    """Base of the actions. It has no state: what it has to know later it leaves with the row (`Row.wait`)."""

    takes: ClassVar[bool] = False  # whether the step of the alarm is taken before
    goes_back: ClassVar[bool] = False  # whether the trial goes on from an earlier step
    waits: ClassVar[bool] = False  # whether steps that it wants to see again are kept beside the snapshots
    changes_course: ClassVar[bool] = False  # whether the trial is another from there on than it was to be
    source: ClassVar[str] = ""  # whose answer it is

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        """What it cannot be in such a trial, each a line with key, value, and what is allowed."""
        yield from ()

    @classmethod
    def needs_snapshots(cls, trial: Trial) -> bool:
        """Whether it has to know what the trial was."""
        return cls.goes_back

    @classmethod
    def back(cls, trial: Trial) -> int:
        """The steps by which a snapshot has to lie before the alarm: its field `back`, where it has one."""
        return 0

    def do(self, row: Row, options: Any) -> Detail | None:
        """Act, and say for the log what was done; None: it could not, and the next rung is tried."""
        raise NotImplementedError

    def resume(self, row: Row, options: Any, memory: Mapping[str, Any]) -> Detail:
        """Go on at the step that was waited for, or at an alarm before it; see `STANDS`."""
        raise NotImplementedError


def not_a_policy(trial: Trial, action: str) -> Iterator[str]:
    """Why an action on a policy cannot be done in a trial that has none."""
    if trial.objective.name != "policy":
        yield f"playbook: {action}: objective.name={trial.objective.name} samples nothing; allowed: policy"
