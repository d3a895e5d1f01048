"""Mitigations joined by `+` are the union of their differences, under one name, and nonsense among them is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from analysis.reading.open_sweep import open_sweep
from harness.config import ConfigError, Trial
from harness.config.trial import YOUNGER, default_of
from sweeps.compose.arguments import expand
from sweeps.compose.folders import read
from sweeps.compose.hydra_calls import FOLDER
from sweeps.compose.places import stems
from tests.sweeps import command

NAMES = stems(FOLDER / "mitigation")
DISTANCES = (1, 5, 21)  # in the alphabet, of the pairs that are composed
COUNT = len(NAMES) - 1  # without `none`
STUDIES = sorted({path.stem for path in (FOLDER / "study").glob("*.yaml")} - {"grid"})
OURS = f"the {COUNT} names that stability-harness list shows"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A --config-dir with mitigations, some of which contradict each other."""
    own = {
        "soft": "optim: {clip: 0.5}",
        "softer": "optim: {clip: 0.25}",
        "unclipped": "optim: {clip: null}",
        "one": "optim: {clip: 1}\nschedule: {decay: linear}",  # an integer: the same value as that of clip_1
        "wide": "model: {width: 24}",
        "large_heads": "model: {head_dim: 16}",
        "narrow": "model: {width: 8}",
    }
    for name, content in own.items():
        command.write_yaml(tmp_path / "mine", f"mitigation/{name}.yaml", content)
    return tmp_path / "mine"


def changed(trial: Trial) -> dict[str, Any]:
    """The fields in which a trial differs from the recipe, by key."""
    ours, recipe = trial.to_dict(), Trial().to_dict()
    parts = [name for name, values in recipe.items() if isinstance(values, dict)]
    pairs = {f"{part}.{name}": (ours[part][name], value) for part in parts for name, value in recipe[part].items()}
    return {key: value for key, (value, default) in pairs.items() if value != default}


# --- what a combination is ---------------------------------------------------------------------------------------


def test_a_combination_is_the_union_of_the_differences(folder: Path) -> None:
    assert changed(*command.grid("mitigation=qk_norm+no_clip")) == {"model.qk_norm": True, "optim.clip": None}
    assert changed(command.only("mitigation=soft+mup+beta2_0999", folder=folder)) == {
        "optim.clip": 0.5,
        "model.parametrization": "mup",
        "optim.beta2": 0.999,
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_with_another_it_is_the_union_or_refused(name: str) -> None:
    """In a small model; what is refused names the parts that disagree, or the combination and the key."""
    small = ("model.width=16", "model.head_dim=8", "model.depth=2", "model.context=16", "train.steps=200")
    others = [other for other in NAMES if other != "none"]
    place = others.index(name)
    for other in {others[(place + distance) % len(others)] for distance in DISTANCES}:
        fields = [read(FOLDER, "mitigation", part).fields for part in (name, other)]
        objective = [] if {name, other} <= set(command.general_mitigations()) else ["objective.name=policy"]
        objective += ["block.channel_mixer=moe"] if "routing_replay" in (name, other) else []
        try:
            trial = command.composer().trial([f"mitigation={name}+{other}", *small, *objective])
        except ConfigError as error:
            assert all(re.match(r"mitigation=[\w+]+: .+; allowed: ", reason) for reason in error.reasons), error
            assert "z_loss" not in (name, other), "a field that no other part sets or needs"
            continue
        for section, values in (pair for part in fields for pair in part.items()):
            assert values.items() <= vars(trial.section(section)).items(), (name, other)


LEFT_OUT = {(field, default_of(section, field)) for section, field in YOUNGER}
"""By trials that do without."""


def test_hydra_composes_the_same_from_a_list(tmp_path: Path) -> None:
    names = ["beta2_0999", "no_clip", "mup", "qk_norm"]
    combinations = [parts for size in (2, 3, 4) for parts in itertools.combinations(names, size)]
    composer = command.composer()
    with hydra.initialize_config_dir(str(command.for_stock_hydra(tmp_path)), version_base="1.3"):
        for parts in combinations:
            stock = hydra.compose("config", [f"mitigation=[{','.join(parts)}]"])
            values = composer.trial([f"mitigation={'+'.join(parts)}"]).to_dict()
            for section in ("model", "optim", "schedule", "train", "data"):
                others = OmegaConf.to_container(stock[section]).items() ^ values[section].items()
                assert others <= LEFT_OUT, (parts, others)


def test_the_order_of_the_parts_makes_no_other_trial() -> None:
    orders = ["+".join(parts) for parts in itertools.permutations(["qk_norm", "clip_1", "beta2_095"])]
    (trial,) = command.grid(f"mitigation={','.join(orders)}")
    assert trial.mitigation == "beta2_095+clip_1+qk_norm"
    assert {command.composer().trial([f"mitigation={order}"]).id for order in orders} == {trial.id}


def test_parts_that_set_the_same_value_agree(folder: Path) -> None:
    trial = command.only("mitigation=one+clip_1", folder=folder)
    assert changed(trial) == {"schedule.decay": "linear"} and trial.optim.clip == 1.0
    assert trial.mitigation == "clip_1+one"


def test_a_golden_twin_keeps_the_combination() -> None:
    golden, faulty = command.grid("mitigation=qk_norm+clip_1", "fault=none,weight_bit")
    assert faulty.golden == golden
    assert golden.mitigation == "clip_1+qk_norm"


@pytest.mark.parametrize(
    ("axis", "names"),
    [
        ("qk_norm+clip_1", ["clip_1+qk_norm"]),
        ("'qk_norm+clip_1'", ["clip_1+qk_norm"]),
        ("qk_norm + clip_1", ["clip_1+qk_norm"]),
        ("none,qk_norm,qk_norm+clip_1", ["none", "qk_norm", "clip_1+qk_norm"]),
        ("choice(mup+clip_1,mup)", ["clip_1+mup", "mup"]),
        ("sort(mup+clip_1,beta2_0999)", ["beta2_0999", "clip_1+mup"]),
    ],
)
def test_forms_of_the_axis(empty: Path, axis: str, names: list[str]) -> None:
    """As trials, and through Hydra's composition, which looks for a file of that name where it is the only value."""
    assert [trial.mitigation for trial in command.grid(f"mitigation={axis}")] == names
    ended = command.call(*command.tiny(f"mitigation={axis}", "plan=true"))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"{len(names)} trial{'s' if len(names) > 1 else ''} asked for")


