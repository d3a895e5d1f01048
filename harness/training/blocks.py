"""Signals of some steps of all trials, on the device until the host asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from harness.storage.store import SIGNALS
from harness.training.pack import Pack

SPEED = ("tokens_per_second", "step_seconds")
PER_LAYER = tuple(name for name, signal in SIGNALS.items() if "layer" in signal.dims)
PER_STEP = tuple(name for name, signal in SIGNALS.items() if "layer" not in signal.dims and name not in SPEED)


class Block:
    """The signals of up to `length` steps of all planned trials, on the device; NaN where a trial has no row.

    `names` are those of each step: `PER_STEP`, and what guards show.
    """

    def __init__(self, pack: Pack, first_step: int, length: int, names: Sequence[str]):
        self.pack, self.first_step, self.length, self.names, self.filled = pack, first_step, length, names, 0
        trials, device, rows = len(pack.planned), pack.device, len(names) + len(PER_LAYER) * pack.planned[0].model.depth
        # The signals of each step, and after them those of each layer.
        self._values = torch.full((length, rows, trials), torch.nan, dtype=torch.float64, device=device)
        self._froze = torch.zeros((length, trials), dtype=torch.bool, device=device)

    def record(
        self,
        step: int,
        values: Mapping[str, Tensor],
        layers: Tensor | None,
        measured: Tensor,
        active: Tensor,
        rows: Tensor | None,
    ) -> None:
        """A step: [R] per signal and [signals, layers, R], of the trials that were active before it (`measured`).

        `active` are those that still are, now that its loss and gradients are known; `rows` stand at this step, [k];
        None: all do.
        """
        i, index = step - self.first_step, self.pack.index
        nan = torch.full_like(values["loss"], float("nan"), dtype=torch.float64)
        stacked = torch.stack([values[name].double() if name in values else nan for name in self.names])
        stacked = stacked if layers is None else torch.cat([stacked, layers.flatten(0, 1)])
        stacked, froze = torch.where(measured, stacked, nan), measured & ~active
        if rows is not None:
            index, stacked, froze = index[rows], stacked[:, rows], froze[rows]
        self._values[i, : len(stacked)].index_copy_(1, index, stacked)
        self._froze[i].index_copy_(0, index, froze)
        self.filled = max(self.filled, i + 1)

    def arrays(self) -> dict[str, np.ndarray]:
        """[R, n] and [R, n, layers] of all planned trials."""
        values = self._values[: self.filled].permute(2, 0, 1).cpu().numpy()
        steps, layers = np.split(values, [len(self.names)], axis=2)
        of_signals = np.split(layers, len(PER_LAYER), axis=2)
        arrays = {name: steps[..., i].copy() for i, name in enumerate(self.names)}
        return arrays | {name: layers.copy() for name, layers in zip(PER_LAYER, of_signals, strict=True)}

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
