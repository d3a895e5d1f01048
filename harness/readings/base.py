"""What every reading shares: what it is shown, when, and what it gives.

All of them are made for a pack, keep nothing from step to step, never wait for the device, and change nothing. What
they give of a row depends on that row alone, bit for bit: so sums go along the last axis of what is contiguous, and
logarithms are taken trial by trial (`each_log`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from harness.basics import renamed
from harness.basics.devices import on_cpu
from harness.config import Trial
from harness.kernels.blocks import cut
from harness.kernels.operators import square_sums
from harness.kernels.use import are_used
from harness.model import sums
from harness.model.branches import branches_of
from harness.model.layers import for_each_trial
from harness.model.outline import tap_shapes
from harness.model.parameters import Layout
from harness.optim.optimizers import OPTIMIZERS
from harness.optim.optimizers.adamw import Adam, falls_short
from harness.optim.optimizers.base import Optimizer


@dataclass(frozen=True)
class ReadingSignal:
    """A signal of a reading: its axes beside trial and step, its unit, and its name in words."""

    along: tuple[str, ...]  # (), ("layer",) or ("layer", "rank")
    units: str
    long_name: str


@dataclass(frozen=True)
class ReadingContext:
    """Of what a reading may be made: a trial of the pack, its model's tensors, the training text's counts of tokens."""

    trial: Trial
    layout: Layout
    counts: np.ndarray  # [V]
    device: torch.device


class Reading:
    """Base of the readings. `cadence` is the default of `signals.NAME`: steps from one to the next; 0: none."""

    cadence: ClassVar[int]
    help: ClassVar[str]  # what is read
    signals: ClassVar[Mapping[str, ReadingSignal]]
    waits: ClassVar[bool] = False  # whether it makes the host wait for a GPU

    def __init__(self, known: ReadingContext):
        self.known, self.depth = known, known.trial.model.depth

    @classmethod
    def missing(cls, trial: Trial) -> str:
        """Why there is nothing to read in this trial; empty if there is."""
        return ""


class TapReading(Reading):
    """Read at taps on the way forward.

    Where some layers may lack the tap (`of_some_layers`), what is read of those is NaN.
    """

    of_some_layers: ClassVar[bool] = False

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        """Where."""
        raise NotImplementedError

    @classmethod
    def missing(cls, trial: Trial) -> str:
        there = cls.layers(trial)
        if all(there) or (cls.of_some_layers and any(there)):
            return ""
        return f"this model has no {cls.taps(trial.model.depth)[there.index(False)]}"

    @classmethod
    def layers(cls, trial: Trial) -> list[bool]:
        """Whether each layer of a trial's model has what is read; of taps that are of no layer, whether it has them."""
        return are_there(trial, cls.taps(trial.model.depth))

    def measure(self, x: Tensor) -> Tensor:
        """Of the activations that pass at once, [r, ...]: numbers of each row, [r, ...]. It changes none of them."""
        raise NotImplementedError

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """The signals, [R, ...] each, from what `measure` gave at each tap: [ranks, calls, R, ...].

        There is a call for each micro-batch, and of attention that is fused one for each sequence.
        """
        raise NotImplementedError


class PolicyReading(TapReading):
    """What a policy shows at a tap of its objective, [r, n], each number a signal, in their order.

    Of a rollout all passes show the same; of steps (`is_of_steps`) it is the mean over ranks and micro-batches.
    """

    cadence = 1
    tap: ClassVar[str]
    is_of_steps: ClassVar[bool] = False

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [cls.tap]

    @classmethod
    def missing(cls, trial: Trial) -> str:
        name = trial.objective.name
        return cls.lacks(trial) if name == "policy" else f"objective.name={name} samples nothing"

    @classmethod
    def lacks(cls, trial: Trial) -> str:
        """Why a policy shows nothing of it; empty if it does."""
        return ""

    def measure(self, x: Tensor) -> Tensor:
        return x

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        numbers = mean_of_ranks(values[0]) if self.is_of_steps else values[0][0, 0]
        return dict(zip(self.signals, numbers.unbind(1), strict=True))


