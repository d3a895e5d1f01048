"""The commands on results are files that find themselves, here and in installed packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import analysis.commands
from analysis.__main__ import main
from harness.basics import plugins
from sweeps.commands import console

ROOT = Path(__file__).parents[2]
OURS = sorted(file.stem for file in Path(analysis.commands.__path__[0]).glob("[!_]*.py"))
THEIRS = '''"""`count OUT`."""

HELP = "say how many words a folder's name has"


def add_arguments(parser):
    parser.add_argument("out", metavar="OUT")


def run(options):
    print(len(options.out.split("_")))
'''


@pytest.fixture
def named(request: pytest.FixtureRequest) -> str:
    """The name of the entry point."""
    return getattr(request, "param", "count")


@pytest.fixture
def installed(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with a command, as if it were installed."""
    (tmp_path / "counting_command.py").write_text(THEIRS)
    entry = importlib.metadata.EntryPoint(named, "counting_command", "stability_harness.commands")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    monkeypatch.delitem(sys.modules, "counting_command", raising=False)
    console.commands.cache_clear()
    yield
    console.commands.cache_clear()


def test_each_file_is_one_and_has_its_line() -> None:
    texts = plugins.texts("commands", "HELP")
    assert list(texts) == OURS and len(OURS) == 21
    assert max(map(len, texts.values())) <= 60  # beside its name on a terminal of 80 columns
    assert not set(texts) & set(console.OWN), "one name, one command"
    for name in OURS:
        module = plugins.module("commands", name)
        assert texts[name] == module.HELP and callable(module.add_arguments) and callable(module.run)
        assert (module.__doc__ or "").startswith(f"`{name} OUT") or name == "figure"


def test_one_of_an_installed_package(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "a_b_c"]) == 0 and capsys.readouterr().out == "3\n"
    assert console.run(["count", "a_b"]) == 0 and capsys.readouterr().out == "2\n"
    assert console.run(["--help"]) == 0
    assert "  count             say how many words a folder's name has" in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit) as ended:
        main(["count", "--help"])
    assert ended.value.code == 0 and "usage: python -m analysis count [-h] OUT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "whose"), [("status", "status"), ("lead", "analysis.commands.lead")], indirect=["named"]
)
def test_one_that_takes_a_name_of_ours(installed: None, whose: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(["--help"]) == 2
    said = capsys.readouterr().err
    assert f"counting_command: the name is that of {whose} already; allowed: another name" in said


BROKEN = {
    "no_such_module": "cannot be loaded (No module named 'no_such_module'); allowed: a module with HELP",
    "pathlib": "cannot be loaded (module 'pathlib' has no attribute 'HELP'); allowed: a module with HELP",
}


@pytest.mark.parametrize("module", BROKEN)
def test_a_broken_package_is_one_line_and_hinders_no_sweep(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = importlib.metadata.EntryPoint("count", module, "stability_harness.commands")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    console.commands.cache_clear()
    try:
        assert console.run(["--help"]) == main(["incidents", "nowhere"]) == 2
        assert capsys.readouterr().err.count(f"count = {module}: {BROKEN[module]}") == 2
        assert console.run(["status", "nowhere"]) == 2
        assert "out=nowhere: does not exist" in capsys.readouterr().err
    finally:
        console.commands.cache_clear()


def test_a_command_loads_no_other() -> None:
    """One that prints a table draws nothing."""
    lines = "import sys, analysis.__main__ as m; m.main(['incidents', 'nowhere']); print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "error: out=nowhere: does not exist" in done.stderr
    loaded = set(done.stdout.split())
    assert "analysis.commands.incidents" in loaded
    assert not loaded & {"analysis.commands.figure", "analysis.commands.export", "seaborn"}
