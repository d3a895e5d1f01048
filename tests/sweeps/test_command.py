"""The console command: its commands and their help, what it refuses, its completion, its version."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from harness.basics.version import commit, version
from sweeps.commands import completion
from sweeps.commands.console import commands, run
from tests.sweeps import command

BIN = Path(sys.executable).parent
SECONDS = 60.0  # for what takes about three


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sweep` sets them for Hydra."""
    monkeypatch.setattr(sys, "argv", sys.argv)


def status_of(*words: str) -> int:
    """How the command ends in this process."""
    try:
        return run(words)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in commands())
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", commands())
def test_each_command_has_help_of_the_same_style(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(name, "--help") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: stability-harness {name} ") and not printed.err
    if name != "sweep":
        purpose = " ".join(printed.out.split("\n\n")[1].split())
        assert purpose[0].isupper() and purpose.endswith(".") and len(purpose) >= 50


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "stability-harness: no command given; allowed: sweep, status, "),
        (["swep"], "stability-harness: swep: no such command; did you mean sweep? allowed: sweep, status, "),
        (["raport"], "stability-harness: raport: no such command; did you mean report? allowed: sweep, status, "),
        (["seed=1"], "stability-harness: seed=1: no such command; allowed: sweep, status, "),
        (["--list"], "stability-harness: --list: no such command; did you mean list? allowed: sweep, status, "),
        (["status"], "stability-harness status: the following arguments are required: OUT; allowed: "),
        (["status", "a", "b"], "stability-harness status: unrecognized arguments: b; allowed: "),
        (["cancel", "nowhere"], "out=nowhere: does not exist; allowed: "),
        (["status", "nowhere"], "out=nowhere: does not exist; allowed: "),
        (["list", "--config-dir=nowhere"], "--config-dir=nowhere: no such folder; allowed: "),
        (["postmortem", "x"], "stability-harness postmortem: the following arguments are required: TRIAL; allowed: "),
        (["report"], "stability-harness report: the following arguments are required: OUT; allowed: "),
        (["report", "nowhere"], "out=nowhere: "),
        (
            ["figure", "nonsense", "out", "x.svg"],
            "stability-harness figure: argument NAME: invalid choice: 'nonsense'; allowed: loss_against_rate, ",
        ),
        (
            ["figure", "loss_vs_rate", "out", "x.svg"],
            "stability-harness figure: argument NAME: invalid choice: 'loss_vs_rate'; "
            "did you mean loss_against_rate? allowed: loss_against_rate, ",
        ),
        (
            ["export", "x", "--to", "csvv"],
            "stability-harness export: argument --to: invalid choice: 'csvv'; did you mean csv? allowed: csv, mlflow, ",
        ),
        (["report", "a", "b"], "stability-harness report: unrecognized arguments: b; allowed: "),
        (
            ["report", "a", "--postmortms", "1"],
            "stability-harness report: unrecognized arguments: --postmortms 1; did you mean --postmortems? allowed: ",
        ),
        (
            ["list", "mitigatoin"],
            "GROUP=mitigatoin: unknown; did you mean mitigation? allowed: study, search, recipe, ",
        ),
        (
            ["coordinate-check"],
            "stability-harness coordinate-check: the following arguments are required: out; allowed: ",
        ),
        (
            ["completion", "tcsh"],
            "stability-harness completion: argument shell: invalid choice: 'tcsh'; allowed: bash, ",
        ),
        (["sweep", "--foo"], "unrecognized arguments: --foo; allowed: KEY=VALUE, --config-dir DIR, "),
        (
            ["sweep", "--cfg=nonsense"],
            "stability-harness: argument --cfg/-c: invalid choice: 'nonsense'; allowed: job, ",
        ),
        (["sweep", "sed=1"], "sed=1: unknown key; did you mean seed? allowed: "),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*words) == 2
    printed = capsys.readouterr()
    assert not printed.out and not list(empty.iterdir())
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: {said}")


def test_what_an_option_takes_is_named_where_it_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("export", "x") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: stability-harness export: the following arguments are required: --to; allowed: ")
    assert said.endswith("; --to: csv, mlflow, netcdf, parquet, tensorboard, trackio, wandb\n")


