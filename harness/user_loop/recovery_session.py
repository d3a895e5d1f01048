"""A playbook for the user's own run: its ladder, its snapshots, and what an action may do to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from harness.config import Trial
from harness.guards.playbook import goes_back, has_oracle, waits
from harness.incidents.book import Book
from harness.incidents.escalation import expectation, oracle_alarm, treat
from harness.incidents.row import IncidentRow
from harness.model.formats import to_measure
from harness.recovery.base import GROWN, Alarm
from harness.training.interventions import Interventions
from harness.user_loop.loop_state import LoopState
from harness.user_loop.measures import MEASURED_AT_END, Watch
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.norms import stacked
from harness.user_loop.snapshots import Keeper, Snapshot, StepUndo
from harness.user_loop.strikes import LoopStrikes


@dataclass
class SavedSnapshot:
    """A snapshot, and what the detectors remembered."""

    snapshot: Snapshot
    memory: dict[str, Tensor]


def _all_finite(values: Sequence[Tensor]) -> bool:
    """Whether each of these numbers is."""
    return bool(stacked(values, values[0].device).isfinite().all())


class Ring:
    """The newest sound snapshots of a run, one every `every` steps, and one more of a step that is awaited."""

    def __init__(self, keeper: Keeper, places: NamedTensors, watch: Watch, every: int, kept: int):
        self._keeper, self._places, self._watch = keeper, places, watch
        self._every, self._most = every, kept
        self._kept: dict[int, SavedSnapshot] = {}
        self._shared: set[int] = set()  # steps of snapshots that others have as well
        self._awaited: int | None = None
        self._spare: Snapshot | None = None

    def fork(self, other: Ring) -> None:
        """Go on with what another run has kept."""
        self._kept, self._awaited = dict(other._kept), other._awaited
        self._shared, other._shared = set(self._kept), set(self._kept)

    def take(
        self, step: int, is_quiet: bool, awaited: int, with_gradients: bool, is_measured: bool = False
    ) -> Snapshot | None:
        """Keep this step, if it is due and nothing was wrong with the one before; what was kept, if it was.

        `is_measured`: the norms of `MEASURED_AT_END` are those of now, and finite.
        """
        is_due = step % self._every == 0
        if not (is_due or step == awaited) or not is_quiet or step in self._kept or not self._is_finite(is_measured):
            return None
        if step == awaited and not is_due:
            self._forget(self._awaited)
            self._awaited = step
        regular = [kept for kept in self._kept if kept != self._awaited]
        if is_due and len(regular) >= self._most:
            self._forget(min(regular))
        snapshot = self._keeper.take(step, self._spare, with_gradients)
        self._kept[step] = SavedSnapshot(snapshot, self._watch.memory())
        self._spare = None
        return snapshot

    def clear(self) -> None:
        """What was kept is of no use."""
        for step in list(self._kept):
            self._forget(step)

    def _forget(self, step: int | None) -> None:
        if step is None or (kept := self._kept.pop(step, None)) is None:
            return
        if step not in self._shared:
            self._spare = kept.snapshot  # its memory serves the next one
        self._shared.discard(step)

    def _is_finite(self, is_measured: bool) -> bool:
        is_known = is_measured and len(self._places.owned) == len(self._places.trained)
        arrays = {"weights": self._places.owned, **self._places.slots()}
        for name in MEASURED_AT_END.values() if is_known else ():
            arrays.pop(name, None)
        with torch.no_grad():
            each = [to_measure(x) for named in arrays.values() for x in named.values() if x.numel()]
            if not each or _all_finite(torch._foreach_norm(each, 2)):
                return True
            return _all_finite([x.sum(dtype=torch.float64) for x in each])  # the squares alone may overflow

    @property
    def oldest(self) -> int | None:
        return min(self._kept, default=None)

    def newest(self, latest: int) -> int | None:
        return max((step for step in self._kept if step <= latest), default=None)

    def sound(self, latest: int) -> int | None:
        """The newest whose weights are not ten times as large as those of the one before it."""
        steps = sorted((step for step in self._kept if step <= latest), reverse=True)
        for now, before in pairwise(steps):
            if self._largest(now) <= GROWN * self._largest(before):
                return now
        return steps[-1] if steps else None

    def _largest(self, step: int) -> float:
        tensors = self._kept[step].snapshot.tensors
        owned = (to_measure(x) for name, x in tensors.items() if name in self._places.owned and x.numel())
        return max(float(x.abs().max()) for x in owned)

    def put_back(self, step: int) -> None:
        """The run is as it was before this step; later snapshots are forgotten."""
        self._keeper.put_back(self._kept[step].snapshot)
        self._watch.recall(self._kept[step].memory)
        for later in [kept for kept in self._kept if kept > step]:
            self._forget(later)

    def earliest_moments(self) -> dict[str, dict[str, Tensor]] | None:
        """What the optimizers kept at the oldest snapshot, by array and weight, on their own devices."""
        if not self._kept:
            return None
        now = self._keeper.take(-1)
        self._keeper.put_back_arrays(self._kept[min(self._kept)].snapshot)
        earlier = {slot: {n: x.clone() for n, x in named.items()} for slot, named in self._places.slots().items()}
        self._keeper.put_back_arrays(now)
        return earlier


class RecoverySession:
    """Climbs the ladder of a run at its alarms."""

    def __init__(
        self,
        trial: Trial,
        watch: Watch,
        strikes: LoopStrikes,
        interventions: Interventions,
        places: NamedTensors,
        extras: Sequence[Any],
        loop: LoopState,
    ):
        self.trial, self.watch, self.strikes, self.interventions, self.places = (
            trial,
            watch,
            strikes,
            interventions,
            places,
        )
        self.book, self.undo = Book(), StepUndo(places, extras, loop)
        snapshot = trial.section("playbook.snapshot")
        keeper = Keeper(places, extras, loop, snapshot.on == "host")
        self.ring = Ring(keeper, places, watch, snapshot.every, snapshot.kept) if goes_back(trial) else None
        self._awaits = snapshot.every > 1 and waits(trial)
        self.has_oracle = has_oracle(trial)
        self.is_quiet = True

    def fork(self, other: RecoverySession) -> None:
        """Stand on the ladder where another run does, with what it may go back to."""
        self.book = replace(Book(**asdict(other.book)), log=[])
        self.interventions.take(0, 0, other.interventions)
        self.is_quiet = other.is_quiet
        if self.ring and other.ring:
            self.ring.fork(other.ring)

    def stands_alike(self, step: int) -> bool:
        """Whether a run whose state is that of its twin after this step will be answered as it is."""
        return self.book.over <= step and self.book.waits is None and self.interventions.same(0, 1)

    @property
    def awaited(self) -> int:
        """A step at which an action is asked again; -1: none."""
        return self.book.waits["step"] if self.book.waits is not None else -1

    @property
    def passes(self) -> bool:
        """Whether steps are run again whose alarms nobody is asked about."""
        return self.book.waits is not None and not self.book.hears_before_awaited

    def begin(self, step: int, with_gradients: bool, is_measured: bool) -> None:
        """Keep what the run may have to go back to; with the gradients that the step adds to. See `Ring.take`."""
        taken = None
        if self.ring:
            awaited = self.awaited if self._awaits else -1
            taken = self.ring.take(step, self.is_quiet, awaited, with_gradients, is_measured)
        self.undo.begin(taken)

    def answer(self, step: int, alarms: Mapping[str, bool], loss: float, norm: float, is_judged: bool = True) -> int:
        """GO, GO_AND_ASK or ASK, as the guard of a pack has it; FREEZE for what no rung answers and cannot be taken."""
        is_finite = isfinite(loss) and (isfinite(norm) or not is_judged)
        to = expectation(self.trial, self.watch.names, self.book)
        return to.answer(step, [alarms[name] for name in self.watch.names], is_finite)

    def settle(self, alarm: Alarm) -> LoopRow:
        """Let the ladder answer; the row says where the run goes on."""
        row = LoopRow(self, alarm)
        treat(row, self.watch.names)
        row.count_lost()
        return row

    @property
    def has_news(self) -> bool:
        """Whether there is a strike that the oracle has not answered."""
        return self.has_oracle and not self.book.is_undone and self.strikes.first_change is not None

    def ask_oracle(self, step: int) -> LoopRow:
        """Let the oracle answer, after the step in which the fault struck."""
        self.book.is_undone = True
        return self.settle(oracle_alarm(step))


class LoopRow(IncidentRow):
    """A run of the user's own loop."""

    def __init__(self, session: RecoverySession, alarm: Alarm):
        self._session = session
        super().__init__(session.trial, alarm, session.book, session.interventions.of(0))

    def put_back(self, latest: int) -> int | None:
        step = self.newest(latest)
        if step is not None and self._session.ring is not None:
            self._session.ring.put_back(step)
            self._session.strikes.roll_back(self.alarm.step + 1)
        return step

    def take_back(self) -> None:
        self._session.strikes.roll_back(self.alarm.step + 1)
        self._session.undo.take_all_back()

    def newest(self, latest: int) -> int | None:
        return self._session.ring.newest(latest) if self._session.ring else None

    def sound(self, latest: int) -> int | None:
        return self._session.ring.sound(latest) if self._session.ring else None

    def odd_batches(self, step: int, most: int) -> int:
        return 0  # what is usual in the user's batches is not known

    def scale_embedding(self, factor: float) -> None:
        raise NotImplementedError("no embedding is known; harness.user_loop.presets refuses this")

    def amend(self, changes: Mapping[str, Any]) -> None:
        raise NotImplementedError("no recipe is known; harness.user_loop.presets refuses this")

    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._session.places.slots()

    def earlier_moments(self) -> Mapping[str, Mapping[str, Tensor]] | None:
        return self._session.ring.earliest_moments() if self._session.ring else None

    def forget_moments(self) -> None:
        for optimizer in self._session.places.optimizers:
            for kept in optimizer.state.values():
                for value in kept.values() if isinstance(kept, dict) else ():
                    if isinstance(value, Tensor):
                        value.zero_()
                if isinstance(kept, dict) and isinstance(kept.get("step"), int):
                    kept["step"] = 0

    def forget_signals(self) -> None:
        self._session.watch.restart()

    def fault_step(self) -> int | None:
        return self._session.strikes.first_change
