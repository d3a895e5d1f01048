"""All that a step of somebody's loop may change, copied and put back bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import ConfigError
from harness.own_loop.places import Places, raw_bytes

Streams = dict[str, Any]


@dataclass
class Snapshot:
    """What model, optimizers, extras and random streams were before a step."""

    step: int
    tensors: dict[str, Tensor]
    optimizers: list[list[tuple[Any, dict[Any, Any]]]]  # of each, what it keeps by key
    groups: list[dict[str, Any]]  # without their parameters
    extras: list[Any]
    streams: Streams
    lacks_gradient: set[str] = field(default_factory=set)  # weights whose gradient was None


class Keeper:
    """Takes snapshots and puts them back, in place, so that whoever refers to a tensor goes on with it.

    Of tensors, model and optimizers; `extras` are objects with state_dict and load_state_dict, or random generators of
    torch, numpy or Python. Raises ConfigError for one that is neither.
    """

    def __init__(self, places: Places, extras: Sequence[Any] = (), on_host: bool = False):
        self._places, self._extras, self._on_host = places, [_adapted(n, x) for n, x in enumerate(extras)], on_host

    def _live(self) -> dict[str, Tensor]:
        return {**self._places.weights, **{f"buffer {name}": x for name, x in self._places.buffers.items()}}

    def take(self, step: int, into: Snapshot | None = None) -> Snapshot:
        """A copy of all there is; the memory of `into` is used again where it fits."""
        spare = into.tensors if into else {}
        spares = [dict(kept) for kept in into.optimizers] if into else [{} for _ in self._places.optimizers]
        return Snapshot(
            step,
            self._copies(self._live(), spare),
            [
                [(key, self._copies(kept, spares[n].get(key, {}))) for key, kept in optimizer.state.items()]
                for n, optimizer in enumerate(self._places.optimizers)
            ],
            *_beside(self._places, self._extras),
            {name for name, weight in self._places.weights.items() if weight.grad is None},
        )

    @torch.no_grad()
    def _copies(self, live: Mapping[Any, Any], spare: Mapping[Any, Any]) -> dict[Any, Any]:
        found, targets, sources = {}, [], []
        for key, value in live.items():
            if not isinstance(value, Tensor):
                found[key] = copy.deepcopy(value)
                continue
            old = spare.get(key)
            if not isinstance(old, Tensor) or old.shape != value.shape or old.dtype != value.dtype:
                place = "cpu" if self._on_host else value.device
                old = torch.empty_like(value, device=place, memory_format=torch.preserve_format)
            found[key] = old
            targets.append(old)
            sources.append(value.detach())
        if targets:
            torch._foreach_copy_(targets, sources)
        return found

    @torch.no_grad()
    def put_back(self, kept: Snapshot) -> None:
        """Everything is as it was when the snapshot was taken; gradients are None where they were."""
        self.put_back_arrays(kept)
        for name in kept.lacks_gradient:
            self._places.weights[name].grad = None
        _put_beside(self._places, self._extras, kept.groups, kept.extras, kept.streams)

    @torch.no_grad()
    def put_back_arrays(self, kept: Snapshot) -> None:
        """Weights, buffers and what the optimizers keep are as they were."""
        for name, live in self._live().items():
            live.copy_(kept.tensors[name])
        for optimizer, states in zip(self._places.optimizers, kept.optimizers, strict=True):
            restored = dict(states)
            for key in [key for key in optimizer.state if key not in restored]:
                del optimizer.state[key]
            for key, values in states:
                put_values(optimizer.state[key], values)


class Undo:
    """What a step changes, so that it can be taken back: all of it, or what its update has changed.

    Buffers are as before the step's forward pass in both. With the update alone, rates, extras and random streams go on
    as if the step had been taken.
    """

    def __init__(self, places: Places, extras: Sequence[Any]):
        self._places, self._keeper = places, Keeper(places)
        self._extras = [_adapted(number, extra) for number, extra in enumerate(extras)]
        self._kept: Snapshot | None = None
        self._has = False

    @torch.no_grad()
    def begin(self) -> None:
        """A step begins."""
        self._buffers = {name: buffer.clone() for name, buffer in self._places.buffers.items()}
        self._beside = _beside(self._places, self._extras)
        self._has = False

    def keep(self) -> None:
        """The update comes next."""
        self._kept, self._has = self._keeper.take(-1, self._kept), True

    @torch.no_grad()
    def take_back(self) -> None:
        """The update was not made."""
        if self._has and self._kept is not None:
            self._keeper.put_back_arrays(self._kept)
            self._has = False
        for name, buffer in self._places.buffers.items():
            buffer.copy_(self._buffers[name])

    def take_all_back(self) -> None:
        """Nor was anything else done in this step."""
        self.take_back()
        _put_beside(self._places, self._extras, *self._beside)


def _beside(places: Places, extras: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Any], Streams]:
    """What there is beside arrays: parameter groups without their parameters, extras, random streams."""
    groups = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in places.groups]
    return groups, [copy.deepcopy(extra.state_dict()) for extra in extras], streams()


@torch.no_grad()
def _put_beside(
    places: Places, extras: Sequence[Any], groups: Sequence[Any], states: Sequence[Any], random: Streams
) -> None:
    for group, values in zip(places.groups, groups, strict=True):
        put_values(group, values)
    for extra, values in zip(extras, states, strict=True):
        extra.load_state_dict(copy.deepcopy(values))
    set_streams(random)


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
            live[key] = copy.deepcopy(value)


def difference(one: Snapshot, other: Snapshot) -> str | None:
    """The name of the first thing that is not the same in two snapshots, bit for bit; None: there is none."""
    for (name, value), (its, its_value) in zip(_named(one), _named(other), strict=False):
        if name != its:
            return f"{name} (there is {its} the other time)"
        if not _same(value, its_value):
            return name
    names = [[name for name, _ in _named(each)] for each in (one, other)]
    return None if len(names[0]) == len(names[1]) else f"the number of tensors: {len(names[0])} and {len(names[1])}"


def _named(snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
    yield from snapshot.tensors.items()
    for number, states in enumerate(snapshot.optimizers):
        for place, (_, kept) in enumerate(states):
            yield from ((f"optimizer {number}, parameter {place}: {name}", value) for name, value in kept.items())
    for number, group in enumerate(snapshot.groups):
        yield from ((f"{name} of parameter group {number}", value) for name, value in group.items())
    for number, values in enumerate(snapshot.extras):
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


# --- random streams ----------------------------------------------------------------------------------------------


def streams() -> Streams:
    """The states of the random streams of Python, numpy and torch."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": on_devices,
    }


