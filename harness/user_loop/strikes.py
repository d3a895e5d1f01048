"""The faults of the user's own run: armed when what they ask for is known, and called where they are due."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.basics.errors import nearest
from harness.config import ConfigError, Problems, shown
from harness.faults.facts import Facts, Shapes
from harness.faults.fault import InjectableFault
from harness.model.formats import real_view
from harness.training.interventions import Interventions
from harness.training.sites import AT_TAPS, Event, FaultSchedule, Site, SiteCall
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.presets import ChosenFault
from harness.user_loop.ranks import Ranks
from harness.user_loop.tokens import as_rows, as_tokens

GIVEN = ("rate", "warmup", "peak", "tokens", "token_counts")  # facts that only the user can know
TOO_EARLY = {
    "taps": "the activations of a model of one's own are known after its first step",
    "slots": "the arrays of an optimizer are known after its first step",
}
OF_ALL_RANKS = (Site.BATCH, Site.LEARNING_RATE, Site.LOSS_SCALE)  # elsewhere a fault is in one process
Tensors = Callable[[], Mapping[str, Tensor]]


class ScheduledFault:
    """One fault, and its schedule once it is armed."""

    def __init__(self, chosen: ChosenFault):
        self.chosen, self.fault = chosen, chosen.fault
        self.fault_schedule: FaultSchedule | None = None
        self.tensors: Shapes = {}  # of the model, among which it strikes
        self.resumed: Any = None  # what it has done before the run was resumed

    @property
    def injector(self) -> Any:
        return self.fault_schedule.armed[0] if self.fault_schedule else None

    @property
    def is_of_data(self) -> bool:
        return self.fault_schedule is not None and self.fault_schedule.is_of_data(0)

    def visit(self, site_call: SiteCall) -> None:
        assert self.fault_schedule is not None
        with torch.no_grad():
            parts = {name: real_view(x) for name, x in site_call.tensors.items()}
            self.fault_schedule.visit(0, dataclasses.replace(site_call, tensors=parts))


class LoopStrikes:
    """Faults by what they ask for. `given` are facts that the user has.

    Raises ConfigError for what can be refused before the first step, and later for what is known only then.
    """

    def __init__(
        self,
        chosen: Sequence[ChosenFault],
        places: NamedTensors,
        given: Mapping[str, Any],
        seed: int,
        interventions: Interventions,
        ranks: Ranks,
        as_written: set[int],
    ):
        """`as_written` takes the steps that have to be run without compilation, because activations are struck."""
        self._places, self._given, self._seed, self._interventions = places, dict(given), seed, interventions
        self._ranks, self._as_written = ranks, as_written
        self._first_elsewhere: int | None = None  # the first change in another process
        self.faults = [ScheduledFault(one) for one in chosen]
        self.facts: Facts | None = None
        self._known = {"has_loss_scale", *(name for name in GIVEN if name in given)}
        self._has_batch = False
        if unknown := [name for name in given if name not in GIVEN]:
            allowed = f"{nearest(unknown[0], GIVEN)}allowed: {', '.join(GIVEN)}"
            raise ConfigError(f"facts.{unknown[0]}={shown(given[unknown[0]])}: unknown; {allowed}")
        problems = Problems()
        for one in self.faults:
            with problems.collect():
                self._check_early(one)
        problems.check()

    def _check_early(self, one: ScheduledFault) -> None:
        """Refuse names that match nothing, and facts that nobody will know."""
        asked = one.fault.asks()
        self._check_samples(one.fault)
        self._check_rank_of_buffers(one.fault)
        if "taps" in asked:
            names = dict.fromkeys(self._places.modules, ())
            one.fault = one.chosen.fitted(names, "module")
        else:
            one.tensors = self._tensors_for(one.fault)
            if one.tensors and _has_tensors(one.fault):
                one.fault = one.chosen.fitted(one.tensors, "tensor")
            if not asked:
                self._check_format(one)
        lacking = [name for name in asked if name in GIVEN and name not in self._known]
        if lacking == ["token_counts"] and self._places.vocabulary:
            return  # counted while batches come
        if lacking:
            why = f"needs {' and '.join(lacking)}, which nobody knows of this run"
            raise ConfigError(f"fault.kind={one.fault.kind}: {why}; allowed: attach(facts={{{lacking[0]!r}: ...}})")

    def _tensors_for(self, fault: InjectableFault) -> Shapes:
        """Those among which it is: buffers, if these are its site; else weights.

        These are the trained ones, or, where none of them fits, frozen ones that an optimizer has.
        """
        if _is_of_buffers(fault):
            return self._places.buffer_shapes
        trained, owned, pattern = self._places.shapes, self._places.owned_shapes, getattr(fault, "tensor", "*")
        is_frozen = not fnmatch.filter(trained, pattern) and fnmatch.filter(owned, pattern)
        return owned if is_frozen else trained

    def _check_rank_of_buffers(self, fault: InjectableFault) -> None:
        """Of several processes, the first may give all of them its buffers."""
        rank = getattr(fault, "rank", 0)
        if rank != 0 and _is_of_buffers(fault) and getattr(self._places.outer, "broadcast_buffers", False):
            why = "DistributedDataParallel gives all processes the buffers of the first before it reads them"
            raise ConfigError(f"fault.rank={rank}: {why}; allowed: 0, which strikes all")

    def _check_format(self, one: ScheduledFault) -> None:
        """Refuse what numbers of the model's own format do not have."""
        facts = Facts(1, one.tensors, formats=self._places.formats, buffers=self._places.buffer_shapes)
        one.fault = one.fault.in_own_format(facts)
        if reasons := list(one.fault.wrong_format(facts)):
            raise ConfigError(*reasons)

    @property
    def known(self) -> set[str]:
        """The facts that are known by now."""
        return set(self._known)

    @property
    def ranks(self) -> int:
        """Processes that train copies of the model."""
        return self._ranks.size

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return self._ranks.rank

    def _check_samples(self, fault: Any) -> None:
        if getattr(fault, "samples", None) is not None:
            raise ConfigError(f"fault.samples={fault.samples}: many faults are for attach.campaign; allowed: null")

    # --- what is known -------------------------------------------------------------------------------------------

    def begin(self, steps: int, has_loss_scale: bool) -> None:
        """A run of so many steps begins."""
        for one in self.faults:
            one.chosen = one.chosen.started(steps)
            if one.fault.start != one.chosen.fault.start:
                start: Any = {"start": one.chosen.fault.start}
                one.fault = dataclasses.replace(one.fault, **start)
        places, known = self._places, {name: self._given[name] for name in GIVEN if name in self._given}
        if "token_counts" not in known and any("token_counts" in one.fault.asks() for one in self.faults):
            known["token_counts"] = np.zeros(places.vocabulary, np.int64)
            self._known.add("token_counts")
        self.facts = Facts(
            steps,
            places.shapes,
            seed=self._seed,
            optimizer=type(places.optimizers[0]).__name__,
            precision="fp64" if places.is_double else "fp32",
            formats=places.formats,
            buffers=places.buffer_shapes,
            has_loss_scale=has_loss_scale,
            ranks=self._ranks.size,
            shape=places.shape_key,
            **known,
        )
        self._learn_slots()
        self._arm(0)

    def _tell(self, step: int, **facts: Any) -> None:
        assert self.facts is not None
        self.facts = dataclasses.replace(self.facts, **facts)
        self._known |= set(facts)
        self._arm(step)

    def _learn_slots(self) -> bool:
        """Whether what the optimizers keep is known now, and was not."""
        if "slots" in self._known or not (slots := tuple(self._places.slots())):
            return False
        assert self.facts is not None
        self.facts = dataclasses.replace(
            self.facts, slots=slots, formats={**self.facts.formats, **self._places.formats}
        )
        self._known.add("slots")
        return True

    def stepped(self, step: int) -> None:
        """The optimizers have taken this step."""
        if self.faults and (self._learn_slots() or "slots" not in self._known):
            self._known.add("slots")  # there may be none
            self._arm(step + 1)

    def learn_from(self, other: LoopStrikes) -> None:
        """What another replay of the same run has come to know; faults are armed."""
        self.facts, self._known, self._has_batch = other.facts, set(other._known), other._has_batch
        self._arm(0)

    def are_over(self, step: int) -> bool:
        """Whether no fault is called after this step."""
        lasts = [one.fault_schedule.last[0] if one.fault_schedule else None for one in self.faults]
        return all(last is None or last <= step for last in lasts)

    def knows_taps(self, shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]) -> None:
        """The model gave these activations before the run was resumed."""
        self.tapped(-1, shapes, formats)

    def tapped(self, step: int, shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]) -> None:
        """The model gives these activations, held in these number formats, as its first pass has shown."""
        assert self.facts is not None
        self._tell(step + 1, taps=dict(shapes), formats={**self.facts.formats, "activation": dict(formats)})

    @property
    def wants_taps(self) -> bool:
        """Whether some fault waits for the shapes of activations."""
        return "taps" not in self._known and any("taps" in one.fault.asks() for one in self.faults)

    def _arm(self, step: int) -> None:
        """Arm the faults of which all that they ask for is known. Raises ConfigError."""
        problems = Problems()
        for one in self.faults:
            if one.fault_schedule is None and set(one.fault.asks()) <= self._known:
                with problems.collect():
                    self._arm_one(one, step)
        problems.check()

    def _arm_one(self, one: ScheduledFault, step: int) -> None:
        assert self.facts is not None
        fault, facts = one.fault, self.facts
        late = next((TOO_EARLY[name] for name in fault.asks() if name in TOO_EARLY and fault.start < step), None)
        if late:
            raise ConfigError(f"fault.start={fault.start}: {late}; allowed: {step} or more")
        if fault.start >= facts.steps:
            raise ConfigError(
                f"fault.start={fault.start}: after the run of {facts.steps} steps; allowed: 0 to {facts.steps - 1}"
            )
        if "taps" in fault.asks():
            fault = one.fault = one.chosen.fitted(facts.taps, "activation")
        elif one.tensors:
            facts = dataclasses.replace(facts, tensors=one.tensors)
        if fault.seed is not None:
            facts = dataclasses.replace(facts, seed=fault.seed)
        fault = one.fault = fault.in_own_format(facts)
        fault.check(facts)
        self._check_ranks(fault, injector := fault.arm(facts))
        one.fault_schedule = FaultSchedule([injector])
        if one.resumed is not None:
            one.fault_schedule.restore(one.resumed)
        self._as_written |= {step for site, step in injector.calls if site in AT_TAPS}

    def _check_ranks(self, fault: InjectableFault, injector: Any) -> None:
        """Of several processes, each sees its own gradients alone, tensor by tensor."""
        is_at_gradient = any(site == Site.GRADIENT for site, _ in injector.calls)
        if self._ranks.size > 1 and is_at_gradient and not getattr(injector, "is_by_tensor", False):
            why = f"has to see the gradients of a rank together, and {self._ranks.size} processes reduce them apart"
            raise ConfigError(f"fault.kind={fault.kind}: {why}; allowed: faults of values, or one process")

    # --- strikes -------------------------------------------------------------------------------------------------

    def due(self, site: Site, step: int) -> Iterator[ScheduledFault]:
        """The faults that are called here and now, and may strike in this process."""
        for one in self.faults:
            is_here = self._ranks.rank == getattr(one.fault, "rank", 0) or site in OF_ALL_RANKS
            is_due = is_here and one.fault_schedule is not None and one.fault_schedule.due(site, step)
            if is_due and self._interventions.strikes(0, one.is_of_data):
                yield one

    def is_due_at(self, step: int) -> bool:
        """Whether some fault that is not of the data is called at this step."""
        return any(any(self.due(site, step)) for site in Site if site != Site.BATCH)

    def is_data_due(self, position: int) -> bool:
        """Whether some fault strikes the batches of this position."""
        return any(
            one.fault_schedule is not None and one.fault_schedule.is_due(0, Site.BATCH, position) for one in self.faults
        )

    def __call__(self, site: Site, step: int, tensors: Tensors) -> None:
        """Let those strike."""
        for one in self.due(site, step):
            if shown := tensors():
                one.visit(SiteCall(site, step, shown, self._ranks.rank if site == Site.GRADIENT else 0))

    def at_taps(self, step: int) -> Iterator[tuple[Site, ScheduledFault, str]]:
        """The activations that are to be struck at this step, or at their gradients."""
        for site in AT_TAPS:
            for one in self.due(site, step):
                for name in one.injector.taps:
                    yield site, one, name

    def batch(self, position: int, batch: Any) -> Any:
        """A batch after the faults of the data, which are at that of a planned step, whenever it is read."""
        asking = [one for one in self.faults if {"batch", "context"} & set(one.fault.asks())]
        if not asking:
            return batch
        if not self._has_batch:
            self._has_batch = True
            self._see(asking, batch)
        self._count(batch)
        for one in asking:
            is_due = one.fault_schedule is not None and one.fault_schedule.is_due(0, Site.BATCH, position)
            if is_due and self._interventions.strikes(0, is_of_data=True):
                read = as_rows if "batch" in one.fault.asks() else as_tokens
                values, put = read(batch, one.fault.name)
                one.visit(SiteCall(Site.BATCH, position, {"batch": values}))
                batch = put(values)
        return batch

    def _see(self, asking: Sequence[ScheduledFault], batch: Any) -> None:
        """The first batch tells how large batches are."""
        of_text = [one for one in asking if "context" in one.fault.asks()]
        rows = as_rows(batch, asking[0].fault.name)[0]
        self._tell(0, batch=len(rows))
        if of_text:
            self._tell(0, context=as_tokens(batch, of_text[0].fault.name)[0].shape[1] - 1)

    def _count(self, batch: Any) -> None:
        """How often each token has come so far, where the user does not say how often it does."""
        if "token_counts" not in self._given and self.facts is not None and len(self.facts.token_counts):
            counts = self.facts.token_counts
            asks = next(one.fault.name for one in self.faults if "token_counts" in one.fault.asks())
            ids = as_tokens(batch, asks)[0].cpu().numpy().reshape(-1)
            counts += np.bincount(ids, minlength=len(counts))[: len(counts)]

    def roll_back(self, reached: int) -> None:
        """The run goes back after having done the steps before `reached`: what was transient does not strike again."""
        for one in self.faults:
            if one.fault_schedule:
                one.fault_schedule.roll_back(0, reached)

    # --- what was done -------------------------------------------------------------------------------------------

    @property
    def events(self) -> list[Event]:
        """What the faults have done, by step."""
        each = (event for one in self.faults if one.fault_schedule for event in one.fault_schedule.events[0])
        return sorted(each, key=lambda event: event.step)

    def total(self, name: str) -> int:
        """Of all faults: `strikes`, or `changes`."""
        return sum(getattr(one.fault_schedule, name)[0] for one in self.faults if one.fault_schedule)

    @property
    def first_change(self) -> int | None:
        """The step of the first strike that changed something; of several processes here alone, until `see_ranks`."""
        steps = [one.fault_schedule.first_change(0) for one in self.faults if one.fault_schedule]
        return min((step for step in [*steps, self._first_elsewhere] if step is not None), default=None)

    def see_ranks(self) -> None:
        """The run is over in all processes, each of which has to ask: `first_change` is that of all of them."""
        self._first_elsewhere = self._ranks.earliest(self.first_change)


def _is_of_buffers(fault: InjectableFault) -> bool:
    return getattr(fault, "site", None) == Site.BUFFER


def _has_tensors(fault: InjectableFault) -> bool:
    """Whether it names tensors of the model."""
    return hasattr(fault, "tensor") and getattr(fault, "site", None) not in (Site.LEARNING_RATE, Site.LOSS_SCALE)
