"""Files of a user's own that are no plain YAML, and what a study may say to its launcher: one line, at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from sweeps.compose.arguments import check_command_line
from sweeps.compose.hydra_calls import FOLDER, fast_yaml_loader, yaml_loader
from tests.sweeps import command

GLOBAL = "# @package _global_\n"
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x0: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 30)}], {new}1: 1}}\n"
    for old, new in zip("abcde", "bcdef", strict=True)
)
NUL = b"model:\n  width: 3\0"

# content, how the line goes on after "error: ", where {file} is the file and {name} the choice of it
CONTENTS: dict[str, tuple[str | bytes, str]] = {
    "a bomb of aliases": (BOMB, "{file}: more than 10,000 values, those of its aliases counted; allowed: fewer"),
    "a bomb of merges": (MERGES, "{file}: more than 10,000 values, those of its aliases counted; allowed: fewer"),
    "a cycle": ("model: &a\n  width: *a\n", "{file}: line 2: *a contains itself; allowed: a tree"),
    "a long cycle": ("a: &a [&b {c: [*a]}, *b]\n", "{file}: line 1: *a contains itself; allowed: a tree"),
    "an unknown alias": ("model: *nobody\n", "{file}: line 1 is not YAML (found undefined alias 'nobody')"),
    "brackets": ("[" * 100_000, "{file}: nested more than 20 deep; allowed: at most 20"),
    "braces": ("model: " + "{a: " * 1000 + "1" + "}" * 1000, "{file}: nested more than 20 deep"),
    "indentation": ("".join(f"{' ' * depth}a:\n" for depth in range(200)), "{file}: nested more than 20 deep"),
    "a scalar": ("fast", "{file}: a str, not a mapping; allowed: lines of key: value"),
    "a number": ("12", "{file}: a int, not a mapping; allowed: lines of key: value"),
    "a list": ("- model\n- width\n", "{file}: a list, not a mapping; allowed: lines of key: value"),
    "a set": ("!!set {model, width}", "{file}: line 1 has a tag (tag:yaml.org,2002:set); allowed: no tags"),
    "a call": (
        "model: !!python/object/apply:os.mkdir [called]",
        "{file}: line 1 has a tag (tag:yaml.org,2002:python/object/apply:os.mkdir); allowed: no tags",
    ),
    "a name of Python's": (
        "model: !!python/name:os.system ''",
        "{file}: line 1 has a tag (tag:yaml.org,2002:python/name",
    ),
    "a path": (
        "out: !!python/object/apply:pathlib.Path [x]",
        "{file}: line 1 has a tag (tag:yaml.org,2002:python/object",
    ),
    "bytes": ("out: !!binary aGVsbG8=", "{file}: line 1 has a tag (tag:yaml.org,2002:binary); allowed: no tags"),
    "a tag of nobody's": ("model: !mine {width: 3}", "{file}: line 1 has a tag (!mine); allowed: no tags"),
    "a key twice": (
        "model: {width: 16}\nmodel: {width: 32}\n",
        "{file}: line 2 is not YAML (found duplicate key model); allowed: YAML",
    ),
    "a tab": ("model:\n\twidth: 3\n", "{file}: line 2 is not YAML (found character '\\t' that cannot start any token)"),
    "two documents": ("model: {}\n---\nmodel: {}\n", "{file}: line 2 is not YAML (but found another document)"),
    "a zero byte": (NUL, "{file}: not YAML (unacceptable character #x0000: special characters are not allowed"),
    "Latin-1": ("model: {}  # Größe".encode("latin-1"), "{file}: byte 15 is no UTF-8; allowed: YAML in UTF-8"),
    "UTF-16": ("model: {}".encode("utf-16"), "{file}: byte 0 is no UTF-8; allowed: YAML in UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n", "{file}: byte 0 is no UTF-8; allowed: YAML in UTF-8"),
    "too large": ("# \n" * 100_000, "{file}: larger than 262,144 bytes; allowed: a YAML file up to that size"),
    "many digits": (f"optim: {{lr: {'9' * 10_000}}}", "{file}: not YAML (Exceeds the limit (4300 digits)"),
    "a large integer": (
        "train: {steps: 99999999999999999999}",
        "{name}: train.steps=0x56bc75e2d630fffff: beyond 64 bits; allowed: -9223372036854775807 to",
    ),
    "a huge integer": (
        f"train: {{steps: 0x{'f' * 9999}}}",
        "{name}: train.steps=(an integer of 39996 bits): beyond 64",
    ),
    "a key of another type": ("model: {1: 3}", "{name}: model.1: the key is a int; allowed: words"),
    "a key that YAML takes for true": ("on: 3", "{name}: True: the key is a bool; allowed: words"),
    "a key of keys": ("? [a, b]\n: 3\n", "{file}: "),
    "no key": ("? \n: 3\n", "{name}: None: the key is a NoneType; allowed: words"),
    "an interpolation": ("out: ${oc.env:HOME}", "{name}: out=${oc.env:HOME}: an interpolation; allowed: a value"),
    "an interpolation within": ("data: {path: 'a ${seed} b'}", "{name}: data.path=a ${seed} b: an interpolation"),
    "a missing value": ("data: {path: '???'}", "{name}: data.path=???: no value; allowed: a value, or null"),
    "an empty word": ("data: {path: ''}", "{name}: data.path=: no value; allowed: a value, or null"),
    "a section in place of a value": ("optim: {lr: {}}", "{name}: optim.lr={}: no value; allowed: a value, or null"),
    "no section": ("search:", "{name}: search=null: a section, and no key; allowed: search.kind, search.trials"),
    "a value for a section": ("pack: 5", "{name}: pack=5: a section, and no key; allowed: pack.size"),
    "a section that there is not": ("nothing: {}", "{name}: nothing={}: no value; allowed: a value, or null"),
    "an escape": ('data: {path: "a\\e[2Jb"}', "{name}: data.path=a\\x1b[2Jb: control characters; allowed: printable"),
    "a target": ("model: {_target_: os.mkdir}", "{name}: model._target_=os.mkdir: would be imported and called"),
    "a header of nothing": ("# @package\nmodel: {}", "{name}: @package: a {group} has its own place; allowed"),
    "a header of another": (
        "# @package optim\nlr: 1",
        "{name}: @package optim: a {group} has its own place; allowed: ",
    ),
}


@pytest.mark.parametrize("group", ["study", "mitigation", "fault"])
@pytest.mark.parametrize(("content", "starts"), CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_is_no_tree_of_values(empty: Path, group: str, content: str | bytes, starts: str) -> None:
    file = empty / "mine" / group / "odd.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (line,) = command.refused(empty, "--config-dir=mine", f"{group}=odd", "train.steps=6", "schedule.warmup=2")
    for word, meaning in {"{file}": str(file), "{name}": f"{group}=odd", "{group}": group}.items():
        starts = starts.replace(word, meaning)
    assert line.startswith(f"error: {starts}")
    assert "; allowed: " in line and len(line) < 500


def test_an_empty_study_is_the_recipe(empty: Path) -> None:
    for name, content in {"empty": "", "comment": "# nothing\n", "mark": "\ufeffseed: 0\n"}.items():
        (empty / "mine" / "study").mkdir(parents=True, exist_ok=True)
        (empty / "mine" / "study" / f"{name}.yaml").write_text(content)
        assert command.only(study=name, folder=empty / "mine") == command.only()


def test_a_study_that_builds_on_another(empty: Path) -> None:
    command.write_yaml(empty, "study/base.yaml", "optim: {lr: 0.5, clip: 2.0}\nhydra: {launcher: {time: 7}}")
    command.write_yaml(empty, "study/mine.yaml", "defaults: [base, _self_]\noptim: {clip: 1.0}")
    trial = command.only(study="mine", folder=empty)
    assert (trial.optim.lr, trial.optim.clip) == (0.5, 1.0)
    config, _ = check_command_line([f"--config-dir={empty}", "study=mine", "hydra/launcher=slurm"])
    assert config.hydra.launcher.time == 7


@pytest.mark.parametrize("group", ["study", "fault"])
def test_files_that_build_on_each_other_for_ever(empty: Path, group: str) -> None:
    package = GLOBAL if group == "study" else ""
    (empty / "mine" / group).mkdir(parents=True)
    for name, base in {"a": "b", "b": "c", "c": "b", **{f"n{i}": f"n{i + 1}" for i in range(50)}}.items():
        (empty / "mine" / group / f"{name}.yaml").write_text(f"{package}defaults: [{base}]\n")
    for name, reason in {
        "a": "builds on a -> b -> c -> b; allowed: at most 10",
        "n0": "builds on n0 -> n1 -> ",
    }.items():
        (line,) = command.refused(empty, "--config-dir=mine", f"{group}={name}")
        assert line.startswith(f"error: {group}={name}: {reason}")


@pytest.mark.parametrize("flag", ["plan=true", "--help", "--list"])
def test_what_stands_where_a_file_should(empty: Path, flag: str) -> None:
    """None of them is waited for; a pipe would never end."""
    for group in ("study", "mitigation", "fault"):
        (empty / "mine" / group / "folder.yaml").mkdir(parents=True)
        os.mkfifo(empty / "mine" / group / "pipe.yaml")
        (empty / "mine" / group / "loop.yaml").symlink_to("loop.yaml")
        (empty / "mine" / group / "device.yaml").symlink_to("/dev/zero")
        for name in ("folder", "pipe", "loop", "device") if flag != "--list" else ():
            (line,) = command.refused(empty, "--config-dir=mine", f"{group}={name}", flag)
            assert line.startswith(f"error: {group}={name}: unknown {group}; ")
    if flag == "--list":
        ended = command.call("--config-dir=mine", "--list")
        assert ended.err == "" and "pipe" not in ended.out and "qk_norm" in ended.out


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("x" * 300, "file name too long"),
        ("x/" * 3000, "file name too long"),
        ("loop", "too many levels of symbolic links"),
        ("file", "no folder"),
        ("file/below", "no such folder"),
        ("", "empty, as where a shell's variable is not set"),
        ("${oc.env:HOME}", "control characters or ${ in its name"),
    ],
)
@pytest.mark.parametrize("flag", ["plan=true", "--help", "--list", "--info=searchpath"])
def test_what_is_no_folder(empty: Path, folder: str, reason: str, flag: str) -> None:
    (empty / "loop").symlink_to("loop")
    (empty / "file").touch()
    (line,) = command.refused(empty, f"--config-dir={folder}", flag)
    assert line.startswith("error: --config-dir=") and f": {reason}; allowed: a folder with studies" in line


def test_names_with_control_characters(empty: Path) -> None:
    command.write_yaml(empty / "mine", "mitigation/a\x1b[2Jb.yaml", "optim: {clip: 1.0}")
    for arguments in (["plan=true"], ["--list"], ["--help"]):
        (line,) = command.refused(empty, "--config-dir=mine", *arguments)
        assert "mitigation/a\\x1b[2Jb.yaml: control characters in its name; allowed: another name" in line


def test_comments_with_control_characters(empty: Path) -> None:
    command.write_yaml(empty / "mine", "mitigation/loud.yaml", "# Clears \x1b]0;mine\x07 the screen\u202e.\n{}")
    shown = command.call("--config-dir=mine", "--list").out
    assert "Clears \\x1b]0;mine\\x07 the screen\\u202e." in shown
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown


@pytest.mark.parametrize(
    "name", ["study/grid", "mitigation/clip_1", "mitigation/none", "fault/weight_bit", "fault/value"]
)
def test_a_name_of_ours_is_not_left_out_in_silence(empty: Path, name: str) -> None:
    command.write_yaml(empty / "mine", f"{name}.yaml", "{}")
    for arguments in (["plan=true"], ["--list"]):
        (line,) = command.refused(empty, "--config-dir=mine", *arguments)
        reason = f"there is a {name.partition('/')[0]} of that name already; allowed: another name"
        assert line == f"error: --config-dir=mine: {name}.yaml: {reason}"


# --- what a study says to its launcher ---------------------------------------------------------------------------

OPTIONS = "hydra: {launcher: {partition: debug, time: 30, memory: 8GB, workers: 3}}"
SLURM = f"defaults: [override /hydra/launcher: slurm]\n{OPTIONS}"


def launcher(folder: Path, *arguments: str) -> dict[str, Any]:
    """The launcher's options of this command line."""
    return dict(check_command_line([f"--config-dir={folder}", *arguments])[0].hydra.launcher)


