"""What NaN, infinity and a gradient a million times too large do, as each optimizer's paper says; SPAM by script."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch

from harness.config import sections
from harness.optim.optimizers import OPTIMIZERS
from harness.testing import engine
from harness.testing.changes import Change
from harness.training.sites import Site
from tests.harness.optimizing import TENSORS, Rig, trial

every = pytest.mark.parametrize("name", OPTIMIZERS)
STRUCK = 7  # an element of the tensor `square`
LATE = 25  # steps, after SPAM's grace
MILLION = 1e6
MATRICES = ("embedding", "square", "tall")


def steady(rig, step):
    """Gradients of one size, the same for every trial."""
    for scaled in rig.layout.tensors:
        generator = torch.Generator().manual_seed(step * 100 + len(scaled.name))
        rig.layout.view(rig.gradients, scaled.name)[:] = 0.1 * torch.randn(scaled.shape, generator=generator)


def after(name, steps, options=None, **optim):
    """A rig of two equal trials in float32 after so many steady steps, and the gradients of the next one."""
    own = trial(name, options=options, **{"lr": 1e-2, "weight_decay": 0.0, **optim})
    return copy.deepcopy(trained(own, steps))  # its arrays share memory as those of the first one do


@cache
def trained(own, steps):
    rig = Rig([own] * 2, dtype=torch.float32)
    for step in range(steps):
        steady(rig, step)
        rig.step()
    steady(rig, steps)
    return rig


def struck(rig):
    return rig.layout.view(rig.gradients, "square")[1].view(-1)


# --- what is not finite ------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("steps", [0, LATE])
@pytest.mark.parametrize("clip_update", [None, 1.0])
def test_whether_an_infinite_element_leaves_finite_weights(name, value, steps, clip_update):
    rig = after(name, steps, clip_update=clip_update)
    struck(rig)[STRUCK] = value
    says = rig.optimizer.repairs().tolist()
    rig.step()
    assert torch.isfinite(rig.weights).all(dim=1).tolist() == [True, says[1]] and says[0] == says[1]
    assert says[1] == (name == "lion" or (name == "spam" and steps == LATE))
    assert OPTIMIZERS[name].repairs_infinity == (name in ("lion", "spam"))


@every
@pytest.mark.parametrize("steps", [0, LATE])
@pytest.mark.parametrize("clip_update", [None, 1.0])
def test_nan_stays_nan(name, steps, clip_update):
    rig = after(name, steps, clip_update=clip_update)
    struck(rig)[STRUCK] = math.nan
    rig.step()
    assert torch.isnan(rig.view("square", 1).view(-1)[STRUCK])
    assert torch.isfinite(rig.weights[0]).all()


def test_lion_goes_on_in_the_direction_of_an_infinite_gradient():
    rig = after("lion", LATE)
    struck(rig)[STRUCK] = -math.inf
    weights = []
    for step in range(4):
        rig.step()
        weights.append(float(rig.view("square", 1).view(-1)[STRUCK]))
        steady(rig, LATE + step)
    steps = torch.tensor(weights).diff()
    torch.testing.assert_close(steps, torch.full((3,), 0.5 * 1e-2), rtol=1e-4, atol=0)
    assert torch.isinf(rig.view("square", 1, "moment_1")).sum() == 1


# --- a million times too large -----------------------------------------------------------------------------------


def changes(rig):
    """The step that both trials make, tensor by tensor: what a rate of one would take off."""
    before = rig.weights.clone()
    rig.step()
    found = {}
    for scaled in rig.layout.tensors:
        moved = rig.layout.view(before - rig.weights, scaled.name) / (1e-2 * scaled.learning_rate)
        found[scaled.name] = moved
    return found


def spiked(name, options=None, **optim):
    """A rig whose second trial has a gradient a million times as large as it should be."""
    rig = after(name, LATE, options, **optim)
    rig.gradients[1] *= MILLION
    return rig


def rms(x):
    return float(x.square().mean().sqrt())


def test_adamw_and_sgd_move_far():
    """AdamW by (1 - beta1) / sqrt(1 - beta2), about 3, wherever there is a gradient; SGD by the gradient."""
    for row in changes(spiked("adamw")).values():
        corrected = (1 - 0.9) / (1 - 0.9**26) / math.sqrt((1 - 0.999) / (1 - 0.999**26))
        assert rms(row[1]) == pytest.approx(corrected, rel=1e-3)
    rig = spiked("sgd")
    gradient = rig.layout.view(rig.gradients, "tall").clone()
    found = changes(rig)["tall"]
    torch.testing.assert_close(found[1], gradient[1], rtol=1e-3, atol=10.0)


def test_lion_moves_as_ever():
    for row in changes(spiked("lion")).values():
        torch.testing.assert_close(row[1].abs(), torch.ones_like(row[1]), rtol=1e-4, atol=0)


def test_stable_adamw_slows_down():
    """By the root of 1 / (1 - beta2), which leaves 1 - beta1."""
    for row in changes(spiked("stable_adamw")).values():
        assert rms(row[1]) == pytest.approx((1 - 0.9) / (1 - 0.9**26), rel=1e-3)


def test_lamb_and_lars_keep_to_the_size_of_the_weights():
    rig = spiked("lamb")
    sizes = {name: float(rig.view(name, 1).norm()) for name in MATRICES}
    found = changes(rig)
    for name in MATRICES:
        assert float(found[name][1].norm()) == pytest.approx(sizes[name], rel=1e-4)
    rig = spiked("lars", beta1=0.0)
    sizes = {name: float(rig.view(name, 1).norm()) for name in MATRICES}
    found = changes(rig)
    for name in MATRICES:
        # A step of a thousandth of the weights' size, of which float32 keeps three digits.
        assert float(found[name][1].norm()) == pytest.approx(1e-3 * sizes[name], rel=5e-3)


def test_adafactor_clips_its_update():
    unclipped = changes(spiked("adafactor", {"clip": 1e9}))
    for name, row in changes(spiked("adafactor")).items():
        assert rms(row[1]) == pytest.approx(1.0, rel=1e-4) and rms(unclipped[name][1]) > 1.5


def test_stable_spam_holds_the_norm():
    """To (1 - gamma1) / sqrt(1 - gamma2), about 0.95, because the spike is all that the averages see."""
    rig = spiked("stable_spam")
    before = rig.optimizer.slot("moment_1").clone()
    rig.step()
    taken = (rig.optimizer.slot("moment_1") - 0.9 * before) / (1 - 0.9)
    for scaled in TENSORS:
        size = float(rig.layout.view(taken, scaled.name)[1].norm())
        mean, root = (1 - 0.7) / (1 - 0.7**26), math.sqrt((1 - 0.9) / (1 - 0.9**26))
        assert size == pytest.approx(mean / root, rel=1e-3)


def test_stable_spam_scales_spikes_to_the_largest_so_far():
    """What is above the moving average T of the largest becomes T times its share of the largest (AdaClip)."""
    rig, gamma3, largest = after("stable_spam", LATE, {"gamma3": 0.9}), 0.9, []
    gradient = struck(rig)
    gradient[STRUCK], gradient[STRUCK + 1] = 1000.0, -500.0
    ordinary = float(gradient[0])
    before = rig.optimizer.slot("moment_1").clone()
    rig.step()
    taken = rig.layout.view((rig.optimizer.slot("moment_1") - 0.9 * before) / (1 - 0.9), "square")[1].view(-1)
    for step in range(LATE):
        steady(rig, step)
        largest.append(float(struck(rig).abs().max()))
    weights = [gamma3**age for age in range(LATE, -1, -1)]
    mean = sum(weight * size for weight, size in zip(weights, [*largest, 1000.0], strict=True)) / sum(weights)
    assert float(taken[STRUCK] / taken[0]) == pytest.approx(mean / ordinary, rel=1e-3)
    assert float(taken[STRUCK] / taken[STRUCK + 1]) == pytest.approx(-2.0, rel=1e-3)


# --- SPAM ---------------------------------------------------------------------------------------------------------

SPAM = {"threshold": 100.0, "interval": 10, "warmup": 4, "grace": 3}
STEADY, BETA1, BETA2 = 0.5, 0.9, 0.99


class Script:
    """SPAM on gradients of 0.5 throughout, but for one element of the tensor `square`."""

    def __init__(self):
        fields = {"lr": 1e-2, "beta1": BETA1, "beta2": BETA2, "eps": 1e-30, "weight_decay": 0.0}
        self.rig = Rig([trial("spam", options=SPAM, **fields)] * 2)

    def step(self, value=STEADY):
        """One step; returns what the struck element and another one lost, over the rate."""
        self.rig.gradients.fill_(STEADY)
        struck(self.rig)[STRUCK] = value
        before = self.rig.view("square", 1).clone().view(-1)
        self.rig.step()
        lost = (before - self.rig.view("square", 1).view(-1)) / (1e-2 * 0.5)
        return float(lost[STRUCK]), float(lost[STRUCK + 1])

    def moments(self):
        return tuple(float(self.rig.view("square", 1, f"moment_{i}").view(-1)[STRUCK]) for i in (1, 2))


@pytest.mark.parametrize("value", [100.0, -100.0, math.inf, -math.inf])
def test_spam_clips_to_the_root_of_the_threshold_times_the_second_moment(value):
    script = Script()
    for _ in range(5):
        script.step()
    m, v = script.moments()
    script.step(value)
    clipped = math.copysign(math.sqrt(SPAM["threshold"] * v), value)
    assert script.moments() == pytest.approx((BETA1 * m + (1 - BETA1) * clipped, BETA2 * v + (1 - BETA2) * clipped**2))


def test_spam_starves_elements_that_never_had_a_gradient():
    """As the authors' code does: after the grace, sqrt(threshold v) is zero where v is."""
    script = Script()
    for _ in range(9):
        assert script.step(0.0)[0] == 0
    script = Script()
    lost = [script.step(0.0 if number < 4 else STEADY)[0] for number in range(11)]
    assert lost[:9] == [0.0] * 9 and lost[9] > 0 and lost[10] > 0


