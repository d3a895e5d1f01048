"""Hooks and wrappers on the user's objects, which go again, and which a pickled or copied object does not carry."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


def idle(*_: Any, **__: Any) -> None:
    """What a hook of ours is in a copy of the user's object: it does nothing."""


def _idle() -> Callable[..., None]:
    return idle


class Hook:
    """A hook that may stand on a model while that is pickled or copied: in the copy it is `idle`."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._function(*args, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle, ()


def wrap(owner: Any, name: str, around: Callable[..., Any], hooks: ExitStack) -> None:
    """`around(real, ...)` stands for a method of one object until the hooks are closed."""
    own, real, is_over = vars(owner).get(name), getattr(owner, name), False

    @wraps(real)
    def method(this: Any, *args: Any, **more: Any) -> Any:
        if this is not owner:  # a copy of it, which nobody has attached
            return getattr(type(this), name)(this, *args, **more)
        return real(*args, **more) if is_over else around(real, *args, **more)

    ours = types.MethodType(method, owner)  # bound, as schedulers of torch want it
    setattr(owner, name, ours)

    def undo() -> None:
        nonlocal is_over
        is_over = True
        if vars(owner).get(name) is not ours:
            return  # a scheduler, perhaps, has wrapped it since, and calls it through us
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    hooks.callback(undo)