def test_a_study_chooses_the_launcher_and_its_options(empty: Path) -> None:
    command.write_yaml(empty, "study/cluster.yaml", SLURM)
    command.write_yaml(empty, "study/either.yaml", OPTIONS)
    command.loader()
    found = launcher(empty, "study=cluster")
    assert found["_target_"].endswith("SlurmLauncher")
    assert (found["partition"], found["time"], found["memory"], found["cpus"]) == ("debug", 30, "8GB", 1)
    found = launcher(empty, "study=cluster", "hydra.launcher.time=5", "hydra.launcher.setup=[module load x]")
    assert (found["partition"], found["time"], found["setup"]) == ("debug", 5, ["module load x"])
    assert launcher(empty, "study=cluster", "hydra/launcher=local")["workers"] == 3
    assert launcher(empty, "study=either")["workers"] == 3
    assert launcher(empty, "study=either", "hydra.launcher.workers=2")["workers"] == 2
    assert launcher(empty, "study=either", "hydra/launcher=slurm")["partition"] == "debug"
    assert [trial.seed for trial in command.trials(study="cluster", folder=empty)] == [0]


def test_a_study_is_sent_to_slurm(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command.write_yaml(empty / "mine", "study/cluster.yaml", SLURM)
    monkeypatch.setenv("PATH", str(empty))
    (line,) = command.refused(empty, "--config-dir=mine", "study=cluster", "train.steps=6", "schedule.warmup=2")
    assert line == "error: hydra/launcher=slurm: no sbatch on PATH; allowed here: local"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("setup: [touch called]", "hydra.launcher.setup=['touch called']: may run any command in a job"),
        ("setup: touch called", "hydra.launcher.setup=touch called: may run any command in a job"),
        ("extra: {wrap: touch called}", "hydra.launcher.extra={'wrap': 'touch called'}: may run any command in a job"),
        ("extra: {}", "hydra.launcher.extra={}: may run any command in a job"),
        ("_target_: os.mkdir", "hydra.launcher._target_=os.mkdir: would be imported and called"),
        ("partitoin: debug", "hydra.launcher.partitoin=debug: unknown key; allowed: workers, partition, "),
        ('partition: "debug\\ntouch called"', "hydra.launcher.partition=debug\\ntouch called: not a plain word"),
        ("account: me; touch called", "hydra.launcher.account=me; touch called: not a plain word"),
        ("constraint: $(touch called)", "hydra.launcher.constraint=$(touch called): not a plain word"),
        ("memory: '4GB '", "hydra.launcher.memory=4GB : not a plain word"),
        ("qos: '${oc.env:HOME}'", "hydra.launcher.qos=${oc.env:HOME}: not a plain word"),
        ("time: long", "hydra.launcher.time=long: wrong type (str); allowed: an integer"),
        ("time: true", "hydra.launcher.time=true: wrong type (bool); allowed: an integer"),
        ("time: 99999999999999999999", "hydra.launcher.time=0x56bc75e2d630fffff: wrong type (int)"),
        ("gpus: -1", "hydra.launcher.gpus=-1: wrong type (int); allowed: an integer"),
        ("workers: [1]", "hydra.launcher.workers=[1]: not a plain word"),
    ],
)  # fmt: skip
def test_what_a_study_may_not_say_to_the_launcher(empty: Path, options: str, reason: str) -> None:
    content = f"defaults: [override /hydra/launcher: slurm]\nhydra: {{launcher: {{{options}}}}}"
    command.write_yaml(empty / "mine", "study/odd.yaml", content)
    for arguments in (["plan=true"], ["--help"], ["--cfg=hydra"], ["hydra/launcher=local"]):
        (line,) = command.refused(empty, "--config-dir=mine", "study=odd", *arguments)
        assert line.startswith(f"error: study=odd: {reason}")
        assert "; allowed: " in line


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("override /hydra/launcher: cloud", "hydra/launcher=cloud: unknown hydra/launcher; allowed: local, slurm"),
        ("override /hydra/launcher: [slurm]", "hydra/launcher=['slurm']: unknown hydra/launcher; allowed: local, "),
        ("override /search: pareto", "defaults: override /search: pareto: may not come from a file; allowed: override"),
        ("override /fault: weight_bit", "fault=weight_bit: belongs under hydra.sweeper.params"),
        ("override hydra/launcher: slurm", "defaults: override hydra/launcher: slurm: may not come from a file"),
        ("override /hydra/sweeper: basic", "defaults: override /hydra/sweeper: basic: may not come from a file"),
        ("/hydra/launcher: slurm", "defaults: /hydra/launcher: slurm: may not come from a file"),
        ("3", "defaults: 3: may not come from a file; allowed: _self_, and the name of one other study"),
    ],
)
def test_what_a_study_may_not_choose(empty: Path, entry: str, reason: str) -> None:
    command.write_yaml(empty / "mine", "study/odd.yaml", f"defaults:\n- {entry}\n")
    (line,) = command.refused(empty, "--config-dir=mine", "study=odd", "plan=true")
    assert line.startswith(f"error: study=odd: {reason}")


