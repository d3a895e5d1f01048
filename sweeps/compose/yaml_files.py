"""YAML files that may be anybody's: read as data, and refused before they are expanded if they are no plain tree."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from harness.config import ConfigError, shown
from sweeps.compose.hydra_calls import fast_yaml_loader, yaml_loader

MOST_BYTES = 256 * 1024
MOST_NODES = 10_000  # as often as they are referred to
MOST_DEPTH = 20
LARGEST = 2**63 - 1


def short(value: Any) -> str:
    """A value as an error shows it; Python refuses to write an integer of thousands of digits."""
    if type(value) is int and abs(value) > LARGEST:
        return hex(value) if value.bit_length() < 100 else f"(an integer of {value.bit_length()} bits)"
    return shown(value)


def has_control(text: str) -> bool:
    """Whether there are control characters, or bytes that are no UTF-8."""
    return any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)


def text_of(file: Path) -> str:
    """What a file holds. Raises ConfigError for anything but a small file of UTF-8; waits for nobody's pipe."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise ConfigError(f"{file}: not a file; allowed: a YAML file")
            content = handle.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or 'cannot be read').lower()}; allowed: a YAML file") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{file}: larger than {MOST_BYTES:,} bytes; allowed: a YAML file up to that size")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is no UTF-8"
        raise ConfigError(f"{file}: {reason}; allowed: YAML in UTF-8") from None


def tree_of(file: Path, text: str) -> dict[str, Any]:
    """The mapping that a YAML text is; nothing at all is an empty one. `file` is named in errors.

    Raises ConfigError for what is no YAML, no mapping, has a tag, contains itself, or is deeper or larger than any
    configuration.
    """
    try:
        tree = _loaded(file, text)
    except yaml.MarkedYAMLError as error:
        raise not_yaml(file, error) from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise ConfigError(f"{file}: not YAML ({' '.join(str(error).split())[:200]}); allowed: YAML") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a {type(tree).__name__}, not a mapping; allowed: lines of key: value")
    return tree


def _loaded(file: Path, text: str) -> Any:
    """What stands there. What libyaml objects to is read once more by PyYAML's own reader, whose words errors have."""
    if (fast := fast_yaml_loader()) is not None:
        with suppress(yaml.YAMLError):
            _check_size(file, yaml.parse(text, Loader=fast))
            return yaml.load(text, Loader=fast)
    _check_size(file, yaml.parse(text, Loader=yaml.SafeLoader))
    return yaml.load(text, Loader=yaml_loader())


def not_yaml(file: Any, error: yaml.MarkedYAMLError) -> ConfigError:
    """The error for a file that is not YAML, with the line at fault."""
    mark = error.problem_mark or error.context_mark
    line = "it" if mark is None else f"line {mark.line + 1}"
    return ConfigError(f"{file}: {line} is not YAML ({error.problem}); allowed: YAML")


def _check_size(file: Path, events: Iterator[yaml.Event]) -> None:
    """Raises ConfigError for a tag, a cycle, or a tree that is too deep or would be too large."""
    sizes: dict[str, int] = {}  # of the anchors that are complete, in nodes
    opened: list[tuple[str, int]] = []  # the collections that we are in: their anchors, and nodes so far
    for event in events:
        line = f"{file}: line {1 + (event.start_mark.line if event.start_mark else 0)}"
        size, anchor, tag = 1, getattr(event, "anchor", None) or "", getattr(event, "tag", None)
        if tag is not None:
            raise ConfigError(f"{line} has a tag ({tag}); allowed: no tags")
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == name for name, _ in opened):
                raise ConfigError(f"{line}: *{anchor} contains itself; allowed: a tree")
            size = sizes.get(anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((anchor, 1))
            if len(opened) > MOST_DEPTH:
                raise ConfigError(f"{file}: nested more than {MOST_DEPTH} deep; allowed: at most {MOST_DEPTH}")
            continue
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            sizes[anchor] = 1
        else:
            continue
        if opened:
            opened[-1] = (opened[-1][0], opened[-1][1] + size)
        if size > MOST_NODES or (opened and opened[-1][1] > MOST_NODES):
            raise ConfigError(f"{file}: more than {MOST_NODES:,} values, those of its aliases counted; allowed: fewer")


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Say of each reason where its key stands."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{where}: {reason}" for reason in error.reasons)) from None