def test_axis_of_a_study_in_a_folder_of_ones_own(folder: Path, empty: Path) -> None:
    axes = "{sweeper: {params: {mitigation: 'none,mup + soft,qk_norm+clip_1'}}}"
    command.write_yaml(folder, "study/mine.yaml", f"optim: {{lr: 0.25}}\nhydra: {axes}")
    found = command.trials(study="mine", folder=folder)
    assert [trial.mitigation for trial in found] == ["none", "mup+soft", "clip_1+qk_norm"]
    assert [trial.optim.clip for trial in found] == [1.0, 0.5, 1.0]
    ended = command.call(*command.tiny("--config-dir=mine", "study=mine", "mitigation=soft+mup", "plan=true"))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("1 trial asked for")


# --- trained and stored ------------------------------------------------------------------------------------------


def test_stored_under_the_canonical_name(empty: Path) -> None:
    ended = command.call(*command.tiny("mitigation=none,qk_norm,qk_norm+clip_1", "optim.lr=0.1", "out=out"))
    assert (ended.status, ended.err) == (0, "")
    assert sorted(open_sweep(empty / "out").mitigation.values) == ["clip_1+qk_norm", "none", "qk_norm"]
    again = command.call(*command.tiny("mitigation=clip_1+qk_norm", "optim.lr=0.1", "out=out"))
    assert "1 complete already: 0 to train" in again.out


def test_trains_as_the_same_fields_set_by_hand(empty: Path) -> None:
    fixed = ("optim.lr=0.3", "seed=range(2)", "out=out")
    by_hand = command.call(*command.tiny("model.qk_norm=true", "optim.clip=1.0", *fixed))
    combined = command.call(*command.tiny("mitigation=clip_1+qk_norm", *fixed))
    assert (by_hand.status, combined.status) == (0, 0)
    sweep = open_sweep(empty / "out").sortby("seed").load()
    losses = [sweep.loss.values[sweep.mitigation.values == name] for name in ("none", "clip_1+qk_norm")]
    assert losses[0].shape == (2, 6)
    assert losses[0].tobytes() == losses[1].tobytes()


@pytest.mark.parametrize("flags", [("--cfg", "job"), ("--help",)])
def test_hydra_answers_questions_about_a_combination(folder: Path, empty: Path, flags: tuple[str]) -> None:
    ended = command.call(*flags, "--config-dir=mine", "mitigation=qk_norm+soft")
    assert (ended.status or 0, ended.err) == (0, "")
    assert "\n  qk_norm: true\n" in ended.out
    assert "\n  clip: 0.5\n" in ended.out
    (line,) = command.refused(empty, *flags, "--config-dir=mine", "mitigation=softer+soft")
    assert line.startswith("error: mitigation=softer+soft: optim.clip is 0.5 in soft, 0.25 in softer;")


