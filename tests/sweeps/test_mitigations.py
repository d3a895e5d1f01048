"""What every mitigation has to keep: found in sweeps/conf/mitigation, each trained in real packs.

What a mitigation's paper has it do otherwise than AdamW with the recipe, its file says itself, under `about`.
"""

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

from harness.config import Trial, shown
from harness.objectives.outcome import NON_FINITE, TRAINED
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.testing import engine
from harness.testing.changes import Change
from harness.training.sites import Site
from sweeps.compose.arguments import config_loader
from sweeps.compose.folders import read
from sweeps.compose.grid import Composer
from sweeps.compose.hydra_calls import FOLDER
from sweeps.compose.places import is_general, stems

ABOUT = {name: read(FOLDER, "mitigation", name).about for name in stems(FOLDER / "mitigation")}
MITIGATIONS = [name for name in ABOUT if is_general("mitigation", name, None)]
"""Others are for policies alone: tests/sweeps/test_policy_mitigations.py."""
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


class Times(NamedTuple):
    """The number of steps of a run, the step at which trials are struck, and the two at which its process is killed."""

    steps: int
    struck: int
    killed: tuple[int, int]


def times(mitigation: str) -> Times:
    """Long enough for every part of a mitigation to act."""
    return Times(30, 20, (15, 18)) if ABOUT[mitigation].slow else Times(12, 8, (6, 7))


@cache
def composer() -> Composer:
    return Composer(config_loader(), "grid")


def trial(mitigation: str, **fields: object) -> Trial:
    """A small trial of this mitigation; `fields` as on the command line, with `__` for the dot."""
    steps = times(mitigation).steps
    given = {**SMALL, "train.steps": steps, "train.validate_every": steps}
    given |= {"optim.lr": rate(mitigation)}
    given |= {key.replace("__", "."): shown(value) for key, value in fields.items()}
    return composer().trial([f"mitigation={mitigation}", *(f"{key}={value}" for key, value in given.items())])


def rate(mitigation: str) -> float:
    return ABOUT[mitigation].rate or SMALL["optim.lr"]


def different(mitigation: str, count: int) -> list[Trial]:
    """Trials of one structure, with other seeds and other values of what is per-trial everywhere."""
    return [
        trial(mitigation, seed=seed, optim__lr=rate(mitigation) * (1 + 0.3 * seed), optim__weight_decay=1e-3 * seed)
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


@pytest.mark.parametrize("element", ["nan", "inf", "-inf"])
def test_an_element_that_is_not_finite(mitigated: Mitigated, element: str) -> None:
    """It freezes the trial at that step, or is survived by what says that it does."""
    step, outcome, loss = mitigated.ends(element)
    if element.removeprefix("-") in ABOUT[mitigated.name].survives:
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
    assert broken == bool(ABOUT[mitigated.name].breaks), loss[times(mitigated.name).struck :]


# --- no strength is no mitigation ------------------------------------------------------------------------------------


def test_each_says_whether_it_has_a_setting_without_strength() -> None:
    """It names that, or why there is none."""
    unsaid = [name for name, about in ABOUT.items() if bool(about.neutral) == bool(about.not_neutral)]
    assert unsaid == ["none"]


def neutral(mitigation: str, fields: Mapping[str, object], **others: object) -> Trial:
    given = {key.replace(".", "__"): value for key, value in fields.items()}
    steps = times(mitigation).steps
    return trial("none", **given, train__steps=steps, train__validate_every=steps, **others)


@cache
def pair(of: Trial) -> engine.Run:
    """Two of the same."""
    return engine.run([of, of])


@pytest.mark.parametrize("mitigation", [name for name in MITIGATIONS if ABOUT[name].neutral])
def test_without_strength_it_is_the_recipe(mitigation: str) -> None:
    """Bit for bit, beside a trial in which it acts where the two can share a pack."""
    about = ABOUT[mitigation]
    recipe, weak = (neutral(mitigation, fields) for fields in (about.beside, {**about.beside, **about.neutral}))
    acting = trial(mitigation, seed=1)
    neighbour = acting if acting.structure == weak.structure else weak
    left, right = pair(recipe)[0], engine.run([weak, neighbour])[0]
    dropped = [signals.pop("dropped", torch.zeros(1)) for signals in (left, right)]
    assert not any(torch.nan_to_num(count).any() for count in dropped)
    assert engine.same_bits(left, right) == []
