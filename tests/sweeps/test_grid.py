"""A grid becomes the trials that Hydra's own composition would give, and a trial's id depends on its values alone."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from harness.config import CORE, NO_FAULT, ConfigError, Model, Optim, Trial, sections, trial_from_dict
from harness.config.trial import YOUNGER
from injectors import fault_types
from injectors.batch import RareTokens
from injectors.value import Value
from sweeps.compose.arguments import expand
from sweeps.compose.hydra_calls import FOLDER
from tests.injectors.faults import OF_EXPERTS, OF_POLICIES
from tests.sweeps import command


def weight_bit(**fields: Any) -> Value:
    """What sweeps/conf/fault/weight_bit.yaml describes, with some of its fields changed."""
    return Value(**{"name": "weight_bit", "site": "weight", "tensor": "blocks.*", "bit": 30, **fields}).of_sweep()


def flat(values: dict[str, Any]) -> dict[str, Any]:
    parts = {key: value for key, value in values.items() if isinstance(value, dict)}
    return {
        **{f"{part}.{name}": value for part, fields in parts.items() for name, value in fields.items()},
        **{key: value for key, value in values.items() if key not in parts},
    }


# --- axes --------------------------------------------------------------------------------------------------------


def test_no_axis_is_one_default_trial() -> None:
    assert command.trials() == [Trial()]


def test_last_axis_runs_fastest() -> None:
    found = command.grid("model.width=32,64", "optim.lr=1e-3,1e-2", "seed=range(2)")
    assert [(t.model.width, t.optim.lr, t.seed) for t in found] == [
        (width, lr, seed) for width in (32, 64) for lr in (1e-3, 1e-2) for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("optim.lr=choice(0.1,0.2)", [0.1, 0.2]),
        ("optim.lr=range(1,2,0.5)", [1.0, 1.5]),
        ("optim.lr=sort(0.3,0.1)", [0.1, 0.3]),
        ("optim.lr=1,1.0,1e0,1e-1", [1.0, 0.1]),
    ],
)
def test_hydras_sweeps(axis: str, values: list[float]) -> None:
    assert [t.optim.lr for t in command.grid(axis)] == values


def test_large_ranges_of_integers() -> None:
    assert [t.seed for t in command.grid("seed=range(0,3000,3)")] == list(range(0, 3000, 3))


def test_glob_over_mitigations() -> None:
    """Those of one objective alone are named, unless a glob matches no others."""
    shipped = sorted(["none", *command.general_mitigations()])
    every = {path.stem for path in (FOLDER / "mitigation").glob("*.yaml")}
    assert every - set(shipped) > {"grpo", "ppo"} and len(shipped) > 80
    of_policies = command.grid("mitigation=glob(*grpo)", "objective.name=policy")
    assert [t.mitigation for t in of_policies] == ["dr_grpo", "grpo"]
    assert [t.mitigation for t in command.grid("mitigation=glob(*)")] == shipped
    assert [t.mitigation for t in command.grid("mitigation=glob(*,exclude=[none,m*])")] == [
        name for name in shipped if name != "none" and not name.startswith("m")
    ]


def test_equal_trials_are_one() -> None:
    assert [t.optim.lr for t in command.grid("optim.lr=0.5,0.25,5e-1")] == [0.5, 0.25]
    # A field that only the faulty trial has makes no second trial without it.
    found = command.grid("fault=none,weight_bit", "fault.bit=3,4")
    assert [getattr(t.fault, "bit", None) for t in found] == [None, 3, 4]


def test_negative_zero_is_zero() -> None:
    assert len(command.grid("optim.weight_decay=0.0,-0.0")) == 1


def test_null_is_a_value() -> None:
    assert [t.optim.clip for t in command.grid("optim.clip=null,0.5")] == [None, 0.5]


def test_command_line_replaces_an_axis_of_the_study() -> None:
    everything = command.trials(study="quickstart")
    widths = sorted({t.model.width for t in everything})
    narrow = command.trials("model.width=16", study="quickstart")
    assert len(widths) > 1
    assert len(narrow) * len(widths) == len(everything)
    assert {t.model.width for t in narrow} == {16}
    assert {t.optim.lr for t in narrow} == {t.optim.lr for t in everything}


@pytest.mark.parametrize("fault", ["none", "rare_tokens", "weight_bit"])
def test_axes_of_the_study_may_reach_no_trial(fault: str) -> None:
    """The study sets fields of its faults; who asks for another fault is not to blame for them."""
    assert {t.fault.name for t in command.trials(f"fault={fault}", study="incident")} == {fault}


# --- faults and mitigations --------------------------------------------------------------------------------------


def test_fault_fields_apply_to_the_faults_that_have_them() -> None:
    found = command.grid("fault=none,weight_bit,rare_tokens", "fault.start=7", "fault.bit=3", "fault.tokens=5")
    assert [t.fault for t in found] == [NO_FAULT, weight_bit(start=7, bit=3), RareTokens(start=7, tokens=5)]


def test_mitigation_goes_over_the_recipe() -> None:
    found = command.grid("mitigation=none,clip_1,beta2_095", "optim.clip=0.5", "optim.beta2=0.9")
    assert [(t.optim.clip, t.optim.beta2) for t in found] == [(0.5, 0.9), (1.0, 0.9), (0.5, 0.95)]


def test_mitigation_that_changes_nothing_still_counts() -> None:
    """It is another trial: its name is part of the configuration, so that it can be compared."""
    without, given = command.grid("mitigation=none,clip_1", "optim.clip=1.0")
    assert without.optim == given.optim
    assert without.id != given.id
    assert given.mitigation == "clip_1"


def test_golden_twin_keeps_the_mitigation() -> None:
    golden, faulty = command.grid("mitigation=qk_norm", "fault=none,weight_bit", "fault.start=3")
    assert faulty.golden == golden
    assert faulty.golden.id == golden.id != faulty.id


def test_seeds() -> None:
    alone = command.composer().trial(["seed=3"])
    assert alone.seeds == {"init": 3, "data": 3, "fault": 3}
    own = command.composer().trial(["seed=3", "model.seed=4", "data.seed=5", "fault=weight_bit", "fault.seed=6"])
    assert own.seeds == {"init": 4, "data": 5, "fault": 6}


# --- the user's own files ----------------------------------------------------------------------------------------


def test_users_files(tmp_path: Path) -> None:
    for group in ("study", "mitigation", "fault"):
        (tmp_path / group).mkdir()
    (tmp_path / "study" / "mine.yaml").write_text(
        "# @package _global_\n"
        "model: {width: 48}\n"
        "hydra: {sweeper: {params: {optim.lr: '0.1,0.2', mitigation: 'none,mine', optim.clip: null}}}\n"
    )
    (tmp_path / "mitigation" / "mine.yaml").write_text("# @package _global_\noptim: {beta1: 0.8, beta2: 0.9}\n")
    (tmp_path / "fault" / "mantissa.yaml").write_text("kind: value\nbit: 3\n")
    (tmp_path / "fault" / "early.yaml").write_text("defaults: [weight_bit]\nstart: 5\n")

    found = command.trials("fault=none,mantissa,early", "fault.element=2", study="mine", folder=tmp_path)
    assert {t.model.width for t in found} == {48}
    assert {(t.optim.lr, t.mitigation, t.optim.beta1, t.optim.beta2) for t in found} == {
        (lr, *mitigation) for lr in (0.1, 0.2) for mitigation in (("none", 0.9, 0.95), ("mine", 0.8, 0.9))
    }
    named = {
        "mantissa": Value(name="mantissa", bit=3, element=2).of_sweep(),
        "early": weight_bit(name="early", start=5, element=2),
    }
    assert {t.fault for t in found} == {NO_FAULT, *named.values()}


# --- the same as stock Hydra -------------------------------------------------------------------------------------

POOL = {
    "model.width": ["16", "32", "128"],
    "model.depth": ["1", "3"],
    "model.activation": ["gelu", "swiglu"],
    "model.qk_norm": ["true", "false"],
    "model.feedforward": ["null", "40"],
    "model.norm_epsilon": ["1e-5"],
    "model.seed": ["null", "7"],
    "optim.lr": ["1e-3", "0.3", "1"],
    "optim.beta2": ["0.9", "0.99"],
    "optim.clip": ["null", "0.5"],
    "schedule.decay": ["linear", "constant"],
    "train.steps": ["150", "1000"],
    "data.source": ["zipf"],
    "seed": ["0", "5"],
    "recipe": ["plain", "gpt2", "olmo2"],
    "mitigation": ["none", "qk_norm", "mup", "beta2_0999", "no_clip"],
    "fault": ["none", "weight_bit", "rare_tokens"],
}
FAULT_POOL = {
    "weight_bit": {"fault.bit": ["3", "31"], "fault.tensor": ["embedding", "blocks.*"], "fault.start": ["9"]},
    "rare_tokens": {"fault.tokens": ["4"], "fault.share": ["1", "0.5"], "fault.seed": ["null", "3"]},
    "none": {},
}


def random_job(seed: int) -> list[str]:
    draw = random.Random(seed)
    job = {key: draw.choice(values) for key, values in POOL.items() if draw.random() < 0.6}
    pool: dict[str, list[str]] = FAULT_POOL[job.get("fault", "none")]
    job |= {key: draw.choice(values) for key, values in pool.items() if draw.random() < 0.7}
    return [f"{key}={value}" for key, value in job.items()]


def test_random_jobs_equal_stock_composition(tmp_path: Path) -> None:
    """Field by field, except that a mitigation goes over what the command line says, where stock Hydra has it under."""
    ruled, folder = 0, command.for_stock_hydra(tmp_path)
    for seed in range(20):
        job = random_job(seed)
        trial = command.composer().trial(job)
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            stock = hydra.compose("config", job)
        mitigation = OmegaConf.load(folder / "mitigation" / f"{trial.mitigation}.yaml")
        for key, value in flat(trial.to_dict()).items():
            if key in ("recipe", "mitigation"):
                assert f"{key}={value}" in job or value in ("plain", "none")
            elif (fixed := OmegaConf.select(mitigation, key)) is not None:
                assert value == fixed, (job, key)
                ruled += 1
            elif key == "fault.name":
                assert f"fault={value}" in job or value == "none"
            elif key.startswith("fault.") and trial.fault == NO_FAULT and key != "fault.kind":
                assert value == getattr(NO_FAULT, key.removeprefix("fault."))
            elif key == "fault.format" and OmegaConf.select(stock, key) is None:
                assert value == "fp32"  # that of our GPT, which a trial names
            else:
                assert value == OmegaConf.select(stock, key), (job, key)
                assert type(value) in (type(OmegaConf.select(stock, key)), float), (job, key)
    assert ruled  # some of the jobs had a mitigation


def test_random_grids_are_the_product_of_their_axes() -> None:
    """Stock Hydra's own sweeper expands to the same jobs; it alone knows nothing of a study's axes."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    its_loader = command.loader()
    for seed in range(10):
        draw = random.Random(seed)
        axes = [f"{key}={','.join(values)}" for key, values in POOL.items() if draw.random() < 0.3]
        axes += [f"optim.eps=range({draw.randint(1, 3)},{draw.randint(4, 6)})", "optim.beta1=choice(0.5,0.6)"]
        parsed = OverridesParser.create(its_loader).parse_overrides(axes)
        (stock,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        assert expand({}, axes, its_loader) == [list(job) for job in stock]


# --- identity ----------------------------------------------------------------------------------------------------

STRUCK = Trial(
    model=Model(width=96, qk_norm=True),
    optim=Optim(lr=1e-2, clip=1.0),
    fault=weight_bit(tensor="head", bit=30, start=50),
    mitigation="qk_norm",
    seed=3,
)


def test_ids_are_pinned() -> None:
    """A trial's id names its results, so it may change only when a field is added, removed or gets a new default.

    After such a change, put the new ids here, and raise FORMAT_VERSION in harness/storage/stored.py if old results can
    no longer be told from new ones.
    """
    message = "ids have changed: stored results are no longer found; see this test's docstring"
    assert (Trial().id, STRUCK.id, STRUCK.golden.id) == ("a30c1764d2fbc436", "c37e2af79cf14100", "96f069bbcd570b45"), (
        message
    )


def test_another_reading_leaves_ids_as_they_are() -> None:
    """That of a trial with readings of its own was taken before `moment_lag` and `gradient_zeros` were there."""
    signals = sections()["signals"]
    assert Trial.of({"signals": signals(kurtosis=3)}).id == "ab06307b6ad76d0c"
    changed = [Trial.of({"signals": signals(kurtosis=3, **{name: 1})}) for name in ("moment_lag", "gradient_zeros")]
    assert len({trial.id for trial in changed}) == 2
    assert [trial.to_dict()["signals"].get("moment_lag") for trial in changed] == [1, None]


def test_ids_are_the_same_in_another_process() -> None:
    lines = (
        "from sweeps.compose.arguments import config_loader",
        "from sweeps.compose.grid import Composer",
        "print(Composer(config_loader(), 'grid').trial(['model.width=96', 'seed=3']).id)",
    )
    code = "\n".join(lines)
    environment = {"PYTHONPATH": str(command.REPOSITORY), "PYTHONHASHSEED": "12345"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout.strip() == command.only("model.width=96", "seed=3").id


PARTS_OF_PACKAGES = """
from importlib.metadata import EntryPoint
from harness.basics import plugins

installed = {"branches": "causal_mean", "objectives": "completion"}
plugins.entry_points = lambda group: [
    EntryPoint(name, name, group) for kind, name in installed.items() if group == f"{plugins.GROUP}.{kind}"
]
from harness.config import ConfigError
from sweeps.compose.arguments import config_loader, expand
from sweeps.compose.grid import Composer

for words in (
    "block.token_mixer=attention,causal_mean causal_mean.keep=0.5,1.0",
    "block.token_mixer=attention causal_mean.keep=0.5",
    "objective.name=next_token,completion completion.prompt=0.25",
    "completion.prompt=0.25",
):
    loader, texts = config_loader(), words.split()
    try:
        composer = Composer(loader, "grid", frozenset(text.split("=")[0] for text in texts))
        trials = composer.trials(expand({}, texts, loader))
        print([[vars(values) for name, values in trial.extras if name in installed.values()] for trial in trials])
    except ConfigError as error:
        print(*error.reasons)
"""


def test_options_of_a_part_count_where_it_is_chosen() -> None:
    """A branch's and an objective's as an optimizer's: trials with another one ignore them, and are one trial."""
    examples = [str(command.REPOSITORY / "examples" / name) for name in ("branch", "objective")]
    environment = {"PYTHONPATH": os.pathsep.join([str(command.REPOSITORY), *examples])}
    code = [sys.executable, "-c", PARTS_OF_PACKAGES]
    ended = subprocess.run(code, capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout.splitlines() == [
        "[[], [{'window': None, 'keep': 0.5}], []]",
        "causal_mean.keep=0.5: reaches no trial, because block.token_mixer=attention and "
        "block.channel_mixer=feedforward have no such field; allowed: leave it out, or another branch",
        "[[], [{'prompt': 0.25}]]",
        "completion.prompt=0.25: reaches no trial, because objective.name=next_token has no such field; "
        "allowed: leave it out, or another objective",
    ]


def test_ids_ignore_the_order_of_fields() -> None:
    job = ["model.width=96", "fault=weight_bit", "seed=3", "fault.bit=4", "optim.lr=0.1", "mitigation=qk_norm"]
    assert command.composer().trial(job).id == command.composer().trial([*reversed(job)]).id
    backwards = json.loads(json.dumps(STRUCK.to_dict()), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert list(backwards) == list(reversed(STRUCK.to_dict()))
    assert trial_from_dict(backwards, fault_types()).id == STRUCK.id


def with_another_value(values: Any, field: dataclasses.Field) -> Any:
    """The dataclass with one of its fields changed."""
    old = getattr(values, field.name)
    others = [word for word in field.metadata.get("choices", ()) if word != old]
    new = others[0] if others else "x" if isinstance(old, str) else not old if isinstance(old, bool) else 17
    return dataclasses.replace(values, **{field.name: new})


def test_every_field_changes_the_id() -> None:
    """A field that the id forgets would make two different trials one."""
    changed = [STRUCK]
    for part in dataclasses.fields(Trial):
        values = getattr(STRUCK, part.name)
        if dataclasses.is_dataclass(values):
            parts = [with_another_value(values, field) for field in dataclasses.fields(values)]
            changed += [dataclasses.replace(STRUCK, **{part.name: values}) for values in parts]
        elif part.name != "extras":
            changed.append(with_another_value(STRUCK, part))
    brought = {name: cls() for name, cls in sections().items() if name not in CORE}
    for name, values in brought.items():
        parts = [with_another_value(values, field) for field in dataclasses.fields(values)]
        changed += [dataclasses.replace(STRUCK, extras=((name, values),)) for values in parts]
    fields = sum(len(v) if isinstance(v, dict) else 1 for v in STRUCK.to_dict().values())
    fields += sum(len(dataclasses.fields(values)) for values in brought.values())
    assert len({trial.id for trial in changed}) == 1 + fields + sum(part in CORE for part, _ in YOUNGER)


@pytest.mark.parametrize("kind", sorted(set(fault_types()) - {"replay"}))  # that needs something to replay
def test_round_trip_through_the_store(kind: str) -> None:
    faulty = () if kind == "none" else ("fault.start=3", "fault.duration=2", "fault.seed=9")
    of_model = ["block.channel_mixer=moe"] if kind in OF_EXPERTS else ["mitigation=mup"]
    of_model = ["objective.name=policy"] if kind in OF_POLICIES else of_model
    trial = command.composer().trial(
        [f"fault={kind}", "optim.lr=0.1", "model.feedforward=24", "train.ranks=2", *of_model, *faulty]
    )
    again = trial_from_dict(json.loads(json.dumps(trial.to_dict())), fault_types())
    assert again == trial
    assert again.id == trial.id
    assert type(again.fault) is fault_types()[kind]


def test_trials_can_be_hashed_and_frozen() -> None:
    trial = command.only("fault=weight_bit")
    assert {trial: 1}[command.only("fault=weight_bit")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        trial.seed = 4


def test_a_problem_of_one_trial_refuses_the_grid() -> None:
    with pytest.raises(ConfigError, match="model.width=40: not divisible by model.head_dim=16"):
        command.grid("model.width=32,40,64")