def test_hydra_answers_from_a_shell(tmp_path: Path) -> None:
    ended = command.end(command.fork("--cfg", "job", "mitigation=qk_norm+clip_1", cwd=tmp_path))
    assert (ended.status, ended.err) == (0, "")
    assert "\n  qk_norm: true\n" in ended.out
    assert "\n  clip: 1.0\n" in ended.out


# --- refused -----------------------------------------------------------------------------------------------------

# mitigation -> the lines after "error: mitigation=", in any order
REFUSED = {
    "qknorm+clip_1": [f"qknorm+clip_1: unknown mitigation qknorm; did you mean qk_norm? allowed: {OURS}"],
    "none,clip_1+x": [f"clip_1+x: unknown mitigation x; allowed: {OURS}"],
    "qk_norm+": [f"qk_norm+: an empty part; allowed: names joined by +, of {OURS}"],
    "+qk_norm": [f"+qk_norm: an empty part; allowed: names joined by +, of {OURS}"],
    "qk_norm++mup": [f"qk_norm++mup: an empty part; allowed: names joined by +, of {OURS}"],
    "+": [f"+: an empty part; allowed: names joined by +, of {OURS}"],
    "mup+mup": ["mup+mup: mup is given 2 times; allowed: each name once"],
    "mup+clip_1+mup": ["mup+clip_1+mup: mup is given 2 times; allowed: each name once"],
    "none+mup": [f"none+mup: none is the recipe as it is; allowed beside others: {OURS}"],
    "../fault/none+mup": [f"../fault/none+mup: unknown mitigation ../fault/none; allowed: {OURS}"],
    "mup+qknorm,x+mup": [
        f"mup+qknorm: unknown mitigation qknorm; did you mean qk_norm? allowed: {OURS}",
        f"x+mup: unknown mitigation x; allowed: {OURS}",
    ],
    "none+x+": [
        f"none+x+: none is the recipe as it is; allowed beside others: {OURS}",
        f"none+x+: unknown mitigation x; allowed: {OURS}",
        f"none+x+: an empty part; allowed: names joined by +, of {OURS}",
    ],
}


@pytest.mark.parametrize(("value", "reasons"), REFUSED.items(), ids=REFUSED)
def test_names_that_are_refused(empty: Path, value: str, reasons: list[str]) -> None:
    lines = command.refused(empty, *command.tiny(f"mitigation={value}"))
    assert sorted(lines) == sorted(f"error: mitigation={reason}" for reason in reasons)


def test_refused_without_the_command_line_too() -> None:
    with pytest.raises(ConfigError, match="none is the recipe as it is"):
        command.Composer(command.loader(), "grid").trial(["mitigation=none+mup"])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("soft+clip_1", "optim.clip is 1.0 in clip_1, 0.5 in soft"),
        ("clip_1+mup+softer+soft", "optim.clip is 1.0 in clip_1, 0.5 in soft, 0.25 in softer"),
        ("soft+unclipped", "optim.clip is 0.5 in soft, null in unclipped"),
    ],
)
def test_parts_that_contradict_each_other(folder: Path, empty: Path, value: str, reason: str) -> None:
    for axis in (value, f"none,{value}"):
        (line,) = command.refused(empty, *command.tiny("--config-dir=mine", f"mitigation={axis}"))
        assert line == f"error: mitigation={value}: {reason}; allowed: parts that agree on it"


def test_a_wrong_file_is_named_once(folder: Path, empty: Path) -> None:
    command.write_yaml(folder, "mitigation/wrong.yaml", "optim: {clip: much}")
    lines = command.refused(empty, *command.tiny("--config-dir=mine", "mitigation=mup+wrong,qk_norm+wrong"))
    assert lines == ["error: mitigation=wrong: optim.clip=much: wrong type (str); allowed: a number or null"]


@pytest.mark.parametrize("axis", ["mup+clip_1", "none,mup+clip_1", "glob(m*)"])
def test_a_file_with_the_name_of_a_combination(folder: Path, empty: Path, axis: str) -> None:
    command.write_yaml(folder, "mitigation/mup+clip_1.yaml", "optim: {clip: 3}")
    (line,) = command.refused(empty, *command.tiny("--config-dir=mine", f"mitigation={axis}"))
    assert line.startswith("error: mitigation=mup+clip_1: a file whose name is that of a combination; allowed: ")


