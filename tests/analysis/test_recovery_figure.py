"""Recovery time against beta2: three measures, what was never seen to end, and with and without clipping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PathCollection

from analysis import open_sweep
from analysis.figures.recovery_against_beta2 import MEASURES, recovery_against_beta2, recovery_table
from analysis.figures.registry import Results
from analysis.measures.outcomes import outcomes_and_notes
from analysis.measures.statistics import median_interval
from analysis.reading.levels import NULL
from tests.analysis import synthetic
from tests.analysis.judging import NEVER_FIRES, START, STEPS, Campaign

RANGE, LEVEL, ENVELOPE = MEASURES


def test_all_measures_have_medians_and_what_did_not_recover(sweeps, drawn) -> None:
    table, drawing = recovery_table(sweeps["few faults"]), drawn["few faults"]["recovery_against_beta2"]
    panels = np.array(drawing.figure.axes).reshape(6, 2)
    assert [panel.get_title() for panel in panels[0]] == ["clip = none", "clip = 1"]
    assert [label.get_text() for label in panels[5, 0].get_xticklabels()] == ["0.95", "0.99", "0.999"]
    words = ["its golden range", "not back", "nat of golden", "not back", "the clean envelope", "not back"]
    assert all(text in panel.get_ylabel() for text, panel in zip(words, panels[:, 0], strict=True))
    betas, faults = sorted(table["beta2"].unique()), sorted(table["fault"].unique())
    for row, measure in ((0, RANGE), (2, LEVEL), (4, ENVELOPE)):
        for column, clip in enumerate((NULL, 1.0)):
            upper, lower = panels[row : row + 2, column]
            part = table[(table["measure"] == measure) & (table["clip"] == clip)]
            for number, fault in enumerate(faults):
                own = part[part["fault"] == fault]
                medians = [median_interval(own.loc[own["beta2"] == beta2, "recovery"].to_numpy())[0] for beta2 in betas]
                expected = [median if np.isfinite(median) else np.nan for median in medians]
                np.testing.assert_allclose(upper.containers[number][0].get_ydata(), expected)
                share = 100 * (1 - own.groupby("beta2")["recovered"].mean())
                np.testing.assert_allclose(lower.containers[number][0].get_ydata(), share)
            assert drawn_trials(upper) == len(part), "every trial is drawn, recovered or not"
    lost = {measure: int((~table["recovered"] & (table["measure"] == measure)).sum()) for measure in MEASURES}
    assert 0 < lost[RANGE] < lost[ENVELOPE], "nothing is seen any more before nothing is left"
    words = f"run: {lost[RANGE]} trials; not level: {lost[LEVEL]}; not inside the envelope: {lost[ENVELOPE]}."
    assert words in drawing.caption


def drawn_trials(panel) -> int:
    dots = [artist for artist in panel.collections if isinstance(artist, PathCollection)]
    return sum(len(artist.get_offsets()) for artist in dots if artist.get_sizes()[0] in (12, 34))


def test_the_table_has_all_times(tmp_path: Path) -> None:
    """Without a golden twin there is a state that was golden again, but no range that a loss could leave."""
    campaign = Campaign(tmp_path)
    campaign.envelope()
    campaign.fault("back", {range(START, START + 3): 9.0, range(START + 3, START + 8): 0.75})
    campaign.fault("idle", {}, bit=NEVER_FIRES)
    wave = np.where(np.arange(STEPS) % 2, 0.0, 0.25)  # golden losses within 0.25, so that 0.75 is not seen
    for trial in synthetic.with_golden(campaign.trials.values()):
        campaign.curves[trial.id] = campaign.curves.get(trial.id, np.full(STEPS, 2.0)) + 4 * wave
    campaign.write()
    orphan = campaign.fault("orphan", {}, base=synthetic.make_trial(seed=7, steps=STEPS))
    campaign.write([orphan], masked_step=campaign.by_name({"orphan": 30}))
    table = recovery_table(outcomes_and_notes(open_sweep(tmp_path))[0]).sort_values(["measure", "recovery"])
    found = list(table[["measure", "recovery", "recovered", "watched"]].itertuples(index=False, name=None))
    assert found == [(ENVELOPE, 0, True, 20), (ENVELOPE, 8, True, 20), (LEVEL, 7, True, 20), (RANGE, 3, True, 20)]


@pytest.mark.parametrize(("clip", "title"), [(None, "clip = none"), (0.5, "clip = 0.5")])
def test_one_clip_threshold_for_the_whole_sweep_is_named(tmp_path: Path, clip, title: str) -> None:
    synthetic.write_campaign(tmp_path, faults=10, clips=[clip], beta2s=(0.9, 0.99))
    figure = recovery_against_beta2(Results(open_sweep(tmp_path))).figure
    assert [panel.get_title() for panel in figure.axes] == [title, *[""] * 5]
    assert synthetic.check_texts(figure)
