"""What a file says of itself under `about`: for lists, tables and tests, and nothing that Hydra composes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config import STRUCTURAL, ConfigError, Problems, anything, checked, field_types, number, shown
from sweeps.compose.overrides import trial_fields, unknown_key

STRIKES = ("inf", "nan")  # an element of a gradient that a mitigation may survive


def _text(help: str) -> str:
    text: str = anything(STRUCTURAL, "", help)
    return text


@dataclass(frozen=True)
class About:
    """`about.*`; users' own files may leave out any of it."""

    text: str = _text("one sentence, without its full stop")
    paper: str = _text("its source")
    question: str = _text("what a study asks, a sentence; the title of its report")
    section: str = _text("the heading in docs below which it has a row of a table")
    note: str = _text("more sentences of that row")
    example: str = _text("what follows `stability-harness sweep fault=NAME` there")
    # What tests/sweeps/test_mitigations.py asks of every mitigation:
    neutral: Mapping[str, Any] = field(default_factory=dict)  # fields with which it is the recipe bit for bit
    not_neutral: str = _text("why there are none")
    beside: Mapping[str, Any] = field(default_factory=dict)  # fields that both have in that comparison
    rate: float | None = number(STRUCTURAL, None, "for a small model, where AdamW's is of no use", above=0)
    slow: str = _text("why it does not act in the first steps")
    survives: Mapping[str, str] = field(default_factory=dict)  # of `STRIKES`: why the trial goes on
    breaks: str = _text("why a gradient a million times too large ends a trial")

    @property
    def said(self) -> str:
        """The sentence with its source; empty if there is none."""
        return f"{self.text}{f' ({self.paper})' if self.paper else ''}." if self.text else ""


KEYS = {
    "study": ("text", "paper", "question"),
    "recipe": ("text", "paper"),
    "fault": ("text", "paper", "section", "note", "example"),
    "playbook": ("text", "paper", "section", "note"),
    "mitigation": tuple(name for name in field_types(About) if name not in ("example", "question")),
}
"""What a file of each group may say of itself."""


def about_of(group: str, tree: Any) -> About:
    """What a file of a group has under `about`. Raises ConfigError with all that is wrong with it."""
    known, problems = [f"about.{key}" for key in KEYS[group]], Problems()
    values: dict[str, Any] = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"about={shown(tree)}: a section, and no key; allowed: {', '.join(known)}")
    for name, value in tree.items():
        with problems.collect():
            if name not in KEYS[group]:
                raise unknown_key(f"about.{name}", shown(value), known)
            is_mapping = name in ("neutral", "beside", "survives")
            values[name] = _mapping(name, value) if is_mapping else checked(f"about.{name}", About, name, value)
    problems.check()
    return About(**values)


def _mapping(name: str, values: Any) -> Mapping[str, Any]:
    """Fields of a trial with values that they take, or words on strikes. Raises ConfigError."""
    key, problems = f"about.{name}", Problems()
    if not isinstance(values, dict):
        raise ConfigError(f"{key}={shown(values)}: wrong type ({type(values).__name__}); allowed: keys and values")
    allowed = trial_fields() if name != "survives" else dict.fromkeys(STRIKES, (About, "text"))
    for inner, value in values.items():
        with problems.collect():
            if inner not in allowed:
                raise unknown_key(inner, shown(value), allowed, f" in {key}")
            checked(f"{key}.{inner}", *allowed[inner], value)
    problems.check()
    return values
