"""A folder from somebody else is data: Hydra calls, imports, opens and truncates nothing that its files name.

Each attack is built as it works on a Hydra application that composes such files, is tried on every way through the
command, and the victim's files are looked at afterwards.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.conf import HydraConf

from harness.config import ConfigError
from tests.sweeps import command

GLOBAL = "# @package _global_\n"
MKDIR = "{_target_: os.mkdir, path: called}"
CALL = "{version: 1, handlers: {mine: {'()': os.mkdir, path: called}}, root: {handlers: [mine]}}"
READ = "{version: 1, filters: {mine: {'()': pickle.loads, data: !!binary %s}}}"
OPEN = (
    "{version: 1, handlers: {mine: {class: logging.FileHandler, filename: victim, mode: w}}, root: {handlers: [mine]}}"
)


class Bomb:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        import os

        return os.mkdir, ("called",)


PICKLED = yaml.dump(pickle.dumps(Bomb())).split("|")[1].strip().replace("\n", "")

# the files of the folder, and what the victim chooses from it
ATTACKS: dict[str, tuple[dict[str, str], str]] = {
    "a callable in logging": ({"study/evil.yaml": f"{GLOBAL}hydra: {{hydra_logging: {CALL}}}"}, "study=evil"),
    "a pickle in logging": ({"study/evil.yaml": f"{GLOBAL}hydra: {{hydra_logging: {READ % PICKLED}}}"}, "study=evil"),
    "a file in logging": ({"study/evil.yaml": f"{GLOBAL}hydra: {{hydra_logging: {OPEN}}}"}, "study=evil"),
    "a file in job logging": ({"study/evil.yaml": f"{GLOBAL}hydra: {{job_logging: {OPEN}}}"}, "study=evil"),
    "a callback": ({"study/evil.yaml": f"{GLOBAL}hydra: {{callbacks: {{mine: {MKDIR}}}}}"}, "study=evil"),
    "a launcher": ({"study/evil.yaml": f"{GLOBAL}hydra: {{launcher: {{_target_: os.mkdir}}}}"}, "study=evil"),
    "a sweeper": ({"study/evil.yaml": f"{GLOBAL}hydra: {{sweeper: {MKDIR}}}"}, "study=evil"),
    "a section": ({"study/evil.yaml": f"{GLOBAL}model: {MKDIR}"}, "study=evil"),
    "a new key": ({"study/evil.yaml": f"{GLOBAL}recipe: {MKDIR}"}, "study=evil"),
    "an option": ({"study/evil.yaml": f"{GLOBAL}hydra: {{launcher: {{workers: {MKDIR}}}}}"}, "study=evil"),
    "an axis": ({"study/evil.yaml": f"{GLOBAL}hydra: {{sweeper: {{params: {{seed: [{MKDIR}]}}}}}}"}, "study=evil"),
    "a dotted key": ({"study/evil.yaml": f"{GLOBAL}hydra.hydra_logging: {OPEN}"}, "study=evil"),
    "the package hydra": ({"study/evil.yaml": f"# @package hydra\nhydra_logging: {OPEN}"}, "study=evil"),
    "a package below hydra": ({"study/evil.yaml": f"# @package hydra.hydra_logging\n{OPEN}"}, "study=evil"),
    "a mitigation of Hydra": ({"mitigation/evil.yaml": f"{GLOBAL}hydra: {{hydra_logging: {OPEN}}}"}, "mitigation=evil"),
    "a mitigation in its package": (
        {"mitigation/evil.yaml": f"# @package hydra.hydra_logging\n{OPEN}"},
        "mitigation=evil",
    ),
    "a mitigation's defaults": (
        {
            "mitigation/evil.yaml": f"{GLOBAL}defaults: [/study/worse]\n",
            "study/worse.yaml": f"# @package hydra.hydra_logging\n{OPEN}",
        },
        "mitigation=evil",
    ),
    "a fault in its package": ({"fault/evil.yaml": f"# @package hydra.hydra_logging\n{OPEN}"}, "fault=evil"),
    "a fault's defaults": (
        {"fault/evil.yaml": "defaults: [value, /study/worse@hydra]\n", "study/worse.yaml": f"hydra_logging: {OPEN}"},
        "fault=evil",
    ),
    "a base with another package": (
        {"study/evil.yaml": f"{GLOBAL}defaults: [worse@hydra.hydra_logging]\n", "study/worse.yaml": OPEN},
        "study=evil",
    ),
    "a base": (
        {
            "study/evil.yaml": f"{GLOBAL}defaults: [worse]\n",
            "study/worse.yaml": f"{GLOBAL}hydra: {{hydra_logging: {OPEN}}}",
        },
        "study=evil",
    ),
    "an override of logging": (
        {
            "study/evil.yaml": f"{GLOBAL}defaults: [override /hydra/hydra_logging: evil]\n",
            "hydra/hydra_logging/evil.yaml": OPEN,
        },
        "study=evil",
    ),
    "callbacks among the defaults": (
        {
            "study/evil.yaml": f"{GLOBAL}defaults: [/hydra/callbacks: evil]\n",
            "hydra/callbacks/evil.yaml": f"mine: {MKDIR}",
        },
        "study=evil",
    ),
    "a configuration of Hydra": ({"hydra/config.yaml": f"hydra_logging: {OPEN}"}, "seed=1"),
    "callbacks of Hydra": ({"hydra/callbacks/default.yaml": f"mine: {MKDIR}"}, "seed=1"),
    "a schema": ({"schema.yaml": f"{GLOBAL}hydra: {{hydra_logging: {OPEN}}}"}, "seed=1"),
    "a search": ({"search/evil.yaml": f"{GLOBAL}hydra: {{hydra_logging: {OPEN}}}"}, "search=evil"),
    "plugins": ({"hydra_plugins/evil.py": "import os\nos.mkdir('called')\n"}, "seed=1"),
    "a fault of our name": ({"fault/value.yaml": f"# @package hydra.hydra_logging\n{OPEN}"}, "fault=value"),
    "a mitigation of our name": ({"mitigation/none.yaml": f"{GLOBAL}hydra: {{hydra_logging: {OPEN}}}"}, "seed=1"),
}
WAYS = {
    "help": ["--help"],
    "hydra help": ["--hydra-help"],
    "configuration": ["--cfg", "all"],
    "resolved configuration": ["--cfg", "hydra", "--resolve"],
    "all information": ["--info", "all"],
    "defaults": ["--info", "defaults-tree"],
    "search path": ["--info", "searchpath"],
    "completion": ["--shell-completion", "query=bash"],
    "list": ["--list"],
    "plan": ["plan=true"],
    "sweep": ["train.steps=2"],
    "search": ["search=max_stable_lr", "plan=true"],
}


@pytest.fixture
def victim(empty: Path) -> Path:
    (empty / "victim").write_text("a thesis")
    return empty


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_that_a_folder_says_is_done(victim: Path, way: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    looks_into_files = way[0] not in ("--hydra-help", "--list", "--shell-completion")  # else at names alone
    attacks = ATTACKS if looks_into_files else {tuple(files): name for name, (files, _) in ATTACKS.items()}.values()
    for number, name in enumerate(attacks):
        files, chosen = ATTACKS[name]
        for file, content in files.items():
            path = victim / str(number) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        before = command.tree(victim)
        monkeypatch.setenv("COMP_LINE", f"sweeps {chosen} opt")
        given = [] if way[0] in ("--list", "--shell-completion") else [chosen]
        if chosen.startswith("search=") and way[0] == "search=max_stable_lr":
            given = []
        ended = command.call(*way, f"--config-dir={number}", *given)
        assert command.tree(victim) == before, name
        lines = ended.err.splitlines()
        assert all(line.startswith("error: ") and "; allowed" in line for line in lines), name
        if given and way != ["--hydra-help"]:  # else it may list its names, without a look into the files
            assert (ended.status, len(lines)) == (2, 1), name


# --- every entry that Hydra has ----------------------------------------------------------------------------------


def entries(cls: Any = HydraConf, prefix: str = "") -> Iterator[str]:
    """Every key of Hydra's own schema that is no section."""
    for field in dataclasses.fields(cls):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            yield from entries(type(default), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def nested(key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("key", [key for key in entries() if key != "defaults"])
def test_no_entry_of_hydra_comes_from_a_file(tmp_path: Path, key: str) -> None:
    """Composed as Hydra composes it, without what the command looks at before."""
    loader = command.loader(tmp_path)
    (tmp_path / "study").mkdir()
    harmful = [{"_target_": "os.mkdir", "path": "called"}, "victim", ["victim"], True, "${oc.env:HOME}"]
    if key in ("sweeper", "launcher"):
        harmful = [*harmful[:1], {"params": {"_target_": "os.mkdir"}}, {"setup": ["rm -rf ~"]}]
    for value in harmful:
        (tmp_path / "study" / "evil.yaml").write_text(GLOBAL + yaml.dump({"hydra": nested(key, value)}))
        with pytest.raises(ConfigError, match=rf"^study=evil: hydra\.{key.split('.')[0]}"):
            loader.load_configuration("config", ["study=evil"], run_mode=command.RunMode.MULTIRUN)


HYDRAS_GROUPS = [next(iter(entry)) for entry in HydraConf().defaults] + ["config", "nothing"]
FORMS = (
    "override /hydra/{}: evil",
    "/hydra/{}: evil",
    "optional /hydra/{}: evil",
    "/hydra/{}/evil",
    "/hydra/{}@hydra: evil",
)
FORMS += ("override hydra/{}: evil", "override /hydra/{}: null", "/hydra/{}@hydra.callbacks: [evil]")


@pytest.mark.parametrize("group", HYDRAS_GROUPS)
@pytest.mark.parametrize("kind", ["study", "mitigation", "fault"])
def test_no_group_of_hydra_is_chosen_by_a_file(tmp_path: Path, group: str, kind: str) -> None:
    loader = command.loader(tmp_path)
    command.write_yaml(tmp_path, f"hydra/{group}/evil.yaml", f"mine: {MKDIR}")
    (tmp_path / kind).mkdir()
    for form in FORMS:
        package = "" if kind == "fault" else GLOBAL
        (tmp_path / kind / "evil.yaml").write_text(f"{package}defaults:\n- {form.format(group)}\n")
        with pytest.raises(ConfigError, match=rf"^{kind}=evil: "):
            loader.load_configuration("config", [f"{kind}=evil"], run_mode=command.RunMode.RUN)


def test_a_folder_has_no_other_groups(tmp_path: Path) -> None:
    """Not even where nobody has looked at the folder first."""
    loader = command.loader(tmp_path)
    for name in ("hydra/launcher/evil", "hydra/help/default", "search/evil", "other/evil", "study/deeper/evil", "evil"):
        command.write_yaml(tmp_path, f"{name}.yaml", f"x: {MKDIR}")
        source = loader.get_sources()[-2]
        assert source.path == str(tmp_path)
        assert not source.is_config(name)
    assert source.list("", None) == ["study"]
    assert loader.get_group_options("study") == command.loader().get_group_options("study")
    assert loader.list_groups("hydra") == command.loader().list_groups("hydra")
