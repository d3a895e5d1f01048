"""Shows the injectors that are due the rows of their trials, at every site of the loop.

Where ranks are processes, what acts on all of them after the mean, or before the batch is cut, is done alike in each.
A strike at a tap is its rank's alone, and the others are told what it did. A strike at a rank's gradient is done by
all, because an injector may look at several ranks; each hands in its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from harness.training.pack import Pack
from harness.training.row_steps import PackStep
from harness.training.sites import AT_TAPS, Event, FaultSchedule, Site, SiteCall

Tensors = Callable[[int], Mapping[str, Tensor]]  # row -> tensors by name


class Strikes:
    """Nothing due: a look-up in a dictionary. Something due: the host waits for the device."""

    def __init__(self, pack: Pack, fault_schedule: FaultSchedule):
        self.pack, self.fault_schedule = pack, fault_schedule
        self._struck: list[tuple[int, list[Event]]] = []  # at taps, since the pass began

    def __call__(self, site: Site, pack_step: PackStep, tensors: Tensors) -> None:
        """Let the injectors that are due at this site strike."""
        for planned, row, step in self.due(site, pack_step):
            self.fault_schedule.visit(planned, SiteCall(site, step, tensors(row)))

    def at(self, pack_step: PackStep) -> StepStrikes:
        """The same at the sites of one step."""
        return StepStrikes(self, pack_step)

    def is_due(self, pack_step: PackStep) -> bool:
        """Whether anything strikes, or looks, between the batch and the end of these steps."""
        at_once = (site for site in Site if site not in (Site.LEARNING_RATE, Site.BATCH))
        return any(self.due(site, pack_step) for site in at_once)

    def due(self, site: Site, pack_step: PackStep) -> list[tuple[int, int, int]]:
        """The trials that are visited here and now, their rows, and the steps that their injectors are told.

        These are the steps at which the rows stand, and of a batch the step for which it was planned.
        """
        pack, interventions = self.pack, self.pack.interventions
        due = [(planned, step, step) for step in pack_step.groups for planned in self.fault_schedule.due(site, step)]
        if interventions:
            if site == Site.BATCH:
                due = [each for each in due if not interventions.batches(each[0])]
                ahead = [(n, step, step + interventions.batches(n)) for n, step in self._read_ahead(pack_step)]
                due += [each for each in ahead if self.fault_schedule.is_due(each[0], site, each[2])]
            due = [each for each in due if interventions.strikes(each[0], self.fault_schedule.is_of_data(each[0]))]
        here = ((planned, pack.row_of(planned), step, told) for planned, step, told in due)
        return [
            (planned, row, told)
            for planned, row, step, told in here
            if row is not None and row in pack_step.groups[step]
        ]

    def _read_ahead(self, pack_step: PackStep) -> list[tuple[int, int]]:
        """The trials with faults that read other batches than the planned ones, and where they stand."""
        rows = ((self.pack.rows[row], step) for step, rows in pack_step.groups.items() for row in rows)
        return [(n, step) for n, step in rows if n in self.fault_schedule.armed and self.pack.interventions.batches(n)]

    def at_gradient(self, pack_step: PackStep, rank: int) -> None:
        """The same for a rank's gradients, right after its backward pass."""
        if due := self.due(Site.GRADIENT, pack_step):
            _, rows, _ = zip(*due, strict=True)
            for each, flat, places in self.pack.ranks.at_gradient(rank, self.pack.gradients, rows):
                for (number, _, step), place in zip(due, places, strict=True):
                    self.fault_schedule.visit(
                        number, SiteCall(Site.GRADIENT, step, self.pack.tensors(flat, place), each)
                    )

    @contextmanager
    def at_taps(self, pack_step: PackStep, rank: int) -> Iterator[None]:
        """For one forward and backward pass: the same for activations and their gradients."""
        due = [(site, *visited) for site in (*AT_TAPS, Site.ROUTING) for visited in self.due(site, pack_step)]
        detach = []
        for site, planned, row, step in due:
            for name in self.fault_schedule.armed[planned].taps:
                strike = partial(self._strike, site, planned, row, step, rank)
                # First, so that telemetry reads what the model goes on with.
                detach.append(self.pack.model.taps.attach_to_rows(name, strike, first=True))
        try:
            yield
        finally:
            for undo in detach:
                undo()
        if not due:
            return
        # Keep what this process's ranks, and those of others, have done at taps.
        has_others, struck = self.pack.ranks.processes > 1, [each for each in self._struck if each[1]]
        self._struck.clear()
        armed = self.fault_schedule.armed
        told = [(planned, events, dict(armed[planned].memory) if has_others else {}) for planned, events in struck]
        for planned, events, memory in self.pack.ranks.told(told):
            self.fault_schedule.note(planned, events)
            if has_others:
                armed[planned].recall(memory)

    def _strike(
        self, site: Site, planned: int, row: int, step: int, rank: int, name: str, x: Tensor, rows: slice
    ) -> None:
        if not rows.start <= row < rows.stop:
            return
        row -= rows.start
        if site in (Site.ACTIVATION, Site.ROUTING):
            # In place and out of autograd's sight, as a fault of the memory is: the gradient passes straight through.
            self._visit(planned, SiteCall(site, step, {name: x.data[row]}, rank))
            return

        def change(gradient: Tensor) -> Tensor:
            # Other branches of the graph may be given the same array. Not so at the logits, where the backward pass
            # begins and memory is at its peak: their gradient comes from the loss alone.
            changed = gradient if name == "logits" else gradient.clone()
            self._visit(planned, SiteCall(site, step, {name: changed[row]}, rank))
            return changed

        x.register_hook(change)

    def _visit(self, planned: int, site_call: SiteCall) -> None:
        self._struck.append((planned, self.fault_schedule.armed[planned].visit(site_call)))


@dataclass(frozen=True)
class StepStrikes:
    """`harness.policy.rows.SiteStrikes` of one step."""

    of: Strikes
    pack_step: PackStep

    def __call__(self, site: Site, tensors: Tensors) -> None:
        self.of(site, self.pack_step, tensors)

    def is_due(self, site: Site) -> bool:
        return bool(self.of.due(site, self.pack_step))


def one(name: str, values_R: Tensor) -> Tensors:
    """A single tensor [R, ...] under a name."""
    return lambda row: {name: values_R[row]}
