"""Alarms of an attached run are those that its store gives: every detector, every schedule, and after each answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis import alarms, open_sweep
from harness import ConfigError, attach
from harness.detectors.table import DETECTORS
from harness.user_loop.presets import can_see
from tests.user_loop.healthy import HEALTHY, epochs_of
from tests.user_loop.loops import seeded
from tests.user_loop.scripts import SCRIPTS, Script

SEEN = sorted(filter(can_see, DETECTORS))
SEED = 30
FAULTS = {  # each stays in what the run has recorded, for nothing goes back
    "a weight": {"name": "weight_bit", "start": 130, "bit": 30, "element": 0},
    "a gradient": {"name": "gradient_bit", "start": 125, "bit": 28, "element": 1},
    "no number": {"name": "nan_gradient", "start": 220},
}


def restarts(seed: int) -> Script:
    """A cosine that begins anew after one epoch, and after two more (Loshchilov & Hutter 2017, arXiv 1608.03983)."""
    seeded(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.ReLU(), torch.nn.Linear(24, 3))
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return epochs_of(seed, model, made, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(made, 1, 2), clip=1.0)


LOOPS: dict[str, Callable[[int], Script]] = {
    "restarts": restarts,
    **{
        name: HEALTHY[name] for name in ("SGD, rate to a tenth", "AdamW, rate to a tenth", "rate that follows the loss")
    },
    **{name: HEALTHY[name] for name in ("adapters", "recurrent", "restored", "unfrozen", "a short last batch")},
}


def compared(folder: Path, script: Script, **options: Any) -> tuple[Any, dict[str, int]]:
    """The run, and how often each detector has sounded in it: at the same steps in the replay; without a warning."""
    with (
        warnings.catch_warnings(),
        attach(script.model, script.optimizers, script.extra, detect="+".join(SEEN), out=folder, **options) as run,
    ):
        warnings.simplefilter("error", RuntimeWarning)
        script.go(run)
    sweep = open_sweep(folder)
    sounded = {}
    for name in SEEN:
        on_line = sweep[f"alarm_{name}"].values[0].astype(bool)
        replayed = alarms(sweep, name)["alarm"].values[0]
        assert np.array_equal(on_line, replayed), (name, np.nonzero(on_line)[0], np.nonzero(replayed)[0])
        sounded[name] = int(on_line.sum())
    return run, sounded


@pytest.mark.parametrize("name", LOOPS)
def test_every_detector(tmp_path: Path, name: str) -> None:
    """Each loop is trained with a NaN gradient, and with a flipped bit in a weight or a gradient, in turn."""
    turn = ("a weight", "a gradient")[list(LOOPS).index(name) % 2]
    sounded = dict.fromkeys(SEEN, 0)
    for fault in (turn, "no number") if name != "unfrozen" else (None,):  # whose first layer is not trained at first
        _, found = compared(tmp_path / f"{fault}", LOOPS[name](SEED), fault=FAULTS.get(fault))
        sounded = {key: sounded[key] + count for key, count in found.items()}
    assert name == "unfrozen" or (sounded["combined"] and sounded["finite"]), sounded


def test_each_sounds_in_one_of_them(tmp_path: Path) -> None:
    """Or what is compared above would be silence with silence."""
    silent = set(SEEN)
    for number, (name, fault) in enumerate([("restarts", FAULTS["a weight"]), ("adapters", FAULTS["no number"])]):
        _, sounded = compared(tmp_path / f"{number}", LOOPS[name](SEED), fault=fault)
        silent -= {key for key, count in sounded.items() if count}
    assert silent == set()


@pytest.mark.parametrize("name", ["restarts", "AdamW, rate to a tenth", "restored", "adapters"])
def test_after_a_run_has_gone_back(tmp_path: Path, name: str) -> None:
    """To a snapshot, from which steps are trained again: what a detector had seen of them is gone on both sides."""
    ladder = {"ladder": [{"action": "roll_back", "limit": 4, "cool_down": 2}], "snapshot": {"every": 5, "kept": 3}}
    run, sounded = compared(tmp_path, LOOPS[name](SEED), fault=FAULTS["a weight"], recover=ladder)
    assert run.incidents and sum(sounded.values()), sounded


@pytest.mark.parametrize("name", ["scaled", "saved_and_loaded"])
@pytest.mark.parametrize("recover", [None, "repair"])
def test_with_a_scaled_loss_and_a_state_that_is_loaded(tmp_path: Path, name: str, recover: str | None) -> None:
    script = SCRIPTS[name]()
    fault = {"name": "weight_bit", "start": 8, "tensor": "0.weight", "bit": -2}
    run, _ = compared(tmp_path, script, fault=fault, recover=recover)
    assert len(run.events) == 1


@pytest.mark.parametrize("name", sorted(set(DETECTORS) - set(SEEN)))
def test_others_are_refused_by_name(name: str) -> None:
    script = SCRIPTS["plain"]()
    with (
        pytest.raises(ConfigError, match=f"{name}.*; allowed: "),
        attach(script.model, script.optimizers, script.extra, detect=name),
    ):
        pass
