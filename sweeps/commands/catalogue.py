"""What the options of each group such as `study`, `mitigation` and `fault` are: one line each, with the paper."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.basics.errors import nearest
from harness.basics.printing import printable
from harness.config import ConfigError, sections, shown
from harness.detectors.table import DETECTORS
from injectors import fault_types
from sweeps.compose.about import About
from sweeps.compose.folders import read
from sweeps.compose.places import NONE, check_folder, named, options, place_of
from sweeps.compose.yaml_files import text_of

HEADINGS = {
    "study": "Studies, ready to run: study=NAME, of which keys may be changed",
    "search": "Searches, in place of a whole grid: search=NAME",
    "recipe": "Recipes: recipe=NAME, which studies and mitigations change",
    "mitigation": "Mitigations: mitigation=NAME, or several at once: mitigation=NAME+NAME",
    "fault": "Faults: fault=NAME",
    "detect": "Detectors: detect=NAME, or several at once: detect=NAME+NAME",
    "playbook": "Playbooks, what is done at an alarm: playbook=NAME",
}
PLURALS = {"study": "studies", "search": "searches", "detect": "detectors"} | {
    group: f"{group}s" for group in ("recipe", "mitigation", "fault", "playbook")
}
_REFERENCE = re.compile(
    r"(?:[Cc]f\. )?(?:"
    r"arXiv[: ]\d{4}\.\d{4,5}"
    r"|doi[: ]10\.\d{4,9}/[^\s,;]*[^\s,;.)]"
    r"|[A-Z][\w'-]+(?: et al\.| (?:and|&) [A-Z][\w'-]+)?,? (?:19|20)\d\d\b)"
)
_ABOUT = re.compile(r"^about\s*:", re.MULTILINE)
_PACKAGE = re.compile(r"#\s*@\w")


@dataclass(frozen=True)
class CatalogueEntry:
    """An option and what is said of it; `file` is where, None for a kind of fault that is a class of `injectors`."""

    group: str
    name: str
    text: str
    file: Path | None
    about: About = About()
    fields: Mapping[str, Any] = field(default_factory=dict)  # that the file sets, as it has them

    @property
    def references(self) -> tuple[str, ...]:
        """What it names as its source: arXiv numbers, DOIs, authors with a year."""
        return tuple(_REFERENCE.findall(self.text))


def entries(group: str, folder: Path | None = None) -> list[CatalogueEntry]:
    """Every option of a group in `HEADINGS`, by name: ours, installed packages', and a user's `folder`'s.

    Raises ConfigError for what a file should not say of itself.
    """
    listed = []
    for name in options(group, folder):
        place = place_of(group, name, folder)
        listed.append(_entry_of_class(group, name) if place is None else _entry(place, group, name))
    return listed


def _entry(place: Path, group: str, name: str) -> CatalogueEntry:
    """Of a file: what it says under `about`, of a study what it asks; or else the comment at its head."""
    file = place / group / f"{name}.yaml"
    if not _ABOUT.search(text_of(file)):
        return CatalogueEntry(group, name, said_in(file), file)
    content = read(place, group, name)
    said = printable(content.about.said or content.about.question) or said_in(file)
    return CatalogueEntry(group, name, said, file, content.about, content.fields)


def said_in(file: Path) -> str:
    """The comment at the head of a YAML file, as one line; the line that says its package is none."""
    comment: list[str] = []
    for line in text_of(file).splitlines():
        text = line.strip()
        if not text.startswith("#"):
            if text or comment:
                break
        elif not _PACKAGE.match(text):
            comment.append(text.lstrip("#").strip())
    return printable(" ".join(filter(None, comment))) or f"(no comment at the head of {file})"


def _entry_of_class(group: str, name: str) -> CatalogueEntry:
    """Of what is no file: a kind of fault, or a detector with its constants."""
    options = sections().get(f"{group}.{name}")
    fields = {group: {name: vars(options())}} if options else {}
    return CatalogueEntry(group, name, _said_of_class(group, name), None, About(section="detectors"), fields)


def _said_of_class(group: str, name: str) -> str:
    """The first line of what its class says, and the references of the rest."""
    if name == NONE:
        return "No fault: the golden run." if group == "fault" else "Nothing watches."
    cls = fault_types()[name] if group == "fault" else DETECTORS[name]
    first, *rest = (inspect.getdoc(cls) or f"(no words on {name})").splitlines()
    if group == "detect":
        return f"{first.removesuffix('.')} ({DETECTORS[name].source})."
    if _REFERENCE.search(first) or not (sources := _REFERENCE.findall("\n".join(rest))):
        return first
    return f"{first.removesuffix('.')} ({', '.join(sources).replace('Cf.', 'cf.')})."


def group_called(name: str) -> str:
    """The group that is called so, in the singular or the plural. Raises ConfigError."""
    names = {called: group for group in HEADINGS for called in (group, PLURALS[group])}
    if name not in names:
        raise ConfigError(f"GROUP={shown(name)}: unknown; {nearest(name, names)}allowed: {', '.join(HEADINGS)}")
    return names[name]


def print_catalogue(folder: Path | None, console: Console, groups: Sequence[str] = tuple(HEADINGS)) -> None:
    """All of these groups: in columns on a terminal, else a line each however long it is."""
    listed = {group: entries(group, folder) for group in groups}
    widest = max(len(entry.name) for members in listed.values() for entry in members)
    for place, (group, members) in enumerate(listed.items()):
        if place:
            console.print()
        console.print(HEADINGS[group], soft_wrap=not console.is_terminal)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=widest, no_wrap=True)
        table.add_column(overflow="fold")
        for entry in members:
            if console.is_terminal:
                table.add_row(Text(entry.name), Text(entry.text))
            else:
                console.print(f"{entry.name.ljust(widest)}  {entry.text}", soft_wrap=True)
        if console.is_terminal:
            console.print(table)


def is_list(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for the catalogue."""
    return any(text == "--list" or text.startswith("--list=") for text in arguments)


def folder_beside_list(arguments: Sequence[str]) -> Path | None:
    """The --config-dir beside --list. Raises ConfigError for anything else beside it, or a folder that is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    try:
        given, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{' '.join(arguments)}: {error.message}; allowed: --list, --config-dir DIR") from None
    if others:
        raise ConfigError(*(f"{text}: not beside --list; allowed: --config-dir DIR" for text in others))
    folder = named(given.config_dir)
    check_folder(folder)
    return folder
