"""One step of one row, run once more for itself with everything read: where it is not finite first, and why.

The row is copied into a small pack of its own, twice at least, because a pack of one rounds otherwise. The fault of
that very step strikes the first of the copies as it did in training; what it has left in weights, moments and the
loss's scale is in the row already. The other copies train without: re-execution, as an operator does it to tell what is
transient. Nothing of the row, of its pack or of the fault schedule changes; what the fault remembers is as it was
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.config.formats import HELD
from harness.model.formats import FORMAT_OF, raw_words, round_to
from harness.nonfinite.trace import OVERFLOW, Origin, Origins, is_finite
from harness.optim.loss_scale import BACKOFF
from harness.training.pack import Pack
from harness.training.pack_sizes import smallest_pack
from harness.training.row_steps import PackStep
from harness.training.sites import FaultSchedule, Injector, Site, SiteCall
from harness.training.strikes import Strikes, one

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
AGAIN = (Site.BATCH, Site.ACTIVATION, Site.ROUTING, Site.ACTIVATION_GRADIENT, Site.GRADIENT, Site.REDUCED_GRADIENT)
LOSS = "loss"
SEVERAL = 3  # numbers of a tensor that tell of its format: by chance one of float32 is of fp16 once in 8,192 times
OWN = ("active", "held", "step")  # state that says whether a row trains, and when: the copies do, now


@dataclass(frozen=True)
class Place:
    """A value of one step: where in it, of which tensor or tap, and which element; `rank` is whose pass it was."""

    direction: str  # FORWARD, BACKWARD or UPDATE
    site: str
    tensor: str
    index: tuple[int, ...]
    rank: int = 0


@dataclass
class RerunResult:
    """What the step came to: the first value that is not finite, and the first at which the copies differ.

    `origin` is the operation that made the first; None: no operation did, so that it was changed where it stood. Where
    the whole tensor is then one of a `narrower` format, that has overflowed, and the operation has no name.
    `spared`: without the fault of that step its loss and gradients are finite.
    """

    first: Place | None = None
    value: float = 0.0
    origin: Origin | None = None
    difference: Place | None = None
    spared: bool = False

    def see(self, at: Callable[[tuple[int, ...]], Place], copies: Tensor, origins: Origins | None) -> None:
        """One tensor of all copies, [n, ...]."""
        struck, spared = copies[0], copies[1]
        if self.first is None and not is_finite(struck) and (index := first_true(unfit(struck))) is not None:
            self.first, self.value = at(index), float(struck[index])
            self.origin = origins.of(copies) if origins else None
            if self.origin is None and (format := narrower(struck, spared)):
                self.origin = Origin("", OVERFLOW, format)
        if self.difference is None and not torch.equal(struck, spared):
            differs = raw_words(struck) != raw_words(spared)
            if (index := first_true(differs)) is not None:
                self.difference = at(index)


def unfit(x: Tensor) -> Tensor:
    """Which elements are NaN or infinite; -inf above the diagonal of attention's logits is the causal mask."""
    wrong = ~torch.isfinite(x)
    if x.dim() == 4 and x.shape[-1] == x.shape[-2]:
        wrong &= ~(torch.isneginf(x) & torch.ones_like(wrong).triu(1))
    return wrong


def narrower(struck: Tensor, spared: Tensor) -> str:
    """The format of fewer bits in which every value of `struck` is, and not of `spared`, its like; "": there is none.

    A kernel in half precision leaves such a tensor: infinities among numbers that the format holds, of both of which
    there are several. A single flip does not.
    """
    told = (struck.isinf(), struck.isfinite() & (struck != 0))
    if not struck.is_floating_point() or any(int(which.sum()) < SEVERAL for which in told):
        return ""
    own = HELD[FORMAT_OF[struck.dtype]]
    fewer = [name for name, layout in HELD.items() if layout.bits < own.bits and own.holds(layout)]
    for name in sorted(fewer, key=lambda name: HELD[name].bits):
        if torch.equal(round_to(struck, name), struck) and not torch.equal(round_to(spared, name), spared):
            return name
    return ""


def first_true(where: Tensor) -> tuple[int, ...] | None:
    """The index of the first true element, in the order of the flat tensor."""
    found = torch.atleast_1d(where).nonzero()
    return tuple(found[0].tolist())[: where.dim()] if len(found) else None


class _Found(Exception):
    """All copies are not finite, and alike: what they go on to is of no interest."""


@dataclass
class _Quietly:
    """An injector, of whose strikes nothing is seen but what they leave."""

    injector: Injector
    origins: Origins

    @property
    def taps(self) -> Any:
        return self.injector.taps

    @property
    def memory(self) -> Mapping[str, Any]:
        return self.injector.memory

    def visit(self, site_call: SiteCall) -> list[Any]:
        with self.origins.quiet():
            return self.injector.visit(site_call)


class _Again(FaultSchedule):
    """What is due for one trial, as trial 0, at the sites of AGAIN; it counts nothing."""

    def __init__(self, fault_schedule: FaultSchedule, trial: int, origins: Origins):
        super().__init__([None])
        self._of, self._trial = fault_schedule, trial
        if trial in fault_schedule.armed:
            self.armed = {0: _Quietly(fault_schedule.armed[trial], origins)}  # type: ignore[dict-item]

    def due(self, site: Site, step: int) -> list[int]:
        return [0] if site in AGAIN and self._trial in self._of.due(site, step) else []

    def is_due(self, trial: int, site: Site, step: int) -> bool:
        return self._of.is_due(self._trial, site, step)

    def is_of_data(self, trial: int) -> bool:
        return self._of.is_of_data(self._trial)

    def note(self, trial: int, events: Any) -> None:
        """Nothing has happened."""


