"""Learning rates: knots, torch's schedulers where one is equal, the papers' formulas, and growth, which counts tokens.

More knots of cosine, linear and constant are in test_differential.py.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from harness.config import ConfigError, Schedule, checked
from harness.optim.schedules import SHAPES, learning_rates, rates_of, warmup_steps
from harness.testing import engine
from injectors.schedule import ScheduleOffset

PEAK = 2.0


def rates(steps, **fields):
    return rates_of(engine.trial(lr=PEAK, steps=steps, **fields))


KNOTS = {
    "wsd: stable, then 1 - sqrt over the last fifth": (
        {"steps": 20, "warmup": 4, "decay": "wsd", "cooldown": 0.2},
        {0: 0.25, 3: 1, 4: 1, 15: 1, 16: 1 - 0.25**0.5, 17: 1 - 0.5**0.5, 19: 0},
    ),
    "wsd to a tenth of the peak": (
        {"steps": 20, "warmup": 0, "decay": "wsd", "cooldown": 0.2, "final": 0.1},
        {0: 1, 15: 1, 16: 0.1 + 0.9 * 0.5, 19: 0.1},
    ),
    "wsd with a cooldown of one step": (
        {"steps": 20, "warmup": 2, "decay": "wsd", "cooldown": 0.05},
        {0: 0.5, 1: 1, 18: 1, 19: 0},
    ),
    "wsd whose cooldown begins inside the warm-up takes what is left": (
        {"steps": 20, "warmup": 4, "decay": "wsd_linear", "cooldown": 1.0},
        {3: 1, 7: 0.75, 11: 0.5, 19: 0},
    ),
    "wsd that is linear": (
        {"steps": 20, "warmup": 4, "decay": "wsd_linear", "cooldown": 0.4, "final": 0.2},
        {3: 1, 11: 1, 12: 0.9, 15: 0.6, 19: 0.2},
    ),
    "restarts: from the peak, four times": (
        {"steps": 18, "warmup": 2, "decay": "restarts", "cycles": 4},
        {1: 1, 3: 0.5, 4: 0.5 - 0.5**1.5, 5: 1, 7: 0.5, 9: 1, 13: 1, 15: 0.5, 17: 0},
    ),
    "restarts to a share": (
        {"steps": 8, "warmup": 0, "decay": "restarts", "cycles": 2, "final": 0.5},
        {0: 0.75 + 0.25 * 0.5**0.5, 1: 0.75, 3: 1, 5: 0.75, 7: 0.5},
    ),
    "one cycle is a cosine": ({"steps": 9, "warmup": 1, "decay": "restarts", "cycles": 1}, {0: 1, 4: 0.5, 8: 0}),
    "a quarter of the run": ({"steps": 20, "warmup": None, "warmup_share": 0.25}, {0: 0.2, 3: 0.8, 4: 1, 19: 0}),
    "no warm-up at all": ({"steps": 20, "warmup": None, "warmup_share": 0.0, "decay": "linear"}, {0: 0.95, 19: 0}),
}


@pytest.mark.parametrize(("fields", "knots"), KNOTS.values(), ids=KNOTS)
def test_knots(fields, knots):
    found = rates(**fields)
    assert len(found) == fields["steps"]
    for step, share in knots.items():
        assert found[step] == pytest.approx(PEAK * share, rel=1e-12, abs=1e-12), step


def test_a_final_rate_is_the_same_whatever_the_peak() -> None:
    """Wortsman et al. 2023: a cosine to 1e-5, whose share of the peak is another for each peak."""
    for peak in (3e-4, 3e-1, 1e-5, 1e-6, 0.0):
        found = rates_of(engine.trial(steps=20, warmup=4, lr=peak, final=None, final_rate=1e-5))
        assert found[3] == peak and found[-1] == pytest.approx(min(peak, 1e-5), rel=1e-12)
        assert (found <= peak).all() and (np.diff(found[3:]) <= 0).all()
    share = rates_of(engine.trial(steps=20, warmup=4, lr=3e-4, final=0.1, final_rate=1e-5))
    assert share[-1] == pytest.approx(3e-5, rel=1e-12), "a share that is given comes first"


@pytest.mark.parametrize("decay", SHAPES)
@pytest.mark.parametrize(
    ("steps", "warmup", "final"), [(1, 0, 0.0), (1, 1, 0.0), (7, 2, 0.3), (40, 0, 1.0), (40, 40, 0)]
)
def test_every_shape_starts_at_the_peak_and_stays_below_it(decay, steps, warmup, final):
    """A new entry of the table is held to the same: the peak ends the warm-up, and nothing leaves the range."""
    found = rates(steps, decay=decay, warmup=warmup, final=final)
    assert len(found) == steps and np.isfinite(found).all()
    assert found[:warmup].tolist() == pytest.approx([PEAK * (step + 1) / warmup for step in range(warmup)], rel=1e-14)
    after = found[warmup:]
    assert (after <= PEAK).all() and (after >= final * PEAK).all()
    if decay != "constant" and len(after):
        assert after[-1] == final * PEAK


def torch_rates(make, steps):
    """The rate that torch's scheduler has set after 1, 2, ... calls."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, found = make(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants optimizer steps in between
        for _ in range(steps):
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
    return found


TORCH = {
    "cosine": ({"decay": "cosine", "final": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, 24, eta_min=0.1 * PEAK)),
    "linear": ({"decay": "linear", "final": 0.1}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=24)),
    "constant": ({"decay": "constant"}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    "restarts": (
        {"decay": "restarts", "cycles": 4, "final": 0.1},
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6, eta_min=0.1 * PEAK),
    ),
}