def test_both_ways_do_the_same(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = command.tiny("plan=true", "optim.lr=1e-3,1e-2", "mitigation=none,qk_norm")
    assert status_of("sweep", *line) == 0
    assert capsys.readouterr().out == command.call(*line).out
    assert status_of("list") == 0
    assert capsys.readouterr().out == command.call("--list").out


def test_a_closed_pipe_is_no_error(empty: Path) -> None:
    """`stability-harness list | head -1`."""
    line = f"{BIN}/stability-harness list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=empty)
    assert (done.stdout.count("\n"), done.stderr) == (1, "") and done.returncode in (0, 141)


# --- the version -------------------------------------------------------------------------------------------------


def test_a_warning_is_one_line(empty: Path) -> None:
    assert command.call(*command.tiny("out=out")).status == 0
    (file,) = (empty / "out").glob("store.zarr/*/zarr.json")
    file.write_text("{")
    for name in ("status", "verify"):
        done = subprocess.run([BIN / "stability-harness", name, "out"], capture_output=True, text=True, cwd=empty)
        lines = done.stderr.splitlines()
        assert len(lines) == (name == "status") and all(line.startswith("warning: ") for line in lines), lines


def test_version_is_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    said = f"stability-harness {version()}" + (f" ({commit()})" if commit() else "") + "\n"
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == said
    assert command.call("--version").out == said
    assert status_of("sweep", "--version") == 0
    assert capsys.readouterr().out == said


# --- completion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sta", ["status "]),
        ("sweep mitigation=qk_n", ["mitigation=qk_norm", "mitigation=qk_norm_per_head"]),
        ("sweep -m 'mitigation=none,qk_norm+zc", ["mitigation=none,qk_norm+zclip"]),
        ("sweep optim.lr=1e-3,1e-2 study=quick", ["study=quickstart"]),
        ("sweep 'seed=range(3)' optim.weight_d", ["optim.weight_decay="]),
        ("sweep fault=none,weight_bit fault.bi", ["fault.bit=", "fault.bits="]),
        ("sweep hydra/launcher=slurm hydra.launcher.part", ["hydra.launcher.partition="]),
        ("sweep nonsense= fault=nonsense optim.weight_d", []),
        ("sweep --config-d", ["--config-dir="]),
        ("coordinate-check x.png recipe=lla", ["recipe=llama"]),
        ("coordinate-check --widths=32,64 --seeds 3 mitigation=none,qk_norm+zc", ["mitigation=none,qk_norm+zclip"]),
        ("coordinate-check x.png optim.weight_d", ["optim.weight_decay="]),
        ("coordinate-check x.png fau", []),
        ("coordinate-check x.png model.sta", []),
        ("coordinate-check x.png devi", []),
        ("figure loss_a", ["loss_against_rate "]),
        ("report --", ["--help "]),
        ("report ", []),
    ],
)
def test_what_is_completed(line: str, found: list[str]) -> None:
    assert completion.completed(f"stability-harness {line}", commands()) == found


def test_bash_is_given_what_stands_behind_the_last_break() -> None:
    assert completion.completed("stability-harness sweep mitigation=none,qk_fc", commands(), " \n=:") == [
        "none,qk_fc_norm"
    ]


def test_a_users_own_files_are_completed(empty: Path) -> None:
    command.write_yaml(empty / "mine", "mitigation/own.yaml", "optim: {beta2: 0.9}")
    line = "stability-harness sweep --config-dir=mine mitigation=ow"
    assert completion.completed(line, commands()) == ["mitigation=own"]


def test_in_a_real_bash(empty: Path) -> None:
    """Typed on a terminal, with TAB; `echo` shows what became of the line."""
    rc = empty / "rc"
    rc.write_text('eval "$(stability-harness completion bash)"\nPS1="ready> "\nbind "set bell-style none"\n')
    master, slave = pty.openpty()
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"}
    bash = ["bash", "--rcfile", str(rc), "-i"]
    process = subprocess.Popen(
        bash, stdin=slave, stdout=slave, stderr=slave, cwd=empty, env=environment, start_new_session=True
    )
    os.close(slave)
    try:
        shown = _read_until(master, "ready> ")
        os.write(master, b"stability-harness compl\tb\t")
        shown = _read_until(master, "completion bash ")
        os.write(master, b"\x15stability-harness sweep 'seed=1,2' mitigation=none,qk_fc\t")
        shown = _read_until(master, "mitigation=none,qk_fc_norm")
        assert "Traceback" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _read_until(master: int, text: str) -> str:
    """What a terminal shows."""
    shown = ""
    while text not in shown:
        assert select.select([master], [], [], SECONDS)[0], f"{text!r} does not come after {shown!r}"
        shown += os.read(master, 4096).decode()
    return shown