# --- a combination that cannot be trained ------------------------------------------------------------------------


def test_what_a_combination_breaks_is_told_of_it(folder: Path, empty: Path) -> None:
    alone = command.call(*command.tiny("--config-dir=mine", "mitigation=none,wide,large_heads", "plan=true"))
    assert (alone.status, alone.err) == (0, "")
    (line,) = command.refused(empty, *command.tiny("--config-dir=mine", "mitigation=none,wide,wide+large_heads"))
    reason = "model.width=24: not divisible by model.head_dim=16; allowed: a multiple of it"
    assert line == f"error: mitigation=large_heads+wide: {reason}"


def test_what_the_recipe_breaks_is_not_told_of_the_mitigation(folder: Path, empty: Path) -> None:
    axes = ("mitigation=none,clip_1,wide+large_heads", "schedule.warmup=9")
    lines = command.refused(empty, *command.tiny("--config-dir=mine", *axes))
    assert sorted(line.split(":")[1].strip() for line in lines) == ["mitigation=large_heads+wide", "schedule.warmup=9"]


def test_a_fault_to_which_a_mitigation_leaves_no_place(folder: Path, empty: Path) -> None:
    struck = ("fault=weight_bit", "fault.tensor=blocks.0.attention.query", "fault.element=200", "fault.start=2")
    (line,) = command.refused(empty, *command.tiny("--config-dir=mine", "mitigation=none,narrow", *struck))
    assert line.startswith("error: mitigation=narrow: fault.element=200: beyond fault.tensor=")


# --- a mitigation without effect ---------------------------------------------------------------------------------


def notices(*overrides: str, folder: Path | None = None) -> list[str]:
    its_loader = command.loader(folder)
    composer = command.Composer(its_loader, "grid")
    return composer.notices(composer.trials(expand({}, overrides, its_loader)))


def idle(*names: str) -> list[str]:
    return [f"mitigation={name}: sets nothing that the recipe does not have already" for name in names]


def test_a_mitigation_that_changes_nothing_is_noticed(folder: Path) -> None:
    axis = "mitigation=none,clip_1,soft,clip_1+qk_norm"
    assert notices(axis, "optim.clip=1", folder=folder) == idle("clip_1")
    assert notices(axis, "optim.clip=1", "model.qk_norm=true", folder=folder) == idle("clip_1", "clip_1+qk_norm")
    plain = ("optim.clip=null", "model.base_width=32")
    assert notices("mitigation=unclipped,mup", *plain, folder=folder) == idle("unclipped")
    assert notices("mitigation=none,beta2_0999,clip_1,mup,qk_norm", *plain) == []


def test_a_mitigation_that_changes_some_trial_is_not_noticed() -> None:
    assert notices("mitigation=clip_1", "optim.clip=1.0,null") == []
    assert notices("mitigation=clip_1", "optim.clip=null,1.0") == []


def test_a_mitigation_that_sets_nothing_at_all_is_noticed(folder: Path) -> None:
    command.write_yaml(folder, "mitigation/nothing.yaml", "{}")
    assert notices("mitigation=none,nothing", folder=folder) == idle("nothing")


def test_notices_stand_in_the_plan_and_before_the_training(empty: Path) -> None:
    arguments = command.tiny("mitigation=none,clip_1,clip_1+qk_norm", "optim.clip=1.0", "model.qk_norm=true", "out=out")
    expected = idle("clip_1", "clip_1+qk_norm")
    plan = command.call(*arguments, "plan=true")
    assert (plan.status, plan.err) == (0, "")
    assert plan.out.splitlines()[:2] == expected
    ended = command.call(*arguments)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines()[:3] == [f"study grid -> {empty}/out", *expected]
    assert "trained 3 of 3 trials" in ended.out


@pytest.mark.parametrize("study", STUDIES)
def test_shipped_studies_have_nothing_that_cannot_act(study: str, empty: Path) -> None:
    plan = command.call(f"study={study}", "plan=true", "out=out")
    assert (plan.status, plan.err) == (0, "") and "is written for" not in plan.out


@pytest.mark.parametrize("study", ["quickstart", "incident", "depth"])
def test_shipped_studies_refuse_what_cannot_act(study: str, empty: Path) -> None:
    (line,) = command.refused(empty, f"study={study}", "plan=true", "out=out", "mitigation=none,softmax_fp32")
    words = f"{idle('softmax_fp32')[0]}; allowed: trials in which it acts, or idle=warn"
    assert line == f"error: {words}"