@pytest.mark.parametrize(("fields", "make"), TORCH.values(), ids=TORCH)
def test_without_warmup_it_is_torchs_scheduler_a_step_ahead(fields, make):
    """Its first call sets the rate of the first step. Restarts end at the bottom, where torch's would start again."""
    theirs = torch_rates(make, 24)
    if fields["decay"] == "restarts":
        assert theirs[-1] == PEAK
        theirs[-1] = 0.1 * PEAK
    assert rates(24, warmup=0, **fields).tolist() == pytest.approx(theirs, rel=1e-12, abs=1e-12)


def test_warmup_and_decay_are_torchs_linear_and_cosine():
    """The share of step 0 is 1/6: LinearLR starts there, and reaches the peak five calls later."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    up = lr_scheduler.LinearLR(optimizer, 1 / 6, 1.0, total_iters=5)
    theirs = [optimizer.param_groups[0]["lr"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            up.step()
            theirs.append(optimizer.param_groups[0]["lr"])
    theirs += torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, 14), 14)
    assert rates(20, warmup=6).tolist() == pytest.approx(theirs, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("cooldown", [0.05, 0.1, 0.2, 0.5, 1.0])
def test_wsd_is_the_papers_formula(cooldown):
    """Haegele et al. 2024, equations 1 and 2, where n counts steps that are done and N - N_decay are stable."""
    steps, warmup = 60, 3
    stable = steps - min(cooldown * steps, steps - warmup)

    def formula(n):
        if n <= warmup:
            return n / warmup
        return 1.0 if n <= stable else 1 - math.sqrt((n - stable) / (steps - stable))

    expected = [PEAK * formula(step + 1) for step in range(steps)]
    found = rates(steps, warmup=warmup, decay="wsd", cooldown=cooldown)
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


# --- growth: warm-up in steps, decay in tokens ----------------------------------------------------------------------


@pytest.mark.parametrize("decay", SHAPES)
@pytest.mark.parametrize("growth", [{"sequence_start": 1, "sequence_steps": 9}, {"batch_start": 1, "batch_steps": 7}])
def test_the_rate_is_that_of_a_run_that_has_trained_on_as_many_tokens(decay, growth):
    """A step of a run with whole batches of one token is one token: its rates are a table over tokens."""
    fields = {"decay": decay, "final": 0.2, "warmup": 4, "cycles": 3, "lr": PEAK}
    grown = engine.trial(steps=20, batch=4, context=8, **growth, **fields)
    tokens = grown.curriculum.tokens
    assert len(tokens) > 20
    before = int(tokens[3])
    by_token = engine.trial(steps=int(tokens[-1]), batch=1, context=1, **{**fields, "warmup": before})
    rates = rates_of(by_token)
    expected = [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, *(rates[int(done) - 1] for done in tokens[4:])]
    assert rates_of(grown).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_as_many_tokens_a_step_leave_the_rates_as_they_are():
    fields = {"steps": 20, "context": 8, "warmup": 4}
    plain, reshaped = (rates(**fields, **more) for more in ({}, {"sequence_start": 1, "sequence_mode": "reshape"}))
    assert np.array_equal(plain, reshaped)


def test_the_warmup_is_as_many_steps_as_without_growth():
    """So a mitigation that lets sequences grow changes nothing else; Li et al. leave the warm-up in steps, too."""
    grown = engine.trial(steps=40, warmup=None, sequence_start=1, sequence_steps=30)
    assert grown.steps > 40 and warmup_steps(grown) == 2
    assert warmup_steps(engine.trial(steps=40, warmup=None, warmup_share=0.5, sequence_start=1)) == 20
    assert warmup_steps(engine.trial(steps=40, warmup=7, warmup_share=0.5)) == 7


def test_a_schedule_that_is_resumed_at_the_wrong_step_of_a_longer_run():
    """Faults see the schedule that is in force, up to its last step."""
    fields = {"steps": 8, "warmup": 2, "sequence_start": 1, "sequence_steps": 6}
    fault = ScheduleOffset(start=9, duration=None, offset=-4)
    golden, faulty = engine.trial(**fields), engine.trial(fault=fault, **fields)
    assert golden.steps == 12
    found = engine.run([golden, faulty]).signals["learning_rate"][1]
    scheduled = rates_of(golden).astype(np.float32)
    expected = [*scheduled[:9], *scheduled[5:8]]
    assert np.array_equal(found.astype(np.float32), np.array(expected))


# --- of packs and configurations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_trial_of_a_pack_has_its_own(dtype):
    trials = [engine.trial(steps=12, lr=1e-3 * (1 + r), decay=decay) for r, decay in enumerate(SHAPES)]
    found = learning_rates(trials, dtype)
    assert found.shape == (12, len(SHAPES)) and found.dtype == dtype
    for r, trial in enumerate(trials):
        assert torch.equal(found[:, r], torch.tensor(rates_of(trial), dtype=dtype))


def test_what_a_caller_gets_is_its_own():
    trial = engine.trial(steps=12)
    expected = rates_of(trial).copy()
    rates_of(trial)[:] = 7
    assert np.array_equal(rates_of(trial), expected)


def test_an_unknown_shape_is_refused_with_those_that_there_are():
    with pytest.raises(
        ConfigError, match=r"^schedule.decay=cosin: .*allowed: cosine, linear, constant, wsd, .*restarts"
    ):
        checked("schedule.decay", Schedule, "decay", "cosin")
