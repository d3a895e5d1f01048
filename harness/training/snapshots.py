"""Snapshots of a pack in memory, to which single rows go back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.training.clock import Tick
from harness.training.pack import Pack


@dataclass(frozen=True)
class Kept:
    """All that training changes, before a step: which planned trials the rows were, and at which steps they stood."""

    rows: list[int]
    steps: list[int]
    values: Mapping[str, Tensor]  # [R, ...] by name
    acts: Mapping[str, Tensor]
    left: set[int]  # planned trials that went back to before it


class Snapshots:
    """The newest `kept` snapshots, one every `every` steps of the rows that are farthest."""

    def __init__(self, pack: Pack, every: int, kept: int):
        self._pack, self._every = pack, every
        self._kept: deque[Kept] = deque(maxlen=kept)

    def take(self, tick: Tick) -> None:
        """Keep the pack as it is, if that is due."""
        if tick.front % self._every == 0:
            pack, steps = self._pack, tick.steps
            of_rows = [steps] * len(pack) if isinstance(steps, int) else list(steps)
            values = {name: values.clone() for name, values in pack.rows_state}
            acts = {name: counts.clone() for name, counts in pack.acts.state().items()}
            self._kept.append(Kept(list(pack.rows), of_rows, values, acts, set()))

    @property
    def oldest(self) -> int | None:
        """The first step to which a row could go back; None: there is none."""
        return min((step for kept in self._kept for step in kept.steps), default=None)

    def put_back(self, row: int, latest: int) -> int | None:
        """The row is as it was in the newest snapshot that has its trial, or had its twin before the two were two.

        Returns the step at which it stands then, `latest` at most; None, and nothing is done, without such a snapshot.
        """
        pack, trial = self._pack, self._pack.rows[row]
        leader, begin = pack.twins.leader[trial], pack.twins.begins[trial]
        for kept in reversed(self._kept):
            source = trial if trial in kept.rows or leader is None else leader
            place = kept.rows.index(source) if source in kept.rows and trial not in kept.left else None
            if place is not None and kept.steps[place] <= min(latest, begin if source != trial else latest):
                for name, values in pack.rows_state:
                    values[row].copy_(kept.values[name][place])
                pack.acts.take(trial, source, kept.acts)
                pack.clock.bind()
                return kept.steps[place]
            kept.left.add(trial)
        return None

    def state(self) -> list[dict[str, Any]]:
        """What is kept, to `restore`."""
        return [vars(kept) | {"left": sorted(kept.left)} for kept in self._kept]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `state` has given."""
        self._kept.clear()
        device = self._pack.device
        for kept in state:
            values, acts = ({name: x.to(device) for name, x in kept[part].items()} for part in ("values", "acts"))
            self._kept.append(Kept(kept["rows"], kept["steps"], values, acts, set(kept["left"])))
