"""What is measured at every step. Values collect on the device and come to the host a block of steps at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from harness.pack import Pack

PER_STEP = (
    "loss",
    "validation_loss",
    "grad_norm",
    "param_norm",
    "second_moment_norm",
    "update_rms",
    "learning_rate",
)
PER_LAYER = ("activation_rms", "attention_logit_max")


class LayerReadings:
    """Reads each block's output and attention scores through taps; [R] per layer and signal."""

    def __init__(self, pack: Pack):
        self.layers = pack.planned[0].model.depth
        self.values: dict[tuple[str, int], Tensor] = {}
        taps = pack.model.taps
        self._detach: list[Callable[[], None]] = []
        for layer in range(self.layers):
            self._detach.append(taps.attach(f"blocks.{layer}.residual", self._reader("activation_rms", layer, _rms)))
            name = f"blocks.{layer}.attention.scores"
            self._detach.append(taps.attach(name, self._reader("attention_logit_max", layer, _largest)))

    def _reader(self, signal: str, layer: int, measure: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], None]:
        def read(_: str, x: Tensor) -> None:
            self.values[signal, layer] = measure(x.detach())

        return read

    def take(self) -> Tensor:
        """[signals, layers, R] of the last forward pass."""
        return torch.stack(
            [torch.stack([self.values[signal, layer] for layer in range(self.layers)]) for signal in PER_LAYER]
        )

    def detach(self) -> None:
        for detach in self._detach:
            detach()


def _rms(x: Tensor) -> Tensor:
    flat = x.reshape(x.shape[0], -1)
    return torch.linalg.vector_norm(flat, dim=1).double() / flat.shape[1] ** 0.5


def _largest(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1).amax(1).double()


class Block:
    """The signals of up to `length` steps, on the device."""

    def __init__(self, pack: Pack, first_step: int, length: int):
        self.first_step, self.length, self.filled = first_step, length, 0
        self.planned, self.rows = len(pack.planned), list(pack.rows)
        trials, layers = len(pack), pack.planned[0].model.depth
        nan = float("nan")
        self._steps = torch.full((length, len(PER_STEP), trials), nan, dtype=torch.float64, device=pack.device)
        self._layers = torch.full(
            (length, len(PER_LAYER), layers, trials), nan, dtype=torch.float64, device=pack.device
        )
        self._measured = torch.zeros((length, trials), dtype=torch.bool, device=pack.device)

    def record(self, values: dict[str, Tensor], layers: Tensor | None, measured: Tensor) -> None:
        """One step: [R] per signal and [signals, layers, R]; NaN for the trials that were frozen before it."""
        i, nan = self.filled, torch.full_like(values["loss"], float("nan"), dtype=torch.float64)
        stacked = torch.stack([values[name].double() if name in values else nan for name in PER_STEP])
        self._steps[i] = torch.where(measured, stacked, nan)
        if layers is not None:
            self._layers[i] = torch.where(measured, layers, nan)
        self._measured[i] = measured
        self.filled += 1

    def arrays(self) -> dict[str, np.ndarray]:
        """[R, n] and [R, n, layers] of all planned trials; those that have left the pack are NaN."""
        n = self.filled
        steps = self._steps[:n].permute(2, 0, 1).cpu().numpy()
        layers = self._layers[:n].permute(3, 0, 2, 1).cpu().numpy()
        found = {}
        for names, values in ((PER_STEP, steps), (PER_LAYER, layers)):
            for i, name in enumerate(names):
                whole = np.full((self.planned, *values.shape[1:-1]), np.nan)
                whole[self.rows] = values[..., i]
                found[name] = whole
        return found

    def first_nonfinite(self) -> dict[int, int]:
        """planned trial -> the step of this block at which its loss or gradient was not finite."""
        n = self.filled
        signals = self._steps[:n, [PER_STEP.index("loss"), PER_STEP.index("grad_norm")]]
        bad = (~torch.isfinite(signals).all(1) & self._measured[:n]).cpu().numpy()
        return {self.rows[r]: self.first_step + int(bad[:, r].argmax()) for r in range(bad.shape[1]) if bad[:, r].any()}
