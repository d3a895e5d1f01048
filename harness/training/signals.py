"""What is measured at every step. Values collect on the device and come to the host a block of steps at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config.limits import SEGMENTS
from harness.optim.optimizers import Norms
from harness.training.pack import Pack

Write = Callable[[int, Mapping[str, np.ndarray]], None]
PER_STEP = (
    "loss",
    "validation_loss",
    "validation_loss_error",
    "grad_norm",
    "param_norm",
    "second_moment_norm",
    "update_rms",
    "learning_rate",
    "loss_scale",
    "tokens",
    "dropped",
)
SCORES_EVERY = 10
PER_LAYER = ("activation_rms", "attention_logit_max")


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
        def read(layer: int, _: str, x: Tensor) -> None:
            parts, first = self._values.setdefault((signal, layer), {}), self._pack.part.start
            found = measure(x.detach())
            parts[first] = torch.maximum(parts[first], found) if first in parts else found

        return [self._taps.attach(f"blocks.{i}.{tap}", partial(read, i)) for i in range(self._layers)]

    def listen(self, step: int) -> None:
        """Be ready for the forward pass of this step."""
        self._values.clear()
        wanted = self._has_scores and (self._explicit or step % SCORES_EVERY == 0)
        if wanted and not self._detach_scores:
            self._detach_scores = self._attach("attention.scores", "attention_logit_max", _largest)
        elif not wanted:
            self._stop_reading_scores()

    def _stop_reading_scores(self) -> None:
        while self._detach_scores:
            self._detach_scores.pop()()

    def take(self) -> Tensor:
        """[signals, layers, R] of the last forward pass; NaN where nothing was read."""
        found = {key: torch.cat(list(parts.values())) for key, parts in self._values.items()}
        missing = torch.full_like(found["activation_rms", 0], float("nan"))
        rows = [[found.get((signal, i), missing) for i in range(self._layers)] for signal in PER_LAYER]
        return self._pack.ranks.largest(torch.stack([torch.stack(row) for row in rows]))

    def detach(self) -> None:
        self._stop_reading_scores()
        while self._detach:  # what detaches refers to its reader, which keeps the pack alive
            self._detach.pop()()


def _mean(losses_RxS: Tensor) -> dict[str, Tensor]:
    """The mean over segments, [R], and its standard error: that of the mean of so many like them."""
    segments = losses_RxS.shape[1]
    error = losses_RxS.std(1) / segments**0.5 if segments > 1 else torch.full_like(losses_RxS[:, 0], torch.nan)
    return {"validation_loss": losses_RxS.mean(1), "validation_loss_error": error}


def _rms(x: Tensor) -> Tensor:
    flat = x.reshape(x.shape[0], -1)
    return torch.linalg.vector_norm(flat, dim=1).double() / flat.shape[1] ** 0.5


def _largest(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1).amax(1).double()


class Block:
    """The signals of up to `length` steps of all planned trials, on the device; NaN where a trial has no row."""

    def __init__(self, pack: Pack, first_step: int, length: int):
        self.pack, self.first_step, self.length, self.filled = pack, first_step, length, 0
        trials, layers = len(pack.planned), pack.planned[0].model.depth
        nan = float("nan")
        self._steps = torch.full((length, len(PER_STEP), trials), nan, dtype=torch.float64, device=pack.device)
        self._layers = torch.full(
            (length, len(PER_LAYER), layers, trials), nan, dtype=torch.float64, device=pack.device
        )
        self._froze = torch.zeros((length, trials), dtype=torch.bool, device=pack.device)

    def record(self, values: Mapping[str, Tensor], layers: Tensor | None, measured: Tensor, active: Tensor) -> None:
        """One step: [R] per signal and [signals, layers, R], of the trials that were active before it (`measured`).

        `active` are those that still are, now that its loss and gradients are known.
        """
        i, nan, index = self.filled, torch.full_like(values["loss"], float("nan"), dtype=torch.float64), self.pack.index
        stacked = torch.stack([values[name].double() if name in values else nan for name in PER_STEP])
        self._steps[i].index_copy_(1, index, torch.where(measured, stacked, nan))
        if layers is not None:
            self._layers[i].index_copy_(2, index, torch.where(measured, layers, nan))
        self._froze[i].index_copy_(0, index, measured & ~active)
        self.filled += 1

    def arrays(self) -> dict[str, np.ndarray]:
        """[R, n] and [R, n, layers] of all planned trials."""
        n = self.filled
        steps = self._steps[:n].permute(2, 0, 1).cpu().numpy()
        layers = self._layers[:n].permute(3, 0, 2, 1).cpu().numpy()
        pairs = ((PER_STEP, steps), (PER_LAYER, layers))
        return {name: values[..., i].copy() for names, values in pairs for i, name in enumerate(names)}

    def state(self) -> dict[str, Tensor]:
        """What has been recorded so far."""
        n = self.filled
        return {"steps": self._steps[:n], "layers": self._layers[:n], "froze": self._froze[:n]}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has given."""
        self.filled = n = len(tensors["steps"])
        for name, own in (("steps", self._steps), ("layers", self._layers), ("froze", self._froze)):
            own[:n] = tensors[name].to(own.device)

    def first_nonfinite(self) -> dict[int, int]:
        """planned trial -> the step of this block at which it froze."""
        bad = self._froze[: self.filled].cpu().numpy()
        return {trial: self.first_step + int(bad[:, trial].argmax()) for trial in np.flatnonzero(bad.any(0)).tolist()}