def set_streams(kept: Streams) -> None:
    """Go on from these."""
    random.setstate(kept["python"])
    np.random.set_state(kept["numpy"])
    torch.set_rng_state(kept["torch"])
    if kept["cuda"]:
        torch.cuda.set_rng_state_all(kept["cuda"])


def same_streams(one: Streams, other: Streams) -> bool:
    """Whether nothing was drawn in between."""
    return (
        _same(one["torch"], other["torch"])
        and one["python"] == other["python"]
        and _same(list(one["numpy"]), list(other["numpy"]))
        and _same(one["cuda"], other["cuda"])
    )


class _Generator:
    """A random generator as if it had state_dict."""

    def __init__(self, get: Any, put: Any):
        self.state_dict, self.load_state_dict = get, put


def _adapted(number: int, extra: Any) -> Any:
    if hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict"):
        return extra
    if isinstance(extra, torch.Generator):
        return _Generator(extra.get_state, extra.set_state)
    if isinstance(extra, random.Random):
        return _Generator(extra.getstate, extra.setstate)
    if isinstance(extra, np.random.Generator):
        return _Generator(lambda: extra.bit_generator.state, lambda state: setattr(extra.bit_generator, "state", state))
    wanted = "objects with state_dict and load_state_dict, such as schedulers and scalers, or random generators"
    raise ConfigError(f"extra[{number}]={type(extra).__name__}: keeps no state; allowed: {wanted}")
