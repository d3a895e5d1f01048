"""Takes the readings of a step: at taps on the way forward, of the batch, of gradients, and of what a step has changed.

Which there are, and every how many steps, the section `signals` says (harness/readings/). Of rows that stand at
different steps each is read at its own. Values stay on the device. Where a reading compares weights, a copy of them is
kept for the length of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config import Trial, sections
from harness.detectors.loop_signals import stored
from harness.detectors.table import DETECTORS
from harness.readings.base import (
    BatchReading,
    GradientReading,
    ProbeReading,
    Reading,
    ReadingContext,
    ReadingSignal,
    StepReading,
    TapReading,
    largest,
    residual_taps,
    rms,
    score_taps,
)
from harness.readings.table import READ_BY, READINGS
from harness.storage.store import SIGNALS, Signal
from harness.training.pack import Pack
from harness.training.routing_probe import RouteProbe
from harness.training.row_steps import PackStep

Measure = Callable[[Tensor], Tensor]
K = TypeVar("K", bound=Reading)
SCORES_EVERY = 10  # steps, where attention is fused


def cadences(trial: Trial) -> dict[str, int]:
    """Every how many steps what is read in a trial, by reading; those alone that are read."""
    chosen = vars(trial.section("signals"))
    return {name: every for name, every in chosen.items() if every and not READINGS[name].missing(trial)}


def reading_signals(trial: Trial) -> dict[str, ReadingSignal]:
    """The signals of a trial's readings, by name."""
    return {name: shown for reading in cadences(trial) for name, shown in READINGS[reading].signals.items()}


def stored_signals(trial: Trial) -> dict[str, Signal]:
    """The same, as the store has them."""
    return {
        name: Signal(("trial", "step", *of.along), of.units, of.long_name)
        for name, of in reading_signals(trial).items()
    }


def numbers_read(trial: Trial) -> int:
    """How many numbers all readings of a trial give."""
    return sum(prod(shape) for shape in shapes_of(trial).values())


def shapes_of(trial: Trial) -> dict[str, tuple[int, ...]]:
    """What the signals of a trial's readings have beside trial and step: (), (layers,) or (layers, ranks)."""
    sizes = {"layer": trial.model.depth, "rank": trial.train.ranks}
    return {name: tuple(sizes[dim] for dim in of.along) for name, of in reading_signals(trial).items()}


def refused(trial: Trial) -> Iterator[str]:
    """Readings of what a trial has not, and detectors of what is not read."""
    chosen, usual = trial.section("signals"), sections()["signals"]()
    for name, reading in READINGS.items():
        if (every := getattr(chosen, name)) not in (0, getattr(usual, name)) and (why := reading.missing(trial)):
            yield f"signals.{name}={every}: {why}; allowed: 0"
    for name in trial.section("detect").name.split("+"):
        if name in DETECTORS:
            yield from _deaf(trial, name)


def _deaf(trial: Trial, name: str) -> Iterator[str]:
    """Why a detector would hear nothing."""
    detector, read = DETECTORS[name], cadences(trial)
    needed = stored(detector.watches)
    lacking = [signal for signal in needed if signal not in SIGNALS and READ_BY.get(signal) not in read]
    for signal in lacking[:1]:
        if signal not in READ_BY:
            yield f"detect={name}: no part of this model gives the signal {signal}; allowed: another detector"
        elif why := READINGS[READ_BY[signal]].missing(trial):
            yield f"detect={name}: it watches {signal}, and {why}; allowed: another detector"
        else:
            key = f"signals.{READ_BY[signal]}"
            yield f"detect={name}: it watches {signal}, which {key}=0 never reads; allowed: {key} >= 1"
    if trial.train.ranks < detector.least_ranks:
        why = f"it compares ranks, and train.ranks={trial.train.ranks}"
        yield f"detect={name}: {why}; allowed: train.ranks >= {detector.least_ranks}, or another detector"


