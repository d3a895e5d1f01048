"""Sees every operation of torch, and knows of each tensor that is not finite which operation has made it so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.model.formats import FORMAT_OF

OVERFLOW, ZERO_BY_ZERO, DIFFERENCE, INVALID = "overflow", "0/0", "inf - inf", "invalid"
# New memory, which may hold anything, and constants, which may be infinite on purpose.
MADE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "full", "full_like", "new_full"}
MADE |= {"fill", "fill_", "scalar_tensor", "lift_fresh", "masked_fill", "masked_fill_"}
OVERWRITES = {"copy_", "zero_"}  # in place, without a look at what was there
CASTS = {"_to_copy", "copy_", "to"}
DIVISIONS = {"div", "div_", "true_divide", "reciprocal", "reciprocal_"}


@dataclass(frozen=True)
class Origin:
    """The operation, of finite numbers, that gave what is not finite; the format that overflowed is `format`.

    `cause`: `overflow` (a result, or a sum or product on the way to it, is beyond the format), `0/0`, `inf - inf`, or
    `invalid`: another operation without a result, as the root of a negative number or a division by zero.
    """

    operation: str
    cause: str
    format: str


class Origins(TorchDispatchMode):
    """While it is entered: a look at every operation's results. One of non-finite arguments hands their origin on.

    Infinities that nobody has computed are masks; what they lead to is looked at as if they were finite. `written` is
    told of every result that is not finite. In a `quiet` block nothing is seen, so that what was changed in there has
    no origin.
    """

    def __init__(self, written: Callable[[Tensor], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._written, self._quiet, self._closed = written, False, False
        self._known: dict[int, Origin | None] = {}  # address of memory -> origin; None: of what no operation has made

    def of(self, x: Tensor) -> Origin | None:
        """What has made a tensor non-finite; None: no operation has, so its memory was changed."""
        return self._known.get(_memory(x))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; to load the compiler, as torch would, takes a second."""
        return False

    def close(self) -> None:
        """See nothing any more."""
        self._closed = True

    @contextmanager
    def quiet(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.partition(".")[0]
        if self._quiet or self._closed:
            return func(*args, **kwargs)
        if name in MADE:
            made = func(*args, **kwargs)
            if isinstance(made, Tensor) and not name.endswith("_"):
                self._known.pop(_memory(made), None)  # memory is used again
            return made
        in_place = name.endswith("_") and not name.endswith("__") and bool(args) and isinstance(args[0], Tensor)
        # What an operation in place has read is gone afterwards.
        seen = [args[0].clone(), *args[1:]] if in_place and name not in OVERWRITES else list(args)
        inputs = seen[1:] if in_place and name in OVERWRITES else seen
        results = func(*args, **kwargs)
        with self.quiet():
            for result in [results] if isinstance(results, Tensor) else tree_leaves(results):
                if isinstance(result, Tensor) and result.is_floating_point() and result.numel():
                    read = [*inputs, *(value for key, value in kwargs.items() if key != "out")]
                    known = args[1:] if in_place and name in OVERWRITES else args
                    self._note(func, name, read, known, seen, kwargs, result)
        return results

    def _note(
        self,
        func: Any,
        name: str,
        read: Sequence[Any],
        known: Sequence[Any],
        seen: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Tensor,
    ) -> None:
        """`read` are the arguments as they were, `known` the same in their own memory, `seen` those of `func`."""
        memory = _memory(result)
        if is_finite(result):
            if result.numel() * result.element_size() >= result.untyped_storage().nbytes():
                self._known.pop(memory, None)
            return
        wrong = ~torch.isfinite(_seen(result))
        written = _memory(kwargs["out"]) if isinstance(kwargs.get("out"), Tensor) else None
        theirs = [x for x in tree_leaves(list(known)) if isinstance(x, Tensor) and _memory(x) != written]
        handed_on = [self._known[_memory(x)] for x in theirs if _memory(x) in self._known]
        floating = [x for x in tree_leaves(list(read)) if isinstance(x, Tensor) and x.is_floating_point()]
        arguments = [_seen(x) for x in floating if _memory(x) != written]
        arguments = [x for x in arguments if not is_finite(x)]
        if arguments and handed_on:
            self._known[memory] = handed_on[0]
        elif all(bool((torch.isfinite(x) | torch.isneginf(x)).all()) for x in arguments) and arguments:
            if bool((wrong & ~torch.isneginf(_seen(result))).any()):
                self._known[memory] = Origin(name, DIFFERENCE, FORMAT_OF[result.dtype])
            elif memory not in self._known:
                return  # a mask
        elif arguments:
            self._known[memory] = None
        else:
            self._known[memory] = Origin(name, *_cause(func, name, seen, kwargs, result, wrong))
        self._written(result)


def is_finite(x: Tensor) -> bool:
    """Whether all elements are: what is not finite does not sum up to a number, and a sum is the quickest look."""
    x = _seen(x.detach())
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _seen(x: Tensor) -> Tensor:
    """In a type that can be looked at: torch has no operations on 8 bits."""
    return x.float() if x.element_size() == 1 else x


def _cause(
    func: Any, name: str, seen: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor, wrong: Tensor
) -> tuple[str, str]:
    """Why an operation on finite numbers has a result that is not finite, and the format of that."""
    format = FORMAT_OF[result.dtype]
    if name in CASTS:
        return OVERFLOW, format
    if name in DIVISIONS:
        divisor = seen[-1] if isinstance(seen[-1], Tensor) else torch.tensor(float(seen[-1]))
        if bool((divisor.expand_as(result)[wrong] == 0).any()):
            return (ZERO_BY_ZERO if bool(torch.isnan(result[wrong]).any()) else INVALID), format
    try:  # the same with a wider range: what is finite there has overflowed here
        wide = func(*tree_map(_widened, list(seen)), **tree_map(_widened, dict(kwargs)))
    except (RuntimeError, TypeError, NotImplementedError):  # there is no such operation in float64
        return OVERFLOW, format
    same = [x for x in tree_leaves(wide) if isinstance(x, Tensor) and x.shape == result.shape]
    is_wide = bool(same) and result.dtype != torch.float64 and bool(torch.isfinite(same[0][wrong]).all())
    return (OVERFLOW if is_wide or bool(torch.isinf(result).any()) else INVALID), format


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
