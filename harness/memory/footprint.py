"""The memory of an accelerator that training a pack takes at its peak, counted without one.

A pack of copies of the trial is made on torch's `meta` device and trained for a step by the real loop, by the ways that
an accelerator takes, and its storages are added up (harness/memory/allocations.py). All of them grow in proportion to
the rows, or to those that pass through the model together, so packs of two and four rows tell of every size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from harness.config import NO_FAULT, Trial
from harness.data.corpus import Corpus
from harness.guards import GUARDS
from harness.guards.playbook import goes_back, waits
from harness.loop.graphs import may_replay
from harness.loop.loop import train
from harness.memory.allocations import Allocations
from harness.model.branches import branches_of
from harness.model.precision import FORMATS
from harness.optim.clippers import CLIPPERS
from harness.policy.proxy import fit_bytes
from harness.training.pack import Pack
from harness.training.pack_sizes import largest_part, part_size, rows_at_once, windows_at_once
from harness.training.sites import FaultSchedule

META = torch.device("meta")
ACCELERATOR = torch.device("cuda")  # any that is no CPU: whose rules of sizes count
BLOCK = 50  # steps between writes to the store: the default of telemetry.block
WORKSPACES = 2 * 8 * 2**22
"""What cuBLAS keeps, by its documentation: eight of 4 MiB with CUBLAS_WORKSPACE_CONFIG=:4096:8, for each thread that
multiplies, and the backward pass has one of its own."""
SHALLOW = 3, 4
"""Depths that tell of deeper models: each block takes as much as another."""
MICRO_BATCHES = 3  # of a step, at most, that are counted: more take as much
FEW_LABELS = 2  # of a learned reward, whose fit is counted by a formula
LEARN, VALIDATE = "learn", "validate"  # phases of a step; what is in neither of them is its rest
HELD = "held"


@dataclass(frozen=True)
class Linear:
    """Bytes in all: `fixed`, for each row, and for each row of the largest part that passes through the model."""

    fixed: float
    row: float
    part: float

    def at(self, rows: int, part: int) -> float:
        return self.fixed + self.row * rows + self.part * part

    def towards(self, other: Linear, times: float) -> Linear:
        """This one, and so many times what the other one has more."""
        fixed, row, part = (
            x + times * (y - x) for x, y in ((self.fixed, other.fixed), (self.row, other.row), (self.part, other.part))
        )
        return Linear(fixed, row, part)


@dataclass(frozen=True)
class Footprint:
    """Of packs of trials like one: what is `held` between steps, and the peak of each phase of a step.

    `at_once` is about how many rows pass through the model together. `pools` are those of recordings, each as large as
    what a step or a validation takes beside what is held between steps. `beside`: bytes that lie there however many
    trials there are, such as the corpus.
    """

    at_once: int
    pools: int
    held: Linear
    peaks: Mapping[str, Linear]
    beside: float = 0

    def bytes(self, rows: int, part: int | None = None) -> int:
        """The peak with so many rows, in parts of `part` slots; None: as the pack would be cut."""
        size = part_size(rows, self.at_once)
        slots, part = rows + -rows % size, size if part is None else part
        held = self.held.at(slots, part)
        most = max(peak.at(slots, part) for peak in self.peaks.values())
        return int(self.beside + WORKSPACES + held + (1 + self.pools) * max(0.0, most - held))

    def rows_within(self, memory: float, most: int) -> int:
        """The most rows, up to `most`, whose peak is within `memory` bytes; 0: not one."""
        low, high = 0, most
        while low < high:
            rows = (low + high + 1) // 2
            fits = self.bytes(rows, largest_part(rows, self.at_once)) <= memory
            low, high = (rows, high) if fits else (low, rows - 1)
        return low


_FOUND: dict[tuple[Any, ...], Footprint] = {}
_COUNTED: dict[tuple[Any, ...], dict[str, Linear]] = {}


def footprint(trial: Trial, beside: float = 0) -> Footprint:
    """Of packs of trials like this one on an accelerator, at whatever step takes most; counted once for each kind."""
    kind = _kind(trial)
    if kind not in _FOUND:
        _FOUND[kind] = _footprint(trial)
    found = _FOUND[kind]
    # A rate for each step, of which the trial that was counted has one.
    rates = (trial.steps - 1) * FORMATS[trial.train.precision][0].itemsize
    fit, fit_of_row = fit_bytes(trial)  # of a learned reward, of which the trial that was counted has few labels
    peaks = {name: replace(peak, row=peak.row + rates + fit_of_row) for name, peak in found.peaks.items()}
    beside += fit + (trial.steps - 1) * 8  # how many tokens it has trained on after each
    return replace(found, held=replace(found.held, row=found.held.row + rates), peaks=peaks, beside=beside)


def _kind(trial: Trial) -> tuple[Any, ...]:
    """What decides how much memory a trial takes: its structure, and which per-trial parts are on."""
    parts = [clipper.is_on(trial) for clipper in CLIPPERS] + [guard.is_on(trial) for guard in GUARDS]
    return trial.structure, *parts, trial.train.z_loss > 0, trial.train.loss_scaling, goes_back(trial), waits(trial)


def _footprint(trial: Trial) -> Footprint:
    model, depths = trial.model, _shallow(trial)
    if model.depth <= depths[1] or model.placement == "mix":  # there the blocks are not alike
        lines = _lines(trial)
    else:
        one, other = (_lines(replace(trial, model=replace(model, depth=depth))) for depth in depths)
        times = (model.depth - depths[0]) / (depths[1] - depths[0])
        lines = {name: line.towards(other[name], times) for name, line in one.items()}
    at_once = rows_at_once(model, trial.train.sequences, ACCELERATOR)
    return Footprint(at_once, int(may_replay(trial)), lines.pop(HELD), lines)


def _shallow(trial: Trial) -> tuple[int, int]:
    """Depths from which those of deeper models follow: behind the blocks that are not as the others."""
    kinds = [[branch.at(block).kind for branch in branches_of(trial)] for block in range(trial.model.depth)]
    others = sum(kind != kinds[-1] for kind in kinds)
    return SHALLOW[0] + others, SHALLOW[1] + others


def _lines(trial: Trial) -> dict[str, Linear]:
    """What is held, and the peak of each phase, from three small packs; once for all depths that these tell of."""
    if (kind := _kind(trial)) in _COUNTED:
        return dict(_COUNTED[kind])
    rehearsed = rehearsal(trial)
    small, large, in_parts = (count(rehearsed, rows, part, META) for rows, part in ((2, 2), (4, 4), (4, 2)))
    lines = {}
    for name in small:
        both = (large[name] - small[name]) / 2
        row = min(both, (in_parts[name] - small[name]) / 2)  # parts that cost a little for their number are no gain
        lines[name] = Linear(small[name] - 2 * both, row, both - row)
    _COUNTED[kind] = lines
    return dict(lines)


def rehearsal(trial: Trial) -> Trial:
    """A trial of one step that takes as much memory as any of this one's: a whole batch, and whole validations.

    Of many micro-batches a few, because one begins when the activations of the one before are gone.
    """
    windows = max(trial.train.sequences, windows_at_once(trial.model, trial.data.vocabulary, ACCELERATOR))
    tokens = min(trial.train.validate_tokens, windows * trial.model.context)
    micro = min(trial.train.micro_batches, MICRO_BATCHES)
    batch = trial.train.batch * micro // trial.train.micro_batches
    train = replace(trial.train, steps=1, batch=batch, micro_batches=micro, validate_tokens=tokens, validate_between=1)
    schedule = replace(trial.schedule, sequence_start=None, batch_start=None)
    rehearsed = replace(trial, train=train, schedule=schedule, model=replace(trial.model, start=None), fault=NO_FAULT)
    if trial.section("policy").proxy is not None:
        policy = replace(trial.section("policy"), proxy=FEW_LABELS)
        rehearsed = replace(rehearsed, extras=tuple((k, policy if k == "policy" else v) for k, v in rehearsed.extras))
    if trial.section("playbook.snapshot").on == "host":  # in main memory
        others = tuple((name, values) for name, values in rehearsed.extras if name != "playbook")
        rehearsed = replace(rehearsed, extras=others)
    return rehearsed


class _Watched(Pack):
    """Says where the phases of a step begin and end."""

    watch: Allocations
    before: int | None = None  # bytes that were alive before the first pass that learns

    def learn(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.before = self.watch.alive if self.before is None else self.before
        with self.watch.phase(LEARN):
            return super().learn(*arguments, **named)

    def validation_losses(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self.watch.phase(VALIDATE):
            return super().validation_losses(*arguments, **named)


def count(trial: Trial, rows: int, part: int, device: torch.device) -> dict[str, int]:
    """Bytes of one step of so many copies of a trial, `part` of them at once: the peak of each phase, and what is held.

    The one place that knows how a pack is made and trained. The device is `meta`, or a CPU, where the code that is run
    is the accelerator's only if that is asked for (`harness.basics.devices.CPUS`).
    """
    context, vocabulary = trial.model.context, trial.data.vocabulary
    held_out = np.zeros(trial.train.validate_tokens + 2 * (context + 1), np.uint16)
    corpus = Corpus(np.zeros(context + 2, np.uint16), held_out, vocabulary, "", {})
    ends: list[int] = []
    with Allocations(device) as watch:
        pack = _Watched([trial] * rows, corpus, device, at_once=part)
        pack.watch = watch
        fault_schedule = FaultSchedule([None] * rows)
        train(pack, fault_schedule, BLOCK, lambda first_step, signals: ends.append(watch.alive), provenance=False)
    # What the first step left, such as the signals' block, is there in all later ones.
    left = ends[0] - (pack.before or 0)
    return {HELD: ends[0], **{name: peak + left for name, peak in watch.peaks.items()}}
