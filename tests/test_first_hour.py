"""`docs/start/first_hour.md` as a newcomer types it: its files, then every command in its order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import command

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "start" / "first_hour.md").read_text()
BLOCK = re.compile(r"(?:`([\w/]+\.(?:yaml|py))`[^`]*?\n\n)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
QUICK = "train.steps=40 fault.start=20 train.validate_every=20 train.validate_tokens=512"


def lines() -> list[str]:
    return [line for _, kind, text in BLOCK.findall(PAGE) if not kind for line in text.splitlines()]


def shorter(line: str) -> str:
    """The same command with fewer steps, or fewer faults."""
    if "study=campaign" in line:
        return line.replace("fault.samples=40", "fault.samples=2")
    return f"{line} {QUICK}" if " sweep " in line else line


def play(home: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each command has printed, by the line as it stands on the page."""
    for path, _, text in BLOCK.findall(PAGE):
        if path:
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
    said: dict[str, str] = {}
    trial = ""
    for line in lines():
        if line.startswith("stability-harness "):
            said[line] = command(shorter(line).replace("TRIAL", trial), home, capsys)
        else:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            words = [sys.executable, *line.split()[1:]]
            done = subprocess.run(words, capture_output=True, text=True, cwd=home, env=environment)
            assert line.split()[0] == "python" and done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            said[line] = done.stdout
        if following := re.search(r"^Next: stability-harness postmortem \S+ (\w+)$", said[line], flags=re.MULTILINE):
            trial = following[1]
    return said


def of(printed: dict[str, str], words: str) -> str:
    (said,) = (said for line, said in printed.items() if words in line)
    return said


def test_the_page_has_all_of_a_first_hour() -> None:
    names = {line.split()[1] for line in lines() if line.startswith("stability-harness")}
    assert names == {"sweep", "report", "incidents", "postmortem", "compare", "campaign", "list", "export"}
    assert {Path(path).parent.name for path, _, _ in BLOCK.findall(PAGE) if path} == {"", "mitigation", "fault"}


def test_every_command_of_the_page_works_in_its_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = play(tmp_path, capsys)
    assert "24 trials asked for" in of(printed, "plan=true")
    assert "over mitigations none, qk_norm: weight_bit moved 12 of 12 trials" in of(printed, "report results/mine")
    assert re.search(r"Trial \w+, steps 20 to \d+: \w+ \(type [123]\), corrupted weight\.", of(printed, "postmortem"))
    compared = of(printed, "compare")
    assert "playbook.name: - and repair" in compared and "Figure: changes.png" in compared
    found = re.search(r"Of 24 pairs (\d+) trained in one folder and 24 in the other\.", compared)
    assert found is not None and int(found[1]) < 24
    assert "all sites" in (told := of(printed, "campaign results/flips"))
    assert "Zeros: share of the faults" in told and "called lingering left more than 0.015 nat/token" in told
    shown = of(printed, "list --config-dir mine")
    assert re.search(r"^calm ", shown, flags=re.MULTILINE) and re.search(r"^sign_flip ", shown, flags=re.MULTILINE)
    assert "Fault sign_flip, mitigation calm" in of(printed, "report results/calm")
    assert re.search(r"tables/\S+/trials\.csv, curves\.csv, events\.csv", of(printed, "export"))
    loop = of(printed, "own_loop.py")
    assert "1 strike from step 20 on, 1 incident answered; trained" in loop
    assert loop.endswith("largest difference to the golden twin: 0.0\n")
    assert "2 trials: 2 trained." in of(printed, "report runs/a")
    assert "1 incident of 1 trial" in of(printed, "incidents runs/a")
