"""What `harness.loop.graphs` asks of a CUDA graph, on a CPU: operations are noted one by one, and done again.

As there, what was recorded reads and writes the tensors of then and nothing else, and recording changes nothing. All of
them share their memory: what one of them has made is gone when another one is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


def tensors_in(values: Any) -> list[Tensor]:
    """In order; what operations take and give has no mappings inside but that of its keywords."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = tuple(values.values())
    return [x for value in values for x in tensors_in(value)] if isinstance(values, tuple | list) else []


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Noted(TorchDispatchMode):
    """Does the operations, notes them, and keeps what they overwrite of tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []  # and what each has made
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if function._schema.is_mutable or getattr(function, "namespace", "") not in ("aten", "prims"):
            for x in given:
                if storage(x) not in self.made and storage(x) not in self.before:
                    whole = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
                    self.before[storage(x)] = whole, whole.clone()
        found = function(*args, **kwargs)
        known, fresh = {storage(x) for x in given}, []
        for number, x in enumerate(tensors_in(found)):
            if storage(x) not in known:
                fresh.append((number, x))
                if storage(x):
                    self.made[storage(x)] = x  # which keeps its memory from being taken by others
        self.operations.append((function, args, kwargs, fresh))
        return found


class Emulated:
    """One of them. `latest` is the one that was replayed last."""

    latest: ClassVar[Emulated | None] = None

    def record(self, function: Callable[[], T]) -> T:
        with Noted() as noted:
            found = function()
        self.noted = noted
        with torch.no_grad():
            for whole, values in noted.before.values():
                whole.copy_(values)
        self.spoil()
        return found

    def spoil(self) -> None:
        """Leave nothing of what was made: NaN, and -1 among integers."""
        for x in self.noted.made.values():
            x.untyped_storage().fill_(255)

    def replay(self) -> None:
        if Emulated.latest not in (None, self):
            Emulated.latest.spoil()
        Emulated.latest = self
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for function, args, kwargs, fresh in self.noted.operations:
                now = tensors_in(function(*args, **kwargs))
                for number, then in fresh:
                    then.copy_(now[number])
