"""Steps and pieces of validation that are recorded once and replayed.

For a small model either is hundreds of kernels of some microseconds on a GPU. One launch of a CUDA graph starts them
faster than the host could one by one.

What changes from step to step is fed (harness/loop/passes.py) or is state on the device, and from piece to piece
only which windows are read. What the host has to do in a step is done as ever: a step that is struck, steps of rows
that stand apart, and what else `Graphs` says. The kernels are the same, so a run in which both are mixed has the same
bits.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from harness.config import Trial
from harness.loop.passes import Fed, Passes
from harness.objectives.table import OBJECTIVES
from harness.training.blocks import Found
from harness.training.pack import Pack
from harness.training.row_steps import PackStep

T = TypeVar("T")
WIDEST = 1024  # features of a model whose steps are replayed: kernels of larger ones take longer than their launches
USUAL_BEFORE = 1  # of a kind that are done as ever before one is recorded: what is made once is then there


def may_replay(trial: Trial) -> bool:
    """Whether steps of a trial are worth it, and its objective says that they may be replayed."""
    return OBJECTIVES[trial.objective.name].may_replay and trial.model.width <= WIDEST


class Recording(Protocol):
    """Operations that were recorded, on tensors that stay where they are."""

    def record(self, function: Callable[[], T]) -> T:
        """What the function returns, whose operations are recorded and not done. Called once."""

    def replay(self) -> None:
        """Do them, on what those tensors hold now."""


class _Memory:
    """Of CUDA graphs: as long as one of them is there."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class CudaRecordings:
    """Makes CUDA graphs, which share their memory: a replay may overwrite what another one has left.

    Where none is left, the next one begins with memory of its own: what the old ones found may still be read.
    """

    def __init__(self) -> None:
        self._memory: Callable[[], _Memory | None] = lambda: None

    def __call__(self) -> Recording:
        memory = self._memory() or _Memory()
        self._memory = weakref.ref(memory)
        return _CudaGraph(memory)


def recordings(device: torch.device) -> CudaRecordings | None:
    """What makes recordings on a device, for `train`; None where none are made."""
    return CudaRecordings() if device.type == "cuda" else None


class _CudaGraph:
    def __init__(self, memory: _Memory):
        self._memory, self._graph = memory, torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], T]) -> T:
        # What other threads of this process ask of the device meanwhile is none of it.
        with torch.cuda.graph(self._graph, pool=self._memory.handle, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self._graph.replay()


@dataclass
class _Known:
    """Something recorded: where it reads what it is given, and leaves what it found."""

    recording: Recording
    given: Sequence[Tensor | None]
    found: Any


class Graphs:
    """The steps of a pack, and the pieces of its validation, replayed where they can be.

    `make` makes recordings; `not_recorded` receives what failed.

    The host has to be there where something is struck, at the first step, where rows stand at different steps, while
    batches grow, where an intervention changes gradients, where somebody reads a tap on the host or a reading waits for
    the device. All of that is of steps, which validation is not part of. Neither is replayed where ranks are processes,
    or for an objective that does not say that it may be. After rows have come or gone, or settings have changed, all is
    recorded anew.
    """

    def __init__(self, pack: Pack, make: Callable[[], Recording], not_recorded: Callable[[str], None]):
        self._pack, self._make, self._not_recorded = pack, make, not_recorded
        self._known: dict[Any, _Known] = {}
        self._usual: Counter[Any] = Counter()  # what was done as ever, by its kind
        self._bound = -1
        self._is_on = may_replay(pack.planned[0])
        self._refused: set[str] = set()  # what could not be recorded: steps, or validation
        self.steps, self.pieces = 0, 0  # that were replayed

    def train(self, passes: Passes, pack_step: PackStep, fed: Fed) -> Found:
        """As `Passes.train`.

        What it returns holds until anything is replayed; `loss` and `trained`, which are looked at after a validation,
        until the next call.
        """

        def step(*given: Any) -> Found:
            return passes.train(pack_step, Fed(*given))

        given = [getattr(fed, field.name) for field in fields(Fed)]
        found = self._replayed(self._kind(passes, pack_step, fed), step, given)
        if found is None:
            return step(*given)
        self.steps += 1
        return replace(found, loss=found.loss.clone())

    def window_losses(self, starts_N: Tensor, rows: slice) -> Tensor:
        """As `Pack.window_losses`, in validation, where nothing is attached to taps.

        What it returns holds until anything is replayed.
        """
        losses_of = partial(self._pack.window_losses, rows=rows)
        found = self._replayed(("piece of validation", rows.start, len(starts_N)), losses_of, [starts_N])
        if found is None:
            return losses_of(starts_N)
        self.pieces += 1
        return found

    def _kind(self, passes: Passes, pack_step: PackStep, fed: Fed) -> Any:
        """Equal for steps of which one can be replayed as the other; None: not to be replayed."""
        pack = self._pack
        read = passes.recorder.kind(pack_step) if self._is_on else None
        is_apart, grows = pack_step.trains is not None, pack_step.size < pack.curriculum.grown
        if read is None or is_apart or grows or pack.model.taps.on_host:
            return None
        if passes.strike.is_due(pack_step) or (pack.interventions and pack.interventions.embeddings(pack.rows)):
            return None
        return "step", read, fed.batch.shape, fed.weights is None

    def _replayed(self, kind: Any, function: Callable[..., T], given: Sequence[Tensor | None]) -> T | None:
        """What the function finds with these, by its recording; None: it has to be called.

        Those of a `kind` do the same, whatever they are given.
        """
        if self._bound != self._pack.bound:
            self._known.clear()
            self._usual.clear()
            self._bound = self._pack.bound
        if kind is None or kind[0] in self._refused or not self._is_on or self._pack.ranks.processes > 1:
            return None
        if kind not in self._known and self._usual[kind] >= USUAL_BEFORE:
            self._record(kind, function, given)
        known = self._known.get(kind)
        if known is None:
            self._usual[kind] += 1
            return None
        for stays, now in zip(known.given, given, strict=True):
            if stays is not None and now is not None:
                stays.copy_(now)
        known.recording.replay()
        return cast(T, known.found)

    def _record(self, kind: Any, function: Callable[..., Any], given: Sequence[Tensor | None]) -> None:
        kept = [None if x is None else x.clone() for x in given]
        recording = self._make()
        try:
            found = recording.record(partial(function, *kept))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._not_recorded(f"a {kind[0]} could not be recorded, and none is replayed: {reason}")
            self._pack.ranks.forget()
            self._refused.add(kind[0])
            self._known = {other: known for other, known in self._known.items() if other[0] != kind[0]}
            return
        self._known[kind] = _Known(recording, kept, found)
