"""`--list` says what every mitigation and every fault is, from where it is defined, on a terminal and into a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from harness.detectors.table import DETECTORS
from injectors import fault_types
from sweeps.commands.catalogue import HEADINGS, CatalogueEntry, entries, said_in
from sweeps.commands.console import run
from sweeps.compose.hydra_calls import FOLDER
from tests.sweeps import command


def listed(text: str) -> dict[str, dict[str, str]]:
    """What a piped `--list` says: group -> name -> words."""
    parts = dict(zip(HEADINGS, text.strip().split("\n\n"), strict=True))
    found = {}
    for group, part in parts.items():
        heading, *lines = part.splitlines()
        assert heading == HEADINGS[group]
        pairs = [line.split(maxsplit=1) for line in lines]
        assert len({name for name, _ in pairs}) == len(pairs)
        found[group] = {name: words.strip() for name, words in pairs}
    return found


def squeezed(text: str) -> str:
    return "".join(text.split())


# --- the list ----------------------------------------------------------------------------------------------------


def test_every_option_has_its_line() -> None:
    """Into a pipe nothing is cut or wrapped, however narrow it claims to be."""
    ended = command.end(command.fork("--list", cwd=FOLDER, COLUMNS="40"))
    assert (ended.status, ended.err) == (0, "")
    found = listed(ended.out)
    for group in ("mitigation", "fault"):
        assert list(found[group]) == sorted(command.loader().get_group_options(group))
        for file in (FOLDER / group).glob("*.yaml"):
            about = yaml.safe_load(file.read_text())["about"]
            paper = f" ({about['paper']})" if "paper" in about else ""
            assert found[group][file.stem] == f"{about['text']}{paper}."
    assert set(fault_types()) < set(found["fault"])
    assert found["mitigation"]["clip_1"].endswith("(Pascanu et al. 2013, arXiv 1211.5063).")
    assert found["fault"]["none"] == "No fault: the golden run."
    assert "arXiv 2204.02311" in found["fault"]["rare_tokens"]  # of the first line of its class
    assert "arXiv 2605.04213" in found["fault"]["realistic_sdc"]  # of a later one


def all_of(master: int) -> str:
    """What is written to a terminal until its last writer has closed it."""
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    return shown.decode()


@pytest.mark.parametrize("columns", [80, 50])
def test_readable_on_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.argv", ["sweeps", "--list"])
    master, slave = pty.openpty()
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(all_of, master)
        with os.fdopen(slave, "w") as terminal, contextlib.redirect_stdout(terminal):
            command.main()
        shown = reading.result()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    catalogue = [entry for group in HEADINGS for entry in entries(group)]
    for entry in catalogue:
        assert squeezed(entry.name + entry.text) in squeezed("\n".join(lines))
    # A description goes on under itself, not under the names.
    widest = max(len(entry.name) for entry in catalogue)
    goes_on = [line for line in lines if line.startswith(" ")]
    assert goes_on and all(line.startswith(" " * (widest + 2)) for line in goes_on)


def test_users_files(empty: Path) -> None:
    command.write_yaml(
        empty / "mine", "mitigation/mine.yaml", "# What I do [red]about[/red] it\n# (Me 2024).\noptim: {}"
    )
    said = "about: {text: What I say, paper: Me 2024}\noptim: {beta2: 0.9}"
    command.write_yaml(empty / "mine", "mitigation/said.yaml", f"# Not this.\n{said}")
    command.write_yaml(empty / "mine", "mitigation/silent.yaml", "optim: {beta2: 0.9}\n# too late")
    command.write_yaml(empty / "mine", "fault/own.yaml", "# A fault :bug: of my own.\ndefaults: [value]")
    ended = command.call("--list", "--config-dir", "mine")
    assert (ended.status, ended.err) == (None, "")
    found = listed(ended.out)
    assert found["mitigation"]["mine"] == "What I do [red]about[/red] it (Me 2024)."
    assert found["mitigation"]["said"] == "What I say (Me 2024)."
    assert found["mitigation"]["silent"] == "(no comment at the head of mine/mitigation/silent.yaml)"
    assert found["fault"]["own"] == "A fault :bug: of my own."
    assert "qk_norm" in found["mitigation"]
    assert list(found["mitigation"]) == sorted(found["mitigation"])
    assert command.call("--config-dir=mine", "--list").out == ended.out
    assert "mine" not in listed(command.call("--list").out)["mitigation"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# @package _global_\n# One line.\noptim: {}\n", "One line."),
        ("# @package _global_\n#  Two\n#lines.\n\n# Not this.\noptim: {}\n", "Two lines."),
        ("\n# @package _global_\n\n# After gaps.\noptim: {}\n# Nor this.", "After gaps."),
        ("# No package.\ndefaults: [value]\n", "No package."),
        ("# A comment alone", "A comment alone"),
        ("# @package _global_\n#\n# After an empty comment.\n{}", "After an empty comment."),
        ("# @package _global_\noptim: {}  # Not at the head.\n", "(no comment at the head of {file})"),
        ("", "(no comment at the head of {file})"),
    ],
)
def test_head_comments(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(content)
    assert said_in(file) == said.format(file=file)


def test_some_groups_alone(empty: Path) -> None:
    """In the order in which they are named, in the singular or the plural; studies with what they ask."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(["list", "faults", "study"]) == 0
    faults, studies = out.getvalue().split("\n\n")
    assert faults.startswith(HEADINGS["fault"]) and studies.startswith(HEADINGS["study"])
    question = yaml.safe_load((FOLDER / "study" / "quickstart.yaml").read_text())["about"]["question"]
    assert re.search(rf"^quickstart +{re.escape(question)}$", studies, re.MULTILINE)