class Recorder:
    """Fills blocks, and hands each to `write` when it is full. `telemetry` False: loss, rate, scale and data alone."""

    def __init__(self, pack: Pack, length: int, write: Write, telemetry: bool):
        self.pack, self.length, self.write = pack, length, write
        self.nonfinite: dict[int, int] = {}  # planned trial -> step
        self._readings = LayerReadings(pack) if telemetry else None
        self._losses: list[np.ndarray] = []
        self._initial, self._final = (self._of_segments() for _ in range(2))
        self._block: Block | None = None
        self._started = time.perf_counter()

    def begin(self, step: int) -> None:
        """Be ready for the forward pass of this step; the first one is validated before."""
        if step == 0:
            self._validate(self.pack.planned[0].train.validate_between, self._initial, self.pack.active)
        if self._readings:
            self._readings.listen(step)

    def record(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor | None,
        rate: Tensor,
        scale: Tensor,
        norms: Norms | None,
        measured: Tensor,
    ) -> None:
        """One step, [R] each, for the trials that were `measured`: those not frozen before it."""
        if self._block is None:
            self._block = Block(self.pack, step, self.length)
        train = self.pack.planned[0].train
        tokens = torch.full_like(rate, int(self.pack.curriculum.tokens[step]), dtype=torch.float64)
        values = {"loss": loss.detach(), "learning_rate": rate, "loss_scale": scale}
        values |= {"tokens": tokens, "dropped": self.pack.screening.dropped}
        if norm is not None:
            values["grad_norm"] = norm
        if norms is not None:
            rms = norms.update / self.pack.layout.elements**0.5
            values |= {"param_norm": norms.weights, "update_rms": rms}
            if norms.second_moment is not None:
                values["second_moment_norm"] = norms.second_moment
        if step + 1 == self.pack.steps:
            values |= _mean(self._validate(train.validate_tokens, self._final, measured))
        elif (step + 1) % train.validate_every == 0:
            values |= _mean(self._validate(train.validate_between))
        self._block.record(values, self._readings.take() if self._readings else None, measured, self.pack.active)

    def _validate(self, tokens: int, into: Tensor | None = None, measured: Tensor | None = None) -> Tensor:
        """The losses of all segments, [R, S], and those of the trials that are `measured` in `into`.

        The time that it takes is no step's. Before the first step and after the last a GPU is waited for, to know it.
        """
        waits = into is not None and self.pack.device.type == "cuda"
        started = self._now(waits)
        losses = self.pack.validation_losses(tokens)
        if into is not None and measured is not None:
            kept = torch.where(measured[:, None], losses, torch.nan)
            into[:, : losses.shape[1]].index_copy_(0, self.pack.index, kept)
        self._started += self._now(waits) - started
        return losses

    def _now(self, waits: bool) -> float:
        if waits:
            torch.cuda.synchronize(self.pack.device)
        return time.perf_counter()

    def _of_segments(self) -> Tensor:
        shape = (len(self.pack.planned), SEGMENTS)
        return torch.full(shape, torch.nan, dtype=torch.float64, device=self.pack.device)

    def ends(self) -> dict[str, np.ndarray]:
        """Held-out losses before the first step and after the last, [R, 64] each, of all planned trials.

        NaN for a trial that was lost before, and for segments that a short text has not.
        """
        initial, final = self._initial.cpu().numpy(), self._final.cpu().numpy()
        self.pack.twins.fill_at(0, initial)
        self.pack.twins.fill_at(self.pack.steps - 1, final)
        return {"initial_segment_loss": initial, "final_segment_loss": final}

    def is_due(self, step: int) -> bool:
        """Whether the block is full, or its last step is the run's."""
        return self._block is not None and (self._block.filled == self.length or step + 1 == self.pack.steps)

    def flush(self) -> None:
        """Write the block; only here does the host wait for the device."""
        block = self._block
        if block is None:
            return
        arrays = block.arrays()
        trained = self.pack.curriculum.tokens
        first, last = block.first_step, block.first_step + block.filled - 1
        tokens = int(trained[last] - (trained[first - 1] if first else 0))
        seconds = time.perf_counter() - self._started
        throughput, step_seconds = tokens / seconds, seconds / block.filled / len(self.pack)
        # Steps that a trial shares with its twin are not trained for it, so they have no speed.
        has_row = np.isfinite(arrays["learning_rate"])
        speed = {
            "tokens_per_second": np.where(has_row, throughput, np.nan),
            "step_seconds": np.where(has_row, step_seconds, np.nan),
        }
        self.pack.twins.fill(block.first_step, arrays)
        self.pack.screening.collect()
        self.write(block.first_step, {**arrays, **speed})
        self._losses.append(arrays["loss"])
        self.nonfinite |= block.first_nonfinite()
        self._block = None
        self._started = time.perf_counter()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What has been recorded so far, to `restore`: tensors by name, and the rest as JSON has it."""
        block = self._block
        tensors = {f"block.{name}": values for name, values in block.state().items()} if block else {}
        tensors["initial"] = self._initial
        if self._losses:
            tensors["losses"] = torch.from_numpy(self.losses())
        values = {
            "nonfinite": list(self.nonfinite.items()),
            "first_step": block.first_step if block else None,
            "seconds": time.perf_counter() - self._started,
        }
        return tensors, values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from what `state` has given."""
        self.nonfinite = dict(values["nonfinite"])
        self._initial.copy_(tensors["initial"])
        self._losses = [tensors["losses"].numpy()] if "losses" in tensors else []
        if values["first_step"] is not None:
            self._block = Block(self.pack, values["first_step"], self.length)
            self._block.restore({name: tensors[f"block.{name}"] for name in ("steps", "layers", "froze")})
        self._started = time.perf_counter() - values["seconds"]

    def nonfinite_step(self, trial: int) -> int | None:
        """The step at which a planned trial froze, in its own row or in that of its twin which it shared."""
        leader = self.pack.twins.leader[trial]
        step = self.nonfinite.get(trial)
        if step is None and leader is not None and (shared := self.nonfinite.get(leader)) is not None:
            return shared if self.pack.twins.shares(trial, shared) is not None else None
        return step

    def losses(self) -> np.ndarray:
        """[R, steps done] of all planned trials."""
        return np.concatenate(self._losses, axis=1)

    def close(self) -> None:
        """Write what is left, and detach from the model's taps."""
        self.flush()
        if self._readings:
            self._readings.detach()
