"""What memory of a device some code takes, counted storage by storage as torch's operations make them.

On the `meta` device, whose tensors have a shape and no numbers, code is counted without being computed: what an
operation gives follows from the shapes that it reads, so each kind of call is asked of torch once, and what changes a
tensor in place is not done at all. The host reads zeros there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

GRAIN = 512  # bytes: torch's CUDA allocator hands out whole multiples
MOST_KNOWN = 2**15  # kinds of calls, of which a model has some hundred
REST = "rest"  # the phase of what belongs to no other
aten = torch.ops.aten


def _norm_in(x: Tensor, *others: Any, dtype: torch.dtype | None = None) -> int:
    """A norm that is taken in another type copies its argument to that."""
    return 0 if dtype in (None, x.dtype) else x.numel() * dtype.itemsize


INSIDE: Mapping[OpOverload, Callable[..., int]] = {aten.linalg_vector_norm.default: _norm_in}
"""Bytes that an operation takes while it runs, out of sight: those that count beside what it reads and gives."""


class Allocations(TorchDispatchMode):
    """Follows the storages on `device` while it is entered: bytes `alive`, and in `peaks` the most, by phase.

    A storage counts from the first operation that gives or reads it until nobody has it any more.
    """

    def __init__(self, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.peaks, self._phase = 0, {REST: 0}, REST
        self._type, self._is_meta = device.type, device.type == "meta"
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}  # by address
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as entering:
            if self._is_meta:
                entering.enter_context(_fused_attention())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._entered = entering.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._entered.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside of this context has a peak of its own."""
        before, self._phase = self._phase, name
        self.peaks[name] = max(self.alive, self.peaks.get(name, 0))
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(
        self, operation: OpOverload, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        for x in _tensors(arguments, *named.values()):
            self._note(x)
        given = _on_meta(operation, arguments, named) if self._is_meta else operation(*arguments, **named)
        for x in _tensors(given):
            self._note(x)
        if (inside := INSIDE.get(operation)) is not None:
            self._rise(inside(*arguments, **named))
        return given

    def _note(self, x: Tensor) -> None:
        if x.device.type != self._type:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            size = -(-storage.nbytes() // GRAIN) * GRAIN
            self._known[key] = weakref.ref(storage, partial(self._gone, key)), size
            self.alive += size
            self._rise(0)

    def _rise(self, more: int) -> None:
        self.peaks[self._phase] = max(self.peaks[self._phase], self.alive + more)

    def _gone(self, key: int, _: weakref.ref[Any]) -> None:
        self.alive -= self._known.pop(key)[1]


def _tensors(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(*value)
    return found


# --- without numbers ---------------------------------------------------------------------------------------------


class _Like(NamedTuple):
    """What is known of a tensor without its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def new(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def _on_meta(operation: OpOverload, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What the operation gives; a value of the host where it reads one."""
    read = _tensors(arguments, *named.values())
    if not any(x.is_meta for x in read):
        return operation(*arguments, **named)
    if operation is aten._local_scalar_dense.default:
        return torch.zeros((), dtype=arguments[0].dtype).item()
    if operation is aten._to_copy.default and (to := named.get("device")) is not None and to.type != "meta":
        return torch.zeros(arguments[0].shape, dtype=named.get("dtype") or arguments[0].dtype)
    if operation is aten.nonzero.default:  # of zeros
        return arguments[0].new_empty((0, arguments[0].dim()), dtype=torch.int64)
    is_new, changed = _gives(operation)
    if changed is not None:
        return named[changed[1]] if changed[1] in named else arguments[changed[0]]
    if is_new:
        told = _told(arguments), tuple((name, _told(value)) for name, value in named.items())
        known = _KNOWN.get(call := (operation, *told))
        if known is None:
            given = operation(*arguments, **named)
            if len(_KNOWN) >= MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[call] = _described(given, read)
            return given
        if known:
            made = tuple(None if like is None else like.new() for like in known)
            return made[0] if len(made) == 1 else made
    return operation(*arguments, **named) if operation._schema.returns else None


_KNOWN: dict[tuple[Any, ...], tuple[_Like | None, ...]] = {}
"""What a kind of call gives, by operation and arguments; nothing where it shares memory with them."""


@cache
def _gives(operation: OpOverload) -> tuple[bool, tuple[int, str] | None]:
    """Whether it gives nothing but tensors that are new; and place and name of the one that it changes and gives."""
    schema = operation._schema
    aliases = [value.alias_info for value in schema.returns]
    if len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write:
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return False, (place, argument.name)
    are_tensors = bool(aliases) and all(str(value.type) == "Tensor" for value in schema.returns)
    return are_tensors and not any(aliases), None


def _told(argument: Any) -> Any:
    """An argument as far as it decides what a call gives: 1 and 1.0 give different types."""
    if isinstance(argument, Tensor):
        return _like(argument)
    return tuple(map(_told, argument)) if isinstance(argument, list | tuple) else (type(argument), argument)


def _like(x: Tensor) -> _Like:
    return _Like(tuple(x.shape), x.stride(), x.dtype, x.device)


def _described(given: Any, read: Sequence[Tensor]) -> tuple[_Like | None, ...]:
    parts = given if isinstance(given, tuple) else (given,)
    theirs = {x.untyped_storage()._cdata for x in read}
    if any(x is not None and x.untyped_storage()._cdata in theirs for x in parts):
        return ()
    return tuple(None if x is None else _like(x) for x in parts)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """torch has no fused kernel for the meta device, and would write the scores [T, T] out there.

    No mode of torch does it: blocks that are computed again in the backward pass see none.
    """
    usual = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        has_kernel = q.is_meta and q.dtype != torch.float64
        if has_kernel:
            mixed: Tensor = _Attention.apply(q, k, v)  # type: ignore[no-untyped-call]
            return mixed
        return usual(q, k, v, **named)

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = usual


class _Attention(torch.autograd.Function):
    """The memory of torch's kernels: of FlashAttention for half precision, of the memory-efficient one for float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx: Any, dmixed: Tensor) -> Any:
        q, k, v, _, log_sum = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.empty_like(log_sum)  # the sum of dmixed * mixed of each query
        if q.dtype != torch.float32:
            torch.empty_like(q, dtype=torch.float32)  # in which the gradient of the queries is summed
        return gradients
