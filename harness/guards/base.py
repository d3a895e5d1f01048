"""What every guard shares: what it is shown, and what it may answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from harness.basics import renamed
from harness.config import Trial
from harness.model.parameters import Layout
from harness.model.state import State
from harness.optim.loss_scale import LossScale

GO, GO_AND_ASK, SKIP, FREEZE, ROLL_BACK, ASK = range(6)
"""What a guard answers for a row; of several answers the largest is done.

GO: the step is taken. SKIP: it is not, and weights and what the optimizer keeps stay as they are. FREEZE: nor is any
later one. ROLL_BACK: the row goes back to a snapshot and trains on from there; where there is none, it freezes. ASK:
the step is not taken, and the row waits until its playbook has answered on the host; GO_AND_ASK: it is, and it waits.
"""


@dataclass(frozen=True)
class GuardSignal:
    """A number of each row and step that a guard has to show: its unit, and its name in words."""

    units: str
    long_name: str


@dataclass(frozen=True)
class Parts:
    """Of what a guard may be made: the model's tensors, the pack's state, its loss scale, and where it stands.

    `alarms` are what detectors have said of the step that is judged, by name: alarm, score, and whether it is of the
    step before, [R] each.
    """

    layout: Layout
    state: State
    loss_scale: LossScale
    rows: int
    device: torch.device
    alarms: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class GuardInput:
    """What a step has come to, before it changes anything; [R] each, on the device.

    `norm` is the global gradient norm before clipping, float64, finite exactly if every element is. `usable` says of
    which rows the gradients leave finite weights, as repaired by what acts on them. `here` are the rows that are
    neither frozen nor wait in this pass; those that do not train in it (`trains`), because their batch was dropped,
    are not to be judged either. `detects` is False where nothing may freeze. `signals` are those of the last step that
    guards have asked for, by name.
    """

    step: Tensor
    loss: Tensor
    norm: Tensor
    usable: Tensor
    here: Tensor
    trains: Tensor
    detects: bool
    signals: Mapping[str, Tensor]


class Guard:
    """Base of the guards: made for a pack in which some trial asks for it, and asked at every step.

    What it remembers are arrays [R, ...] that it adds to the pack's `state`, and then forks, snapshots, rollbacks and
    checkpoints have it; an answer never waits for the device. What is not finite has to leave it able to judge.
    """

    order: ClassVar[int] = 0  # which of several is asked first
    signals: Mapping[str, GuardSignal] = {}  # what `shown` gives: stored and read like the harness's own
    asks: Sequence[str] = ()  # names of the harness's signals that it wants in `Seen.signals`
    every: int | None = None  # steps between the snapshots that it needs to roll back; None: it never does
    back: int = 0  # steps by which a snapshot has to lie before the step that is answered so
    kept: int = 2  # how many of them
    most: int = 3  # rollbacks of one trial, after which it freezes
    on_host: bool = False  # where snapshots are kept

    def __init__(self, parts: Parts):
        self.parts, self.device = parts, parts.device

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        """Whether the trial's configuration asks for it."""
        raise NotImplementedError

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        """(key, why) of what cannot act in a trial that asks for it."""
        yield from ()

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""

    def judge(self, seen: GuardInput) -> Tensor:
        """What to do with each row, [R], int8, from GO to ASK; of rows that do not train, GO."""
        raise NotImplementedError

    def measured(self, values: Mapping[str, Tensor], trained: Tensor) -> None:
        """The signals of the step that it judged last, [R] each, by name; the rows that `trained` have taken it."""

    def restart(self, where_R: Tensor) -> None:
        """These rows begin anew with other data or settings: what was before is no measure of what comes."""

    def shown(self) -> Mapping[str, Tensor]:
        """What it has to show of the step that it judged last: [R] for each of `signals`."""
        return {}


def answers(where_R: Tensor, answer: int) -> Tensor:
    """`answer` in these rows, and GO elsewhere: [R], int8."""
    return where_R.to(torch.int8) * answer


__getattr__ = renamed.names(__name__, Seen="GuardInput")
