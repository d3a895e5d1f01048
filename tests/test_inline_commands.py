"""Commands in the sentences and tables of the README, the first pages and the guides work as they stand there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.sweeps.command import tiny
from tests.test_readme import FILES, README, command

PROGRAM = "stability-harness"
ELSEWHERE = {
    "completion bash": "tests/sweeps/test_command.py",
    "completion fish | source": "tests/sweeps/test_command.py",
    "demo": "tests/sweeps/test_everyday.py",
    "list --config-dir mine": "tests/test_readme.py",
    "sweep": "tests/test_readme.py",
}
"""Where those are run that need more than a small grid."""


def inline() -> list[str]:
    """Of the README's table of questions, and all that stand behind the program's name; each once."""
    found = re.findall(r"^\| [^|`]+\? \| `([^`]+)` \|", README, flags=re.MULTILINE)
    for file in FILES:
        text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [words.replace("\n", " ") for words in re.findall(rf"`(?:[^`]*\()?{PROGRAM} ([^`\")]+)", text)]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands are typed."""
    return tmp_path_factory.mktemp("home")


def test_there_are_many_and_those_of_the_table_are_among_them() -> None:
    found = inline()
    assert len(found) > 20 and {"detectors OUT skip_step combined", "postmortem OUT TRIAL"} < set(found)
    assert ELSEWHERE.keys() <= set(found)
    assert all((Path(__file__).parent.parent / where).exists() for where in ELSEWHERE.values())


@pytest.mark.parametrize("line", [line for line in inline() if line not in ELSEWHERE])
def test_they_work(line: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (trained / "results" / "first").exists():
        words = "fault=none,weight_bit fault.start=4 model.width=32,64 mitigation=none,qk_norm seed=range(2)"
        command(f"{PROGRAM} sweep", trained, capsys, *tiny("out=results/first", *words.split()))
        shutil.copytree(trained / "results" / "first", trained / "results" / "other")
    if "playbooks" in line:
        words = "fault=none,weight_bit fault.start=4 playbook=none,repair seed=range(2)"
        command(f"{PROGRAM} sweep", trained, capsys, *tiny("out=results/answered", *words.split()))
        line = line.replace("OUT", "results/answered")
    if line.startswith("forecast OUT"):
        words = "model.width=16,32,64 optim.lr=1e-2,1e-1 seed=range(2)"
        command(f"{PROGRAM} sweep", trained, capsys, *tiny("out=results/sizes", *words.split()))
        line = line.replace("OUT", "results/sizes")
    words = line.replace("OUT OUT", "results/first results/other").replace("OUT", "results/first")
    if "TRIAL" in line:
        said = command(f"{PROGRAM} incidents results/first", trained, capsys)
        trial = re.findall(rf"^Next: {PROGRAM} postmortem results/first (\w+)$", said, flags=re.MULTILINE)[0]
        words = words.replace("TRIAL TRIAL", f"{trial} golden").replace("TRIAL", trial)
    words = words.replace("NAME", "qk_norm_sensitivity")
    more = ["plan=true"] if words.startswith("sweep ") and "--cfg" not in words else []
    assert command(f"{PROGRAM} {words}", trained, capsys, *more)
