"""Values of every kind that a command line, a YAML or a JSON file may hold, sensible and not."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from harness.config import field_types, sections
from harness.config.limits import LARGEST_SEED
from sweeps.compose import settings
from sweeps.compose.overrides import fault_fields, trial_fields
from tests.sweeps.command import TINY

NUMBERS = [0, 1, -1, 2, 3, 4, 7, 16, 100, 10**6, 10**9, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400]
FRACTIONS = [0.0, -0.0, 0.5, 1.0, 1.5, 1e-3, -1e-3, 1e-45, 1e-320, 3.4e38, 1e39, 1e308, float("inf"), float("nan")]
TEXTS = [
    "",
    " ",
    "none",
    "null",
    "true",
    "auto",
    "???",
    ".",
    "..",
    "../victims",
    "~",
    "~nobody",
    "${seed}",
    "${oc.env:HOME}",
    "$\\frac{$",
    "\x1b[2J",
    "\x00",
    "\n",
    "\u202e",
    "\ud800",
    "é",
    "𝔘",
    "x" * 300,
    "a,b",
    "a b",
    "a=b",
    "a#b",
    "'",
    '"',
    "\\",
    "[",
    "{",
    "}",
    "(",
    "*",
    "&a",
    "!!binary",
    "!!python/object/apply:os.mkdir [called]",
    "%",
    "-",
    "--",
    "0x1F",
    "1_000",
    "1e5",
    "0o17",
    "１",
    "2026-01-01",
    "NaN",
    "inf",
    "none+none",
    "clip_1+zclip",
    "pipe",
    "folder",
    "loop",
    "victims",
    "binary",
    "text",
    "/dev/zero",
    "/dev/full",
    "/proc/self/mem",
    "/nowhere",
]

typed = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
texts = st.one_of(st.sampled_from(TEXTS), typed, typed, st.text(max_size=4))
integers = st.one_of(st.sampled_from(NUMBERS), st.integers(-10, 10), st.integers(-(2**70), 2**70))
fractions = st.one_of(st.sampled_from(FRACTIONS), st.floats())
scalars: SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), integers, fractions, texts)
trees: SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


@cache
def _classes() -> dict[str, tuple[type, ...]]:
    """key -> the dataclasses that have it as a field, for every key of a trial and of a run."""
    own = {key: (cls,) for key, (cls, _) in trial_fields().items()}
    of_run = dict.fromkeys(settings.Settings.__dataclass_fields__, (settings.Settings,))
    of_parts = {f"{part}.{name}": (cls,) for part, cls in settings.PARTS.items() for name in vars(cls())}
    return {**own, **of_run, **of_parts, **fault_fields()}


@cache
def keys() -> tuple[str, ...]:
    """Every key that has a value of some type; `out` and `plan` are for those who run the command."""
    return tuple(sorted({*_classes()} - {"out", "plan", "data.path"}))


@cache
def sensible(key: str) -> SearchStrategy[Any]:
    """Values that the key may well take: those of its type, its choices, its default and small numbers."""
    name = key.rpartition(".")[2]
    found: list[SearchStrategy[Any]] = []
    for cls in _classes()[key]:
        kind, is_optional = field_types(cls)[name]
        field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
        if choices := tuple(field.metadata.get("choices", ())):
            found.append(st.sampled_from(choices))
        elif kind is bool:
            found.append(st.booleans())
        elif kind is int:
            found.append(st.integers(0, 8) | st.sampled_from([16, 64, 1000, LARGEST_SEED]))
        elif kind is float:
            found.append(st.sampled_from([0.0, 1e-4, 0.01, 0.5, 0.9, 1.0, 2.0, 100.0]))
        else:
            found.append(st.sampled_from(["*", "0", "1", "size", "blocks.0.*", "fp32", "none"]))
        if is_optional:
            found.append(st.none())
    return st.one_of(found)


SMALL = {key: value for key, value in TINY.items() if not key.startswith("hydra")}
"""Of the tiny models that are trained here."""

SECTIONS = tuple(sections())
