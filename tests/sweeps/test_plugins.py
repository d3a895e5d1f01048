"""YAML files of installed packages are options like ours, and are checked like a user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.basics import plugins
from harness.config import ConfigError
from sweeps.commands.completion import completed
from sweeps.compose import folders, places
from tests.sweeps import command

GLOBAL = "# @package _global_\n"
THEIRS = {
    "mitigation/theirs.yaml": f"{GLOBAL}about: {{text: Their clip, paper: They 2024}}\noptim: {{clip: 0.25}}",
    "fault/their_bit.yaml": "about: {text: Their bit}\ndefaults: [value]\nsite: weight\nbit: 3",
    "recipe/their_recipe.yaml": f"{GLOBAL}optim: {{beta2: 0.9}}",
    "study/their_study.yaml": GLOBAL
    + "hydra: {sweeper: {params: {mitigation: 'none,theirs'}}, launcher: {workers: 3}}",
}
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package of these files where Python finds it, as pip would, and returns the folder that it names."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(files: dict[str, str], name: str = "theirs", named: str = "{name}_package.conf") -> Path:
        for file, content in files.items():
            path = site / f"{name}_package/conf" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        about = site / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        entry = f"{name} = {named.format(name=name)}"
        (about / "entry_points.txt").write_text(f"[stability_harness.conf]\n{entry}\n")
        places.shipped.cache_clear()
        return site / f"{name}_package/conf"

    yield install
    monkeypatch.undo()
    places.shipped.cache_clear()


def test_their_files_are_options(install: Install, empty: Path) -> None:
    install(THEIRS)
    listed = command.call("--list").out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in listed if line.startswith("theirs ")] == ["Their clip (They 2024)."]
    assert [line.split(maxsplit=1)[1] for line in listed if line.startswith("their_bit ")] == ["Their bit."]
    chosen = ("mitigation=theirs+qk_norm", "fault=their_bit", "recipe=their_recipe", "fault.start=2")
    trial = command.only(*chosen)
    assert (trial.optim.clip, trial.model.qk_norm, trial.optim.beta2, trial.fault.bit) == (0.25, True, 0.9, 3)
    assert [t.mitigation for t in command.trials(study="their_study")] == ["none", "theirs"]
    assert folders.launch_of("their_study", None) == (None, {"workers": 3})
    ended = command.call(*command.tiny("study=their_study", "out=out"))
    assert (ended.status, ended.err) == (0, "") and "trained 2 of 2 trials" in ended.out
    shown = command.call("--cfg", "job", "mitigation=theirs")
    assert (shown.status or 0, shown.err) == (0, "") and "\n  clip: 0.25\n" in shown.out and "about" not in shown.out


def test_they_are_completed(install: Install) -> None:
    install(THEIRS)
    assert completed("stability-harness sweep mitigation=their", ["sweep"]) == ["mitigation=theirs"]
    assert completed("stability-harness sweep study=their", ["sweep"]) == ["study=their_study"]


def test_a_users_study_builds_on_theirs(install: Install, empty: Path) -> None:
    install(THEIRS)
    command.write_yaml(empty / "mine", "study/mine.yaml", "defaults: [their_study]\noptim: {lr: 0.5}")
    found = command.trials(study="mine", folder=empty / "mine")
    assert [(t.mitigation, t.optim.lr) for t in found] == [("none", 0.5), ("theirs", 0.5)]


@pytest.mark.parametrize("words", [["--list"], ["plan=true"], ["--cfg", "job"], ["--help"]])
def test_two_files_of_a_name(install: Install, empty: Path, words: list[str]) -> None:
    """One of a package and one of ours, or of another package: a line each, whatever is asked for."""
    first = install({"fault/same.yaml": "defaults: [value]"}, "a")
    install({"mitigation/qk_norm.yaml": "{}", "fault/rare_tokens.yaml": "{}", "fault/same.yaml": "{}"}, "b")
    given, allowed = "error: stability_harness.conf: b = b_package.conf", "allowed: another name"
    assert sorted(command.refused(empty, *words)) == [
        f"{given}: fault/rare_tokens.yaml: there is a fault of that name already; {allowed}",
        f"{given}: fault/same.yaml: there is a fault of that name already in {first}; {allowed}",
        f"{given}: mitigation/qk_norm.yaml: there is a mitigation of that name already; {allowed}",
    ]


def test_a_users_file_with_the_name_of_theirs(install: Install, empty: Path) -> None:
    place = install(THEIRS)
    command.write_yaml(empty / "mine", "mitigation/theirs.yaml", "optim: {clip: 2}")
    (line,) = command.refused(empty, "--config-dir=mine", "plan=true")
    reason = f"mitigation/theirs.yaml: there is a mitigation of that name already in {place}"
    assert line == f"error: --config-dir=mine: {reason}; allowed: another name"


def test_not_a_package(install: Install, empty: Path) -> None:
    install({}, named="{name}_nowhere.conf")
    (line,) = command.refused(empty, "plan=true")
    given = "error: stability_harness.conf: theirs = theirs_nowhere.conf: not a package"
    assert line == f"{given} (No module named 'theirs_nowhere'); allowed: an installed package of folders"


def test_a_module_with_the_name_of_one_of_ours(install: Install) -> None:
    about = install({}, "a").parents[1] / "a-1.0.dist-info"
    (about / "entry_points.txt").write_text("[stability_harness.clippers]\nzclip = a_package.zclip\n")
    with pytest.raises(
        ConfigError, match="stability_harness.clippers: zclip = a_package.zclip: the name is that of harn"
    ):
        plugins.modules.__wrapped__("clippers")


def test_they_are_checked_like_a_users(install: Install, empty: Path) -> None:
    install(
        {"mitigation/typo.yaml": f"{GLOBAL}optim: {{clpi: 1}}", "study/evil.yaml": f"{GLOBAL}hydra: {{verbose: x}}"}
    )
    (line,) = command.refused(empty, "mitigation=typo", "plan=true")
    assert line.startswith("error: mitigation=typo: optim.clpi=1: unknown key; did you mean optim.clip")
    (line,) = command.refused(empty, "study=evil", "plan=true")
    assert line.startswith("error: study=evil: hydra.verbose: may not come from a file")
