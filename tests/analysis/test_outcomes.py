"""What faults did, on loss curves whose outcome is known beforehand; thresholds at their edges."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

from analysis import open_sweep, outcomes
from analysis.measures.outcomes import JUDGED, OUTCOMES, UNJUDGED
from tests.analysis import synthetic
from tests.analysis.judging import (
    CHANGES_NOTHING,
    ENVELOPE_FINAL,
    ENVELOPE_MAX,
    NEVER_FIRES,
    SLIGHTLY,
    STEPS,
    Campaign,
    Curve,
    Judged,
    deviation,
)

# --- deviations --------------------------------------------------------------------------------------------------


def test_deviations_by_hand(campaign: Campaign) -> None:
    campaign.envelope()
    campaign.fault("both signs", {21: 1, 22: -3, range(35, STEPS): -0.125})
    campaign.fault("mean of the final steps", {range(35, 40): np.array([1, -1, 1, -1, 0.5])})
    campaign.fault("struck in the final steps", {38: 1, 39: 2}, start=38)
    campaign.fault("before the strike too", {19: 9, 21: 1})
    campaign.fault("lost", {20: 1, range(24, 28): 0.5, 28: 2, 29: 1, range(30, STEPS): np.nan})
    campaign.fault("lost at once", {range(20, STEPS): np.nan})
    campaign.fault("infinite", {25: 1, range(26, STEPS): np.inf})
    campaign.write()
    judged = campaign.judge()
    expected = {
        "both signs": (3, 0.125),
        "mean of the final steps": (1, 0.1),
        "struck in the final steps": (2, 1.5),
        "before the strike too": (1, 0),
        "lost": (2, (3 * 0.5 + 2 + 1) / 5),
        "lost at once": (np.nan, np.nan),
        "infinite": (1, 1 / 5),
    }
    for name, (largest, final) in expected.items():
        assert judged("deviation_max", name) == pytest.approx(largest, nan_ok=True), name
        assert judged("deviation_final", name) == pytest.approx(final, nan_ok=True), name
    golden = judged.sweep.isel(trial=np.flatnonzero(judged.sweep["fault"].values == "none"))
    assert np.isnan(golden["deviation_max"]).all() and np.isnan(golden["recovery_steps"]).all()
    assert set(golden["fault_outcome"].values) == {""} == set(golden["visibility"].values)


def test_runs_of_different_length_end_where_they_end(campaign: Campaign) -> None:
    long = synthetic.make_trial(steps=400)
    campaign.fault("long", {range(380, 400): 1.0}, base=long)
    campaign.fault("short", {range(35, 40): 1.0})
    for steps in (400, STEPS):
        campaign.write(synthetic.with_golden(t for t in campaign.trials.values() if t.train.steps == steps))
    with pytest.warns(UserWarning, match="steps=40 has 0; steps=400 has 0"):
        judged = campaign.judge()
    assert judged("deviation_final", "long") == judged("deviation_final", "short") == 1


# --- outcomes ----------------------------------------------------------------------------------------------------

END = range(35, STEPS)
CASES: dict[str, tuple[Curve, str, float]] = {
    # name: D_t, outcome, recovery steps
    "no deviation at all": ({}, "masked", 0),
    "exactly at the envelope": ({22: ENVELOPE_MAX}, "masked", 0),
    "exactly at it from below": ({22: -ENVELOPE_MAX}, "masked", 0),
    "ends far out, but never left": ({range(20, STEPS): ENVELOPE_MAX}, "masked", 0),
    "slightly out of it": ({22: ENVELOPE_MAX + SLIGHTLY}, "recovered", 3),
    "out of it at the strike alone": ({20: -9}, "recovered", 1),
    "in and out again": ({20: 1, 27: 1}, "recovered", 8),
    "ends exactly at the envelope": ({range(20, 25): 1, END: -ENVELOPE_FINAL}, "recovered", 5),
    "ends slightly out of it": ({range(20, 25): 1, END: ENVELOPE_FINAL + SLIGHTLY}, "lingering", np.nan),
    "ends better than golden": ({range(20, STEPS): -1}, "lingering", np.nan),
    "ends on average inside": ({END: np.array([1, -1, 1, -1, 0])}, "recovered", 19),
    "return not seen": ({END: np.array([0, 1, -1, 1, -1])}, "recovered", np.nan),
    "lost": ({range(30, STEPS): np.nan}, "non-finite", np.nan),
    "infinite": ({range(20, STEPS): np.inf}, "non-finite", np.nan),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    campaign = Campaign(tmp_path_factory.mktemp("cases"))
    campaign.envelope()
    for name, (curve, _, _) in CASES.items():
        campaign.fault(name, curve)
    campaign.write()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return campaign.judge()


@pytest.mark.parametrize("name", CASES)
def test_outcome_and_recovery(cases: Judged, name: str) -> None:
    assert cases("fault_outcome", name) == CASES[name][1]
    assert cases("recovery_steps", name) == pytest.approx(CASES[name][2], nan_ok=True)


def test_coordinates_describe_themselves_and_values_stay_lazy(cases: Judged) -> None:
    assert cases.sweep["deviation_max"].attrs == {
        "long_name": "largest deviation of the loss from golden",
        "units": "nat/token",
    }
    assert cases.sweep["recovery_steps"].attrs["units"] == "step"
    assert all(variable.chunks for variable in cases.sweep.data_vars.values())


def test_divergence_is_the_harness_word_and_counts_unless_golden_diverged_too(campaign: Campaign) -> None:
    worse = synthetic.make_trial(lr=0.5, steps=STEPS)
    for base in (None, worse):
        campaign.envelope(base=base)
    campaign.fault("diverged", {range(20, STEPS): 3})
    campaign.fault("called divergent inside the envelope", {20: 0.25})
    campaign.fault("diverged as golden did", {range(20, STEPS): 3}, base=worse)
    campaign.fault("returned to a golden that diverged", {20: 3}, base=worse)
    campaign.fault("golden diverged, this did not", {range(20, STEPS): -1}, base=worse)
    campaign.fault("lost where golden diverged", {range(30, STEPS): np.nan}, base=worse)
    names = ["diverged", "called divergent inside the envelope", "diverged as golden did"]
    divergent = {campaign.trials[name].id for name in names} | {worse.id}
    campaign.write(outcome=lambda trial: "divergent" if trial.id in divergent else "trained")
    judged = campaign.judge()
    found = {name: judged("fault_outcome", name) for name in campaign.trials if "twin" not in name}
    assert found == {
        "diverged": "divergent",
        "called divergent inside the envelope": "masked",
        "diverged as golden did": "lingering",
        "returned to a golden that diverged": "recovered",
        "golden diverged, this did not": "lingering",
        "lost where golden diverged": "non-finite",
    }


@pytest.mark.parametrize("word", ["divergent", "never learned"])
def test_a_diverged_fault_has_lost_half_of_what_its_twin_had_learned(campaign: Campaign, word: str) -> None:
    """Two runs are called divergent by their own first and best losses; one of them ends close to its twin."""
    falling = np.linspace(4, 0, STEPS)  # the mean of its last five is 0.2, so that half of what it learned is 1.9
    campaign.add("golden", synthetic.make_trial(steps=STEPS), falling)
    campaign.fault("close", falling + deviation({END: 1.89}))
    campaign.fault("far", falling + deviation({END: 1.91}))
    campaign.fault("below", falling + deviation({END: -3.0}))
    campaign.write(outcome=lambda trial: "trained" if trial.id == campaign.trials["golden"].id else word)
    with pytest.warns(UserWarning, match="has 0"):  # no clean envelope: whatever moves is beyond it
        judged = campaign.judge()
    found = {name: judged("fault_outcome", name) for name in ("close", "far", "below")}
    assert found == {"close": "lingering", "far": "divergent", "below": "lingering"}


def test_a_golden_twin_that_became_nonfinite_is_no_ending_to_compare_with(campaign: Campaign) -> None:
    lost = synthetic.make_trial(seed=5, steps=STEPS)
    gone = {range(30, STEPS): np.nan}
    campaign.add("golden", lost, gone)
    campaign.envelope()
    campaign.fault("the same end", {22: ENVELOPE_MAX} | gone, base=lost)
    campaign.fault("the same end, but it had left", {22: 1} | gone, base=lost)
    campaign.fault("sooner", {range(29, STEPS): np.nan}, base=lost)
    campaign.fault("saved", {}, base=lost)
    campaign.fault("bitwise", gone, base=lost)
    campaign.fault("after the end", gone, start=35, base=lost, bit=NEVER_FIRES)
    campaign.write(masked_step=campaign.by_name({"bitwise": 25}))
    judged = campaign.judge()
    assert {name: judged("fault_outcome", name) for name in campaign.trials if "twin" not in name} == {
        "golden": "",
        "the same end": "masked",
        "the same end, but it had left": UNJUDGED,
        "sooner": UNJUDGED,
        "saved": UNJUDGED,
        "bitwise": "masked",
        "after the end": "idle",
    }


def test_a_state_that_was_golden_again_is_masked_whatever_the_loss_did_meanwhile(campaign: Campaign) -> None:
    campaign.envelope()
    campaign.fault("back", {20: 5, 21: 5})
    campaign.write(masked_step=campaign.by_name({"back": 21}))
    judged = campaign.judge()
    assert (judged("fault_outcome", "back"), judged("recovery_steps", "back")) == ("masked", 0)
    assert judged("deviation_max", "back") == 5 and judged("masked_step", "back") == 21
    assert judged("visibility", "back") == "visible"


def test_idle_faults(campaign: Campaign) -> None:
    campaign.envelope()
    campaign.fault("never fired", {}, bit=NEVER_FIRES)
    campaign.fault("wrote what was there", {}, bit=CHANGES_NOTHING)
    campaign.fault("changed", {}, bit=2)
    campaign.fault("no event, but it acted", {range(20, STEPS): 1}, bit=NEVER_FIRES)
    campaign.write()
    judged = campaign.judge()
    assert [judged("idle", name) for name in list(campaign.trials)[-4:]] == [True, True, False, True]
    assert judged("fault_outcome", "never fired") == judged("fault_outcome", "wrote what was there") == "idle"
    assert judged("fault_outcome", "no event, but it acted") == "lingering"
    assert not judged.sweep["idle"].values[judged.sweep["fault"].values == "none"].any()


# --- what is not there -------------------------------------------------------------------------------------------


def test_unfinished_trials_and_missing_twins(campaign: Campaign) -> None:
    campaign.envelope()
    campaign.write()
    unfinished = campaign.fault("unfinished", {range(20, STEPS): 1})
    campaign.write([unfinished], finish=False, steps_done=30)
    orphan = campaign.fault("orphan", {}, base=synthetic.make_trial(seed=1, steps=STEPS))
    masked = campaign.fault("masked orphan", {}, base=synthetic.make_trial(seed=2, steps=STEPS))
    idle = campaign.fault("idle orphan", {}, base=synthetic.make_trial(seed=2, steps=STEPS), bit=NEVER_FIRES)
    campaign.write([orphan, masked, idle], masked_step=campaign.by_name({"masked orphan": 30}))
    waiting = campaign.fault("waiting for its twin", {}, base=synthetic.make_trial(seed=3, steps=STEPS))
    campaign.write([waiting])
    campaign.write([waiting.golden], finish=False, steps_done=10)
    judged = campaign.judge()
    expected = {
        "unfinished": "unfinished",
        "orphan": UNJUDGED,
        "masked orphan": "masked",
        "idle orphan": "idle",
        "waiting for its twin": UNJUDGED,
    }
    for name, outcome in expected.items():
        assert judged("fault_outcome", name) == outcome
        assert np.isnan(judged("deviation_max", name)) and judged("visibility", name) == ""
        assert np.isnan(judged("visible_steps", name))
    assert not judged("idle", "unfinished")
    assert set(judged.sweep["envelope_max"].values) == {ENVELOPE_MAX}, "unfinished trials have one too"


def test_without_an_envelope_only_bitwise_equality_masks(campaign: Campaign) -> None:
    campaign.fault("tiny", {22: SLIGHTLY})
    campaign.fault("tiny to the end", {range(20, STEPS): SLIGHTLY})
    campaign.fault("loss is golden", {})
    campaign.fault("bitwise", {}, bit=2)
    campaign.write(masked_step=campaign.by_name({"bitwise": 20}))
    with pytest.warns(UserWarning, match="all trials has 0"):
        judged = campaign.judge()
    assert np.isnan(judged("envelope_max", "tiny")) and np.isnan(judged("envelope_final", "tiny"))
    found = {name: (judged("fault_outcome", name), judged("recovery_steps", name)) for name in campaign.trials}
    assert found.pop("tiny to the end")[0] == "lingering"
    assert found == {"tiny": ("recovered", 3), "loss is golden": ("recovered", 0), "bitwise": ("masked", 0)}


def test_sweeps_without_faults_or_trials(campaign: Campaign) -> None:
    synthetic.open_store(campaign.out, "test")
    assert outcomes(open_sweep(campaign.out)).sizes["trial"] == 0
    synthetic.write_pack(campaign.out, [synthetic.make_trial()])
    sweep = outcomes(open_sweep(campaign.out))
    assert sweep["fault_outcome"].values.tolist() == [""] and np.isnan(sweep["deviation_max"].values).all()


# --- parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3 * 4 * STEPS, 2**30])
def test_blocks_make_no_difference(cases: Judged, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sys.modules["analysis.reading.twins"], "BLOCK_BYTES", size)
    sweep = open_sweep(cases.campaign.out)
    for ds in (sweep, sweep.load(), sweep.chunk(trial=4)):
        judged = outcomes(ds)
        for name in JUDGED:
            np.testing.assert_array_equal(judged[name].values, cases.sweep[name].values, err_msg=name)


def test_a_part_of_a_sweep_can_be_judged(cases: Judged) -> None:
    sweep = open_sweep(cases.campaign.out)
    part = sweep.isel(trial=np.flatnonzero(np.isin(sweep["fault"].values, ["none", "last_bit"]))[::-1])
    assert set(outcomes(part)["fault_outcome"].values) == {"", "masked"}
    with pytest.warns(UserWarning, match="has 0"):
        no_twins = outcomes(sweep.isel(trial=np.flatnonzero(sweep["fault"].values != "last_bit")))
    assert set(no_twins["fault_outcome"].values) <= {"", *OUTCOMES}