# --- in a pack ----------------------------------------------------------------------------------------------------


def infinite(step):
    return Change(Site.REDUCED_GRADIENT, range(step, step + 1), lambda t: t["head"].view(-1)[:1].fill_(math.inf))


@cache
def five(name, steps, struck=None, **fields):
    """One of them may freeze without another being dropped; in step `struck` an element of its gradient is infinite."""
    trials = [engine.trial(seed=r, name=name, steps=steps, lr=1e-3, depth=1, **fields) for r in range(5)]
    return engine.run(trials, {} if struck is None else {1: infinite(struck)})


@pytest.mark.parametrize(
    ("name", "step", "fields", "goes_on"),
    [
        ("spam", 25, {}, True),
        ("spam", 3, {}, False),  # in the grace
        ("spam", 25, {"clip": 1.0}, False),  # 0 x infinity, before SPAM sees it
        ("spam", 3, {"clip_value": 1.0}, True),
        ("lion", 3, {}, True),
        ("adamw", 25, {}, False),
        ("stable_spam", 25, {}, False),
    ],
)
def test_a_trial_goes_on_only_if_its_weights_stay_finite(name, step, fields, goes_on):
    run, clean = five(name, step + 5, step, **fields), five(name, step + 5, **fields)
    assert run.result.nonfinite_step == [None, None if goes_on else step, None, None, None]
    if not goes_on:
        assert torch.equal(run.weights[-1][1], run.weights[step - 1][1]) and torch.isfinite(run.weights[-1][1]).all()
    assert [engine.same_bits(run[i], clean[i]) for i in (0, 2, 3, 4)] == [[], [], [], []]


def test_every_number_of_an_optimizer_can_differ_inside_a_pack():
    for name in OPTIMIZERS:
        options = sections().get(name)
        for field_name, field in options.__dataclass_fields__.items() if options else ():
            is_number = isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
            assert not is_number or field.metadata["scope"] == "per-trial", f"{name}.{field_name}"
