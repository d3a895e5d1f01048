"""All that a step of the user's loop may change, copied and put back bit for bit."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.config import ConfigError
from harness.user_loop.loop_state import LoopState
from harness.user_loop.named_tensors import NamedTensors, raw_bytes
from harness.user_loop.streams import Streams, generator_state, set_streams, streams
from harness.user_loop.structure import IMMUTABLE, Structure


@dataclass
class Around:
    """What stands around the arrays: parameter groups without their parameters, extras, random streams, structure."""

    groups: list[list[dict[str, Any]]]  # of each optimizer
    extras: list[Any]
    streams: Streams
    structure: Structure


@dataclass
class Snapshot:
    """What model, optimizers, extras, random streams and the loop's carried values were before a step.

    `gradients` are those that the next step adds to; None where a step clears them first. `loader` is the number of
    the loader that the loop goes through, and `is_before_loader` says that it was not opened yet.
    """

    step: int
    tensors: dict[str, Tensor]
    optimizers: list[list[tuple[Any, dict[Any, Any]]]]  # of each, what it keeps by key
    around: Around | None  # None: of the arrays alone
    lacks_gradient: set[str] = field(default_factory=set)
    gradients: dict[str, Tensor] | None = None
    carried: dict[str, Any] = field(default_factory=dict)
    loader: int = 0
    is_before_loader: bool = False


class Keeper:
    """Takes snapshots and puts them back, in place, so that whoever refers to a tensor goes on with it.

    Of tensors, model and optimizers; `extras` are objects with state_dict and load_state_dict, or random generators of
    torch, numpy or Python. Raises ConfigError for one that is neither.
    """

    def __init__(self, places: NamedTensors, extras: Sequence[Any], loop: LoopState, on_host: bool = False):
        self._places, self._loop, self._on_host = places, loop, on_host
        self._extras = [_adapted(n, x) for n, x in enumerate(extras)]

    def _live(self) -> dict[str, Tensor]:
        places = self._places
        buffers = {f"buffer {name}": x for name, x in places.buffers.items()}
        return {**places.weights, **buffers, **places.outside}

    def take(self, step: int, into: Snapshot | None = None, with_gradients: bool = False) -> Snapshot:
        """A copy of all there is; the memory of `into` is used again where it fits."""
        self._places.refresh()
        weights = self._places.weights
        gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
        return replace(
            self.take_arrays(step, into),
            around=self.around(),
            lacks_gradient={name for name in weights if name not in gradients},
            gradients={name: g.detach().clone() for name, g in gradients.items()} if with_gradients else None,
            carried=self._loop.carried,
            loader=self._loop.loader,
        )

    @torch.no_grad()
    def take_arrays(self, step: int, into: Snapshot | None = None, like: Snapshot | None = None) -> Snapshot:
        """A copy of weights, buffers and what the optimizers keep; the latter is what `like` has of it, if given."""
        copies = Copies(self._on_host)
        tensors = copies.of(self._live(), into.tensors if into else {})
        states = like.optimizers if like else self._copied_states(copies, into.optimizers if into else [])
        copies.make()
        return Snapshot(step, tensors, states, None)

    def _copied_states(self, copies: Copies, memory: Sequence[Any]) -> list[list[tuple[Any, dict[Any, Any]]]]:
        spares = [dict(kept) for kept in memory]
        spares += [{} for _ in self._places.optimizers[len(spares) :]]
        return [
            [(key, copies.of(kept, spares[n].get(key, {}))) for key, kept in optimizer.state.items()]
            for n, optimizer in enumerate(self._places.optimizers)
        ]

    def around(self) -> Around:
        """What stands around the arrays now."""
        places = self._places
        groups = [
            [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in places.optimizers
        ]
        extras = [copy.deepcopy(extra.state_dict()) for extra in self._extras]
        return Around(groups, extras, streams(), Structure.of(places.built_of, places.optimizers))

    @torch.no_grad()
    def put_around(self, kept: Around, with_structure: bool = True) -> None:
        """Parameter groups, extras and random streams are as they were, and what stands where."""
        if with_structure:
            kept.structure.put_back(self._places.optimizers)
            self._places.refresh()
        for optimizer, groups in zip(self._places.optimizers, kept.groups, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                put_values(group, values)
        for extra, values in zip(self._extras, kept.extras, strict=True):
            extra.load_state_dict(copy.deepcopy(values))
        set_streams(kept.streams)

    @torch.no_grad()
    def put_back(self, kept: Snapshot) -> None:
        """Everything is as it was when the snapshot was taken; gradients are None where they were."""
        assert kept.around is not None
        self.put_around(kept.around)
        self._put_arrays(kept)
        weights = self._places.weights
        for name in kept.lacks_gradient & weights.keys():
            weights[name].grad = None
        for name, gradient in (kept.gradients or {}).items():
            weights[name].grad = gradient.to(weights[name].device, copy=True)
        self._loop.give_back(kept.carried, kept.loader)

    @torch.no_grad()
    def put_back_arrays(self, kept: Snapshot) -> None:
        """Weights, buffers and what the optimizers keep are as they were, and stand where they stood if it is known."""
        if kept.around is not None:
            kept.around.structure.put_back(self._places.optimizers)
            self._places.refresh()
        self._put_arrays(kept)

    def _put_arrays(self, kept: Snapshot) -> None:
        live = self._live()
        for name, values in kept.tensors.items():
            if live[name].shape == values.shape and live[name].dtype == values.dtype:
                live[name].copy_(values)
            else:  # the loop has given it another array
                live[name].data = values.to(live[name].device, copy=True)
        for optimizer, states in zip(self._places.optimizers, kept.optimizers, strict=True):
            restored = dict(states)
            for key in [key for key in optimizer.state if key not in restored]:
                del optimizer.state[key]
            for key, kept_values in states:
                put_values(optimizer.state[key], kept_values)


class StepUndo:
    """What a step changes, so that it can be taken back: all of it, or what its update has changed.

    Buffers are as before the step's forward pass in both. With the update alone, rates, extras and random streams go on
    as if the step had been taken.
    """

    def __init__(self, places: NamedTensors, extras: Sequence[Any], loop: LoopState):
        self._places, self._loop, self._keeper = places, loop, Keeper(places, extras, loop)
        self._kept: Snapshot | None = None
        self._memory: Snapshot | None = None  # of what was kept in an earlier step
        self._has = False

    @torch.no_grad()
    def begin(self, taken: Snapshot | None) -> None:
        """A step begins, of which this snapshot was taken just now, if any was."""
        self.see_buffers()
        self._around = taken.around if taken and taken.around else self._keeper.around()
        self._at = self._loop.carried, self._loop.loader
        self._taken, self._states = taken, StateVersions(self._places.optimizers) if taken else None
        self._has = False

    @torch.no_grad()
    def see_buffers(self) -> None:
        """Buffers are as the forward pass of this step will read them."""
        self._buffers = [(buffer, buffer.clone()) for buffer in self._places.buffers.values()]

    def keep(self) -> None:
        """The update comes next."""
        still = self._taken if self._states and self._states.hold() else None
        own = self._memory.optimizers if self._memory else []
        self._kept, self._has = self._keeper.take_arrays(-1, self._memory, like=still), True
        # What `taken` has is lent: it is no memory for a later step.
        self._memory = replace(self._kept, optimizers=own) if still else self._kept

    @torch.no_grad()
    def take_back(self) -> None:
        """The update was not made."""
        if self._has and self._kept is not None:
            self._keeper.put_back_arrays(self._kept)
            self._has = False
        for buffer, values in self._buffers:
            if buffer.shape == values.shape:
                buffer.copy_(values)

    def take_all_back(self) -> None:
        """Nor was anything else done in this step."""
        self.take_back()
        self._keeper.put_around(self._around)
        self._loop.give_back(*self._at)


class StateVersions:
    """Whether what optimizers keep is what it was.

    What changes a tensor in place counts up its version, unless it is done through `.data`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]):
        self._optimizers = optimizers
        self._objects, self._versions = self._now()

    def _now(self) -> tuple[list[Any], list[int]]:
        kept = [(key, of) for optimizer in self._optimizers for key, of in optimizer.state.items()]
        objects = [part for key, of in kept for part in (key, *of, *of.values())]
        return objects, [_version(value) for _, of in kept for value in of.values()]

    def hold(self) -> bool:
        """Nothing has changed it, and nothing has taken its place."""
        objects, versions = self._now()
        if versions != self._versions or UNSEEN in versions or len(objects) != len(self._objects):
            return False
        return all(map(operator.is_, objects, self._objects))


