"""Signals of each block, read through taps on the way forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from harness.storage.store import SIGNALS
from harness.training.clock import Tick
from harness.training.pack import Pack

SCORES_EVERY = 10
PER_LAYER = tuple(name for name, signal in SIGNALS.items() if "layer" in signal.dims)


class LayerReadings:
    """Reads each block's output and attention scores through taps; [R] per layer and signal.

    Where attention is fused, scores cost a matrix product of their own: they are read every `SCORES_EVERY` steps.
    """

    def __init__(self, pack: Pack):
        self._pack, self._taps, self._explicit = pack, pack.model.taps, pack.model.explicit_attention
        self._layers = pack.planned[0].model.depth
        self._has_scores = "blocks.0.attention.scores" in self._taps.names
        self._values: dict[tuple[str, int], dict[int, Tensor]] = {}  # (signal, layer) -> first row of a part -> [r]
        self._detach = self._attach("residual", "activation_rms", _rms)
        self._detach_scores: list[Callable[[], None]] = []

    def _attach(self, tap: str, signal: str, measure: Callable[[Tensor], Tensor]) -> list[Callable[[], None]]:
        def read(layer: int, _: str, x: Tensor, rows: slice) -> None:
            parts, first, value = self._values.setdefault((signal, layer), {}), rows.start, measure(x.detach())
            parts[first] = torch.maximum(parts[first], value) if first in parts else value

        return [self._taps.attach_to_rows(f"blocks.{i}.{tap}", partial(read, i)) for i in range(self._layers)]

    def listen(self, tick: Tick) -> None:
        """Be ready for the forward pass of these steps."""
        self._values.clear()
        wanted = self._has_scores and (self._explicit or any(step % SCORES_EVERY == 0 for step in tick.groups))
        if wanted and not self._detach_scores:
            self._detach_scores = self._attach("attention.scores", "attention_logit_max", _largest)
        elif not wanted:
            self._stop_reading_scores()

    def _stop_reading_scores(self) -> None:
        while self._detach_scores:
            self._detach_scores.pop()()

    def take(self) -> Tensor:
        """[signals, layers, R] of the last forward pass; NaN where nothing was read."""
        values = {key: torch.cat(list(parts.values())) for key, parts in self._values.items()}
        missing = torch.full_like(values["activation_rms", 0], float("nan"))
        rows = [[values.get((signal, i), missing) for i in range(self._layers)] for signal in PER_LAYER]
        return self._pack.ranks.largest(torch.stack([torch.stack(row) for row in rows]))

    def detach(self) -> None:
        self._stop_reading_scores()
        while self._detach:  # what detaches refers to its reader, which keeps the pack alive
            self._detach.pop()()


def _rms(x: Tensor) -> Tensor:
    flat = x.reshape(x.shape[0], -1)
    return torch.linalg.vector_norm(flat, dim=1).double() / flat.shape[1] ** 0.5


def _largest(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1).amax(1).double()