class BatchReading(Reading):
    """Read of the tokens that train."""

    def read(self, batch_RxBxT1: Tensor) -> Mapping[str, Tensor]:
        """The signals, [R] each, of the batch of all ranks."""
        raise NotImplementedError


class GradientReading(Reading):
    """Read of the gradients as they are after the mean over ranks, before clipping."""

    def read(self, gradients_RxP: Tensor) -> Mapping[str, Tensor]:
        """The signals, [R, ...] each."""
        raise NotImplementedError


class StepReading(Reading):
    """Read when a step is over, so detectors judge it at the next."""

    compares: ClassVar[bool] = False  # whether it needs the weights as they were before

    def begun(self, optimizer: Optimizer) -> None:
        """The step begins: nothing of it was done yet."""

    def updates(self, optimizer: Optimizer) -> None:
        """All is there for the update, which comes next."""

    def read(self, before_RxP: Tensor | None, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """The signals, [R, ...] each; `before_RxP` are the weights before the step, where it `compares`."""
        raise NotImplementedError


class ProbeReading(StepReading):
    """Read of where a mixture of experts sends a batch that stays the same, as a step begins and when it is over.

    It takes two forward passes of its own (harness/training/routing_probe.py).
    """

    of_some_layers: ClassVar[bool] = False

    @classmethod
    def layers(cls, trial: Trial) -> list[bool]:
        """Whether each layer of a trial's model has what is read."""
        raise NotImplementedError

    def compared(self, before_RxLxNxK: Tensor, after_RxLxNxK: Tensor) -> Mapping[str, Tensor]:
        """The signals, [R, ...] each, of the experts that each token goes to."""
        raise NotImplementedError


KINDS = (TapReading, PolicyReading, BatchReading, GradientReading, StepReading, ProbeReading)


def no_second_moment(trial: Trial) -> str:
    """Why a reading of Adam's second moment has nothing to read; empty if it has."""
    name = trial.optim.name
    if not OPTIMIZERS[name].keeps_elementwise:
        return f"optim.name={name} keeps them in another basis"
    return "" if {"moment_1", "moment_2"} <= set(OPTIMIZERS[name].slots) else f"optim.name={name} has no such moments"


def second_share(optimizer: Optimizer) -> Tensor:
    """What share of a mean the second moment has, which started at zero, [R, 1], float64."""
    if isinstance(optimizer, Adam):
        return optimizer.second_share()
    return falls_short(optimizer.hyperparameter("beta2"), optimizer.updates.double()[:, None])


# --- what several of them need -------------------------------------------------------------------------------------


class Groups:
    """The columns of each layer, of what stands in front of the layers (`embedding`), and behind them (`head`)."""

    def __init__(self, layout: Layout, depth: int):
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(depth + 2)]
        ends = [layout.offsets[scaled.name] for scaled in layout.tensors[1:]] + [layout.size]
        for scaled, end in zip(layout.tensors, ends, strict=True):
            start, parts = layout.offsets[scaled.name], ranges[group_of(scaled.name, depth)]
            if parts and parts[-1][1] == start:  # with the padding between them, which is zero
                parts[-1] = parts[-1][0], end
            else:
                parts.append((start, end))
        self.ranges, self.depth = ranges, depth

    def norms(self, flat_RxP: Tensor) -> Tensor:
        """L2 norm of each group, [R, layers + 2], float64: layers, embedding, head; NaN for one without tensors."""
        if not are_used(flat_RxP.device):
            return self._norms(lambda start, end: flat_RxP[:, start:end], flat_RxP)
        spans = [span for parts in self.ranges for span in parts]
        each = square_sums(flat_RxP, cut(spans, flat_RxP.shape[1], flat_RxP.device)).sqrt_()
        norms = dict(zip(spans, each.unbind(1), strict=True))
        return self._of_parts([[norms[span] for span in parts] for parts in self.ranges], flat_RxP)

    def norms_of_change(self, before_RxP: Tensor, after_RxP: Tensor) -> Tensor:
        """The same for the difference of two arrays, of which one piece at a time is made."""
        return self._norms(lambda start, end: after_RxP[:, start:end] - before_RxP[:, start:end], after_RxP)

    def named(self, name: str, values_RxG: Tensor) -> dict[str, Tensor]:
        """`layer_NAME` [R, layers], `embedding_NAME` and `head_NAME` [R]."""
        layers, embedding, head = values_RxG[:, : self.depth], values_RxG[:, self.depth], values_RxG[:, self.depth + 1]
        return {f"layer_{name}": layers, f"embedding_{name}": embedding, f"head_{name}": head}

    def _norms(self, piece: Callable[[int, int], Tensor], like: Tensor) -> Tensor:
        groups = [[sums.norm(piece(start, end)).double() for start, end in parts] for parts in self.ranges]
        return self._of_parts(groups, like)

    def _of_parts(self, groups: Sequence[Sequence[Tensor]], like: Tensor) -> Tensor:
        nothing = torch.full((len(like),), torch.nan, dtype=torch.float64, device=like.device)
        return torch.stack([_joined(norms) if norms else nothing for norms in groups], 1)


