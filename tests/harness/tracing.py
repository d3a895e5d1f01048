"""A step of a pack without data, on torch's `meta` device, as an accelerator takes it: each of its operations.

On that device nothing has a value, so whatever would make the host wait raises by itself. What would not are operands
of two devices, and values that come from the host in the midst of a step: those raise here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from harness.config import Trial
from harness.incidents.guard_runner import GuardRunner
from harness.loop.passes import Passes
from harness.testing import engine
from harness.training.pack import Pack
from harness.training.row_steps import PackStep
from harness.training.signals import Recorder
from harness.training.sites import FaultSchedule
from harness.training.strikes import Strikes

META = torch.device("meta")
BLOCK = 1000  # steps, so that the host does not look at any that is traced


class FromHost(Exception):
    """A value of the host would be baked into a step, or waited for."""


@dataclass(frozen=True)
class Operation:
    """Its name, the shapes, types and strides of its tensors, and all its other arguments."""

    name: str
    tensors: tuple[Any, ...]
    others: tuple[Any, ...]


class _NoNumbers(TorchFunctionMode):
    """Raises FromHost for tensors that are made on the device of Python's numbers: what does so waits on CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == META:
            raise FromHost(f"{function} of {args}")
        return function(*args, **kwargs)


class Trace(TorchDispatchMode):
    """Notes every operation; raises FromHost for one with an operand of another device.

    Where a step is fed and kept, it `may_send` what lies in main memory, if the host does not wait for that.
    """

    def __init__(self, may_send: bool = False) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._may_send, self._numbers = may_send, _NoNumbers()

    def __enter__(self) -> Trace:
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, _ = tree_flatten((args, kwargs or {}))
        tensors = [x for x in given if isinstance(x, Tensor)]
        if self._may_send and all(x.device.type == "cpu" for x in tensors) and tensors:
            is_sent = function is torch.ops.aten._to_copy.default and bool((kwargs or {}).get("non_blocking"))
            if is_sent or torch.device((kwargs or {}).get("device") or "cpu").type == "cpu":
                return function(*args, **(kwargs or {}))
        if any(x.device.type != "meta" for x in tensors):
            raise FromHost(f"{function} of {[(x.device.type, tuple(x.shape)) for x in tensors]}")
        shapes = tuple((tuple(x.shape), x.dtype, x.stride()) for x in tensors)
        others = tuple(repr(x) for x in given if not isinstance(x, Tensor))
        self.operations.append(Operation(str(function), shapes, others))
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Traced:
    """One step: what is done to feed it, the step itself, and what is done to keep what it came to."""

    fed: list[Operation]
    trained: list[Operation]
    kept: list[Operation]

    @property
    def all(self) -> list[Operation]:
        return [*self.fed, *self.trained, *self.kept]


def steps_of(
    trials: Sequence[Trial], steps: Sequence[int], prepare: Callable[[Pack], None] = lambda pack: None
) -> list[Traced]:
    """These steps of a pack that trains from its first on, with all its telemetry and detectors; none is struck."""
    pack = Pack(trials, engine.corpus_of(trials[0]), META)
    prepare(pack)
    fault_schedule = FaultSchedule([None] * len(trials))
    recorder = Recorder(pack, BLOCK, lambda first, signals: None, True)
    answers = GuardRunner(pack, fault_schedule, recorder, True, True)
    passes = Passes(pack, recorder, answers, Strikes(pack, fault_schedule), True, True)
    traced = []
    for step in range(max(steps) + 1):
        pack_step = pack.row_steps.pack_step()
        assert pack_step is not None
        if step not in steps:
            _step(pack_step, pack, recorder, answers, passes, [_Nothing()] * 3)
            continue
        traces = [Trace(may_send=True), Trace(), Trace(may_send=True)]
        _step(pack_step, pack, recorder, answers, passes, traces)
        traced.append(Traced(*(trace.operations for trace in traces)))
    return traced


def pieces_of(trials: Sequence[Trial]) -> list[list[Operation]]:
    """Two pieces of validation of a pack, as they are recorded."""
    pack = Pack(trials, engine.corpus_of(trials[0]), META)
    pack.begin(0)
    windows = pack.objective.held_out(6 * trials[0].model.context).flatten()
    first, *traces = [_Nothing(), Trace(), Trace()]  # what is made once is there after the first
    with torch.no_grad(), pack.model.taps.muted():
        for piece, trace in zip(windows.split(2), (first, *traces), strict=True):
            with trace:
                pack.window_losses(piece, pack.parts[0])
    return [trace.operations for trace in traces if isinstance(trace, Trace)]


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _step(
    pack_step: PackStep, pack: Pack, recorder: Recorder, answers: GuardRunner, passes: Passes, traces: Sequence[Any]
) -> None:
    """As `harness.loop.loop.train` takes it."""
    with traces[0]:
        answers.begin(pack_step)
        fed = passes.feed(pack_step)
    with traces[1]:
        found = passes.train(pack_step, fed)
    with traces[2]:
        recorder.keep(pack_step, found)
        pack.row_steps.done(pack_step)
        assert not recorder.is_due(pack_step)
        answers.settle(pack_step, found.loss, False, False)
