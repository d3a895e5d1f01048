"""The ways through the user's loop: the run itself, its twin, a campaign's golden run, and each of its faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.config import Trial
from harness.objectives.outcome import judge
from harness.training.interventions import Interventions
from harness.user_loop.measures import SignalBuffer, Watch
from harness.user_loop.recovery_session import RecoverySession
from harness.user_loop.replay_check import ReplayCheck, StepRecords
from harness.user_loop.strikes import LoopStrikes

RUN, TWIN, CONTROL, WALK, FAULT = "run", "twin", "control", "walk", "fault"  # kinds


@dataclass
class LoopReplay:
    """One way through the loop, from a snapshot on; `steps` at most. What is measured of it stands in `series`."""

    kind: str
    steps: int
    strikes: LoopStrikes
    interventions: Interventions
    watch: Watch
    session: RecoverySession | None = None
    series: SignalBuffer = field(default_factory=SignalBuffer)
    nonfinite_step: int | None = None
    masked_step: int | None = None
    stopped: str = ""  # why it ended before its last step
    records: StepRecords = field(default_factory=StepRecords)
    comparison: ReplayCheck | None = None  # with a replay whose steps it repeats
    trained: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)  # from which steps on which weights are

    def __post_init__(self) -> None:
        self.series.settle = self.watch.settle
        self.watch.tells(self.series.add)

    def sees_trained(self, step: int, names: tuple[str, ...]) -> bool:
        """Whether these are other weights than those that the step before has trained."""
        while self.trained and self.trained[-1][0] >= step:  # the run went back
            self.trained.pop()
        if self.trained and self.trained[-1][1] == names:
            return False
        self.trained.append((step, names))
        return len(self.trained) > 1

    @property
    def losses(self) -> np.ndarray:
        """[steps], float32."""
        return self.series.get("loss")

    @property
    def outcome(self) -> str:
        """How it ended, by the written criterion of harness/objectives/outcome.py."""
        return judge(self.losses, self.nonfinite_step, is_untrained=False)

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """What its playbook has answered, as stores have it."""
        return self.session.book.incidents(self.steps) if self.session else []

    def record(self, step: int, values: dict[str, float], is_bad: bool) -> None:
        """The numbers of a step, and whether it was not finite and trained on all the same."""
        self.series.put(step, values)
        if is_bad and self.nonfinite_step is None:
            self.nonfinite_step = step

    def forget(self, step: int) -> None:
        """It went back: it has not done the steps from this one on."""
        self.series.length = step
        if self.nonfinite_step is not None and self.nonfinite_step >= step:
            self.nonfinite_step = None


def has_ladder(trial: Trial) -> bool:
    """Whether there is an answer to alarms."""
    return trial.playbook.ladder != "[]"