@dataclass
class Rerun:
    """The copies of a row as it was before the step at which it froze, and that step."""

    pack: Pack
    fault_schedule: FaultSchedule
    row: int
    step: int
    readings: RerunResult = field(default_factory=RerunResult)

    def __post_init__(self) -> None:
        source, trial = self.pack, self.pack.rows[self.row]
        count = smallest_pack(source.device)
        self.copies = copies = Pack([source.planned[trial]] * count, source.corpus, source.device)
        state = dict(source.rows_state)
        for name, values in copies.rows_state:
            if name in state and name not in OWN:
                values.copy_(state[name][self.row].expand_as(values))
        for number in range(count):
            copies.interventions.take(number, trial, source.interventions)
        copies.refresh()
        if copies.loss_scale.is_dynamic:
            copies.loss_scale.scale.div_(BACKOFF)  # which the step that overflowed has halved

    def run(self) -> RerunResult:
        """Run the step up to where it was judged."""
        trial, origins = self.pack.rows[self.row], Origins(self._written)
        self._origins = origins
        again = _Again(self.fault_schedule, trial, origins)
        injector = self.fault_schedule.armed.get(trial)
        memory = dict(injector.memory) if injector else {}
        try:
            self._run(Strikes(self.copies, again))
        except _Found:
            pass
        finally:
            if injector:
                injector.recall(memory)
        return self.readings

    def _run(self, strike: Strikes) -> None:
        copies, step = self.copies, self.step
        pack_step = PackStep(0, step, {step: range(len(copies))}, None)
        batch = copies.batch(step)
        strike(Site.BATCH, pack_step, one("batch", batch))
        self._see(FORWARD, Site.BATCH, "batch", batch.double())
        parts, weights = copies.what_trains(batch, step, step)
        for name in copies.layout.by_name:
            self._see(FORWARD, Site.WEIGHT, name, copies.layout.view(copies.weights, name))
        copies.model.stand_at(step)  # not `begin`: what that moves has been moved in this step
        _, stale = copies.routes(step)
        if copies.stale_routing and stale is not None:
            copies.stale_routing.begin(copies.objective.forward, parts, None, stale, copies.active)
        parts = copies.objective.rolled_out(parts)
        copies.model.taps.attach_to_rows("*", self._read)
        self._listen_to_loss()
        losses = []
        with self._origins:
            for rank, part in copies.ranks.parts(parts):
                self._rank, of_part = rank, None if weights is None else copies.ranks.part(weights, rank)
                losses.append(copies.learn(part, of_part, strike.at_taps(pack_step, rank), rank))
                strike.at_gradient(pack_step, rank)
                self._see_gradients(Site.GRADIENT)
                copies.ranks.add(copies.gradients)
            copies.ranks.finish(copies.gradients)
            copies.unscale()
        self._rank = 0
        self._see_gradients(Site.REDUCED_GRADIENT)
        strike(Site.REDUCED_GRADIENT, pack_step, partial(copies.tensors, copies.gradients))
        self._see_gradients(Site.REDUCED_GRADIENT)
        loss = copies.ranks.mean(losses).where(copies.objective.trains, 0.0)
        ends = torch.isfinite(loss) & torch.isfinite(copies.gradients).all(1)
        self.readings.spared = bool(ends[1])

    _rank = 0

    def _see(self, direction: str, site: str, tensor: str, copies: Tensor) -> None:
        readings = self.readings
        readings.see(lambda index: Place(direction, site, tensor, index, self._rank), copies, self._origins)
        if readings.first is not None:
            self._origins.close()
            if readings.difference is None:
                raise _Found

    def _see_gradients(self, site: Site) -> None:
        with self._origins.quiet():
            for name in self.copies.layout.by_name:
                self._see(BACKWARD, site, name, self.copies.layout.view(self.copies.gradients, name))

    def _listen_to_loss(self) -> None:
        plain = self.copies.loss

        def loss(*arguments: Any) -> Tensor:
            value = plain(*arguments)
            with self._origins.quiet():
                self._see(FORWARD, LOSS, LOSS, value.detach())
            return value

        self.copies.loss = loss  # type: ignore[method-assign, assignment]

    def _read(self, name: str, x: Tensor, rows: slice) -> None:
        with self._origins.quiet():
            self._see(FORWARD, Site.ACTIVATION, name, x.detach())
        if x.requires_grad:
            x.register_hook(partial(self._read_gradient, name, self._rank))

    def _read_gradient(self, name: str, rank: int, gradient: Tensor) -> None:
        with self._origins.quiet():
            self._see(BACKWARD, Site.ACTIVATION_GRADIENT, name, gradient)

    def _written(self, result: Tensor) -> None:
        """Something is not finite: perhaps a gradient, before those of earlier activations are computed."""
        if result.untyped_storage().data_ptr() == self.copies.gradients.untyped_storage().data_ptr():
            self._see_gradients(Site.GRADIENT)
