"""Published rules of detection against the code of their authors, step by step.

OLMo-core, Lightning, Megatron-LM and trainscope are asked themselves. metaseq, and Levanter, which needs JAX, are not
installed: their rules are written down here a second time, from their code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from analysis import open_sweep
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS
from tests.harness.test_detectors import options_of
from tests.sweeps import command

pytestmark = pytest.mark.filterwarnings("default")  # theirs warn of much

STEPS = 400
Rule = Callable[..., Sequence[bool]]


def olmo(loss: np.ndarray, norm: np.ndarray, window: int = 128, sigma: float = 6.0) -> list[bool]:
    """`SkipStepOptimizer`, from its file alone: its package wants what downloads from clouds."""
    found = importlib.util.find_spec("olmo_core")
    assert found is not None and found.origin is not None
    place = Path(found.origin).parent / "optim" / "skip_step_optimizer.py"
    tools = ModuleType("olmo_core.utils")
    tools.get_default_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    tools.move_to_device = lambda x, device: x.to(device)  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("olmo_skip_step", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "olmo_core", ModuleType("olmo_core"))
        patch.setitem(sys.modules, "olmo_core.utils", tools)
        spec.loader.exec_module(module)
    skipping = module.SkipStepOptimizer([nn.Parameter(torch.zeros(1))], {}, window, sigma)
    said = []
    for of_loss, of_norm in zip(loss, norm, strict=True):
        skipping.latest_loss, skipping.latest_grad_norm = torch.tensor(of_loss).double(), torch.tensor(of_norm).double()
        said.append(not skipping.get_step_factor())
    return said


def levanter(loss: np.ndarray, norm: np.ndarray, window: int = 128, sigma: float = 6.0) -> list[bool]:
    """optim/skipstep.py: one value more than OLMo-core has, the deviation of a population, never below 1e-6."""

    def is_high(values: np.ndarray, step: int) -> bool:
        past = values[max(0, step - window) : step]
        return bool(values[step] > past.mean() + sigma * max(float(past.std()), 1e-6))

    is_heard = np.arange(len(loss)) >= max(2, window // 2)
    return [bool(is_heard[n]) and (is_high(loss, n) or is_high(norm, n)) for n in range(len(loss))]


def lightning(loss: np.ndarray, folder: Path, rise: float = 2.0, window: int = 10) -> list[bool]:
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

    fabric = Fabric(accelerator="cpu", devices=1)
    spikes = SpikeDetection(window=window, rtol=rise, exclude_batches_path=folder / "skipped.json")
    said = []
    for number, value in enumerate(loss):
        try:
            spikes.on_train_batch_end(fabric, torch.tensor(value).double(), None, number)
            said.append(False)
        except TrainingSpikeException:
            said.append(True)
    return said


def megatron(loss: np.ndarray, factor: float = 10.0, samples: int = 100) -> list[bool]:
    from megatron.core.rerun_state_machine import RerunStateMachine

    machine = RerunStateMachine()
    return [machine.is_unexpectedly_large(torch.tensor(x).double(), factor, "loss", samples) for x in loss]


def metaseq(loss: np.ndarray, ratio: float = 1.5, span: float = 9.0) -> list[bool]:
    """trainer.py, skip_spike: a mean that begins with the first loss, and takes in what is no spike."""
    mean, said = loss[0], []
    for value in loss:
        said.append(bool(value / mean > ratio))
        if not said[-1]:
            mean += 2 / (span + 1) * (value - mean)
    return said


def trainscope(loss: np.ndarray, limit: float = 6.0, sigma: float = 3.5) -> list[bool]:
    from trainscope.core.detectors import ChangePointDetector, ZScoreDetector

    sums, single = ChangePointDetector(threshold=limit), ZScoreDetector(threshold=sigma, robust=True)
    return [(sums.update(x) is not None) | (single.update(x) is not None) for x in loss.tolist()]


def trainscope_experts(share: np.ndarray) -> list[bool]:
    from trainscope.core.detectors.expert_utilization import ExpertUtilizationDriftDetector

    detector = ExpertUtilizationDriftDetector()
    return [detector.update(x) is not None for x in share.tolist()]


# --- what they are shown -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """Loss and gradient norm of one run, [STEPS], float32 values."""

    loss: np.ndarray
    grad_norm: np.ndarray


def made() -> dict[str, Shown]:
    """Noise on a plateau, a fall, steps up and down, single spikes of all sizes, exact limits, and what never moves."""
    draw = np.random.default_rng(0)
    noise = 0.05 * draw.standard_normal(STEPS)
    falling = 2 + 4 * np.exp(-np.arange(STEPS) / 100) + noise
    spiky = 3 + noise
    spiky[::7] *= np.exp(draw.uniform(-1.5, 2.5, len(spiky[::7])))
    stairs = 3 + 0.01 * draw.standard_normal(STEPS) + 4 * (np.arange(STEPS) // 90 % 2)
    drift = 3 + noise + 0.12 * (np.arange(STEPS) >= 200)
    exact = np.full(STEPS, 1.0)
    exact[150], exact[200], exact[250], exact[270] = 3.0, 10.0, 1.5, 2.99  # at limits: 3 means, 10 times the largest
    signed = np.where(np.arange(STEPS) % 5 == 0, -1.0, 1.0) * draw.integers(1, 4, STEPS)
    curves = {"falling": falling, "spiky": spiky, "stairs": stairs, "exact": exact, "signed": signed}
    curves |= {"drift": drift, "still": np.full(STEPS, 3.0), "zeros": np.zeros(STEPS)}
    norms = {name: np.roll(curve, 3)[::-1].copy() for name, curve in curves.items()}
    return {name: Shown(*(x.astype("f4").astype("f8") for x in (curves[name], norms[name]))) for name in curves}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Shown]:
    """Those, and what a store has of undisturbed and of struck runs, warm-up and all."""
    out = tmp_path_factory.mktemp("published") / "out"
    faults = ["fault=none,weight_bit,learning_rate_jump,rare_tokens", "fault.start=150", "fault.bit=29"]
    ended = command.call(f"out={out}", *command.tiny(f"train.steps={STEPS}", "optim.lr=1e-2", *faults))
    assert ended.status == 0, ended.err
    sweep = open_sweep(out)
    found = made()
    for trial in sweep["trial"].values.tolist():
        loss, norm = (sweep[name].sel(trial=trial).values.astype("f8") for name in ("loss", "grad_norm"))
        if np.isfinite(loss).all() and np.isfinite(norm).all():
            found[trial] = Shown(loss, norm)
    assert len(found) > len(made()) + 2, "of four"
    return found


def ours(name: str, options: Any, **signals: np.ndarray) -> list[bool]:
    of = {signal: values[None] for signal, values in signals.items()}
    return replay(DETECTORS[name], options, of, np.ones((1, STEPS), bool))[0][0].tolist()


def differing(one: Sequence[bool], other: Sequence[bool]) -> list[int]:
    return np.flatnonzero(np.array(one) != np.array(other)).tolist()


@pytest.mark.parametrize(("window", "sigma"), [(128, 6.0), (7, 3.0)])
def test_skip_step_is_that_of_olmo_core(shown: Mapping[str, Shown], window: int, sigma: float) -> None:
    heard = 0
    for name, of in shown.items():
        theirs = olmo(of.loss, of.grad_norm, window, sigma)
        said = ours("skip_step", options_of("skip_step", window=window, sigma=sigma), **vars(of))
        assert not differing(said, theirs), name
        heard += sum(said)
    assert heard > 3


def test_levanter_begins_a_step_later_and_has_a_smaller_deviation(shown: Mapping[str, Shown]) -> None:
    """So it is not ours step by step, which the docs say."""
    apart = 0
    for of in shown.values():
        theirs, said = levanter(of.loss, of.grad_norm), ours("skip_step", options_of("skip_step"), **vars(of))
        assert not any(theirs[:64]) and all(theirs[n] for n in range(64, STEPS) if said[n])
        apart += len(differing(said, theirs))
    assert apart < 0.01 * STEPS * len(shown)


@pytest.mark.parametrize("rise", [2.0, 0.2])
def test_running_mean_is_that_of_lightning(shown: Mapping[str, Shown], tmp_path: Path, rise: float) -> None:
    heard = 0
    for name, of in shown.items():
        theirs = lightning(of.loss, tmp_path, rise)
        said = ours("running_mean", options_of("running_mean", rise=rise), loss=of.loss)
        assert not differing(said, theirs), name
        heard += sum(said)
    assert heard > 3


@pytest.mark.parametrize(("factor", "samples"), [(10.0, 100), (1.2, 20), (2.0, 1)])
def test_spiky_loss_is_that_of_megatron(shown: Mapping[str, Shown], factor: float, samples: int) -> None:
    heard = 0
    for name, of in shown.items():
        theirs = megatron(of.loss, factor, samples)
        said = ours("spiky_loss", options_of("spiky_loss", factor=factor, samples=samples), loss=of.loss)
        assert not differing(said, theirs), name
        heard += sum(said)
    assert heard


def test_loss_ratio_is_that_of_metaseq(shown: Mapping[str, Shown]) -> None:
    heard = 0
    for name, of in shown.items():
        if (of.loss == 0).any():
            continue  # there it divides by zero
        said = ours("loss_ratio", options_of("loss_ratio"), loss=of.loss)
        assert not differing(said, metaseq(of.loss)), name
        heard += sum(said)
    assert heard


@pytest.mark.parametrize(("limit", "sigma"), [(6.0, 3.5), (3.0, 50.0)])
def test_cusum_is_that_of_trainscope(shown: Mapping[str, Shown], limit: float, sigma: float) -> None:
    """Its change points by cumulative sums, and beside them its robust deviations."""
    heard = 0
    for name, of in shown.items():
        said = ours("cusum", options_of("cusum", limit=limit, sigma=sigma), loss=of.loss)
        assert not differing(said, trainscope(of.loss, limit, sigma)), name
        heard += sum(said)
    assert heard


def test_expert_share_is_that_of_trainscope() -> None:
    share = np.random.default_rng(4).choice(np.array([0.3, 0.85, 0.9, 1.0], "f4"), STEPS, p=[0.2, 0.3, 0.3, 0.2])
    said = ours("expert_share", options_of("expert_share"), loss=np.full(STEPS, 3.0), expert_share=share[:, None])
    theirs = trainscope_experts(np.where(share == np.float32(0.85), 0.85, share.astype("f8")))
    assert sum(said) > 20 and not differing(said, theirs)


RULES: dict[str, tuple[Callable[[np.ndarray, Path], list[bool]], Sequence[int]]] = {
    "skip_step": (lambda loss, folder: olmo(loss, np.ones(STEPS)), range(200, 200 + 129)),  # until it leaves the window
    "running_mean": (lightning, [200]),
    "spiky_loss": (lambda loss, folder: megatron(loss), []),
    "loss_ratio": (lambda loss, folder: metaseq(loss), []),
}


@pytest.mark.parametrize("name", [*RULES, "cusum"])
def test_what_theirs_say_of_a_nan(tmp_path: Path, name: str) -> None:
    """Ours is an alarm at that step, and forgets it; theirs are what the docs say."""
    loss = 3 + 0.05 * np.random.default_rng(0).standard_normal(STEPS).astype("f4").astype("f8")
    loss[200] = np.nan
    signals = {"loss": loss} | ({"grad_norm": np.ones(STEPS)} if name == "skip_step" else {})
    said = ours(name, options_of(name), **signals)
    loss[200] = 3.0
    assert differing(said, ours(name, options_of(name), **signals)) == [200]
    loss[200] = np.nan
    if name == "cusum":
        assert not trainscope(loss)[200] and any(trainscope(loss)[301:])  # a median over it depends on its place
        assert not trainscope(np.roll(loss, -190))[10], "in the warm-up"
    else:
        rule, alarms = RULES[name]
        assert np.flatnonzero(rule(loss, tmp_path)).tolist() == list(alarms)
        assert not rule(np.roll(loss, -200), tmp_path)[0], "at the first step"
