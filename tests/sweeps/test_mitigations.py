"""What every mitigation has to keep: found in sweeps/conf/mitigation, each trained in real packs."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config import Trial
from harness.objectives.outcome import NON_FINITE, TRAINED
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.training.sites import Site
from sweeps.commands.sweep import register
from sweeps.compose.arguments import config_loader
from sweeps.compose.grid import Composer
from tests.harness import conftest as engine
from tests.harness.test_promises import Change

MITIGATIONS = sorted(path.stem for path in (Path(engine.__file__).parents[2] / "sweeps/conf/mitigation").glob("*.yaml"))
SMALL = {
    "model.width": 16,
    "model.depth": 2,
    "model.head_dim": 8,
    "model.context": 16,
    "model.base_width": 8,
    "model.base_depth": 1,
    "train.batch": 4,
    "data.source": "zipf",
    "data.vocabulary": 32,
    "data.length": 20_000,
    "schedule.warmup": 3,
    "optim.lr": 1e-2,
    "optim.clip": "null",
    "optim.beta2": 0.999,
    "optim.decay_follows": "rate",
}
RATES = {"sgd": 0.3, "lars": 0.05, "lion": 3e-3, "lamb": 3e-2, "adafactor": 3e-2}
"""Where the scale of a rate is another than AdamW's, by the mitigation's own paper."""


class Times(NamedTuple):
    """The number of steps of a run, the step at which trials are struck, and the two at which its process is killed."""

    steps: int
    struck: int
    killed: tuple[int, int]


SLOW = {
    "batch_warmup": "grows over 50 steps, some of which are added",
    "sequence_reshape": "grows over 50 steps",
    "sequence_warmup": "grows over 50 steps, some of which are added",
    "spam": "clips nothing in its first 20 steps",
    "stable_spam": "its threshold follows slow means",
    "zclip": "clips nothing in its first 25 steps",
}


def times(mitigation: str) -> Times:
    """Long enough for every part of a mitigation to act."""
    return Times(30, 20, (15, 18)) if mitigation in SLOW else Times(12, 8, (6, 7))


@cache
def composer() -> Composer:
    register()
    return Composer(config_loader(), "grid")


def trial(mitigation: str, **fields: object) -> Trial:
    """A small trial of this mitigation; `fields` as on the command line, with `__` for the dot."""
    steps = times(mitigation).steps
    given = {**SMALL, "train.steps": steps, "train.validate_every": steps}
    given |= {"optim.lr": RATES.get(mitigation, SMALL["optim.lr"])}
    given |= {key.replace("__", "."): value for key, value in fields.items()}
    return composer().trial([f"mitigation={mitigation}", *(f"{key}={value}" for key, value in given.items())])


def different(mitigation: str, count: int) -> list[Trial]:
    """Trials of one structure, with other seeds and other values of what is per-trial everywhere."""
    rate = RATES.get(mitigation, 1e-2)
    return [
        trial(mitigation, seed=seed, optim__lr=rate * (1 + 0.3 * seed), optim__weight_decay=1e-3 * seed)
        for seed in range(count)
    ]


@dataclass(frozen=True)
class Mitigated:
    """A pack of three trials of the mitigation, and one with the last and the first of them and others that are struck.

    `folder` has a checkpoint of the first pack, from which the first of the two killed processes leaves off.
    """

    name: str
    trials: list[Trial]
    clean: engine.Run
    struck: engine.Run
    folder: Path

    @property
    def shared(self) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """What the first and the last trial left in either pack."""
        return [(self.clean[0], self.struck[1]), (self.clean[2], self.struck[0])]

    def ends(self, strike: str) -> tuple[int | None, str, np.ndarray]:
        """The first non-finite step, the outcome and the loss [steps] of the trial that was struck so."""
        row = 2 + STRIKES.index(strike)
        return self.struck.result.nonfinite_step[row], self.struck.result.outcome[row], self.struck.signals["loss"][row]


def fill(value: float) -> Callable[[Mapping[str, Tensor]], object]:
    def change(tensors: Mapping[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(value)

    return change


def one(value: float) -> Callable[[Mapping[str, Tensor]], object]:
    def change(tensors: Mapping[str, Tensor]) -> None:
        tensors["blocks.0.feedforward.up"].view(-1)[5] = value

    return change


def times_all(factor: float) -> Callable[[Mapping[str, Tensor]], object]:
    def change(tensors: Mapping[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.mul_(factor)

    return change


def strikes(step: int) -> dict[str, Change]:
    """What may befall a trial in this step."""
    once, reduced = range(step, step + 1), Site.REDUCED_GRADIENT
    return {
        "nan gradient": Change(reduced, once, fill(math.nan)),
        "nan weights": Change(Site.WEIGHT, once, fill(math.nan)),
        "nan": Change(reduced, once, one(math.nan)),
        "inf": Change(reduced, once, one(math.inf)),
        "-inf": Change(reduced, once, one(-math.inf)),
        "million": Change(reduced, once, times_all(1e6)),
    }


STRIKES = list(strikes(0))


@dataclass
class At(Checkpoints):
    """Saves before one step alone."""

    step: int = 0

    def is_due(self, step: int) -> bool:
        return step == self.step


@pytest.fixture(scope="module", params=MITIGATIONS)
def mitigated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mitigated:
    name, (_, struck_at, (killed_at, _)) = request.param, times(request.param)
    trials, folder = different(name, 3), tmp_path_factory.mktemp(name)
    clean = engine.run(trials, checkpoints=At(ResultsPath.at(folder), step=killed_at))
    injectors = {2 + i: change for i, change in enumerate(strikes(struck_at).values())}
    struck = engine.run([trials[2], trials[0], *different(name, len(STRIKES))], injectors)
    return Mitigated(name, trials, clean, struck, folder)


def test_there_are_mitigations() -> None:
    assert {"none", "qk_norm", "mup"} <= set(MITIGATIONS)


def test_it_trains(mitigated: Mitigated) -> None:
    loss = mitigated.clean.signals["loss"]
    assert np.isfinite(loss).all()
    assert (loss[:, -5:].mean(1) < loss[:, 0] - 0.1).all(), loss[:, ::5]
    assert mitigated.clean.result.outcome == [TRAINED] * 3


def test_its_bits_do_not_depend_on_the_pack(mitigated: Mitigated) -> None:
    """Neither on how many trials train together, nor on the place of each: up to where some are struck."""
    before = slice(times(mitigated.name).struck)
    for clean, struck in mitigated.shared:
        del clean["weights"], struck["weights"]
        left, right = ({key: values[before] for key, values in run.items()} for run in (clean, struck))
        assert engine.same_bits(left, right) == []


def test_killed_it_goes_on_bit_for_bit(mitigated: Mitigated) -> None:
    """Killed, begun again from its checkpoint, killed once more, and brought to its end."""
    begun, again = times(mitigated.name).killed
    assert Checkpoints(ResultsPath.at(mitigated.folder)).latest == begun
    engine.assert_same_end(engine.resumed(mitigated.trials, mitigated.folder, [again]), mitigated.clean, begun)


def test_what_strikes_some_trials_leaves_the_others_alone(mitigated: Mitigated) -> None:
    """NaN in the whole gradient of one and in all weights of another, beside what else is in the pack."""
    assert [engine.same_bits(clean, struck) for clean, struck in mitigated.shared] == [[], []]
    assert mitigated.ends("nan weights")[0] is not None


@pytest.mark.parametrize("mitigation", ["none", "qk_clip", "sigma_reparam", "zclip"])
def test_a_trained_pack_gives_its_memory_back_at_once(mitigation: str) -> None:
    """Not when Python next looks for cycles: a worker that trains hundreds of packs would grow by each of them."""
    gc.collect()
    gc.disable()
    try:
        pack = weakref.ref(engine.run(different(mitigation, 2)).pack)
        assert pack() is None
    finally:
        gc.enable()


# --- a gradient that is not what it should be ------------------------------------------------------------------------

SURVIVE_INFINITY = {
    "clip_value": "an infinite element becomes the bound",
    "spam": "an element beyond the threshold becomes the threshold (arXiv 2501.06842, section 4.1)",
    "fp16_dynamic": "the step is skipped (Micikevicius et al. 2017, section 3.2)",
    "lion": "a step is a sign, also that of infinity",
}
SURVIVE_NAN = {"fp16_dynamic"}
BREAK_AT_A_MILLION = {
    "sgd": "a step is in proportion to the gradient, and nothing bounds it",
    "lars": "so it is for the gains of norms, which are left out of the scaling",
}


@pytest.mark.parametrize("element", ["nan", "inf", "-inf"])
def test_an_element_that_is_not_finite(mitigated: Mitigated, element: str) -> None:
    """It freezes the trial at that step, or is survived by what says that it does."""
    step, outcome, loss = mitigated.ends(element)
    if mitigated.name in (SURVIVE_NAN if element == "nan" else SURVIVE_INFINITY):
        assert step is None and np.isfinite(loss).all()
        assert loss[-1] < loss[0]
    else:
        struck = times(mitigated.name).struck
        assert step == struck and outcome == NON_FINITE
        assert np.isnan(loss[struck + 1 :]).all() and len(loss) > struck + 1


def test_a_gradient_a_million_times_too_large(mitigated: Mitigated) -> None:
    """No step makes anything non-finite, except where it is in proportion to the gradient."""
    loss = mitigated.ends("million")[2]
    broken = not np.isfinite(loss).all() or loss[-1] > 100
    assert broken == (mitigated.name in BREAK_AT_A_MILLION), loss[times(mitigated.name).struck :]


# --- no strength is no mitigation ------------------------------------------------------------------------------------

NEUTRAL: dict[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    # mitigation: (the recipe, what has no strength): equal bit for bit
    "adagc": ({}, {"adagc.threshold": 1e30, "adagc.warmup_clip": 1e30}),
    "attention_temperature": ({}, {"model.attention_temperature": 1.0}),
    "batch_warmup": ({}, {"schedule.batch_start": 4}),
    "beta2_095": ({}, {"optim.beta2": 0.999}),
    "beta2_0999": ({"optim.beta2": 0.95}, {"optim.beta2": 0.95}),
    "checkpointing": ({}, {"train.checkpointing": "true"}),
    "clip_1": ({}, {"optim.clip": 1e30}),
    "clip_tensor": ({}, {"optim.clip_tensor": 1e30}),
    "clip_value": ({}, {"optim.clip_value": 1e30}),
    "coupled_decay": (
        {"optim.weight_decay": 0.0, "optim.decay_follows": "schedule"},
        {"optim.weight_decay": 0.0, "optim.decay_follows": "rate"},
    ),
    "completep": ({}, {"model.parametrization": "completep", "model.base_width": 16, "model.base_depth": 2}),
    "eps_large": ({}, {"optim.eps": 1e-8}),
    "eps_small": ({}, {"optim.eps": 1e-8}),
    "fp16_static": (
        {"train.precision": "fp16"},
        {"train.precision": "fp16", "train.loss_scaling": "static", "train.loss_scale": 1.0},
    ),
    "independent_decay": (
        {"optim.weight_decay": 0.0, "optim.decay_follows": "rate"},
        {"optim.weight_decay": 0.0, "optim.decay_follows": "schedule"},
    ),
    "long_warmup": ({"schedule.warmup": "null"}, {"schedule.warmup": "null", "schedule.warmup_share": 0.05}),
    "mix_ln": ({}, {"model.placement": "mix", "model.mix": 0.0}),
    "mup": ({}, {"model.parametrization": "mup", "model.base_width": 16}),
    "qk_clip": ({}, {"model.qk_clip": 1e30}),
    "restarts": ({}, {"schedule.decay": "restarts", "schedule.cycles": 1}),
    "screen_entropy": ({}, {"screen.entropy": 1e-9}),
    "screen_rarity": ({}, {"screen.rarity": 1e9}),
    "screen_repetition": ({}, {"screen.repetition": 1.0}),
    "sequence_reshape": ({}, {"schedule.sequence_start": 16, "schedule.sequence_mode": "reshape"}),
    "sequence_warmup": ({}, {"schedule.sequence_start": 16}),
    "soft_clip": ({}, {"model.soft_clip_high": 1.0, "model.soft_clip_low": 0.0}),
    # Of whole vectors: beside them a CPU rounds SiLU by where an element lies, and the clamp copies the gate.
    "swiglu_clamp": (
        {"model.activation": "swiglu", "model.feedforward": 64},
        {"model.activation": "swiglu", "model.feedforward": 64, "model.swiglu_clamp": 1e30},
    ),
    "z_loss": ({}, {"train.z_loss": 0.0}),
    "zclip": ({}, {"zclip.threshold": 1e30}),
}

NOT_BITWISE = {
    # mitigation: why no setting of it equals the recipe bit for bit
    "accumulation_fp32": "it is what the recipe has",
    "adafactor": "other equations",
    "attention_cap": "c tanh(x / c) rounds, however large c is",
    "bf16": "another format",
    "branchnorm": "branches are absent in step 0, however few steps they grow in",
    "clip_update": "it takes AdamW's equations one by one, and the recipe a fused kernel",
    "constant_rate": "a shape, not a strength",
    "deepnorm": "constants of the depth",
    "deepnorm_glm": "constants of the depth",
    "down_norm": "a norm",
    "embedding_norm": "a norm",
    "fixup": "another structure",
    "fp16": "another format",
    "fp16_dynamic": "the scale moves by itself",
    "fp8": "another format",
    "lamb": "other equations",
    "lars": "other equations",
    "layer_scale": "gains of one learn",
    "linear_decay": "a shape, not a strength",
    "lion": "other equations",
    "no_clip": "it takes away what has a strength",
    "norms_fp32": "it is what the recipe has",
    "output_cap": "c tanh(x / c) rounds, however large c is",
    "post_ln": "another structure",
    "projection_norm": "a norm",
    "qk_fc_norm": "a norm",
    "qk_norm": "a norm",
    "qk_norm_per_head": "a norm",
    "qkv_norm": "a norm",
    "relu": "another activation",
    "rms_norm": "another norm",
    "sandwich": "a norm",
    "scaled_embedding": "a constant of the width",
    "scaled_residual": "a constant of the depth",
    "sgd": "other equations",
    "sigma_reparam": "a matrix divided by its spectral norm",
    "small_init": "a constant of the width",
    "softmax_fp32": "it is what the recipe has",
    "spam": "its equations one by one, and the recipe a fused kernel",
    "spike_no_more": "constants of width and depth",
    "stable_adamw": "other equations",
    "stable_spam": "other equations",
    "swiglu": "another activation",
    "up_norm": "a norm",
    "wsd": "a shape, not a strength",
    "zero_head": "another start",
    "zero_residual": "another start",
}


def test_it_is_said_of_every_mitigation_whether_it_has_a_setting_without_strength() -> None:
    assert NEUTRAL.keys() | NOT_BITWISE.keys() == set(MITIGATIONS) - {"none"}
    assert not NEUTRAL.keys() & NOT_BITWISE.keys()


def neutral(mitigation: str, fields: Mapping[str, object], **others: object) -> Trial:
    given = {key.replace(".", "__"): value for key, value in fields.items()}
    steps = times(mitigation).steps
    return trial("none", **given, train__steps=steps, train__validate_every=steps, **others)


@cache
def pair(of: Trial) -> engine.Run:
    """Two of the same."""
    return engine.run([of, of])


@pytest.mark.parametrize("mitigation", NEUTRAL)
def test_without_strength_it_is_the_recipe(mitigation: str) -> None:
    """Bit for bit, beside a trial in which it acts where the two can share a pack."""
    recipe, weak = (neutral(mitigation, fields) for fields in NEUTRAL[mitigation])
    acting = trial(mitigation, seed=1)
    neighbour = acting if acting.structure == weak.structure else weak
    left, right = pair(recipe)[0], engine.run([weak, neighbour])[0]
    dropped = [signals.pop("dropped", torch.zeros(1)) for signals in (left, right)]
    assert not any(torch.nan_to_num(count).any() for count in dropped)
    assert engine.same_bits(left, right) == []