class Tapped:
    """What measures give at taps in all passes of a step: numbers of each row, by tap and measure.

    A measure that several readings take at one tap is taken once.
    """

    def __init__(self, pack: Pack):
        self._taps, self._pack = pack.model.taps, pack
        self._attached: dict[str, tuple[Collection[Measure], Callable[[], None]]] = {}
        self._calls: dict[tuple[str, Measure], dict[tuple[int, int], list[Tensor]]] = {}

    def listen(self, wanted: Mapping[str, Collection[Measure]]) -> None:
        """Be ready for the passes of a step, in which these measures are wanted at these taps."""
        self._calls.clear()
        for name in [name for name, (measures, _) in self._attached.items() if wanted.get(name) != measures]:
            self._attached.pop(name)[1]()
        for name, measures in wanted.items():
            if name not in self._attached:
                reader = partial(self._read, measures)
                detach = self._taps.attach_to_rows(name, reader, on_host=False, largest=set(measures) == {largest})
                self._attached[name] = measures, detach

    def _read(self, measures: Collection[Measure], name: str, x: Tensor, rows: slice) -> None:
        place = self._pack.ranks.current, rows.start
        for measure in measures:
            self._calls.setdefault((name, measure), {}).setdefault(place, []).append(measure(x.detach()))

    def values(self, name: str, measure: Measure) -> Tensor:
        """[ranks of this process, calls, R, ...]."""
        calls = self._calls[name, measure]
        ranks, starts = (sorted({place[i] for place in calls}) for i in range(2))
        of_ranks = [
            _stacked([_joined(parts) for parts in zip(*(calls[rank, start] for start in starts), strict=True)])
            for rank in ranks
        ]
        return _stacked(of_ranks)

    def largest(self, name: str, measure: Measure) -> Tensor:
        """The largest of all ranks and calls, [R, ...]."""
        values = self.values(name, measure)
        return values[0, 0] if values.shape[:2] == (1, 1) else values.amax((0, 1))

    def detach(self) -> None:
        """What detaches refers to its reader, which keeps the pack alive."""
        self.listen({})


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Readings:
    """All that is read of a pack's steps beside loss and norms.

    In the order of a step: `begun`, `begin`, the passes forward and backward, `learned`, `updates`, the update,
    `stepped`. What was read of this step so far is in `values`, [R, ...] by signal, NaN in rows for which it was not
    due.
    """

    def __init__(self, pack: Pack):
        self._pack, self._tapped = pack, Tapped(pack)
        trial = pack.planned[0]
        self.values: dict[str, Tensor] = {}
        self._every = cadences(trial)
        known = ReadingContext(trial, pack.layout, pack.corpus.counts, pack.device) if self._every else None
        self._readings: dict[str, Reading] = {name: READINGS[name](known) for name in self._every} if known else {}
        names = set(pack.model.taps.names)
        self._at = {  # the taps that this model has
            name: [tap for tap in reading.taps(reading.depth) if not reading.of_some_layers or tap in names]
            for name, reading in self._readings.items()
            if isinstance(reading, TapReading)
        }
        self._residual, scores = residual_taps(trial.model.depth), score_taps(trial.model.depth)
        self._scores = scores if set(scores) <= set(pack.model.taps.names) else []
        self._due: list[str] = []
        self._before: Tensor | None = None
        self._at_begin: Tensor | None = None
        self._probe: RouteProbe | None = None
        self._wants_scores = self._has_scores = False

    def due(self, pack_step: PackStep) -> tuple[list[str], bool]:
        """Which readings are taken at these steps, and whether attention's logits are."""
        steps = pack_step.groups
        due = [name for name, every in self._every.items() if any(step % every == 0 for step in steps)]
        return due, self._pack.model.explicit_attention or any(step % SCORES_EVERY == 0 for step in steps)

    def waits(self, pack_step: PackStep) -> bool:
        """Whether one of those makes the host wait."""
        return any(self._readings[name].waits for name in self.due(pack_step)[0])

    def begun(self, pack_step: PackStep) -> None:
        """These steps begin."""
        self._tick = pack_step
        self.values.clear()
        self._due, self._wants_scores = self.due(pack_step)
        for _, reading in self._those(StepReading):
            reading.begun(self._pack.optimizer)
        self._at_begin = self._pack.weights.clone() if self._those(ProbeReading) else None

    def begin(self, batch_RxBxx: Tensor) -> None:
        """Be ready for their passes."""
        is_wanted = self._wants_scores
        self._has_scores = bool(self._scores) and is_wanted
        wanted: dict[str, list[Measure]] = {name: [rms] for name in self._residual}
        wanted |= {name: [largest] for name in self._scores if is_wanted}
        for reading_name, reading in self._those(TapReading):
            for name in self._at[reading_name]:
                measures = wanted.setdefault(name, [])
                if reading.measure not in measures:
                    measures.append(reading.measure)
        self._tapped.listen(wanted)
        if batch_RxBxx.dim() == 3 and not batch_RxBxx.is_floating_point():
            for name, of_batch in self._those(BatchReading):
                self._keep(name, of_batch.read(batch_RxBxx))

    def layers(self) -> Tensor:
        """`activation_rms` and `attention_logit_max` of the last passes, [2, layers, R]; NaN where not read."""
        found = [self._tapped.largest(name, rms) for name in self._residual]
        if self._has_scores:
            found += [self._tapped.largest(name, largest) for name in self._scores]
        else:
            found += [torch.full_like(found[0], torch.nan)] * len(found)
        return self._pack.ranks.largest(torch.stack(found).unflatten(0, (2, -1)))

    def learned(self) -> None:
        """Gradients are there, as they are before clipping."""
        for name, reading in self._those(TapReading):
            there = self._at[name]
            values = [self._tapped.values(tap, reading.measure) for tap in there]
            of_taps = dict(zip(there, self._pack.ranks.of_all(torch.stack(values, 1)).unbind(1), strict=True))
            if len(there) < len(wanted := reading.taps(reading.depth)):
                nothing = torch.full_like(of_taps[there[0]], torch.nan)
                of_taps = {tap: of_taps.get(tap, nothing) for tap in wanted}
            self._keep(name, reading.joined([of_taps[tap] for tap in wanted]))
        for name, of_gradients in self._those(GradientReading):
            self._keep(name, of_gradients.read(self._pack.gradients))
        if any(reading.compares for _, reading in self._those(StepReading)):
            self._before = self._pack.weights.clone()

    def updates(self) -> None:
        """The update comes next."""
        for _, reading in self._those(StepReading):
            reading.updates(self._pack.optimizer)

    def stepped(self) -> None:
        """The step is done."""
        for name, reading in self._those(StepReading):
            if isinstance(reading, ProbeReading) and self._at_begin is not None:
                self._probe = self._probe or RouteProbe(self._pack)
                both = [self._probe.experts(weights) for weights in (self._at_begin, self._pack.weights)]
                self._keep(name, reading.compared(*both))
            else:
                self._keep(name, reading.read(self._before if reading.compares else None, self._pack.optimizer))
        self._before = self._at_begin = None

    def shown(self, names: Collection[str]) -> dict[str, Tensor]:
        """What was read of these signals at this step so far."""
        return {name: value for name, value in self.values.items() if name in names}

    def detach(self) -> None:
        """Leave the model's taps."""
        self._tapped.detach()

    def _those(self, kind: type[K]) -> list[tuple[str, K]]:
        """The readings of a kind that are due."""
        return [(name, reading) for name in self._due if isinstance(reading := self._readings[name], kind)]

    def _keep(self, name: str, values: Mapping[str, Tensor]) -> None:
        every, rows = self._every[name], len(self._pack)
        due = [row for step, group in self._tick.groups.items() if step % every == 0 for row in group]
        if len(due) < rows:
            here = sent(self._pack.slots.of_rows(due), self._pack.device)
            values = {
                signal: torch.where(here.view(-1, *[1] * (x.dim() - 1)), x, torch.nan) for signal, x in values.items()
            }
        self.values.update(values)
