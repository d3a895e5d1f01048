"""What goes wrong between data-parallel ranks: gradients that come late, are missing or are added differently.

A rank's gradient that is corrupted or partly NaN is a value fault at the site `gradient`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.config import PER_TRIAL, anything, choice, number
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault, matching
from harness.model.formats import FORMATS
from harness.training.ranks import Communicator
from harness.training.sites import Event, Site, SiteCall
from injectors.fault import Strike, optimizers_with, replaced, too_late, wrong_rank

Tensors = Mapping[str, Tensor]


def _copy(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class StaleGradient(InjectableFault):
    """A rank hands in the gradient that it had `late` steps ago, as in asynchronous training.

    Chen et al. 2016, arXiv 1604.00981.
    """

    kind: str = "stale_gradient"
    start: int = number(PER_TRIAL, 100, "first step with a stale gradient", low=0)
    rank: int = number(PER_TRIAL, 0, "data-parallel rank", low=0)
    late: int = number(PER_TRIAL, 1, "steps by which it is late", low=1)

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from wrong_rank(self.rank, facts)
        yield from too_late(self.late, self.start)

    def arm(self, facts: Facts) -> Stale:
        return self.armed(Stale, Site.GRADIENT, facts, Site.GRADIENT, self.late, rank=self.rank, late=self.late)


@dataclass(kw_only=True)
class Stale(Strike):
    """Keeps the gradients of the last `late` steps, and those before the first strike for when that comes again.

    After a rollback into the strikes, a gradient that is not kept any more is handed in fresh.
    """

    rank: int
    late: int
    _kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def memory(self) -> dict[str, Tensor]:
        return {f"{step} {name}": values for step, kept in self._kept.items() for name, values in kept.items()}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._kept = {}
        for key, values in memory.items():
            step, _, name = key.partition(" ")
            self._kept.setdefault(int(step), {})[name] = values

    def visit(self, site_call: SiteCall) -> list[Event]:
        if site_call.rank != self.rank:
            return []
        if (site_call.site, site_call.step) in self.looks:
            # Where several optimizers step in turn, each visit has the gradients of one.
            self._kept.setdefault(site_call.step, {}).update(_copy(site_call.tensors))
        for step in [step for step in self._kept if self.steps.start <= step < site_call.step - self.late]:
            del self._kept[step]
        old = self._kept.get(site_call.step - self.late, {})
        here = {name: tensor for name, tensor in site_call.tensors.items() if name in old}
        if site_call.step not in self.steps or not here:
            return []
        return replaced(site_call, here, old)


@dataclass(frozen=True)
class DroppedRank(InjectableFault):
    """A rank's gradient is lost: it counts as zero, or the mean is taken over the ranks that are left.

    Chen et al. 2016, arXiv 1604.00981.
    """

    kind: str = "dropped_rank"
    start: int = number(PER_TRIAL, 100, "first step without the rank", low=0)
    rank: int = number(PER_TRIAL, 0, "data-parallel rank", low=0)
    rescale: bool = anything(PER_TRIAL, False, "take the mean over the ranks that are left")

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from wrong_rank(self.rank, facts)
        if self.rescale and facts.ranks == 1:
            left = f"no rank is left of {facts.said('train.ranks', 1)}"
            yield f"fault.rescale=true: {left}; allowed: false, or more ranks"

    def arm(self, facts: Facts) -> Dropped:
        others = facts.ranks / (facts.ranks - 1) if self.rescale else 1.0
        return self.armed(Dropped, Site.GRADIENT, facts, rank=self.rank, others=others)


@dataclass(kw_only=True)
class Dropped(Strike):
    """Zeroes one rank, and multiplies the others by a factor."""

    rank: int
    others: float

    def strike(self, site_call: SiteCall) -> list[Event]:
        if site_call.rank != self.rank:
            for tensor in site_call.tensors.values() if self.others != 1 else ():
                tensor.mul_(self.others)
            return []
        return replaced(
            site_call, site_call.tensors, {name: torch.zeros_like(x) for name, x in site_call.tensors.items()}
        )


@dataclass(frozen=True)
class Reduction(InjectableFault):
    """The gradients of the ranks are added in another order, or in a narrower format, than everybody else's.

    Shanmugavelu et al. 2024, arXiv 2408.05148.
    """

    kind: str = "reduction"
    start: int = number(PER_TRIAL, 100, "first step with the other reduction", low=0)
    order: str = choice(PER_TRIAL, "sequential", "order of the sum", "sequential", "reversed", "pairwise")
    format: str = choice(PER_TRIAL, "bf16", "format of the running sum", *FORMATS)

    def refused(self, facts: Facts) -> Iterator[str]:
        if facts.ranks == 1:
            yield f"{facts.said('train.ranks', 1)}: nothing to add; allowed with fault=reduction: 2 or more"

    def arm(self, facts: Facts) -> OtherSum:
        adder = Communicator(facts.ranks, self.order, self.format)
        made = self.armed(OtherSum, Site.REDUCED_GRADIENT, facts, Site.GRADIENT, adder=adder)
        if not facts.has_loss_scale:
            return made
        return replace(made, looks=(*made.looks, *((Site.LOSS_SCALE, step) for step in made.steps)))


@dataclass(kw_only=True)
class OtherSum(Strike):
    """Keeps the gradients of all ranks for the length of a step, and the scale of the loss that is still in them."""

    adder: Communicator
    _scale: float = 1.0
    _parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # of this step

    def look(self, site_call: SiteCall) -> None:
        if site_call.site == Site.LOSS_SCALE:
            self._scale = site_call.tensors["loss_scale"].item()
        else:
            self._parts[site_call.rank] = _copy(site_call.tensors)

    def strike(self, site_call: SiteCall) -> list[Event]:
        means = {name: torch.empty_like(tensor) for name, tensor in site_call.tensors.items()}
        for name, mean in means.items():
            for rank in self.adder.sequence():
                self.adder.add(self._parts[rank][name])
            self.adder.finish(mean)
            mean /= self._scale
        self._parts.clear()
        return replaced(site_call, site_call.tensors, means)


@dataclass(frozen=True)
class MissedUpdate(InjectableFault):
    """An optimizer shard misses its updates: its weights and moments stay as they were.

    The shard is all elements of the tensors that match, or one of `shards` equal slices of them. What all shards share
    goes on: the optimizer's step count, and the numbers that it keeps of whole tensors.
    Such shards: cf. Rajbhandari et al. 2019, arXiv 1910.02054.
    """

    kind: str = "missed_update"
    start: int = number(PER_TRIAL, 100, "first update that is missed", low=0)
    tensor: str = anything(PER_TRIAL, "*", "glob over tensor names")
    layer: int | None = number(PER_TRIAL, None, "block of the tensors; null: any", low=0)
    shards: int = number(PER_TRIAL, 1, "slices into which the matching elements are cut", low=1)
    shard: int = number(PER_TRIAL, 0, "the slice that misses the update", low=0)

    def asks(self) -> tuple[str, ...]:
        return ("slots",)

    def _matching(self, facts: Facts) -> tuple[list[str], list[int]]:
        """The tensors of which the shards are, and how many elements each has."""
        names = matching("fault.tensor", self.tensor, facts.tensors, self.layer)
        return names, [math.prod(facts.tensors[name]) for name in names]

    def refused(self, facts: Facts) -> Iterator[str]:
        if not facts.slots:
            why = f"keeps no moment element by element that fault.kind={self.kind} could leave as it was"
            allowed = optimizers_with("moment_1", facts) or "an optimizer that does"
            yield f"{facts.said('optim.name', facts.optimizer)}: {why}; allowed: {allowed}"
        total = sum(self._matching(facts)[1])
        if self.shards > total:
            yield f"fault.shards={self.shards}: more than elements; allowed: 1 to {total}"
        elif self.shard >= self.shards:
            yield f"fault.shard={self.shard}: beyond fault.shards={self.shards}; allowed: 0 to {self.shards - 1}"

    def arm(self, facts: Facts) -> Missed:
        names, sizes = self._matching(facts)
        first, last = (sum(sizes) * number // self.shards for number in (self.shard, self.shard + 1))
        slices, end = {}, 0
        for name, size in zip(names, sizes, strict=True):
            start, end = end, end + size
            if start < last and end > first:
                slices[name] = slice(max(first - start, 0), min(last - start, size))
        arrays = ("", *(f"{slot}:" for slot in facts.slots))
        return self.armed(Missed, Site.UPDATE, facts, Site.BEFORE_UPDATE, slices=slices, arrays=arrays)


@dataclass(kw_only=True)
class Missed(Strike):
    """Puts the shard back to what it was before the optimizer step."""

    slices: dict[str, slice]
    arrays: tuple[str, ...]  # what stands before a tensor's name: nothing for its weights, `moment_1:`
    _before: dict[str, Tensor] = field(default_factory=dict)  # of this step

    def _shard(self, site_call: SiteCall) -> dict[str, Tensor]:
        keys = [(f"{array}{name}", part) for array in self.arrays for name, part in self.slices.items()]
        # Where several optimizers share the tensors, not each of these has every array.
        return {key: site_call.tensors[key].view(-1)[part] for key, part in keys if key in site_call.tensors}

    def look(self, site_call: SiteCall) -> None:
        self._before = _copy(self._shard(site_call))

    def strike(self, site_call: SiteCall) -> list[Event]:
        shard = {key: values for key, values in self._shard(site_call).items() if key in self._before}
        return replaced(site_call, shard, self._before) if shard else []
