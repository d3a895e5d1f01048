"""What enters the user's model at each step, as checksums: whether a step that is run again is the step that it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
import torch
from torch import Tensor, nn

from harness.basics.tensor_bytes import byte_view
from harness.config import ConfigError
from harness.user_loop.hooks import Hook
from harness.user_loop.named_tensors import COMPILED, raw_bytes, tensors_in

Call = dict[str, int]  # of one call of the model: a checksum of each argument


class NotRepeated(ConfigError):
    """A step that was run again is another one than the first time; the message says in what."""


def not_repeated(what: str, step: int | None = None) -> str:
    """What is said of a loop whose step, run again from the same state, differs first in this."""
    where = "" if step is None else f" in step {step}"
    if "argument" in what:
        allowed = (
            "run.carry(NAME=value) for a batch, a hidden state or an environment that the loop keeps from one step to "
            "the next, and seeds for what it draws"
        )
    elif "rate" in what or "passes" in what:
        allowed = (
            "extra=[scheduler] for a scheduler of rates, run.step or run.carry(NAME=value) for a counter of the loop's "
            "own, run.epochs for code between epochs"
        )
    else:
        allowed = (
            "torch.use_deterministic_algorithms(True), seeds of all random streams, run.carry(NAME=value) for what the "
            "loop keeps or counts by itself, and extra=[scaler, average, ...] for other objects that a step changes"
        )
    reason = f"the loop does not repeat itself: run again from the same state, it differs{where} in {what}"
    return f"{reason}; allowed: {allowed}"


class Inputs:
    """Follows the calls of a model in training, by hooks that stand until `close`.

    A model without a forward of its own, such as a ModuleDict, is followed in its parts. Calls under `no_grad` are no
    part of a step.
    """

    def __init__(self, model: nn.Module):
        self._calls: list[Call] = []
        self._hooks: list[Any] = []
        self._name = type(model).__name__
        self._is_on = self._only_first = self._raises = False
        self._expected: list[Call] = []
        self.differing = ""  # the first argument that is another one
        self._modules = list(_callable(model))

    def follow(self) -> None:
        """Look at the calls from here on."""
        if self._hooks or not self._modules:
            return
        for name, module in self._modules:
            hook = Hook(lambda module, given, named, name=name: self._called(name, module, given, named))
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def close(self) -> None:
        """No hook is left."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._is_on = False

    def begin(self, expected: list[Call] | None, only_first: bool, raises: bool) -> None:
        """A step begins, whose calls were `expected` ones before; of these the first alone, with `only_first`.

        An argument that is another one is an error at once with `raises`; else `differing` names it.
        """
        self._calls, self._expected, self.differing = [], expected or [], ""
        self._only_first, self._raises, self._is_on = only_first, raises, bool(self._hooks)

    @property
    def calls(self) -> list[Call]:
        """Those of the step at hand."""
        return self._calls

    def rest(self) -> None:
        """Calls are no part of a step."""
        self._is_on = False

    def _called(self, name: str, module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._is_on or not torch.is_grad_enabled():
            return
        number = len(self._calls)
        call = dict(_checksums(name, given, named))
        self._calls.append(call)
        if number >= len(self._expected) or (self._only_first and number):
            return
        before = self._expected[number]
        for argument in [*before, *(key for key in call if key not in before)]:
            if before.get(argument) != call.get(argument) and not self.differing:
                self.differing = f"{argument} of the model's call {number + 1}"
                if self._raises:
                    raise NotRepeated(not_repeated(self.differing))


def _callable(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that can be called."""
    if hasattr(model, COMPILED):
        yield name, model
        return
    if type(model).forward is not nn.Module.forward and not isinstance(model, nn.ModuleList | nn.ModuleDict):
        yield name, model
        return
    for part, module in model.named_children():
        yield from _callable(module, f"{name}.{part}" if name else part)


def _checksums(name: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """A checksum of each argument that has tensors or numbers."""
    of = f" of {name}" if name else ""
    for key, value in [*enumerate(given), *named.items()]:
        what = f"argument {key}{of}"
        tensors = list(tensors_in(value))
        if tensors:
            total = 0
            for values in tensors:
                total = checksum(values, total)
            yield what, total
        elif isinstance(value, int | float | str | bool):
            yield what, google_crc32c.value(repr(value).encode())


@torch.no_grad()
def checksum(values: Tensor, start: int = 0) -> int:
    """A CRC-32C of the bytes of a tensor; on an accelerator of sums over its bits, so that few bytes are copied."""
    x = values.detach()
    if x.device.type != "cpu" and x.layout == torch.strided and x.numel():
        words = byte_view(x)
        words = words.view(torch.int32) if words.numel() % 4 == 0 else words
        weights = torch.arange(1, words.numel() + 1, device=x.device, dtype=torch.int64) % 65_521
        x = torch.stack([words.sum(dtype=torch.int64), (words.long() * weights).sum()])
    elif x.layout != torch.strided:
        x = x.to_dense()
    return int(google_crc32c.extend(start, raw_bytes(x)))
