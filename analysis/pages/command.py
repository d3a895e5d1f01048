"""The command that trains one stored trial again, alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from harness.basics.errors import PROGRAM
from harness.config import CORE, IDENTITY, NO_FAULT, sections
from harness.config.names import OWN
from harness.config.trial import Detect, Playbook

PLAIN = "plain"  # the recipe whose fields are the defaults
CHOSEN = {"detect": Detect, "playbook": Playbook}  # sections that a choice of this name sets
OWN_LOOP = "There is no command for it: it is a run of one's own, which its own program trains."
NO_COMMAND = "There is no command for it: its configuration has letters that are not to be typed."


def training_command(config: Mapping[str, Any], out: str = "results/alone") -> str:
    """What to type so that a trial with this configuration, and its golden twin, are trained into a new folder.

    Nothing of the configuration is a shell's: each word is quoted. A sentence instead, if it cannot be typed.
    """
    if OWN in config:
        return OWN_LOOP
    words = [
        PROGRAM,
        "sweep",
        f"out={out}",
        *_choices(config),
        *_fields(config),
        f"seed={_value(config.get('seed', 0))}",
    ]
    line = shlex.join(words)
    return line if line.isprintable() else NO_COMMAND


def _choices(config: Mapping[str, Any]) -> Iterator[str]:
    for group, usual in (("recipe", PLAIN), ("mitigation", "none")):
        if (chosen := config.get(group, usual)) != usual:
            yield f"{group}={_value(chosen)}"
    for group in CHOSEN:
        if (chosen := _section(config, group).get("name", "none")) not in ("none", "own"):
            yield f"{group}={_value(chosen)}"
    fault = config["fault"]
    if fault["name"] != NO_FAULT.name:
        yield f"fault={_value(fault['name'])}"
        yield from (f"fault.{name}={_value(value)}" for name, value in fault.items() if name not in IDENTITY)


def _fields(config: Mapping[str, Any]) -> Iterator[str]:
    """The fields that are not the default; under another recipe all of them, since it may set any."""
    has_recipe = config.get("recipe", PLAIN) != PLAIN
    for section, cls in sections().items():
        default = vars(cls())
        for name, value in _section(config, section).items():
            is_default = value == default.get(name)
            is_chosen = section in CHOSEN and name == "name"
            if not is_chosen and value != "" and not (is_default and (not has_recipe or section not in CORE)):
                yield f"{section}.{name}={_value(value)}"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Those at their defaults are left out of what is stored; a stranger's may be anything."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _value(value: Any) -> str:
    """As Hydra's command line has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    is_word = text.replace("_", "").replace("+", "").isalnum() and text[0].isalpha()
    is_special = text.lower() in ("null", "true", "false", "nan", "inf", "on", "off", "yes", "no")
    return text if is_word and not is_special else QuotedString(text, Quote.double).with_quotes()
