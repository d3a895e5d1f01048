"""Shows the injectors that are due the rows of their trials, at every site of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from harness.pack import Pack
from harness.sites import AT_TAPS, Agenda, Site, Visit

Tensors = Callable[[int], Mapping[str, Tensor]]  # row -> tensors by name


class Strikes:
    """Nothing due: a look-up in a dictionary. Something due: the host waits for the device."""

    def __init__(self, pack: Pack, agenda: Agenda):
        self.pack, self.agenda = pack, agenda

    def __call__(self, site: Site, step: int, tensors: Tensors, rank: int = 0) -> None:
        """Let the injectors that are due at this site strike."""
        for planned in self.agenda.due(site, step):
            row = self.pack.row_of(planned)
            if row is not None:
                self.agenda.visit(planned, Visit(site, step, tensors(row), rank))

    @contextmanager
    def at_taps(self, step: int, rank: int) -> Iterator[None]:
        """For one forward and backward pass: the same for activations and their gradients."""
        detach = []
        for site in AT_TAPS:
            for planned in self.agenda.due(site, step):
                row = self.pack.row_of(planned)
                if row is None:
                    continue
                for name in self.agenda.taps(planned):
                    strike = partial(self._strike, site, planned, row, step, rank)
                    # First, so that telemetry reads what the model goes on with.
                    detach.append(self.pack.model.taps.attach(name, strike, first=True))
        try:
            yield
        finally:
            for undo in detach:
                undo()

    def _strike(self, site: Site, planned: int, row: int, step: int, rank: int, name: str, x: Tensor) -> None:
        part = self.pack.part
        if not part.start <= row < part.stop:
            return
        row -= part.start
        if site == Site.ACTIVATION:
            # In place and out of autograd's sight, as a fault of the memory is: the gradient passes straight through.
            self.agenda.visit(planned, Visit(site, step, {name: x.data[row]}, rank))
            return

        def change(gradient: Tensor) -> Tensor:
            # Other branches of the graph may be given the same array. Not so at the logits, where the backward pass
            # begins and memory is at its peak: their gradient comes from the loss alone.
            changed = gradient if name == "logits" else gradient.clone()
            self.agenda.visit(planned, Visit(site, step, {name: changed[row]}, rank))
            return changed

        x.register_hook(change)


def one(name: str, values_R: Tensor) -> Tensors:
    """A single tensor [R, ...] under a name."""
    return lambda row: {name: values_R[row]}