# --- beside it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["--list", "seed=1"], ["seed=1: not beside --list; allowed: --config-dir DIR"]),
        (["seed=1", "--list", "-m"], ["-m: not beside --list; allowed", "seed=1: not beside --list; allowed"]),
        (["--list", "--help"], ["--help: not beside --list; allowed: --config-dir DIR"]),
        (["--list", "mitigation"], ["mitigation: not beside --list; allowed: --config-dir DIR"]),
        (["--list=faults"], ["--list=faults: ignored explicit argument 'faults'; allowed: --list, --config-dir DIR"]),
        (["--list", "--config-dir"], ["--list --config-dir: expected one argument; allowed: --list, --config-dir DIR"]),
        (["--list", "--config-dir=nowhere"], ["--config-dir=nowhere: no such folder; allowed: a folder"]),
    ],
)
def test_extra_arguments(empty: Path, arguments: list[str], starts: list[str]) -> None:
    lines = sorted(command.refused(empty, *arguments))
    assert len(lines) == len(starts)
    assert all(line.startswith(f"error: {start}") for line, start in zip(lines, starts, strict=True))


def test_help_mentions_it(empty: Path) -> None:
    ended = command.end(command.fork("--help", cwd=empty))
    assert (ended.status, ended.err) == (0, "")
    start = ended.out.partition("== Configuration groups ==")[0]
    assert "stability-harness list " in start
    assert "mitigation=NAME+NAME" in start
    assert max(map(len, start.splitlines())) <= 80


# --- our own -----------------------------------------------------------------------------------------------------


def sentences(text: str) -> int:
    """How many there are, what stands in brackets aside."""
    return len(re.findall(r"[.!?](?=\s|$)", re.sub(r"\([^()]*\)", "", text)))


WITH_SOURCES = [group for group in HEADINGS if group not in ("study", "search")]
OURS = [entry for group in WITH_SOURCES for entry in entries(group) if entry.name not in ("none", "replay")]
"""All but the recipe as it is, the golden run and what does a recorded fault again, which are nobody's but ours."""


@pytest.mark.parametrize("entry", OURS, ids=[f"{entry.group}={entry.name}" for entry in OURS])
def test_one_description_and_a_source(entry: CatalogueEntry) -> None:
    assert not entry.text.startswith("(no "), "about.text says what it is"
    assert entry.text.endswith(".") and sentences(entry.text) == 1, f"one sentence: {entry.text}"
    source = entry.references or (entry.group == "detect" and DETECTORS[entry.name].source)
    source = source or (entry.group == "playbook" and (entry.about.paper or entry.about.note.startswith("Ours")))
    assert source, f"a source, such as (Pascanu et al. 2013, arXiv 1211.5063): {entry.text}"
    assert [other.name for other in OURS if other.text == entry.text] == [entry.name]


@pytest.mark.parametrize(
    ("text", "references"),
    [
        ("Clips (Pascanu et al. 2013, arXiv 1211.5063).", ("Pascanu et al. 2013", "arXiv 1211.5063")),
        ("Decays (Loshchilov & Hutter 2019; He and Li, 2023).", ("Loshchilov & Hutter 2019", "He and Li, 2023")),
        ("Fails (cf. He et al. 2023; cf. arXiv:2303.06296).", ("cf. He et al. 2023", "cf. arXiv:2303.06296")),
        ("Fails (doi:10.1145/3579371.3589105).", ("doi:10.1145/3579371.3589105",)),
        ("Fails at step 2013, width 1024.", ()),
        ("From everybody's experience et al.", ()),
    ],
)
def test_references(text: str, references: tuple[str, ...]) -> None:
    assert CatalogueEntry("mitigation", "some", text, None).references == references
