"""Asks the guards of a pack at every step, and does what they answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.guards import ASK, FREEZE, GO, GO_AND_ASK, ROLL_BACK, GuardInput
from harness.guards.playbook import PlaybookGuard
from harness.incidents.batches_ahead import odd_batches
from harness.incidents.recovery import Recovery
from harness.incidents.snapshots import Snapshots
from harness.nonfinite.provenance import Provenances
from harness.training.masking import Masking
from harness.training.pack import Pack
from harness.training.row_steps import PackStep
from harness.training.signals import Recorder
from harness.training.sites import FaultSchedule


class GuardRunner:
    """What guards say is done on the device: a healthy step waits for nothing.

    A row that is to go back, or whose playbook is asked, takes no step until the host has looked, which it does at
    every step on a CPU, and once a block of signals elsewhere. Where no playbook answers, a row freezes after the last
    of its rollbacks, and where there is no snapshot.
    """

    def __init__(self, pack: Pack, fault_schedule: FaultSchedule, recorder: Recorder, detects: bool, provenance: bool):
        self.pack, self.fault_schedule, self._recorder, self._detects = pack, fault_schedule, recorder, detects
        self.provenances = Provenances(pack, fault_schedule, recorder, provenance)
        self._snapshots: Snapshots | None = None
        guards = pack.guards if detects else []
        goes_back = [guard for guard in guards if guard.every is not None]
        playbooks = [guard for guard in guards if isinstance(guard, PlaybookGuard)]
        self._holds = bool(goes_back or playbooks)
        rows = torch.ones_like(pack.active)
        # Whether nothing was wrong with a row's last step.
        self._quiet = pack.rows_state.add("quiet", rows) if self._holds else None
        if goes_back:
            self._back, self._most = max(guard.back for guard in goes_back), max(guard.most for guard in goes_back)
            every, kept = min(guard.every for guard in goes_back if guard.every), max(guard.kept for guard in goes_back)
            awaits = any(playbook.awaits for playbook in playbooks)
            self._snapshots = Snapshots(pack, every, kept, any(guard.on_host for guard in goes_back), awaits)
        self.recovery = Recovery(self, playbooks[0]) if playbooks else None
        self._asked = {name for guard in pack.guards for name in guard.asks}
        self.rollbacks: Counter[int] = Counter()  # of each planned trial
        self._masking = Masking(pack, fault_schedule.last)

    def forked(self, leaders: Mapping[int, int]) -> None:
        """These planned trials have a row of their own now, a copy of that of their twins."""
        if self.recovery:
            for trial, leader in leaders.items():
                self.recovery.fork(trial, leader)

    def begin(self, pack_step: PackStep) -> None:
        """Keep what a row may have to go back to."""
        if self.recovery:
            self.recovery.begin()
        if self._snapshots and self._quiet:
            self._snapshots.take(pack_step, self._quiet.used, self.recovery.awaited() if self.recovery else ())

    def judge(self, loss: Tensor, norm: Tensor | None, here: Tensor, trains: Tensor) -> Tensor:
        """Which of the rows of this pass, `here` [R], take the step; of `trains` [R] some of the batch is left.

        `norm` is None where nothing has to be judged.
        """
        pack, trains = self.pack, here & trains
        self._recorder.learned()
        if norm is None:
            return trains
        # Of the signals that guards have asked for, what the forward pass of this step has shown.
        signals = self._recorder.shown(self._asked)
        seen = GuardInput(
            pack.row_steps.on_device, loss, norm, pack.can_step(norm), here, trains, self._detects, signals
        )
        answer = reduce(torch.maximum, [guard.judge(seen) for guard in pack.guards])
        if self._quiet:
            is_taken = (answer == GO) | (answer == GO_AND_ASK)
            self._quiet.used.copy_(torch.where(trains, is_taken, self._quiet.used))
            passes = self.recovery.guard.passes if self.recovery else torch.zeros_like(trains)
            for alarm, *_ in pack.alarms.values():
                self._quiet.used.logical_and_(~alarm | passes)
            pack.row_steps.hold((answer == ROLL_BACK) | (answer == ASK) | (answer == GO_AND_ASK))
        pack.active.logical_and_(answer != FREEZE)
        return trains & (answer <= GO_AND_ASK)

    def settle(self, pack_step: PackStep, loss: Tensor, is_due: bool, saves: bool) -> None:
        """Find what is masked, and let the rows go on that wait for an answer, where a block ends (`is_due`).

        On a CPU at every step; also before a checkpoint (`saves`), which has nothing that is waited for.
        """
        pack = self.pack
        looks = is_due or on_cpu(pack.device)
        self._masking.look(pack_step, loss, looks or saves, self._stand_alike)
        has_news = self.recovery is not None and self.recovery.has_news
        if not self._holds or not (looks or saves or has_news):
            return
        if self._snapshots and is_due:
            self._recorder.keeps = self._snapshots.oldest
        for row, struck in pack.row_steps.held():
            if self.recovery and self.recovery.settle(row, struck):
                continue
            trial, step = pack.rows[row], None
            if self._snapshots and self.rollbacks[trial] < self._most:
                step = self.go_back(row, struck, struck - self._back)
            if step is None:
                self.freeze(row, struck)
                continue
            self.rollbacks[trial] += 1
            self.go_on(row, step)
        if self.recovery and has_news:
            self.recovery.undo()

    def _stand_alike(self, trial: int, twin: int, step: int) -> bool:
        """Whether two trials whose states are equal after this step are so from there on, as far as the host knows."""
        is_same = self.pack.interventions.same(trial, twin)
        return is_same and (self.recovery is None or self.recovery.same(trial, twin, step))

    def go_back(self, row: int, struck: int, latest: int) -> int | None:
        """To the newest sound snapshot of a step up to `latest`, whose step is returned, without what has struck."""
        trial = self.pack.rows[row]
        step = self._snapshots.put_back(row, latest) if self._snapshots else None
        if step is not None:
            self.fault_schedule.roll_back(trial, struck + 1)
            self._forget(trial, step)
        return step

    def newest(self, row: int, latest: int) -> int | None:
        """The step of that snapshot."""
        found = self._snapshots.find(row, latest) if self._snapshots else None
        return None if found is None else found[0]

    def sound(self, row: int, latest: int) -> int | None:
        """The step of the newest one whose weights are of the size of those before."""
        return self._snapshots.sound(row, latest) if self._snapshots else None

    def odd_batches(self, row: int, step: int, most: int) -> int:
        """How many batches from that of a step on are unlike those before; 0 also if more than `most` are."""
        return odd_batches(self.pack, self.fault_schedule, row, step, most)

    def go_on(self, row: int, step: int) -> None:
        """The row trains on from this step."""
        if self.pack.row_steps.put(row, step):
            self._forget(self.pack.rows[row], step)

    def _forget(self, trial: int, step: int) -> None:
        """What a trial has done from this step on is none of its history."""
        twins = self.pack.twins
        for follower in twins.leave(trial, step):
            self._recorder.share_history(trial, follower, step)
        twins.begins[trial] = min(twins.begins[trial], step)
        self._recorder.roll_back(trial, step)
        self.pack.objective.forget(trial, step)

    def calm(self, row: int) -> None:
        """Its last step was right, though it was an alarm: a snapshot may be taken."""
        if self._quiet:
            self._quiet.used[row] = True

    def freeze(self, row: int, step: int) -> None:
        """The row trains no more, since this step."""
        self.pack.active[row] = False
        self.pack.row_steps.release(row)
        self._recorder.freeze(self.pack.rows[row], step)

    def earliest(self, row: int) -> Mapping[str, Tensor] | None:
        """The oldest sound state that is kept of a row, by name."""
        return self._snapshots.earliest(row) if self._snapshots else None

    def incidents(self) -> list[list[dict[str, Any]]]:
        """Of each planned trial, the first of its own row's incidents, as JSON has them."""
        return self.recovery.incidents() if self.recovery else [[] for _ in self.pack.planned]

    def state(self) -> dict[str, Any]:
        """What has happened so far, to `restore`."""
        return {
            "kept": self._snapshots.state() if self._snapshots else {},
            "rollbacks": list(self.rollbacks.items()),
            "remedies": self.pack.interventions.state(),
            "books": self.recovery.state() if self.recovery else [],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has given."""
        self.rollbacks = Counter(dict(state["rollbacks"]))
        self.pack.interventions.restore(state["remedies"])
        self.pack.refresh()
        if self._snapshots:
            self._snapshots.restore(state["kept"])
        if self.recovery:
            self.recovery.restore(state["books"])
