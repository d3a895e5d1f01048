"""What there is to strike and to measure in a model and its optimizers, by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from harness.basics.tensor_bytes import byte_view
from harness.config import ConfigError
from harness.faults.facts import formats_of, shapes_of
from harness.model.formats import FORMAT_OF, real_view

COMPILED = "_orig_mod"  # what torch.compile puts between a module and its names
SLOTS = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "momentum"), "moment_1"),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum", "exp_inf"), "moment_2"),
}
"""What optimizers call their moments; an array of another name keeps it."""


class NamedTensors:
    """The tensors of a model and of the optimizers that train it; `refresh` looks them up anew.

    A weight that stands in several places (tied) has the first of its names. Raises ConfigError for an optimizer that
    trains none of the model's parameters, for one that is none, and for a model whose parameters are sharded.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]):
        self.outer, self.model = model, unwrapped(model)
        self.optimizers = [inner_optimizer(one) for one in optimizers]
        if len({id(one) for one in self.optimizers}) < len(self.optimizers):
            raise ConfigError("optimizer: the same one stands in the list twice; allowed: each once")
        _refuse_sharded(self.model)
        self._look_up()
        for number, optimizer in enumerate(self.optimizers):
            if number not in self._owner.values():
                why = f"{type(optimizer).__name__} trains no parameter of the model"
                raise ConfigError(f"optimizer: {why}; allowed: optimizers over model.parameters()")

    def _look_up(self) -> None:
        """Which parameters there are, and which optimizer owns each."""
        named = self.model.named_parameters()  # in the model's own order, on which what a fault draws depends
        self.weights: dict[str, Tensor] = {name.replace(f"{COMPILED}.", ""): weight for name, weight in named}
        names = {weight: name for name, weight in self.weights.items()}
        named_modules = [(name.replace(f"{COMPILED}.", ""), module) for name, module in self.model.named_modules()]
        self.built_of = [module for _, module in named_modules]
        """All modules, the model first."""
        self._slots = [  # where each weight stands
            (module._parameters, leaf, weight)
            for module in self.built_of
            for leaf, weight in module._parameters.items()
            if weight is not None
        ]
        self._parts = [  # of every module, and how many there were, or which
            (module._parameters, len(module._parameters), module._buffers, len(module._buffers))
            for module in self.built_of
        ]
        self._children = [
            (module._modules, list(module._modules.values())) for module in self.built_of if module._modules
        ]
        self._childless = [module._modules for module in self.built_of if not module._modules]
        self._buffers = [
            (f"{prefix}.{leaf}" if prefix else leaf, module._buffers, leaf)
            for prefix, module in named_modules
            for leaf in module._buffers
        ]
        self._owner: dict[str, int] = {}
        self.outside: dict[str, Tensor] = {}  # what the optimizers train that is not the model's
        for number, optimizer in enumerate(self.optimizers):
            each = (weight for group in optimizer.param_groups for weight in group["params"])
            for place, weight in enumerate(each):
                if weight in names:
                    self._owner.setdefault(names[weight], number)
                else:
                    self.outside[f"optimizer {number}, parameter {place}"] = weight
        self._listed = self._list()
        self.owned = {name: weight for name, weight in self.weights.items() if name in self._owner}
        self._see_frozen()

    def _list(self) -> list[int]:
        """Which parameters the optimizers have, by identity."""
        return [id(w) for optimizer in self.optimizers for group in optimizer.param_groups for w in group["params"]]

    def _see_frozen(self) -> None:
        self.trained = {name: weight for name, weight in self.owned.items() if weight.requires_grad}

    def refresh(self) -> None:
        """See what the loop has frozen, added to an optimizer, or put in a parameter's place."""
        same = all(parts.get(leaf) is weight for parts, leaf, weight in self._slots)
        if not same or self._listed != self._list() or self._has_more():
            self._look_up()
        else:
            self._see_frozen()

    def _has_more(self) -> bool:
        """Whether a module, a parameter or a buffer was added."""
        if any(self._childless) or any(list(inside.values()) != there for inside, there in self._children):
            return True
        return any(len(mine) != weights or len(others) != buffers for mine, weights, others, buffers in self._parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight that is trained and has a number format: complex ones as pairs of numbers."""
        return shapes_of(self.trained)

    @property
    def struck_buffers(self) -> dict[str, Tensor]:
        """Those that faults can strike: dense ones, each number of which has a place of its own."""
        return {name: x for name, x in self.buffers.items() if _is_plain(x)}

    @property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of those that have a number format."""
        return shapes_of(self.struck_buffers)

    @property
    def formats(self) -> dict[str, dict[str, str]]:
        """The number formats of weights, buffers and what the optimizers keep, as `Facts.formats` has them."""
        rate = self.groups[0].get("lr")
        of_rate = FORMAT_OF.get(rate.dtype, "fp64") if isinstance(rate, Tensor) else "fp64"
        slots = {slot: formats_of(named) for slot, named in self.slots().items()}
        held = {"weight": formats_of(self.owned), "buffer": formats_of(self.struck_buffers)}
        return {**held, **slots, "learning_rate": {"learning_rate": of_rate}}

    @property
    def owned_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight that an optimizer has, frozen ones too."""
        return shapes_of(self.owned)

    def owner(self, name: str) -> int | None:
        """The number of the optimizer that has a weight; None: no one has."""
        return self._owner.get(name)

    def of(self, number: int) -> dict[str, Tensor]:
        """The trained weights of one optimizer."""
        if len(self.optimizers) == 1:
            return self.trained
        return {name: weight for name, weight in self.trained.items() if self._owner[name] == number}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """By name, each once."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, parts, leaf in self._buffers:
            buffer = parts.get(leaf)
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[name] = buffer
        return found

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every module inside the model, by name."""
        inner = ((name.replace(f"{COMPILED}.", ""), module) for name, module in self.model.named_modules())
        return {name: module for name, module in inner if name and name.split(".")[-1] != COMPILED}

    def gradients(self, number: int | None = None) -> dict[str, Tensor]:
        """Of each trained weight that has one; with `number`, of those of that optimizer. Complex ones as pairs."""
        found = {}
        for name, weight in (self.trained if number is None else self.of(number)).items():
            gradient = weight.grad
            if gradient is None:
                continue
            if gradient.is_conj():  # a view, whose parts would be copies
                gradient = weight.grad = gradient.resolve_conj()
            found[name] = real_view(gradient)
        return found

    def slots(self, number: int | None = None) -> dict[str, dict[str, Tensor]]:
        """What the optimizers, or one of them, keep element by element: by array and weight; complex as pairs."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, weight in (self.trained if number is None else self.of(number)).items():
            for key, values in self.optimizers[self._owner[name]].state.get(weight, {}).items():
                if _is_kept_of(weight, values):
                    found.setdefault(SLOTS.get(key, key), {})[name] = real_view(values)
        return found

    def slot(self, name: str, number: int | None = None) -> dict[str, Tensor]:
        """One array of the optimizers, or of one of them, by name of the weight; empty where there is none."""
        found = {}
        for of, weight in (self.trained if number is None else self.of(number)).items():
            for key, values in self.optimizers[self._owner[of]].state.get(weight, {}).items():
                if SLOTS.get(key, key) == name and _is_kept_of(weight, values):
                    found[of] = real_view(values)
        return found

    def around_update(self, number: int) -> dict[str, Tensor]:
        """The weights of an optimizer by name, and its arrays as `moment_1:name`."""
        arrays = {f"{slot}:{name}": x for slot, named in self.slots(number).items() for name, x in named.items()}
        return {**{name: real_view(weight) for name, weight in self.of(number).items()}, **arrays}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        return next(iter(self.owned.values())).device

    @property
    def is_double(self) -> bool:
        return next(iter(self.owned.values())).dtype == torch.float64

    @property
    def vocabulary(self) -> int:
        """Of the largest embedding; 0 without one."""
        sizes = (m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding))
        return max(sizes, default=0)

    @property
    def shape_key(self) -> dict[str, str]:
        """What decides which elements there are, and so what a record of a fault is of."""
        text = json.dumps([[name, list(shape)] for name, shape in self.shapes.items()])
        return {"own.tensors": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def digest(self) -> str:
        """SHA-256 of names and values of all weights and buffers."""
        sha = hashlib.sha256()
        for name, values in [*self.weights.items(), *self.buffers.items()]:
            sha.update(name.encode())
            sha.update(raw_bytes(values))
        return sha.hexdigest()


def _is_plain(x: Tensor) -> bool:
    """Whether it is there, dense, neither expanded nor to be conjugated or negated where it is read."""
    if is_lazy(x) or x.layout != torch.strided or x.is_conj() or x.is_neg():
        return False
    return all(step != 0 or size < 2 for size, step in zip(x.shape, x.stride(), strict=True))


def _refuse_sharded(model: nn.Module) -> None:
    """Raise ConfigError for a model of which each process has a part."""
    allowed = "a model whose processes each have all of it, such as DistributedDataParallel"
    for module in model.modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            which = "FSDP2 (fully_shard)" if "FSDPModule" in kinds else "FullyShardedDataParallel"
            raise ConfigError(f"model={type(module).__name__}: is sharded by {which}; allowed: {allowed}")
    for name, weight in model.named_parameters():
        if type(weight.data).__name__ == "DTensor" or type(weight).__name__ == "DTensor":
            raise ConfigError(f"model: {name} is a DTensor, of which this process has a part; allowed: {allowed}")


def _is_kept_of(weight: Tensor, values: Any) -> bool:
    """Whether what an optimizer keeps of a weight is a number for each of its elements."""
    return isinstance(values, Tensor) and values.shape == weight.shape and is_of_numbers(values)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside those of torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        if isinstance(getattr(model, COMPILED, None), nn.Module):
            model = getattr(model, COMPILED)
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside one that wraps it, as Accelerate's does. Raises ConfigError for anything else."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state") or not hasattr(optimizer, "step"):
        wanted = "an optimizer as torch.optim has them: with param_groups, state and step, or a list of such"
        raise ConfigError(f"optimizer={type(optimizer).__name__}: no optimizer; allowed: {wanted}")
    if isinstance(optimizer, torch.optim.LBFGS):
        why = "evaluates the model inside of a step, where nothing can be told apart"
        raise ConfigError(f"optimizer=LBFGS: {why}; allowed: optimizers that take one gradient a step")
    found: Optimizer = optimizer
    return found


def raw_bytes(values: Tensor) -> bytes:
    """The bytes of a tensor of any type."""
    return byte_view(values.detach().cpu()).numpy().tobytes()


def first_tensor(values: Any) -> Tensor | None:
    """The first floating-point or complex tensor in what a module gives: a tensor, or nested sequences and mappings."""
    return next(filter(is_of_numbers, tensors_in(values)), None)


def is_of_numbers(x: Tensor) -> bool:
    """Whether it holds real or complex numbers, and no integers."""
    return x.is_floating_point() or x.is_complex()


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested sequences and mappings, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
