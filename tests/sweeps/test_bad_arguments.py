"""Command lines that would take for ever, crash the grammar, do nothing, or name no folder: one line, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import ConfigError
from sweeps.compose.arguments import check_command_line
from sweeps.compose.overrides import MOST_JOBS, check_jobs
from tests.sweeps import command

AXES = ["model.width=8,16,24,32", "seed=range(1000)", "train.batch=range(1,100)"]

# overrides, how the line begins after "error: ", what it holds
CASES: dict[str, tuple[list[str], str, str]] = {
    "a long range": (["seed=range(100000000)"], "seed=range(100000000): 100,000,000 values", "at most 100,000"),
    "a range of fractions": (["optim.lr=range(0,1,1e-9)"], "optim.lr=range(0,1,1e-9): 1,000,000,000 values", "at most"),
    "a range beyond 64 bits": ([f"seed=range({10**30})"], f"seed=range({10**30}): 1,000,000,000", "at most 100,000"),
    "a range that is shuffled": (["seed=shuffle(range(1000000000))"], "seed=shuffle(range(1000000000)): 1,000,0", "at"),
    "a range with a tag": (["seed=tag(a,range(1000000000))"], "seed=tag(a,range(1000000000)): 1,000,000,000", "at"),
    "a product": (AXES, "model.width (4) x seed (1,000) x train.batch (99): 396,000 combinations", "at most 100,000"),
    "no step": (["seed=range(0,10,0)"], "seed=range(0,10,0): no such range", "step not 0"),
    "no end": (["seed=range(0,inf)"], "seed=range(0,inf): no such range", "of finite numbers"),
    "an infinite step": (["seed=range(0,1,inf)"], "seed=range(0,1,inf): no such range", "of finite numbers"),
    "nested brackets": (["seed=" + "[" * 5000 + "]" * 5000], "seed=[[[", "brackets nested 5000 deep; allowed: at most"),
    "nested braces": (["seed=" + "{a:" * 300 + "1" + "}" * 300], "seed={a:", "brackets nested 300 deep; allowed: at"),
    "many values": (["seed=" + ",".join(map(str, range(20_000)))], "seed=0,1,2", "108,894 letters; allowed: at most"),
    "many letters": (["seed=" + "a" * 100_000], "seed=aaa", "100,005 letters; allowed: at most 20,000"),
    "many letters for a folder": (["out=" + "a" * 100_000], "out=aaa", "100,004 letters; allowed: at most 20,000"),
    "no space after a comma": (["optim.lr=1e-3,", "seed=1"], "optim.lr=1e-3,: no space after a comma", "key=1,2"),
    "nothing between commas": (["optim.lr=1e-3,,1"], "optim.lr=1e-3,,1: no value between two commas", "key=1,2"),
    "a range that is not closed": (["seed=range(3"], "seed=range(3: a bracket is not closed", "'seed=range(3)'"),
    "a bracket that closes none": (["seed=range(3))"], "seed=range(3)): the bracket ) closes none", "in pairs"),
    "spaces around the sign": (["seed = 3"], "seed = 3: a space or another sign in the key", "without spaces"),
    "a sign twice": (["seed==3"], "seed==3: more than one =", "key=value"),
    "a sign that needs quotes": (["seed=1;2"], "seed=1;2: ; needs quotes", "'seed=\"...\"'"),
    "a range of words": (["seed=range(a)"], "seed=range(a): range() cannot be read so", "range(start, stop)"),
    "a function that is none": (["seed=f(3)"], "seed=f(3): no function f", "allowed: range, interval, choice, glob"),
    "many digits": (["seed=" + "9" * 5000], "seed=999", "not an override (a number of too many digits)"),
    "many digits of a range": ([f"seed=range({'9' * 5000})"], "seed=range(999", "(a number of too many digits)"),
    "steps beyond 64 bits": (
        ["train.steps=99999999999999999999"],
        "train.steps=99999999999999999999: out of range",
        "",
    ),
    "workers beyond any number": (["pack.size=99999999999999999999"], "pack.size=99999999999999999999: not a size", ""),
    "an escape": (["seed=1\x1b[2J"], "seed=1\\x1b[2J: control characters", "allowed: printable text"),
    "a line": (["seed=1\nout=x"], "seed=1\\nout=x: control characters", "allowed: printable text"),
    "a zero byte": (["out=a\0b"], "out=a\\x00b: control characters", "allowed: printable text"),
    "no UTF-8": (["out=a\udcffb"], "out=a\\udcffb: control characters, or bytes that are no UTF-8", "printable text"),
    "an empty folder": (["out="], "out=: empty, as where a shell's variable is not set", "results/"),
    "an empty path of data": (["data.source=text", "data.path="], "data.path=: empty, as where a shell's", "a word"),
    "an empty study": (["study="], "study=: unknown study", "grid"),
    "an empty tensor": (["fault=weight_bit", "fault.start=2", "fault.tensor="], "fault.tensor=: empty, as", "a word"),
    "a folder to be interpolated": (["out=${oc.env:HOME}/x"], "out=${oc.env:HOME}/x: an interpolation", "the path of"),
    "the folder of nobody": (["out=~nobody_here/x"], "out=~nobody_here/x: no such user", "the path of a folder"),
    "several folders": (["out=a,b"], "out=a,b: belongs to the run and cannot be swept", "one value"),
    "a plan by another name": (["--dry-run"], "", "unrecognized arguments: --dry-run (did you mean plan=true?)"),
    "an unknown flag": (["--fast"], "", "unrecognized arguments: --fast; allowed: KEY=VALUE, --config-dir DIR"),
    "a question that is none": (["--cfg=everything"], "", "invalid choice: 'everything'; allowed: job"),
    "two questions": (["--cfg=job", "--info=plugins", "--package=["], "", "allowed"),
    "another configuration in a question": (["--help", "--config-path=/tmp"], "--config-path=/tmp: not for sweeps", ""),
    "a pickle in a question": (
        ["--help", "--experimental-rerun=x.pickle"],
        "--experimental-rerun=x.pickle: not for",
        "",
    ),
    "an unknown study in a question": (["--cfg=job", "study=nope"], "study=nope: unknown study", "grid"),
}
IDLE = (
    "hydra.sweep.dir=x", "hydra.sweep.subdir=x", "hydra.run.dir=x", "hydra.job.chdir=true", "hydra.output_subdir=x",
    "hydra.job.name=x", "+hydra.job.env_set.A=b", "hydra.job.env_copy=[HOME]", "hydra.verbose=true",
    "hydra.searchpath=[file:///tmp]", "hydra.help.template=x", "hydra.hydra_logging.version=2", "hydra/help=default",
    "hydra/job_logging=default", "hydra/hydra_logging=default", "+hydra/callbacks=x", "hydra/output=default",
    "hydra.sweeper.params=3", "+hydra.sweeper.params.seed=3", "++hydra.runtime.cwd=x", "hydra.callbacks={a:{b:c}}",
)  # fmt: skip


@pytest.mark.parametrize(("arguments", "start", "rest"), CASES.values(), ids=CASES)
def test_one_line_at_once(empty: Path, arguments: list[str], start: str, rest: str) -> None:
    (line,) = command.refused(empty, *command.tiny(*arguments))
    assert line.startswith(f"error: {start}")
    assert "; allowed: " in line and rest in line
    assert line.isprintable()


@pytest.mark.parametrize(
    "way", [["plan=true"], ["--help"], ["--cfg=hydra"], ["--info=searchpath"]], ids=lambda way: way[0]
)
@pytest.mark.parametrize("text", IDLE)
def test_what_would_have_no_effect(empty: Path, text: str, way: list[str]) -> None:
    (line,) = command.refused(empty, text, *way)
    assert line.startswith(f"error: {text}: has no effect here; allowed: ")
    assert line.endswith("of hydra.*: hydra/launcher, hydra.launcher.*")
    assert ("out=DIR" in line) == text.startswith(("hydra.sweep.", "hydra.run."))


@pytest.mark.parametrize("text", ["~hydra.launcher.workers", "~hydra/launcher", "hydra/launcher@x=local"])
def test_what_removes_or_moves(empty: Path, text: str) -> None:
    (line,) = command.refused(empty, text)
    assert line == f"error: {text}: keys cannot be removed or moved; allowed: key=value"


@pytest.mark.parametrize("value", ["[slurm]", "1", "true", "nan", "null", "???", "a.b", "../local", "{a:b}", ""])
@pytest.mark.parametrize("group", ["hydra/launcher", "hydra/sweeper"])
def test_a_launcher_that_is_no_name(empty: Path, group: str, value: str) -> None:
    (line,) = command.refused(empty, f"{group}={value}")
    assert line == f"error: {group}={value}: not a name; allowed: one name"


def test_as_many_jobs_as_are_allowed() -> None:
    from sweeps.compose.arguments import axes_of

    axes = axes_of({}, [f"seed=range({MOST_JOBS // 2})", "model.width=16,32", "optim.lr=0.1"], command.loader())
    check_jobs(axes)
    more = axes_of({}, ["model.depth=1,2"], command.loader())
    with pytest.raises(ConfigError, match=r"^seed \(50,000\) x model.width \(2\) x model.depth \(2\): 200,000 comb"):
        check_jobs([*axes, *more])


def test_a_search_of_too_many_cells(empty: Path) -> None:
    axes = ["seed=range(2)", "model.width=8,16,24,32", "train.steps=range(6,50006)", "optim.lr=0.1,0.2"]
    (line,) = command.refused(empty, *command.tiny("search=max_stable_lr", *axes))
    assert line.endswith(
        "model.width (4) x train.steps (50,000) x seed (2): 400,000 combinations; allowed: at most 100,000"
    )


def test_a_search_of_what_cannot_act(empty: Path) -> None:
    """As a sweep, it refuses before anything is written."""
    axes = ["idle=refuse", "mitigation=none,softmax_fp32", "optim.lr=0.1,0.2"]
    lines = command.refused(empty, *command.tiny("search=max_stable_lr", "out=out", *axes))
    assert lines[-1].endswith("; allowed: trials in which it acts, or idle=warn")


FOLDERS = (
    "2026", "2026-11", "3.5", "1e3", "true", "No", "nan", "0x10", "é", "C#", "a=b", "my results", "it's", 'say "so"',
    "x'y'", "a\\b", "(x)", "a(1)", "a;b", "a&b", "a!b", "a^b", "a`b", "<a>", "日本", "a+b", "a@b", "a:b",
    "a%b", "$HOME", "null.d", "-", "_", "a|b", "a*", "a?", "{", "a]b", "naïve \\\"quoted\\\"",
)  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_any_name_of_a_folder(empty: Path, folder: str) -> None:
    command.loader()
    assert check_command_line([f"out={folder}"])[0].out == folder


def test_folders_that_are_quoted_already(empty: Path) -> None:
    command.loader()
    for written, folder in {"'a, b'": "a, b", '"C#"': "C#", "a\\,b": "a,b", "null": None}.items():
        assert check_command_line([f"out={written}"])[0].out == folder


def test_where_results_go(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(empty / "home"))
    ended = command.call(*command.tiny("out=~/C# é", "train.steps=2"))
    assert ended.status == 0 and (empty / "home" / "C# é" / "store.zarr").is_dir()
    assert not (empty / "~").exists() and not (empty / "results").exists()
