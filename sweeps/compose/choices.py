"""Names of options: what a choice of a study, recipe, mitigation or fault may be, and mitigations joined by `+`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from harness.config import ConfigError, Problems, shown

NONE = "none"
PLAIN = "plain"  # the recipe of harness/config/recipe.py as it is
MOST_NAMES = 50  # that an error lists; beyond it a line would be a page


def listed(options: Sequence[str]) -> str:
    """What is allowed, in a line that can be read."""
    if len(options) <= MOST_NAMES:
        return ", ".join(options)
    return f"the {len(options)} names that stability-harness list shows"


def unknown_option(group: str, name: Any, options: Sequence[str], part: str = "") -> ConfigError:
    """For a choice that is none of `options`, or one with a `part` that is none."""
    close = difflib.get_close_matches(part or str(name), options, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return ConfigError(f"{group}={name}: unknown {f'{group} {part}'.rstrip()}; {hint}allowed: {listed(options)}")


def parts_of(name: Any, options: Sequence[str]) -> tuple[str, ...]:
    """The mitigations that a choice of `mitigation` joins by `+`, sorted; one alone is its own only part.

    Joined again by `+` they are the combination's canonical name. `options` are the names of the files. Raises
    ConfigError with everything that is wrong with the name: a part that is unknown, empty or given twice, or `none`.
    """
    chosen, files = f"mitigation={shown(name)}", [option for option in options if "+" not in option]
    if name in options:
        if "+" in name:
            reason = "a file whose name is that of a combination; allowed: a file name without +"
            raise ConfigError(f"{chosen}: {reason}")
        return (name,)
    if not isinstance(name, str) or "+" not in name:
        raise unknown_option("mitigation", shown(name), files)
    problems = Problems()
    parts, allowed = [part.strip() for part in name.split("+")], [option for option in files if option != NONE]
    for part in dict.fromkeys(parts):
        with problems.collect():
            if not part:
                raise ConfigError(f"{chosen}: an empty part; allowed: names joined by +, of {listed(allowed)}")
            if parts.count(part) > 1:
                raise ConfigError(f"{chosen}: {part} is given {parts.count(part)} times; allowed: each name once")
            if part == NONE:
                raise ConfigError(f"{chosen}: none is the recipe as it is; allowed beside others: {listed(allowed)}")
            if part not in allowed:
                raise unknown_option("mitigation", shown(name), allowed, part)
    problems.check()
    return tuple(sorted(parts))
