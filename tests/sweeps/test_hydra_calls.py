"""Hydra by its public names: what its users expect of a command line, and what is private of it or of OmegaConf."""

from __future__ import annotations

import ast
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import submitit
from hydra._internal.utils import get_args_parser
from hydra.types import RunMode
from omegaconf import OmegaConf

from harness.config import ConfigError
from sweeps.compose import hydra_calls
from sweeps.compose.arguments import FLAGS, config_loader, options_of, question_of
from sweeps.compose.grid import Composer
from sweeps.compose.settings import SlurmOptions
from sweeps.slurm.executor import SlurmExecutor
from tests.sweeps import command

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "sweeps/compose/hydra_calls.py": {"omegaconf._utils", "omegaconf.basecontainer", "_resolvers"},
    "sweeps/slurm/executor.py": {"_make_submission_file_text", "_submitit_command_str"},
}
OF_SUBMITIT = ("_make_submission_file_text", "_submitit_command_str", "_usr_sig")
PRIVATE = (
    "_query",
    "_get_header_dict",
    "_compose_config_from_defaults_list",
    "_resolvers",
    "__deepcopy__",
    *OF_SUBMITIT,
)


def private_names(file: Path) -> set[str]:
    """Modules of Hydra and OmegaConf that are private, or made for them alone, and private attributes of theirs."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("hydra", "omegaconf"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name for name in names if "._" in name or name == "omegaconf.basecontainer"}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith(("hydra._", "omegaconf._"))}
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.add(node.value)
    return found - {"omegaconf._utils.get_yaml_loader"}


def test_what_is_private_stands_in_one_file() -> None:
    for folder in ("sweeps", "hydra_plugins", "harness", "injectors", "analysis"):
        for file in (ROOT / folder).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            assert private_names(file) == ALLOWED.get(name, set()), name


def test_the_script_is_what_submitit_would_submit(tmp_path: Path) -> None:
    options = vars(SlurmOptions()) | {"time": 7}
    options.pop("_target_")
    text = SlurmExecutor(options, wait=True)._text(tmp_path, processes=2, tasks=3, parallel=1)
    lines = text.splitlines()
    assert {"#SBATCH --time=7", "#SBATCH --array=0-2%1", "#SBATCH --cpus-per-task=2"} <= {*lines}
    assert lines[0] == "#!/bin/bash" and lines[-1].startswith("srun ")
    assert lines[-1].endswith(f"-u -m submitit.core._submit {tmp_path}")
    signal_name = submitit.JobEnvironment.USR_SIG
    assert f"#SBATCH --signal={signal_name}@120" in lines
    assert signal.Signals[f"SIG{signal_name}"] == submitit.JobEnvironment._usr_sig()


def test_flags_are_those_of_the_hydra_that_is_installed() -> None:
    theirs = {
        " ".join(action.option_strings): (action.nargs, action.const, action.choices and [*action.choices])
        for action in get_args_parser()._actions
        if action.option_strings and "--version" not in action.option_strings  # our own
    }
    ours = {
        names: (0, True, None) if "action" in kind else (kind.get("nargs"), kind.get("const"), _listed(kind))
        for names, kind in FLAGS.items()
        if names != "--verbose"  # our own
    }
    assert ours == theirs


def _listed(kind: dict[str, Any]) -> list[str] | None:
    return [*kind["choices"]] if "choices" in kind else None


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "seed=1", "optim.lr=0.1"],
        ["seed=1", "optim.lr=0.1", "-m"],
        ["seed=1", "-m", "optim.lr=0.1"],
        ["seed=1", "--config-dir=mine", "--multirun", "optim.lr=0.1"],
        ["--config-dir", "mine", "seed=1", "-m", "optim.lr=0.1"],
    ],
)
def test_overrides_may_stand_on_both_sides_of_a_flag(words: list[str]) -> None:
    options = options_of(words)
    assert options.overrides == ["seed=1", "optim.lr=0.1"] and options.multirun and not question_of(options)


def test_such_a_command_line_is_a_sweep(empty: Path) -> None:
    line = command.tiny("plan=true", "seed=1,2")
    mixed = command.call(line[0], "-m", *line[1:])
    assert (mixed.status, mixed.out) == (0, command.call(*line).out)
    shown = command.call("seed=3", "--cfg", "job", "optim.lr=0.5", "--package", "optim")
    assert shown.status == 0 and shown.out.startswith("# @package optim\n") and "lr: 0.5" in shown.out


def test_a_fault_is_what_hydra_composes(empty: Path) -> None:
    files = {
        "after": "defaults: [value, _self_]\nbit: 3\nsite: update",
        "before": "defaults: [_self_, value]\nbit: 3\nsite: update",
        "on_a_file": "defaults: [after]\nsite: gradient",
        "on_a_preset": "defaults: [weight_bit]\nbits: 2",
        "before_a_preset": "defaults: [_self_, weight_bit]\nbits: 2\nstart: 7",
        "alone": "kind: value\nsite: weight\nbit: 1",
    }
    for name, text in files.items():
        (empty / "mine" / "fault").mkdir(parents=True, exist_ok=True)
        (empty / "mine" / "fault" / f"{name}.yaml").write_text(text)
    loader = config_loader(Path("mine"))
    composer = Composer(loader, "grid")
    options = loader.get_group_options("fault")
    assert {*files, "weight_bit"} <= {*options}
    for name in options:
        whole = loader.load_configuration("config", [f"fault={name}"], run_mode=RunMode.MULTIRUN)
        composed = composer._fault_composed(name)
        assert composed == OmegaConf.to_container(whole.fault), name


def test_a_fault_that_builds_on_none_is_refused(empty: Path) -> None:
    command.write_yaml(empty / "mine", "fault/odd.yaml", "defaults: [nonsense]")
    (line,) = command.refused(empty / "out", "--config-dir=mine", "fault=none,odd")
    assert line.startswith("error: fault=nonsense: unknown fault; ")


def test_somebody_elses_hydra_is_not_ours(empty: Path) -> None:
    """Neither its files nor what it has initialized."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    (empty / "config.yaml").write_text("a: 1")
    with initialize_config_dir(str(empty), version_base="1.3"):
        theirs = GlobalHydra.instance().hydra
        assert "mine" not in config_loader().get_group_options("study")
        assert GlobalHydra.instance().hydra is theirs and compose("config").a == 1
        assert not any(source.scheme() == "checked" for source in GlobalHydra.instance().config_loader().get_sources())
    assert hydra_calls.own_folder(config_loader(empty)) == empty and hydra_calls.own_folder(config_loader()) is None


@pytest.mark.parametrize(
    "words", [["--help"], ["--hydra-help"], ["--info", "all"], ["--cfg", "all"], ["--list"], command.tiny("plan=true")]
)
def test_what_a_process_logs_to_is_left_open(empty: Path, words: list[str]) -> None:
    """Some close what they write to along with themselves, such as absl's, which optax loads: it may be everybody's."""
    log = logging.FileHandler("log", mode="w")
    logging.getLogger("mine").addHandler(log)
    stream = log.stream
    try:
        assert command.call(*words).status in (None, 0)
        assert not stream.closed and log.stream is stream
    finally:
        logging.getLogger("mine").removeHandler(log)
        log.close()


def test_a_flag_that_does_not_go_with_another_is_one_line(empty: Path) -> None:
    (line,) = command.refused(empty / "out", "--info", "--resolve")
    assert line.startswith("error: --info --resolve: The --resolve flag can only be used ")
    with pytest.raises(ConfigError, match="--nonsense; allowed: KEY=VALUE"):
        options_of(["seed=1", "--nonsense"])