# --- libyaml, which reads files faster -------------------------------------------------------------------------------

SCALARS = ["1e-3", "1_000", ".5", "2026-01-01", "yes", "No", "0x1F", "1:30", "~", "null", ".inf", ".nan", "12e03"]
SCALARS += ["+.5e+2", "1.e5", "08", "0o7", "0b11", "'a''b'"]
TEXTS = [
    *(f"a: {scalar}\n{scalar}: [{scalar}]\n" for scalar in SCALARS),
    "a: |\n  x\n  y\nb: >-\n  x\n  y\n",
    "<<: {a: 1}\nb: &x [1]\nc: *x\n",
    "%YAML 1.1\n---\na: \U0001f600\n",
    "{1: a, true: b}",
    "- 1\n- 2",
    "",
]


def read_as(loader: Any, text: str) -> str:
    return repr(yaml.load(text, Loader=loader))


def test_both_readers_say_the_same() -> None:
    """Of every file that is shipped, and of what YAML reads in more ways than one."""
    fast, slow = fast_yaml_loader(), yaml_loader()
    assert fast is not None, "PyYAML has libyaml in all its wheels"
    for text in [*(file.read_text() for file in FOLDER.rglob("*.yaml")), *TEXTS]:
        assert read_as(fast, text) == read_as(slow, text)


def test_without_libyaml_a_sweep_is_planned_as_with_it(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command.tiny("--config-dir=mine", "study=odd", "plan=true")
    command.write_yaml(empty / "mine", "study/odd.yaml", "optim:\n  lr: 3e-3\n")
    planned = command.call(*words)
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    fast_yaml_loader.cache_clear()
    try:
        assert fast_yaml_loader() is None and command.call(*words) == planned and planned.status == 0
    finally:
        fast_yaml_loader.cache_clear()
