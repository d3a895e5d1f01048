"""Steps that are recorded once and replayed: on a GPU a small model's step is hundreds of kernels of some microseconds,
which one launch of a CUDA graph starts faster than the host could one by one.

What changes from step to step is fed (harness/training/passes.py) or is state on the device. What the host has to do in
a step is done as ever: a step that is struck, steps of rows that stand apart, and what else `Graphs` says. The kernels
are the same, so a run in which both are mixed has the same bits.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from harness.config import Trial
from harness.objectives.table import OBJECTIVES
from harness.training.blocks import Found
from harness.training.clock import Tick
from harness.training.passes import Fed, Passes

T = TypeVar("T")
USUAL_BEFORE = 3  # steps of a kind that are taken as ever before one is recorded: what is made once is then there
WIDEST = 512  # features of a model whose steps are replayed: kernels of larger ones take longer than their launches


def may_replay(trial: Trial) -> bool:
    """Whether steps of a trial are worth it, and its objective says that they may be replayed."""
    return OBJECTIVES[trial.objective.name].may_replay and trial.model.width <= WIDEST


class Recording(Protocol):
    """Operations that were recorded, on tensors that stay where they are."""

    def record(self, function: Callable[[], T]) -> T:
        """What the function returns, whose operations are recorded and not done. Called once."""

    def replay(self) -> None:
        """Do them, on what those tensors hold now."""


class CudaRecordings:
    """Makes CUDA graphs, which share their memory: no two of them are replayed at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> Recording:
        return _CudaGraph(self._pool)


def recordings(device: torch.device) -> CudaRecordings | None:
    """What makes recordings of steps on a device, for `train`; None where none are made."""
    return CudaRecordings() if device.type == "cuda" else None


class _CudaGraph:
    def __init__(self, pool: Any):
        self._pool, self._graph = pool, torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], T]) -> T:
        with torch.cuda.graph(self._graph, pool=self._pool):
            return function()

    def replay(self) -> None:
        self._graph.replay()


@dataclass
class _Known:
    """A recorded step: where it reads what it is fed, and leaves what it found."""

    recording: Recording
    fed: Fed
    found: Found


class Graphs:
    """The steps of a pack, replayed where they can be. `make` makes recordings.

    The host has to be there where something is struck, at the first step, where rows stand at different steps, while
    batches grow, where a remedy changes gradients, where ranks are processes, where somebody reads a tap on the host or
    a reading waits for the device, and for an objective that does not say that it may be replayed. After rows have come
    or gone, or settings have changed, all is recorded anew.
    """

    def __init__(self, passes: Passes, make: Callable[[], Recording]):
        self._passes, self._pack, self._make = passes, passes.pack, make
        self._known: dict[Any, _Known] = {}
        self._usual: Counter[Any] = Counter()  # steps of each kind that were taken as ever
        self._bound = -1
        self.replayed = 0
        self._is_on = may_replay(self._pack.planned[0])

    def train(self, tick: Tick, fed: Fed) -> Found:
        """As `Passes.train`; what it returns holds until the next call."""
        if self._bound != self._pack.bound:
            self._known.clear()
            self._usual.clear()
            self._bound = self._pack.bound
        kind = self._kind(tick, fed) if self._is_on else None
        if kind is not None and kind not in self._known and self._usual[kind] >= USUAL_BEFORE:
            self._record(kind, tick, fed)
        known = self._known.get(kind)
        if known is None:
            self._usual[kind] += 1
            return self._passes.train(tick, fed)
        for field in fields(Fed):
            stays, now = getattr(known.fed, field.name), getattr(fed, field.name)
            if now is not None:
                stays.copy_(now)
        known.recording.replay()
        self.replayed += 1
        return known.found

    def _kind(self, tick: Tick, fed: Fed) -> Any:
        """Equal for steps of which one can be replayed as the other; None: not to be replayed."""
        pack = self._pack
        read = self._passes.recorder.kind(tick)
        is_apart, grows = tick.trains is not None, tick.size < pack.curriculum.grown
        if read is None or is_apart or grows or pack.ranks.processes > 1 or pack.model.taps.on_host:
            return None
        if self._passes.strike.is_due(tick) or (pack.remedies and pack.remedies.embeddings(pack.rows)):
            return None
        return read, fed.batch.shape, fed.weights is None

    def _record(self, kind: Any, tick: Tick, fed: Fed) -> None:
        given = {field.name: getattr(fed, field.name) for field in fields(Fed)}
        kept = Fed(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()})
        recording = self._make()
        try:
            found = recording.record(lambda: self._passes.train(tick, kept))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"a step could not be recorded, and none is replayed: {reason}", stacklevel=2)
            self._pack.ranks.forget()
            self._known.clear()
            self._is_on = False
            return
        self._known[kind] = _Known(recording, kept, found)