UNSEEN = -1  # as a version: whether it was changed cannot be seen


def _version(value: Any) -> int:
    if isinstance(value, Tensor):
        return UNSEEN if value.is_inference() else value._version
    return 0 if isinstance(value, IMMUTABLE) else UNSEEN


class Copies:
    """Copies of many tensors, made at once; on the host with `on_host`."""

    def __init__(self, on_host: bool):
        self._on_host = on_host
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def of(self, live: Mapping[Any, Any], spare: Mapping[Any, Any]) -> dict[Any, Any]:
        """What a mapping has, copied once `make` is called; tensors into those of `spare` where they fit."""
        found = {}
        for key, value in live.items():
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                found[key] = copy.deepcopy(value)
                continue
            old = spare.get(key)
            if not isinstance(old, Tensor) or old.shape != value.shape or old.dtype != value.dtype:
                place = "cpu" if self._on_host else value.device
                old = torch.empty_like(value, device=place, memory_format=torch.preserve_format).detach()
            found[key] = old
            self._targets.append(old)
            self._sources.append(value)
        return found

    def make(self) -> None:
        """Copy."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def _copied(value: Any) -> Any:
    return value if isinstance(value, IMMUTABLE) else copy.deepcopy(value)


def put_values(live: Any, kept: Mapping[Any, Any]) -> None:
    """What a mapping has becomes what was kept of it: tensors in place, other values as copies."""
    for key in [key for key in live if key not in kept and key != "params"]:
        del live[key]
    for key, value in kept.items():
        there = live.get(key)
        if isinstance(value, Tensor) and isinstance(there, Tensor) and there.shape == value.shape:
            there.copy_(value)
        elif isinstance(value, Tensor):
            live[key] = value.clone()
        else:
            live[key] = _copied(value)


def difference(one: Snapshot, other: Snapshot, only_arrays: bool = False) -> str | None:
    """The name of the first thing that is not the same in two snapshots, bit for bit; None: there is none.

    With `only_arrays` of weights, buffers and what the optimizers keep.
    """
    names = [[name for name, _ in _named(each, only_arrays)] for each in (one, other)]
    for (name, value), (its, its_value) in zip(_named(one, only_arrays), _named(other, only_arrays), strict=False):
        if name != its:
            return f"{name} (there is {its} the other time)"
        if not _same(value, its_value):
            return name
    return None if len(names[0]) == len(names[1]) else f"the number of tensors: {len(names[0])} and {len(names[1])}"


def _named(snapshot: Snapshot, only_arrays: bool = False) -> Iterator[tuple[str, Any]]:
    yield from snapshot.tensors.items()
    for number, states in enumerate(snapshot.optimizers):
        for place, (_, kept) in enumerate(states):
            yield from ((f"optimizer {number}, parameter {place}: {name}", value) for name, value in kept.items())
    if only_arrays:
        return
    assert snapshot.around is not None
    groups = [group for of_one in snapshot.around.groups for group in of_one]
    for number, group in enumerate(groups):
        yield from ((f"{name} of parameter group {number}", value) for name, value in group.items())
    for number, values in enumerate(snapshot.around.extras):
        yield f"state of extra[{number}]", values


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and raw_bytes(one) == raw_bytes(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(repr(one) == repr(other))


def _adapted(number: int, extra: Any) -> Any:
    if hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict"):
        return extra
    if (state := generator_state(extra)) is not None:
        return state
    wanted = "objects with state_dict and load_state_dict, such as schedulers and scalers, or random generators"
    raise ConfigError(f"extra[{number}]={type(extra).__name__}: keeps no state; allowed: {wanted}")
