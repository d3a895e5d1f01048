"""Signals of some steps of all trials, on the device until the host asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from harness.storage.store import SIGNALS
from harness.training.pack import Pack

SPEED = ("tokens_per_second", "step_seconds")
PER_LAYER = tuple(name for name, signal in SIGNALS.items() if "layer" in signal.dims)
PER_STEP = tuple(name for name, signal in SIGNALS.items() if "layer" not in signal.dims and name not in SPEED)


@dataclass(frozen=True)
class Found:
    """What a step has come to, all on the device.

    `values` [R, signals + signals of layers x layers], float64, NaN in rows that were not active before it and for what
    is known later; `read` [R, n] of each reading that was due; `froze` [R]: rows that are not active any more. `loss`
    [R] as it was judged; `trained` [R]: rows that took the step, or would have.
    """

    loss: Tensor
    values: Tensor
    read: Mapping[str, Tensor]
    froze: Tensor
    trained: Tensor


class Block:
    """The signals of up to `length` steps of all planned trials, on the device; NaN where a trial has no row.

    `names` are those of each step: `PER_STEP`, and what guards show; `read` those of readings, and what each has for a
    row beside the step.
    """

    def __init__(
        self, pack: Pack, first_step: int, length: int, names: Sequence[str], read: Mapping[str, tuple[int, ...]]
    ):
        self.pack, self.first_step, self.length, self.names, self.filled = pack, first_step, length, names, 0
        trials, device, rows = len(pack.planned), pack.device, len(names) + len(PER_LAYER) * pack.planned[0].model.depth
        # The signals of each step, and after them those of each layer, and those of readings.
        self._shapes, self._places = read, {}
        for name, shape in read.items():
            self._places[name] = slice(rows, rows + prod(shape))
            rows += prod(shape)
        self._values = torch.full((length, rows, trials), torch.nan, dtype=torch.float64, device=device)
        self._froze = torch.zeros((length, trials), dtype=torch.bool, device=device)

    def record(self, step: int, found: Found, here: Tensor | None) -> None:
        """What a step has come to, of the rows that stand at it (`here`, [R]; None: all do)."""
        i, slots = step - self.first_step, self.pack.slots
        slots.update(self._values[i, : found.values.shape[1]].mT, found.values, here)
        for name, value in found.read.items():
            slots.update(self._values[i, self._places[name]].mT, value, here)
        slots.update(self._froze[i], found.froze, here)
        self.filled = max(self.filled, i + 1)

    def set(self, step: int, values: Mapping[str, Tensor], measured: Tensor) -> None:
        """Signals of a step that are known later, [R] each, of the rows that are `measured`, [R]."""
        for name, value in values.items():
            self.pack.slots.update(self._values[step - self.first_step, self.names.index(name)], value, measured)

    def arrays(self) -> dict[str, np.ndarray]:
        """[R, n], [R, n, layers], ... of all planned trials."""
        values = self._values[: self.filled].permute(2, 0, 1).cpu().numpy()
        end = len(self.names) + len(PER_LAYER) * self.pack.planned[0].model.depth
        steps, layers, _ = np.split(values, [len(self.names), end], axis=2)
        of_signals = np.split(layers, len(PER_LAYER), axis=2)
        arrays = {name: steps[..., i].copy() for i, name in enumerate(self.names)}
        arrays |= {name: layers.copy() for name, layers in zip(PER_LAYER, of_signals, strict=True)}
        for name, shape in self._shapes.items():
            arrays[name] = values[..., self._places[name]].reshape(*values.shape[:2], *shape)
        return arrays

    def state(self) -> dict[str, Tensor]:
        """What has been recorded so far."""
        return {"values": self._values[: self.filled], "froze": self._froze[: self.filled]}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has given."""
        self.filled = len(tensors["values"])
        for name, recorded in self.state().items():
            recorded.copy_(tensors[name])

    def forget(self, trial: int, step: int) -> None:
        """A planned trial goes back to this step: it has not done those since."""
        begin = max(0, step - self.first_step)
        self._values[begin:, :, trial] = float("nan")
        self._froze[begin:, trial] = False

    def freeze(self, trial: int, step: int) -> None:
        """A planned trial froze at this step."""
        self._froze[step - self.first_step, trial] = True

    def copy(self, source: int, target: int, step: int) -> None:
        """From this step on, a planned trial has what another has where it has nothing of its own."""
        begin = max(0, step - self.first_step)
        values = self._values[begin:, :, target]
        values.copy_(torch.where(torch.isnan(values), self._values[begin:, :, source], values))

    def first_nonfinite(self) -> dict[int, int]:
        """planned trial -> the step of this block at which it froze."""
        bad = self._froze[: self.filled].cpu().numpy()
        return {trial: self.first_step + int(bad[:, trial].argmax()) for trial in np.flatnonzero(bad.any(0)).tolist()}