def _joined(norms: Sequence[Tensor]) -> Tensor:
    """The L2 norm of the whole, [R], from those of its parts."""
    if len(norms) == 1:
        return norms[0]
    if on_cpu(norms[0]):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms), 1), dim=1)
        return norm
    return sums.root_of_squares(norms)


def group_of(name: str, depth: int) -> int:
    """The group of a tensor in `Groups`, by its name."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return depth if name.startswith(("embedding", "positions")) else depth + 1


def shown_of_groups(name: str, units: str, long_name: str) -> dict[str, ReadingSignal]:
    """What `Groups.named` gives."""
    layers = {f"layer_{name}": ReadingSignal(("layer",), units, f"{long_name} of a layer")}
    outer = {f"{part}_{name}": ReadingSignal((), units, f"{long_name} of the {part}") for part in ("embedding", "head")}
    return layers | outer


def are_there(trial: Trial, taps: Sequence[str]) -> list[bool]:
    """Whether a trial's model has each of these taps."""
    there = tap_shapes(trial.model, 1, 1, branches_of(trial))
    return [tap in there for tap in taps]


def router_taps(depth: int) -> list[str]:
    """The logits of the layers' routers."""
    return [f"blocks.{layer}.moe.logits" for layer in range(depth)]


def residual_taps(depth: int) -> list[str]:
    """The outputs of the layers."""
    return [f"blocks.{layer}.residual" for layer in range(depth)]


def score_taps(depth: int) -> list[str]:
    """What the softmax of each layer's attention reads."""
    return [f"blocks.{layer}.attention.scores" for layer in range(depth)]


def rms(x: Tensor) -> Tensor:
    """Root mean square of each row, [r], float64."""
    flat = x.reshape(x.shape[0], -1)
    rms: Tensor = sums.norm(flat).double() / flat.shape[1] ** 0.5
    return rms


def largest(x: Tensor) -> Tensor:
    """The largest of each row, [r], float64."""
    return x.reshape(x.shape[0], -1).amax(1).double()


def mean_of_calls(values: Tensor) -> Tensor:
    """Over axis 1 of [ranks, calls, ...], one after the other."""
    calls = values.unbind(1)
    return calls[0] if len(calls) == 1 else sum(calls[1:], calls[0]) / len(calls)


def mean_of_ranks(values: Tensor) -> Tensor:
    """The mean over ranks and calls of [ranks, calls, ...]."""
    return mean_of_calls(mean_of_calls(values)[None])[0]


def each_log(x_Rxxx: Tensor) -> Tensor:
    """Natural logarithm, in place, a call for each trial on a CPU: what fills vectors there may round differently."""
    return for_each_trial(torch.log, x_Rxxx)


__getattr__ = renamed.names(__name__, Shown="ReadingSignal", Known="ReadingContext")
