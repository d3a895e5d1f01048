"""What is measured at every step. Values collect on the device and come to the host a block of steps at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config.limits import SEGMENTS
from harness.model import sums
from harness.optim.optimizers import Norms
from harness.training.blocks import PER_LAYER, PER_STEP, SPEED, Block, Found
from harness.training.pack import Pack, WindowLosses
from harness.training.readings import Readings, shapes_of
from harness.training.row_steps import PackStep

Write = Callable[[int, Mapping[str, np.ndarray]], None]
INITIAL, FINAL = "initial_segment_loss", "final_segment_loss"


class Recorder:
    """Fills blocks, and hands each to `write` when it is full. `telemetry` False: loss, rate, scale and data alone.

    A row that goes back to an earlier step is recorded anew from there on, and the blocks that hold those steps are
    handed to `write` again. `keeps` is the first step to which a row may still come back; None: none ever does.
    Validation asks `losses_of` for the losses of its pieces, as `Pack.validation_losses` does.
    """

    def __init__(self, pack: Pack, length: int, write: Write, telemetry: bool, losses_of: WindowLosses | None = None):
        self.pack, self.length, self.write, self._losses_of = pack, length, write, losses_of
        self.nonfinite: dict[int, int] = {}  # planned trial -> step
        self.provenance: dict[int, dict[str, Any]] = {}  # planned trial -> that of its first non-finite value
        self.keeps: int | None = None
        self._readings = Readings(pack) if telemetry else None
        self._read = shapes_of(pack.planned[0])
        self._names = (*PER_STEP, *pack.guard_signals)
        self._blocks: dict[int, Block] = {}  # by their first step: those that some row may have to fill
        self._pending: set[int] = set()  # those of them that have to be written, perhaps again
        self._speeds: dict[int, Sequence[float]] = {}  # of those that were written before
        self._losses: dict[int, np.ndarray] = {}
        self._judged_by = [name for name in pack.objective.judged_by if self._read.get(name) == ()]
        self._judged: dict[int, dict[str, np.ndarray]] = {}
        shape, device = (len(pack.planned), SEGMENTS), pack.device
        nan = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        self._nan = nan.new_full((), torch.nan)
        self._ends = {INITIAL: nan, FINAL: nan.clone()}
        self._layers: Tensor | None = None
        self._started, self._passed = time.perf_counter(), 0  # when a block was last written, and the passes until then

    def begun(self, pack_step: PackStep) -> None:
        """These steps begin: nothing of theirs was done yet."""
        if self._readings:
            self._readings.begun(pack_step)

    def begin(self, pack_step: PackStep, batch_RxBxx: Tensor) -> None:
        """Be ready for the forward pass of these steps, with this batch; the first one is validated before."""
        if 0 in pack_step.groups:
            measured = self.pack.active & self._rows_at(pack_step, 0)
            self._validate(self.pack.planned[0].train.validate_between, INITIAL, measured)
        self._layers = None
        if self._readings:
            self._readings.begin(batch_RxBxx)

    def kind(self, pack_step: PackStep) -> tuple[Any, ...] | None:
        """What of these steps is measured.

        It is the same for steps that can be replayed as one another, and None where the host has to be there.
        """
        waits = self.pack.optimizer.waits or (self._readings and self._readings.waits(pack_step))
        if 0 in pack_step.groups or waits:
            return None
        due, has_scores = self._readings.due(pack_step) if self._readings else ([], False)
        return (*due, has_scores)

    def learned(self) -> None:
        """Gradients are as they are before clipping."""
        if self._readings:
            self._readings.learned()

    def updates(self) -> None:
        """The update comes next."""
        if self._readings:
            self._readings.updates()

    def shown(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """What the passes of this step have shown of these signals, [R, ...]; nothing without telemetry."""
        if not self._readings or not names or (layers := self.layers()) is None:
            return {}
        pairs = zip(PER_LAYER, layers.transpose(1, 2), strict=True)
        return {name: x for name, x in pairs if name in names} | self._readings.shown(names)

    def layers(self) -> Tensor | None:
        """What was read on the way forward, [signals, layers, R]; None without telemetry."""
        if self._layers is None and self._readings:
            self._layers = self._readings.layers()
        return self._layers

    def found(self, values: dict[str, Tensor], norms: Norms | None, trained: Tensor) -> Found:
        """What a step has come to: signals, [R] each; `trained` are the trials that were not frozen before it.

        What else is measured of a step is added to `values`. Nothing here depends on which step it is.
        """
        if norms is not None:
            rms = norms.update / self.pack.layout.elements**0.5
            values |= {"param_norm": norms.weights, "update_rms": rms}
            if norms.second_moment is not None:
                values["second_moment_norm"] = norms.second_moment
        read: Mapping[str, Tensor] = {}
        if self._readings:
            self._readings.stepped()
            read = self._readings.values
        for guard in self.pack.guards:
            guard.measured({**values, **read}, trained)
            values |= guard.shown()
        nothing = self._nan.expand(len(trained))
        rows = [values[name].double() if name in values else nothing for name in self._names]
        if (layers := self.layers()) is not None:
            rows += layers.flatten(0, 1).unbind()
        numbers = {name: value.double().reshape(len(trained), -1) for name, value in read.items()}
        numbers = {name: torch.where(trained[:, None], value, torch.nan) for name, value in numbers.items()}
        froze = trained & ~self.pack.active
        return Found(values["loss"], torch.where(trained, torch.stack(rows), self._nan).mT, numbers, froze, trained)

    def keep(self, pack_step: PackStep, found: Found) -> None:
        """Keep what the rows that train have come to at their steps, and validate those for which that is due."""
        for step in pack_step.groups:
            here = None if pack_step.trains is None else self._rows_at(pack_step, step)
            block = self._block_of(step)
            block.record(step, found, here)
            validated = self._validation(pack_step, step, found.trained)
            block.set(step, validated, found.trained if here is None else found.trained & here)

    def _block_of(self, step: int) -> Block:
        first = next((first for first in self._blocks if first <= step < first + self.length), step)
        if first not in self._blocks:
            self._blocks[first] = Block(self.pack, first, self.length, self._names, self._read)
        self._pending.add(first)
        return self._blocks[first]

    def _rows_at(self, pack_step: PackStep, step: int) -> Tensor:
        """The rows that train at a step, [R]."""
        return sent(self.pack.slots.of_rows(pack_step.groups[step]), self.pack.device)

    # --- validation ----------------------------------------------------------------------------------------------

    def _validation(self, pack_step: PackStep, step: int, trained: Tensor) -> dict[str, Tensor]:
        """What the rows at this step have on held-out data after it, if that is due."""
        train = self.pack.planned[0].train
        if step + 1 == self.pack.steps:
            return _mean(self._validate(train.validate_tokens, FINAL, trained & self._rows_at(pack_step, step)))
        if (step + 1) % train.validate_every == 0:
            return _mean(self._validate(train.validate_between))
        return {}

    def _validate(self, tokens: int, end: str | None = None, measured: Tensor | None = None) -> Tensor:
        """The losses of all segments, [R, S]; those of the trials that are `measured` are kept as that `end`.

        The time that it takes is no step's. Before the first step and after the last a GPU is waited for, to know it.
        """
        waits = end is not None and self.pack.device.type == "cuda"
        started = self._now(waits)
        losses = self.pack.validation_losses(tokens, self._losses_of)
        if end is not None and measured is not None:
            self.pack.slots.update(self._ends[end][:, : losses.shape[1]], losses, measured)
        self._started += self._now(waits) - started
        return losses

    def _now(self, waits: bool) -> float:
        if waits:
            torch.cuda.synchronize(self.pack.device)
        return time.perf_counter()

    def ends(self) -> dict[str, np.ndarray]:
        """Held-out losses before the first step and after the last, [R, 64] each, of all planned trials.

        NaN for a trial that was lost before, and for segments that a short text has not.
        """
        ends = {name: losses.cpu().numpy() for name, losses in self._ends.items()}
        self.pack.twins.fill_at(0, ends[INITIAL])
        self.pack.twins.fill_at(self.pack.steps - 1, ends[FINAL])
        return ends

    # --- blocks --------------------------------------------------------------------------------------------------

    def is_due(self, pack_step: PackStep) -> bool:
        """Whether these steps have filled a block, or were a row's last."""
        ends = {self.pack.steps, *(first + self.length for first in self._blocks)}
        return any(step + 1 in ends for step in pack_step.groups)

    def flush(self) -> None:
        """Write the blocks in which no row stands any more; only here does the host wait for the device."""
        row_steps, has_written = self.pack.row_steps, False
        for first in sorted(self._pending):
            end = min(first + self.length, self.pack.steps)
            if not any(first <= step < end for step in row_steps.steps):
                self._write(self._blocks[first])
                has_written = True
        kept_from = inf if self.keeps is None else self.keeps
        for first in [first for first in self._blocks if first not in self._pending]:
            if first + self.length <= kept_from:
                del self._blocks[first], self._speeds[first]
        if has_written:
            self._started, self._passed = time.perf_counter(), row_steps.number

    def _write(self, block: Block) -> None:
        arrays, first = block.arrays(), block.first_step
        if first not in self._speeds:
            # Tokens of a trial in a second, and seconds of one step of one trial, by the passes since a block was last
            # written: more than its steps where rows went back.
            passes = max(1, self.pack.row_steps.number - self._passed)
            trained, seconds = self.pack.curriculum.tokens, time.perf_counter() - self._started
            tokens = int(trained[first + block.filled - 1] - (trained[first - 1] if first else 0))
            self._speeds[first] = tokens * passes / (block.filled * seconds), seconds / passes / len(self.pack)
        # Steps that a trial shares with its twin are not trained for it, so they have no speed.
        has_row = np.isfinite(arrays["learning_rate"])
        self.pack.twins.fill(first, arrays)
        speed = zip(SPEED, self._speeds[first], strict=True)
        arrays |= {name: np.where(has_row, value, np.nan) for name, value in speed}
        self.write(first, arrays)
        self._losses[first] = arrays["loss"]
        self._judged[first] = {name: arrays[name] for name in self._judged_by}
        self.nonfinite |= block.first_nonfinite()
        self._pending.discard(first)

    def freeze(self, trial: int, step: int) -> None:
        """A planned trial froze at this step after all."""
        self._block_of(step).freeze(trial, step)

    def share_history(self, leader: int, follower: int, step: int) -> None:
        """What a trial shared with its twin from this step on is its own, before the twin goes back to that step."""
        for first, block in self._blocks.items():
            if first + self.length > step:
                block.copy(leader, follower, step)

    def roll_back(self, trial: int, step: int) -> None:
        """A planned trial goes back to this step: what it did since is none of its history."""
        for first, block in self._blocks.items():
            if first + self.length > step:
                block.forget(trial, step)
                self._pending.add(first)
        self.nonfinite = {number: at for number, at in self.nonfinite.items() if number != trial or at < step}

    # --- the rest ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What has been recorded so far, to `restore`."""
        return {
            "nonfinite": list(self.nonfinite.items()),
            "provenance": list(self.provenance.items()),
            "ends": self._ends,
            "blocks": [(first, block.state()) for first, block in self._blocks.items()],
            "pending": sorted(self._pending),
            "speeds": list(self._speeds.items()),
            "judged": [(first, _tensors(read)) for first, read in self._judged.items()],
            "losses": [(first, torch.from_numpy(losses)) for first, losses in self._losses.items()],
            "seconds": time.perf_counter() - self._started,
            "passed": self._passed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has given."""
        self.nonfinite, self._speeds = dict(state["nonfinite"]), dict(state["speeds"])
        self.provenance = dict(state["provenance"])
        self._pending = set(state["pending"])
        self._losses = {first: losses.numpy() for first, losses in state["losses"]}
        self._judged = {first: {name: x.numpy() for name, x in read.items()} for first, read in state["judged"]}
        for name, losses in self._ends.items():
            losses.copy_(state["ends"][name])
        for first, tensors in state["blocks"]:
            self._blocks[first] = Block(self.pack, first, self.length, self._names, self._read)
            self._blocks[first].restore(tensors)
        self._started, self._passed = time.perf_counter() - state["seconds"], state["passed"]

    def nonfinite_step(self, trial: int) -> int | None:
        """The step at which a planned trial froze, in its own row or in that of its twin which it shared."""
        return self.nonfinite.get(self._froze_in(trial))

    def provenance_of(self, trial: int) -> dict[str, Any]:
        """That of its first non-finite value, in the same row; empty without one."""
        return self.provenance.get(self._froze_in(trial), {})

    def _froze_in(self, trial: int) -> int:
        """The planned trial in whose row it froze, if it did: itself, or its twin."""
        twins, leader = self.pack.twins, self.pack.twins.leader[trial]
        if trial in self.nonfinite or leader is None:
            return trial
        step = self.nonfinite.get(leader)
        return trial if step is None or twins.shares(trial, step) is None else leader

    def frozen(self) -> dict[int, int]:
        """planned trial -> the step at which it froze, also where its block is not written yet; the host waits."""
        steps = dict(self.nonfinite)
        for block in self._blocks.values():
            steps |= block.first_nonfinite()
        return steps

    def losses(self) -> np.ndarray:
        """[R, steps done] of all planned trials."""
        return np.concatenate([self._losses[first] for first in sorted(self._losses)], axis=1)

    def judged(self) -> dict[str, np.ndarray]:
        """The signals by which the objective judges runs, as far as they are read: [R, steps done] of each."""
        blocks = [self._judged[first] for first in sorted(self._judged)]
        return {name: np.concatenate([block[name] for block in blocks], axis=1) for name in self._judged_by}

    def close(self) -> None:
        """Write what is left, and detach from the model's taps."""
        self.flush()
        for first in sorted(self._pending):
            self._write(self._blocks[first])
        if self._readings:
            self._readings.detach()


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def _mean(losses_RxS: Tensor) -> dict[str, Tensor]:
    """The mean over segments, [R], and its standard error: that of the mean of so many like them."""
    segments = losses_RxS.shape[1]
    error = sums.std(losses_RxS) / segments**0.5 if segments > 1 else torch.full_like(losses_RxS[:, 0], torch.nan)
    return {"validation_loss": sums.mean(losses_RxS), "validation_loss_error": error}
