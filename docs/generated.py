"""The pages of the reference that the code itself tells: every command with its options, and every key."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generated_data import dataset_page, errors_page, figures_page

from harness.basics.errors import PROGRAM
from harness.basics.printing import sentence
from harness.config import sections
from injectors import fault_types
from sweeps.commands.console import commands, grouped, run
from sweeps.compose.settings import LAUNCHERS, PARTS, Settings

OF_RUN = "These belong to the run and not to a trial, so they cannot be swept."


def write_reference(folder: Path) -> None:
    """Write the pages that the code tells, where they are not as they would be."""
    pages = {"commands": commands_page(), "keys": keys_page()}
    pages |= {"figures": figures_page(), "dataset": dataset_page(), "errors": errors_page()}
    for name, text in pages.items():
        file = folder / f"{name}.md"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def commands_page() -> str:
    """Every command with what its --help says, in groups."""
    known = commands()
    lines = ["# Commands", "", f"`{PROGRAM} COMMAND --help` says the same in a terminal.", ""]
    for title, names in grouped().items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"### {name}", "", f"{sentence(known[name].help)}", ""]
            lines += ["" if name == "sweep" else f"```text\n{_help_of(name)}\n```", ""]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _help_of(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run([name, "--help"])
    return printed.getvalue().strip()


def keys_page() -> str:
    """Every key of a trial and of a run: its default, what it allows, and whether it may differ inside a pack."""
    scope = "*Scope* says whether a value may differ between the trials of one pack, or makes another pack."
    lines = ["# Keys", "", f"`{PROGRAM} sweep KEY=VALUE`. {scope}", ""]
    lines += ["## Of a trial", ""]
    for section, cls in sections().items():
        lines += [f"### {section}", "", *_table(cls, f"{section}.")]
    lines += ["## Of a fault", "", "For each kind of fault, the fields that `fault.NAME` sets.", ""]
    for kind, cls in fault_types().items():
        if kind != "none":
            lines += [f"### fault: {kind}", "", *_table(cls, "fault.")]
    lines += ["## Of the run", "", OF_RUN, "", *_table(Settings, "")]
    for part, cls in PARTS.items():
        lines += [f"### {part}", "", *_table(cls, f"{part}.")]
    for launcher, cls in LAUNCHERS.items():
        lines += [f"### hydra/launcher={launcher}", "", "| key | default |", "|---|---|"]
        lines += [f"| `hydra.launcher.{name}` | `{value}` |" for name, value in _plain(vars(cls())).items()] + [""]
    return "\n".join(lines) + "\n"


def _plain(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _shown(value) for name, value in values.items() if not name.startswith("_")}


def _table(cls: type, prefix: str) -> list[str]:
    rows = list(_rows(cls, prefix))
    return ["| key | default | allowed | scope | what |", "|---|---|---|---|---|", *rows, ""] if rows else []


def _rows(cls: type, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        facts = field.metadata
        if "help" not in facts or dataclasses.is_dataclass(field.type):
            continue
        allowed = ", ".join(map(str, facts["choices"])) or facts["allowed"]
        cells = (f"`{prefix}{field.name}`", f"`{_shown(field.default)}`", allowed, facts["scope"], facts["help"])
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
