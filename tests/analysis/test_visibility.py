"""What somebody who watches loss and gradient norm sees of a fault, and for how long."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis import synthetic
from tests.analysis.judging import SLIGHTLY, STEPS, Campaign, Curve, Judged, deviation

# Golden loss and gradient norm go up and down between 1 and 2, so that up to 3 and down to 0 is usual.
WAVE = np.where(np.arange(STEPS) % 4 == 0, 2.0, 1.0)
LOST = {range(30, STEPS): np.nan}
CASES: dict[str, tuple[Curve, Curve, str, float]] = {
    # name: D of the loss, D of the gradient norm, whether it shows, for how many steps
    "nothing": ({}, {}, "silent", 0),
    "at the edge": ({21: 2.0, 20: -2.0}, {39: 2.0}, "silent", 0),
    "before the strike": ({19: 9}, {19: 9}, "silent", 0),
    "loss above": ({21: 2 + SLIGHTLY}, {}, "visible", 2),
    "loss below, at the strike": ({20: -2 - SLIGHTLY}, {}, "visible", 1),
    "twice": ({20: 9, 27: 9}, {}, "visible", 8),
    "gradient later than the loss": ({20: 9}, {24: 9}, "visible", 5),
    "loss later than the gradient": ({25: 9}, {20: 9}, "visible", 6),
    "until the last step but one": ({38: 9}, {}, "visible", 19),
    "outside at the last step": ({}, {39: 2 + SLIGHTLY}, "visible", np.nan),
    "gradient not finite for a step": ({}, {30: np.inf}, "visible", 11),
    "lost": (LOST, {}, "visible", np.nan),
    "bitwise golden again": ({20: 9, 21: 9}, {}, "visible", 2),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    campaign = Campaign(tmp_path_factory.mktemp("cases"))
    norms: dict[str, np.ndarray] = {}
    for name, (loss, norm, _, _) in CASES.items():
        trial = campaign.fault(name, {})
        campaign.curves[trial.id], norms[trial.id] = WAVE + deviation(loss), WAVE + deviation(norm)
        campaign.curves[trial.golden.id] = WAVE
    campaign.write(
        grad_norm=lambda trial: norms.get(trial.id, WAVE),
        masked_step=campaign.by_name({"bitwise golden again": 30}),
    )
    with pytest.warns(UserWarning, match="clean envelope"):
        return campaign.judge()


@pytest.mark.parametrize("name", CASES)
def test_what_shows_in_loss_or_gradient_from_the_strike_on_and_for_how_long(cases: Judged, name: str) -> None:
    assert cases("visibility", name) == CASES[name][2]
    assert cases("visible_steps", name) == pytest.approx(CASES[name][3], nan_ok=True)


def test_what_does_not_show_any_more_may_not_have_recovered(cases: Judged) -> None:
    """The two measures: of the same fault one is 0 and the other is not."""
    assert cases("recovery_steps", "bitwise golden again") == 0 < cases("visible_steps", "bitwise golden again")
    assert cases("recovery_steps", "at the edge") > 0 == cases("visible_steps", "at the edge")
    assert cases.sweep["visible_steps"].attrs["units"] == "step"


LEVEL: dict[str, tuple[Curve, float]] = {
    # name: D of the loss, steps until its mean over ten steps is at most 0.1 for good
    "nothing": ({}, 0),
    "a step, little in ten": ({25: 0.9}, 0),
    "a step, much in ten": ({25: 1.5}, 6),
    "long, and at the edge": ({range(20, 33): 0.19}, 8),
    "always a little": ({range(20, STEPS): 0.05}, 0),
    "always much": ({range(20, STEPS): 0.2}, np.nan),
    "better than golden": ({range(20, STEPS): -5.0}, 0),
    "up and down": ({range(20, STEPS, 2): 3.0, range(21, STEPS, 2): -3.0}, 0),
    "twice": ({20: 9.0, 27: 9.0}, 8),
    "before the strike": ({range(10, 20): 9.0}, 0),
    "not seen to end": ({30: 9.0}, np.nan),
    "seen to end": ({29: 9.0}, 10),
    "lost": (LOST, np.nan),
}


def test_until_the_loss_is_level_with_golden(campaign: Campaign) -> None:
    for name, (curve, _) in LEVEL.items():
        campaign.fault(name, curve)
    campaign.write()
    with pytest.warns(UserWarning, match="clean envelope"):
        judged = campaign.judge()
    found = {name: judged("settling_steps", name) for name in LEVEL}
    assert found == pytest.approx({name: steps for name, (_, steps) in LEVEL.items()}, nan_ok=True)


def test_a_run_that_is_lost_from_its_first_step_on_shows(campaign: Campaign) -> None:
    """None of its losses is finite, as of a run whose losses were not measured."""
    campaign.fault("lost at once", {range(STEPS): np.nan}, start=0)
    campaign.write()
    with pytest.warns(UserWarning, match="clean envelope"):
        judged = campaign.judge()
    assert judged("fault_outcome", "lost at once") == "non-finite"
    assert judged("visibility", "lost at once") == "visible" and np.isnan(judged("visible_steps", "lost at once"))


def test_after_the_end_of_the_golden_run_nothing_is_known(campaign: Campaign) -> None:
    lost = synthetic.make_trial(seed=5, steps=STEPS)
    campaign.add("golden", lost, LOST)
    campaign.fault("the same end", LOST, base=lost)
    campaign.fault("seen before", {20: 9} | LOST, base=lost)
    campaign.fault("seen, and saved", {20: 9}, base=lost)
    campaign.write()
    with pytest.warns(UserWarning, match="clean envelope"):
        judged = campaign.judge()
    found = {name: (judged("visibility", name), judged("visible_steps", name)) for name in campaign.trials}
    assert found.pop("the same end") == ("silent", 0)
    assert {words for words, _ in found.values()} == {"", "visible"} and np.isnan([s for _, s in found.values()]).all()
