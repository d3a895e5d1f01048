"""Asks the guards of a pack at every step, and does what they answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from harness.guards import FREEZE, GO, ROLL_BACK, Seen
from harness.training.blocks import PER_LAYER
from harness.training.clock import Tick
from harness.training.pack import Pack
from harness.training.signals import Recorder
from harness.training.sites import Agenda
from harness.training.snapshots import Snapshots


class Answers:
    """What guards say is done on the device: a healthy step waits for nothing.

    A row that is to go back takes no step until the host has looked, which it does at every step on a CPU, and once a
    block of signals elsewhere. After the last of its rollbacks, and where there is no snapshot, it freezes.
    """

    def __init__(self, pack: Pack, agenda: Agenda, recorder: Recorder, detects: bool):
        self._pack, self._agenda, self._recorder, self._detects = pack, agenda, recorder, detects
        self._snapshots: Snapshots | None = None
        every = [guard.every for guard in pack.guards if guard.every is not None] if detects else []
        if every:
            goes_back = [guard for guard in pack.guards if guard.every is not None]
            self._back, self._most = max(guard.back for guard in goes_back), max(guard.most for guard in goes_back)
            self._snapshots = Snapshots(pack, min(every), max(guard.kept for guard in goes_back))
        self._asked = {name for guard in pack.guards for name in guard.asks}
        self.rollbacks: Counter[int] = Counter()  # of each planned trial

    def begin(self, tick: Tick) -> None:
        """Keep what a row may have to go back to."""
        if self._snapshots:
            self._snapshots.take(tick)
            self._recorder.keeps = self._snapshots.oldest

    def judge(self, loss: Tensor, norm: Tensor | None, trains: Tensor) -> Tensor:
        """Which of the rows that train take the step, [R]; `norm` is None where nothing has to be judged."""
        pack = self._pack
        if norm is None:
            return trains
        # Of the signals that guards have asked for, what the forward pass of this step has shown.
        layers = self._recorder.layers() if self._asked else None
        pairs = [] if layers is None else zip(PER_LAYER, layers.transpose(1, 2), strict=True)
        signals = {name: values for name, values in pairs if name in self._asked}
        seen = Seen(pack.clock.on_device, loss, norm, pack.can_step(norm), trains, self._detects, signals)
        answer = reduce(torch.maximum, [guard.judge(seen) for guard in pack.guards])
        if self._snapshots:
            pack.clock.hold(answer == ROLL_BACK)
        pack.active = pack.active & (answer != FREEZE)
        return trains & (answer == GO)

    def settle(self, is_due: bool) -> None:
        """Let the rows go back that have to."""
        pack = self._pack
        if not self._snapshots or not (is_due or pack.device.type == "cpu"):
            return
        for row, struck in pack.clock.held():
            trial = pack.rows[row]
            step = self._snapshots.put_back(row, struck - self._back) if self.rollbacks[trial] < self._most else None
            if step is None:
                pack.active[row] = False
                pack.clock.release(row)
                self._recorder.freeze(trial, struck)
                continue
            self.rollbacks[trial] += 1
            self._agenda.roll_back(trial, struck + 1)
            for follower in pack.twins.leave(trial, step):
                self._recorder.share_history(trial, follower, step)
            self._recorder.roll_back(trial, step)
            pack.objective.forget(trial, step)

    def state(self) -> dict[str, Any]:
        """What has happened so far, to `restore`."""
        kept = self._snapshots.state() if self._snapshots else []
        return {"kept": kept, "rollbacks": list(self.rollbacks.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has given."""
        self.rollbacks = Counter(dict(state["rollbacks"]))
        if self._snapshots:
            self._snapshots.restore(state["kept"])
