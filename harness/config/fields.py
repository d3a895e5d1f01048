"""Fields of a configuration: what each may hold, and one clear error for what it may not.

A field is *per-trial* (it may differ between the trials of one pack), *structural* (it fixes the shape of the
computation, so all trials of a pack share it), or *switched*: a per-trial strength of something that is absent, for
the whole pack, where it is null.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_type_hints

from harness.basics.errors import ConfigError
from harness.basics.plugins import TableKeys
from harness.config.limits import LARGEST_SEED

PER_TRIAL, STRUCTURAL, SWITCHED = "per-trial", "structural", "per-trial where it is not null"
LARGEST_INTEGER = 2**53  # float64, through which numbers of steps pass, holds every integer up to here
LARGEST_FLOAT, SMALLEST_FLOAT = (2 - 2.0**-23) * 2.0**127, 2.0**-149  # of float32, in which trials are trained
MOST_SHOWN = 100  # characters of a value, in an error
KINDS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a word"}


def _setting(
    scope: str,
    default: Any,
    help: str,
    allowed: str,
    check: Callable[[Any], bool],
    choices: Sequence[str] = (),
    is_bounded: bool = False,
    convert: Callable[[Any, str], Any] | None = None,
) -> Any:
    facts = {"scope": scope, "help": help, "allowed": allowed, "check": check}
    return field(default=default, metadata={**facts, "choices": choices, "is_bounded": is_bounded, "convert": convert})


def number(
    scope: str,
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    is_double: bool = False,
) -> Any:
    """A number, bounded inclusively by `low` and `high`, exclusively by `above` and `below`.

    Without an upper bound, an integer goes up to `LARGEST_INTEGER`. A fraction has to be one that float32 can hold,
    unless it `is_double`: then what it is written into says how large it may be.
    """
    bounds: list[tuple[str, float | None, Callable[[Any], bool]]] = [
        (">=", low, lambda x: x >= low),
        (">", above, lambda x: x > above),
    ]
    bounds += [("<=", high, lambda x: x <= high), ("<", below, lambda x: x < below)]
    held = [(f"{sign} {bound}", test) for sign, bound, test in bounds if bound is not None]
    allowed = " and ".join(text for text, _ in held) or "any number"
    is_bounded = is_double or (isinstance(high, int) and high > LARGEST_INTEGER)

    def check(x: Any) -> bool:
        return abs(x) < float("inf") and all(test(x) for _, test in held)

    return _setting(scope, default, help, allowed, check, is_bounded=is_bounded)


def steps_of(steps: int | None, share: float, whole: int, low: int = 0) -> int:
    """`steps`, or where that is null a share of `whole` steps, at least `low`: so times follow a run's length."""
    return max(low, round(share * whole)) if steps is None else steps


def choice(scope: str, default: str | None, help: str, *choices: str, table: str | None = None) -> Any:
    """One of a few words, or of the keys of a `table`, given as `module:NAME`."""
    options = TableKeys(table) if table else choices
    return _setting(scope, default, help, "", lambda x: x in options, options)


def names(scope: str, default: str, help: str, table: str) -> Any:
    """Keys of a `table`, given as `module:NAME`, joined by `+` in order; or `none`."""
    options = TableKeys(table)

    def check(x: Any) -> bool:
        parts = x.split("+")
        return x == "none" or (parts == sorted(set(parts)) and set(parts) <= set(options))

    return _setting(scope, default, help, "none, or different names in order, joined by +", check)


def anything(scope: str, default: Any, help: str) -> Any:
    """A value that its type alone constrains."""
    return _setting(scope, default, help, "any value of its type", lambda x: True)


def text(scope: str, default: str, help: str, convert: Callable[[Any, str], str]) -> Any:
    """A text that `convert(value, key)` makes of what is given; it raises ConfigError for what it cannot."""
    return _setting(scope, default, help, "any text", lambda x: True, convert=convert)


def seed(help: str) -> Any:
    """A seed, or null for another one that the help names."""
    return number(PER_TRIAL, None, help, low=0, high=LARGEST_SEED)


