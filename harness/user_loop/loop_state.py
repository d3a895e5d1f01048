"""What of the user's loop itself goes back with a snapshot: its place among the loaders, and what it carries."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from harness.config import ConfigError


class LoopState:
    """`loader` is the number of the loader at hand; `carried` has values that the loop keeps from step to step."""

    def __init__(self) -> None:
        self.loader = 0
        self.carried: dict[str, Any] = {}
        self.is_restored = False  # the loop went back, and `carried` has what it had then
        self.keeps = False  # whether anything may go back

    def carry(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values with which the step begins: those given, or after going back those of the first time."""
        if self.is_restored:
            for name in values.keys() - self.carried.keys():  # the snapshot was taken before the loop told it
                self.carried[name] = copied(name, values[name])
            return tuple(copied(name, self.carried[name]) for name in values)
        if self.keeps:
            self.carried.update({name: copied(name, value) for name, value in values.items()})
        return tuple(values.values())

    def give_back(self, carried: dict[str, Any], loader: int) -> None:
        """The loop is where it was when it had these."""
        self.carried, self.loader, self.is_restored = carried, loader, True

    def stepped(self) -> None:
        """Another step comes."""
        self.carried, self.is_restored = {}, False


def copied(name: str, value: Any) -> Any:
    """A copy that shares nothing with the value. Raises ConfigError for one that cannot be copied."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(name, one) for one in value))
    if isinstance(value, tuple | list):
        return type(value)(copied(name, one) for one in value)
    if type(value) is dict:
        return {key: copied(name, one) for key, one in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception as error:
        why = f"a {type(value).__name__} that cannot be copied ({error})"
        allowed = "tensors, numbers, containers of them, and objects that copy.deepcopy takes"
        raise ConfigError(f"run.carry: {name} is {why:.200}; allowed: {allowed}") from error
