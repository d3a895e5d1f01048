"""The clean envelope: whose it is, and what is said when it is thin."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

from analysis.measures.envelope import FEWEST_TWINS, _final_sizes, recipes
from analysis.measures.outcomes import _sizes
from tests.analysis import synthetic
from tests.analysis.judging import ENVELOPE_MAX, GOLDEN, SLIGHTLY, START, STEPS, Campaign, events


@pytest.mark.parametrize("count", [FEWEST_TWINS - 1, FEWEST_TWINS])
def test_few_twins_are_said(campaign: Campaign, count: int) -> None:
    campaign.envelope(count)
    campaign.fault("a", {22: 1})
    campaign.write()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert campaign.judge()("envelope_max", "a") == ENVELOPE_MAX
    assert [f"all trials has {count}" in str(one.message) for one in caught] == [True] * (count < FEWEST_TWINS)


def test_every_recipe_has_its_own_envelope(campaign: Campaign) -> None:
    """Seeds do not make a recipe; widths, rates and mitigations do."""
    make = synthetic.make_trial
    for seed in range(FEWEST_TWINS):
        campaign.envelope(count=2 if seed == 0 else 1, base=make(seed=seed, steps=STEPS))
    campaign.envelope(count=3, base=make(lr=0.5, steps=STEPS), scale=4)
    campaign.fault("plain", {22: 1})
    campaign.fault("other rate", {22: 1}, base=make(lr=0.5, steps=STEPS))
    campaign.fault("mitigated", {22: 1}, base=make(mitigation="qk_norm", steps=STEPS))
    campaign.write([t for t in synthetic.with_golden(campaign.trials.values()) if t.mitigation == "none"])
    campaign.write([t for t in synthetic.with_golden(campaign.trials.values()) if t.mitigation != "none"])
    with pytest.warns(UserWarning) as caught:
        judged = campaign.judge()
    message = str(caught[0].message)
    assert message.endswith("mitigation=none, lr=0.5 has 3; mitigation=qk_norm, lr=0.01 has 0")
    assert judged("envelope_max", "plain") == ENVELOPE_MAX and judged("fault_outcome", "plain") == "recovered"
    assert judged("envelope_max", "other rate") == 4 * ENVELOPE_MAX
    assert judged("fault_outcome", "other rate") == "masked"
    assert np.isnan(judged("envelope_max", "mitigated"))
    number, names = recipes(judged.sweep)
    assert len(names) == 3 == len(np.unique(number))


def test_another_bit_than_the_last_is_no_twin(campaign: Campaign) -> None:
    """A sweep over bits with fault=last_bit among its faults sets those of last_bit too."""
    campaign.envelope()
    fault = synthetic.LastBit(start=START, bit=30)
    campaign.add("wild", dataclasses.replace(synthetic.make_trial(steps=STEPS), fault=fault), {25: 9})
    campaign.fault("a", {22: 1})
    campaign.write()
    with pytest.warns(UserWarning, match="1 trials with fault=last_bit change another bit"):
        judged = campaign.judge()
    assert judged("envelope_max", "a") == ENVELOPE_MAX and judged("fault_outcome", "wild") == "recovered"


def test_a_clean_run_whose_last_bit_did_not_change_measures_nothing(campaign: Campaign) -> None:
    campaign.envelope()
    still = dataclasses.replace(synthetic.make_trial(steps=STEPS), fault=synthetic.LastBit(start=START, seed=99))
    campaign.add("still", still, {range(20, STEPS): 1.0})  # by what else went on, such as a loop that is not repeatable
    campaign.fault("plain", {22: ENVELOPE_MAX})
    changed = lambda trial: [event | {"changed": trial.id != still.id} for event in events(trial)]  # noqa: E731
    trials = synthetic.with_golden(campaign.trials.values())
    curve = lambda trial: campaign.curves.get(trial.id, np.full(STEPS, GOLDEN))  # noqa: E731
    synthetic.write_pack(campaign.out, trials, curve, faults=changed)
    with pytest.warns(UserWarning, match="1 trial with fault=last_bit changed no bit; they do not count"):
        judged = campaign.judge()
    assert judged("envelope_max", "plain") == ENVELOPE_MAX and judged("fault_outcome", "plain") == "masked"


UNIT = 2.0**-10
FIRST = 10  # step of the change, of twins whose drift grows by a unit a step


def growing(campaign: Campaign, count: int = FEWEST_TWINS) -> None:
    curve = np.maximum(np.arange(STEPS) - FIRST + 1, 0) * UNIT
    for seed in range(count):
        fault = synthetic.LastBit(start=FIRST, seed=seed)
        trial = dataclasses.replace(synthetic.make_trial(steps=STEPS), fault=fault)
        campaign.add(f"twin {seed}", trial, curve / (seed + 1))


def test_a_fault_is_held_to_what_clean_runs_reach_in_as_many_steps(campaign: Campaign) -> None:
    """In n steps a clean run drifts by n units, and its last five by n - 2 on average."""
    growing(campaign)
    end = range(35, STEPS)
    campaign.fault("early", {12: 20 * UNIT}, start=FIRST)
    campaign.fault("late", {32: 20 * UNIT}, start=30)
    campaign.fault("late, at the edge", {32: 10 * UNIT}, start=30)
    campaign.fault("late, ends at the edge", {32: 20 * UNIT, end: 8 * UNIT}, start=30)
    campaign.fault("late, ends outside", {32: 20 * UNIT, end: 8 * UNIT + SLIGHTLY}, start=30)
    campaign.fault("in the last steps", {38: UNIT, 39: -2 * UNIT}, start=38)
    campaign.write()
    judged = campaign.judge()
    expected = {
        # name: E_max and E_final in units, outcome, steps to recover
        "early": (30, 28, "masked", 0),
        "late": (10, 8, "recovered", 3),
        "late, at the edge": (10, 8, "masked", 0),
        "late, ends at the edge": (10, 8, "recovered", 3),
        "late, ends outside": (10, 8, "lingering", np.nan),
        "in the last steps": (2, 1.5, "masked", 0),
    }
    for name, (largest, final, outcome, steps) in expected.items():
        assert (judged("envelope_max", name), judged("envelope_final", name)) == (largest * UNIT, final * UNIT), name
        assert judged("fault_outcome", name) == outcome, name
        assert judged("recovery_steps", name) == pytest.approx(steps, nan_ok=True), name
    assert set(judged.sweep.isel(trial=judged.sweep["fault"].values == "last_bit")["fault_outcome"].values) == {
        "masked"
    }


def test_the_largest_drift_stays_and_the_final_one_passes(campaign: Campaign) -> None:
    campaign.envelope()  # changed at 20: one reaches 0.5 at 25, another has -0.25 from 30 on
    for start in (20, 31, 35, 36):
        campaign.fault(f"at {start}", {}, start=start)
    campaign.write()
    judged = campaign.judge()
    found = {start: judged("envelope_max", f"at {start}") for start in (20, 31, 35, 36)}
    assert found == {20: ENVELOPE_MAX, 31: ENVELOPE_MAX, 35: 0.0, 36: 0.0}
    finals = {start: judged("envelope_final", f"at {start}") for start in (20, 31, 35, 36)}
    assert finals == {20: 0.25, 31: pytest.approx(0.1), 35: 0.0, 36: 0.0}


def test_faults_that_are_watched_for_longer_than_any_twin_are_said(campaign: Campaign) -> None:
    growing(campaign)
    campaign.fault("as long", {}, start=FIRST)
    campaign.fault("longer", {}, start=FIRST - 1)
    campaign.write()
    with pytest.warns(UserWarning, match="1 of 2 faults struck so early that they were watched for longer than any"):
        judged = campaign.judge()
    assert judged("envelope_max", "longer") == judged("envelope_max", "as long") == 30 * UNIT
    assert judged("envelope_final", "longer") == judged("envelope_final", "as long") == 28 * UNIT


def test_twins_that_are_changed_at_different_steps_are_compared_by_the_steps_since(campaign: Campaign) -> None:
    campaign.envelope()
    fault = synthetic.LastBit(start=5, seed=99)
    campaign.add("sooner", dataclasses.replace(synthetic.make_trial(steps=STEPS), fault=fault), {7: 4.0})
    campaign.fault("a", {}, start=37)
    campaign.fault("b", {}, start=38)
    campaign.write()
    judged = campaign.judge()
    assert (judged("envelope_max", "a"), judged("envelope_max", "b")) == (4.0, 0.0)


def test_a_clean_run_that_is_cut_off_ends_as_whole_runs_do() -> None:
    """Against the measure of whole runs, of each length; with losses that are not finite in between, or at all."""
    drift = np.random.default_rng(0).normal(size=(6, 30))
    drift[2, 12:], drift[3, 4:9], drift[4], drift[5, :3] = np.nan, np.nan, np.nan, np.nan
    window, zeros = np.array([5, 7, 5, 5, 5, 7]), np.zeros(6, dtype=int)
    found = _final_sizes(drift, window)
    for steps in range(1, 31):
        expected = np.abs(_sizes(drift[:, :steps], window, zeros, np.zeros(6))[1])
        np.testing.assert_allclose(found[:, steps - 1], expected, rtol=1e-12, atol=1e-15)  # sums in another order


def test_a_warning_of_many_recipes_names_the_first(campaign: Campaign) -> None:
    for number in range(8):
        campaign.fault(f"{number}", {}, base=synthetic.make_trial(lr=0.1 + number, steps=STEPS))
    campaign.write()
    with pytest.warns(UserWarning, match=r"lr=4\.1 has 0; and 3 more recipes have too few$"):
        campaign.judge()


def test_twins_that_blow_up_are_said(campaign: Campaign) -> None:
    campaign.envelope()
    first = campaign.trials["twin 0"].id
    campaign.curves[first][30:] = np.nan
    campaign.fault("a", {22: 1})
    campaign.write()
    with pytest.warns(UserWarning, match="1 of 8 trials with fault=last_bit became non-finite"):
        judged = campaign.judge()
    assert judged("envelope_max", "a") == ENVELOPE_MAX and judged("fault_outcome", "twin 0") == "non-finite"
