"""How a model and its optimizers are built at a step: which tensors stand where, what is frozen, modes, hooks.

A loop may freeze layers, add parameter groups, replace buffers or count in attributes of a module. A snapshot has to
put all of that back, or the steps after it are not those that were.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.user_loop.streams import generator_state

INTERNAL = frozenset(vars(nn.Module()))  # of every module; what else it has is its owner's
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
MISSING = object()


@dataclass
class BuiltModule:
    """One module: its parameters, buffers and children as objects, its mode, and plain values among its attributes."""

    module: nn.Module
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    children: dict[str, Any]
    training: bool
    values: dict[str, Any]
    hooks: dict[str, dict[Any, Any]]


@dataclass
class Structure:
    """What a model and its optimizers were built of."""

    modules: list[BuiltModule]
    trains: list[tuple[Tensor, bool]]  # requires_grad of every parameter
    weight_hooks: list[tuple[Any, dict[Any, Any]]]
    groups: list[list[tuple[dict[str, Any], list[Tensor]]]]  # of each optimizer: its groups, and their parameters
    optimizer_hooks: list[dict[str, dict[Any, Any]]]

    @classmethod
    def of(cls, parts_of_model: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Structure:
        """As it is now: these modules, which are all of the model."""
        modules, trains, weight_hooks = [], [], []
        for module in parts_of_model:
            parts = module.__dict__
            modules.append(
                BuiltModule(
                    module,
                    dict(parts["_parameters"]),
                    dict(parts["_buffers"]),
                    dict(parts["_modules"]),
                    parts["training"],
                    _values(parts),
                    {name: dict(parts[name]) for name in HOOKS if parts[name]},
                )
            )
            for weight in parts["_parameters"].values():
                if weight is not None:
                    trains.append((weight, weight.requires_grad))
                    if weight._backward_hooks:
                        weight_hooks.append((weight, dict(weight._backward_hooks)))
        groups = [[(group, list(group["params"])) for group in one.param_groups] for one in optimizers]
        hooks = [{name: dict(getattr(one, name, None) or {}) for name in OPTIMIZER_HOOKS} for one in optimizers]
        return cls(modules, trains, weight_hooks, groups, hooks)

    @torch.no_grad()
    def put_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Everything is built as it was; values of weights and buffers are put back elsewhere."""
        for built in self.modules:
            parts = built.module.__dict__
            for name, kept in (
                ("_parameters", built.parameters),
                ("_buffers", built.buffers),
                ("_modules", built.children),
            ):
                _become(parts[name], kept)
            parts["training"] = built.training
            _put_values(parts, built.values)
            for name in HOOKS:
                _become(parts[name], built.hooks.get(name, {}))
        hooked = {id(weight): hooks for weight, hooks in self.weight_hooks}
        for weight, trains in self.trains:
            if weight.requires_grad != trains:
                weight.requires_grad_(trains)
            if weight._backward_hooks:
                _become(weight._backward_hooks, hooked.get(id(weight), {}))
        for optimizer, groups, hooks in zip(optimizers, self.groups, self.optimizer_hooks, strict=True):
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, weights in groups:
                group["params"][:] = weights
            for name, kept in hooks.items():
                if getattr(optimizer, name, None) is not None:
                    _become(getattr(optimizer, name), kept)


def _become(live: Any, kept: Mapping[Any, Any]) -> None:
    """A mapping has these entries, in this order; it stays the same object, to which others refer."""
    if len(live) == len(kept) and all(live.get(key, MISSING) is value for key, value in kept.items()):
        return
    live.clear()
    live.update(kept)


# --- plain values among the attributes of a module ---------------------------------------------------------------


def _values(parts: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in parts.items():
        if name in INTERNAL:
            continue
        kept = value if isinstance(value, IMMUTABLE) else _kept(value)
        if kept is not MISSING:
            found[name] = kept
    return found


@dataclass
class KeptTensor:
    """A tensor that is an attribute, and what it held."""

    tensor: Tensor
    values: Tensor


@dataclass
class KeptGenerator:
    """A random generator that is an attribute, and its state."""

    generator: Any
    state: Any


def _kept(value: Any, depth: int = 4) -> Any:
    """A copy of numbers, texts, tensors, arrays, generators, and containers of them; MISSING for anything else."""
    if isinstance(value, IMMUTABLE):
        return value
    if isinstance(value, Tensor):
        return KeptTensor(value, value.detach().clone()) if not isinstance(value, nn.Parameter) else MISSING
    if isinstance(value, np.ndarray):
        return value.copy()
    if (state := generator_state(value)) is not None:
        return KeptGenerator(value, copy.deepcopy(state.state_dict()))
    if depth and type(value) in (list, tuple, set, frozenset, dict):
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        copies = [_kept(one, depth - 1) for one in inner]
        if any(one is MISSING for one in copies):
            return MISSING
        if isinstance(value, dict):
            return dict(zip(value, copies[len(value) :], strict=True))
        return type(value)(copies)
    return MISSING


def _put_values(parts: dict[str, Any], kept: Mapping[str, Any]) -> None:
    for name in [name for name in parts if name not in INTERNAL and name not in kept]:
        if isinstance(parts[name], IMMUTABLE) or _kept(parts[name]) is not MISSING:
            del parts[name]
    for name, value in kept.items():
        there = parts.get(name, MISSING)
        if isinstance(value, IMMUTABLE):
            if there is not value:
                parts[name] = value
        elif type(there) is type(value) and isinstance(there, list | dict | set):  # others may refer to it
            restored = _given_back(value)
            there.clear()
            there.extend(restored) if isinstance(there, list) else there.update(restored)
        else:
            parts[name] = _given_back(value)


def _given_back(value: Any) -> Any:
    if isinstance(value, KeptTensor):
        if value.tensor.is_leaf or not value.tensor.requires_grad:
            value.tensor.copy_(value.values)
            return value.tensor
        return value.values.clone()
    if isinstance(value, KeptGenerator):
        state = generator_state(value.generator)
        assert state is not None
        state.load_state_dict(copy.deepcopy(value.state))
        return value.generator
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_given_back(one) for one in value)
    if type(value) is dict:
        return {key: _given_back(one) for key, one in value.items()}
    return value