# --- checking values ---------------------------------------------------------------------------------------------


@cache
def field_types(cls: type) -> dict[str, tuple[type, bool]]:
    """name -> (type, whether null is allowed) of a config dataclass."""
    hints = get_type_hints(cls)
    kinds = {name: [kind for kind in get_args(hints[name]) if kind is not NoneType] for name in _metadata(cls)}
    return {name: (kind[0], True) if kind else (hints[name], False) for name, kind in kinds.items()}


@cache
def _metadata(cls: type) -> dict[str, Mapping[str, Any]]:
    return {f.name: f.metadata for f in dataclasses.fields(cls)}


@cache
def _with_scope(cls: type, scope: str) -> Callable[[Any], tuple[Any, ...]]:
    """What reads the fields of one scope of such an object."""
    return getter_of([name for name, metadata in _metadata(cls).items() if metadata["scope"] == scope], attrgetter)


def getter_of(names: Sequence[str], getter: Callable[..., Callable[[Any], Any]]) -> Callable[[Any], tuple[Any, ...]]:
    """What reads all of these names as a tuple, by `attrgetter` or `itemgetter`, however many they are."""
    if len(names) > 1:
        return getter(*names)
    one = getter(*names) if names else None
    return lambda values: () if one is None else (one(values),)


def scope_of(cls: type, name: str) -> str:
    """Whether a field is per-trial, structural, or per-trial where it is not null."""
    scope: str = _metadata(cls)[name]["scope"]
    return scope


def structure(values: Any) -> tuple[Any, ...]:
    """What the trials of a pack have in common in this section: structural fields, and which switched ones are on."""
    cls: Any = type(values)
    switched = _with_scope(cls, SWITCHED)(values)
    return (*_with_scope(cls, STRUCTURAL)(values), *[value is not None for value in switched])


def _convert(value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) + 0.0  # -0.0 is the same configuration as 0.0
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, str):
        return str(value)
    if type(value) is kind:
        return value
    raise TypeError


def from_yaml(value: Any) -> Any:
    """What a text says as YAML, or the text, if it is none; other values as they are."""
    if not isinstance(value, str):
        return value
    import yaml  # packs are trained without it

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def shown(value: Any) -> str:
    """As it stands on a command line; the beginning of what is long."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


def _allowed(metadata: Mapping[str, Any]) -> str:
    return ", ".join(metadata["choices"]) or metadata["allowed"]


def checked(key: str, cls: type, name: str, value: Any) -> Any:
    """`value` as field `name` of `cls` wants it.

    Raises ConfigError, naming `key`, for a value of the wrong type or outside what the field allows.
    """
    kind, optional = field_types(cls)[name]
    metadata = _metadata(cls)[name]
    if str(value) in metadata["choices"]:
        value = str(value)  # Hydra takes the word nan for a number
    if metadata["convert"]:
        return metadata["convert"](value, key)
    null = " or null" if optional else ""
    if value is None and optional:
        return None
    try:
        value = _convert(value, kind)
    except (TypeError, OverflowError):
        allowed = _allowed(metadata) if kind is str and metadata["choices"] else f"{KINDS[kind]}{null}"
        raise ConfigError(f"{key}={shown(value)}: wrong type ({type(value).__name__}); allowed: {allowed}") from None
    reason = "" if metadata["is_bounded"] else _beyond(value)
    if reason or not metadata["check"](value):
        why = f"out of range, {reason}" if metadata["check"](value) else "out of range"
        raise ConfigError(f"{key}={shown(value)}: {why}; allowed: {_allowed(metadata)}{null}")
    return value


def _beyond(value: Any) -> str:
    """Why no format holds the number, if none does."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"beyond {LARGEST_INTEGER}"
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        return f"beyond {LARGEST_FLOAT:.6g}, the largest number that float32 holds"
    if isinstance(value, float) and 0 < abs(value) < SMALLEST_FLOAT:
        return f"below {SMALLEST_FLOAT:.6g}, the smallest that float32 holds, so it would be 0"
    return ""
