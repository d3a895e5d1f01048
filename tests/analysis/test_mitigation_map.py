"""The heat map of mitigations and its words: what stands in a cell, what its colour means, and that it can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.figures.mitigation_legend import COLOURS, PALE
from analysis.figures.mitigation_map import WIDEST, full_colour, mitigation_map
from analysis.figures.mitigation_words import mitigation_findings, table_rows
from analysis.measures.mitigations import METRICS, Comparison
from analysis.reports.report import DOTS_PER_INCH
from harness.config import Trial
from tests.analysis import synthetic
from tests.analysis.given import given
from tests.analysis.mitigated import LOST, Ending, Study

PAGE = 1088  # pixels that a figure has on the page


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return Study(tmp_path_factory.mktemp("mitigations"))


@pytest.fixture(scope="module")
def known(study: Study) -> Comparison:
    """`better` and `worse` in every seed, `noise` in some; `worse` is lost at its largest rate and under the fault."""
    size = {"none": 0.0, "better": -0.5, "worse": 1.0, "noise": 0.25}

    def ending(trial: Trial) -> Ending:
        own = size[trial.mitigation] * (1 if trial.mitigation != "noise" else trial.seed - 1)
        if trial.fault.name == "none":
            is_high = trial.optim.lr == 1e-1 and trial.mitigation in ("none", "worse")
            return Ending(loss=3 + own, outcome="divergent" if is_high else "trained", seconds=1 + 0.5 * own)
        if trial.mitigation == "worse":
            return LOST
        return Ending(deviation={range(0, 4 + trial.seed): 1 + own})

    study.write(ending, mitigations=["none", "noise", "worse", "better"], faults=[study.flip()], widths=(32, 64))
    return study.compare()


@pytest.fixture(scope="module")
def figure(known: Comparison) -> Figure:
    return mitigation_map(given(comparison=known)).figure


def words_at(figure: Figure, name: str) -> list[str]:
    """The cells of a row, from left to right."""
    texts = figure.axes[0].texts
    (label,) = [text for text in texts if text.get_text() == name]
    height, left = label.get_position()[1], label.get_position()[0]
    own = [text for text in texts if text.get_position()[1] == pytest.approx(height) and text.get_position()[0] > left]
    return [text.get_text() for text in sorted(own, key=lambda text: text.get_position()[0])]


def looks_at(figure: Figure, name: str, column: int) -> tuple[np.ndarray, str]:
    """(colour, weight of the number) of a cell."""
    panel = figure.axes[0]
    (label,) = [text for text in panel.texts if text.get_text() == name]
    height = label.get_position()[1]
    own = [patch for patch in panel.patches if isinstance(patch, Rectangle) and patch.get_y() < height]
    own = sorted((patch for patch in own if height < patch.get_y() + patch.get_height()), key=Rectangle.get_x)
    x = own[column].get_x() + own[column].get_width() / 2
    (text,) = [t for t in panel.texts if t.get_position() == pytest.approx((x, height))]
    return np.array(own[column].get_facecolor()[:3]), text.get_fontweight()


# --- the figure --------------------------------------------------------------------------------------------------


def test_rows_are_mitigations_and_numbers_the_values(figure: Figure) -> None:
    expected = {
        "none": ["3.000", "0.01", "0.67", "1.00", "4"],
        "better": ["2.500", "≥0.1", "0.00", "0.50", "3"],
        "noise": ["3.000", "≥0.1", "0.00", "1.00", "4"],
        "worse": ["4.000", "0.01", "0.33", "∞", ">20"],
    }
    for name, words in expected.items():
        shown = words_at(figure, name)
        assert len(shown) == 2 * len(words), "two widths"
        assert [shown[0], shown[2], shown[6], shown[8]] == [*words[:2], *words[3:]], name


def test_colours_say_better_or_worse_and_bold_what_can_be_told(figure: Figure) -> None:
    (red, heavy), (blue, also), (pale, light) = (looks_at(figure, name, 0) for name in ("worse", "better", "noise"))
    assert red[0] > red[2] + 0.1 and blue[2] > blue[0] + 0.1
    assert (heavy, also, light) == ("bold", "bold", "normal")
    np.testing.assert_array_equal(pale, [1, 1, 1])
    baseline, _ = looks_at(figure, "none", 0)
    np.testing.assert_array_equal(baseline, [1, 1, 1])
    infinite, weight = looks_at(figure, "worse", 6)
    np.testing.assert_allclose(infinite, COLOURS(0.0)[:3])
    assert weight == "bold"
    faster, weight = looks_at(figure, "better", 2)
    assert faster[2] > faster[0] and weight == "bold", "more is better: 10 times the baseline's rate, in every seed"


def test_a_change_that_cannot_be_told_is_paler_than_one_that_can(study: Study, tmp_path: Path) -> None:
    other = Study(tmp_path)
    sizes = {"none": (0.0, 0.0, 0.0), "sure": (1.0, 1.0, 1.0), "unsure": (-1.0, 0.0, 4.0)}
    other.write(lambda t: Ending(loss=3 + sizes[t.mitigation][t.seed]), mitigations=list(sizes), seeds=(0, 1, 2))
    figure = mitigation_map(given(comparison=other.compare())).figure
    sure, unsure = (looks_at(figure, name, 0)[0] for name in ("sure", "unsure"))
    np.testing.assert_allclose(1 - unsure, PALE * (1 - sure), atol=1e-6)


def test_the_full_colour_is_written_over_the_metric(known: Comparison, figure: Figure) -> None:
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert full_colour(known, "final_loss") == 1 and "full at ± 1" in texts
    assert full_colour(known, "stable_rate") == 10 and "full at x or / 10" in texts
    assert "slowest recovery\n[steps]" in texts and "width" in texts and texts.count("64") == 5


def test_what_was_not_measured_is_a_dash_on_grey(tmp_path: Path) -> None:
    own = Study(tmp_path)
    own.write(lambda t: LOST if t.mitigation == "b" else Ending(), mitigations=["none", "a", "b"], faults=[own.flip()])
    figure = mitigation_map(given(comparison=own.compare())).figure
    assert words_at(figure, "b") == ["∞", "<0.001", "0.00", "–", "–"]
    grey, _ = looks_at(figure, "b", 3)
    assert len(set(grey)) == 1 and grey[0] < 1


def test_one_seed_has_numbers_and_no_bold_but_the_baseline(tmp_path: Path) -> None:
    own = Study(tmp_path)
    drawing = mitigation_map(given(comparison=own.write(lambda t: Ending(loss=len(t.mitigation)), seeds=[0]).compare()))
    assert looks_at(drawing.figure, "qk_norm", 0)[1] == "normal"
    assert "One seed, so there are no intervals" in drawing.caption


def test_the_caption_says_what_the_signs_mean(known: Comparison) -> None:
    caption = mitigation_map(given(comparison=known)).caption
    for words in ("blue is better, red worse", "3 seeds", "a quarter of the time", "≥", "∞", ">", "3 mitigations"):
        assert words in caption


# --- its size ----------------------------------------------------------------------------------------------------


def many(study: Study, names: list[str], **options) -> Comparison:
    rng = np.random.default_rng(0)
    size = {name: 0.0 if name == "none" else rng.normal(0, 0.5) for name in names}
    noise = dict(zip(names, rng.normal(0, 0.2, (len(names), 3)), strict=True))

    def ending(trial: Trial) -> Ending:
        own = size[trial.mitigation] + noise[trial.mitigation][trial.seed]
        if trial.fault.name != "none":
            return (
                LOST if own > 0.9 else Ending(deviation={range(0, round(6 + 5 * own)): 2000 if own > 0.7 else 2**own})
            )
        is_high = trial.optim.lr > 10 ** (-2 - own)
        return Ending(3 + own, outcome="divergent" if is_high else "trained", seconds=2**own)

    return study.write(ending, mitigations=names, faults=[study.flip()], **options).compare()


NAMES = {
    "three": ["none", "qk_norm", "z_loss"],
    "twenty-four": ["none", "embedding_layernorm+qk_norm+z_loss", "W" * 50, *(f"mitigation_{n}" for n in range(21))],
}


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return many(Study(tmp_path_factory.mktemp("many")), NAMES["twenty-four"], widths=(32, 64))


@pytest.mark.parametrize(("names", "widths"), [("three", (32,)), ("three", (32, 64)), ("twenty-four", (32, 64))])
def test_no_text_lies_on_another_or_outside(request, tmp_path: Path, names: str, widths: tuple) -> None:
    is_many = names == "twenty-four"
    found = request.getfixturevalue("many_rows") if is_many else many(Study(tmp_path), NAMES[names], widths=widths)
    figure = mitigation_map(given(comparison=found)).figure
    assert synthetic.check_texts(figure) > 6 * len(NAMES[names]) * len(widths)
    assert figure.get_figwidth() * DOTS_PER_INCH < 1.25 * PAGE, "letters shrink with the figure"
    cut = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text().endswith("W…")]
    assert len(cut) == is_many and all(WIDEST - 0.4 < box.width / figure.dpi <= WIDEST for box in cut)


def test_other_axes_stand_upright_beside_the_width(tmp_path: Path) -> None:
    found = many(Study(tmp_path), NAMES["three"], widths=(32, 64), depths=(1, 2))
    figure = mitigation_map(given(comparison=found)).figure
    assert synthetic.check_texts(figure)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "width, depth" in texts and texts.count("64, 2") == 5


def test_of_very_many_columns_and_rows_some_are_drawn(tmp_path: Path) -> None:
    """Beyond 65,535 pixels a figure cannot be saved at all, and long before that nobody can read it."""
    names = ["none", *(f"m{number:03}" for number in range(160))]
    axes = ["mitigation", "width", "depth"]
    places = [(width, depth) for width in (16, 32, 64, 128) for depth in (1, 2, 3)]
    rows = [{"mitigation": name, "width": width, "depth": depth} for name in names for width, depth in places]
    columns = {f"final_loss{part}": 1.0 for part in ("", "_low", "_high", "_change", "_change_low", "_change_high")}
    table = pd.DataFrame(rows).assign(**columns, final_loss_seeds=3, final_loss_idle="")
    drawing = mitigation_map(given(comparison=Comparison(table, axes, {"final_loss": METRICS["final_loss"]})))
    texts = [text.get_text() for text in drawing.figure.axes[0].texts]
    shown = [f"{width}, {depth}" for width, depth in places if f"{width}, {depth}" in texts]
    assert shown == ["16, 1", "16, 3", "32, 2", "64, 2", "128, 1", "128, 3"]
    assert "m148" in texts and "m149" not in texts
    assert drawing.caption.endswith(
        " Drawn are 6 of 12 combinations of width, depth, evenly spaced and the first 150 of 161 rows; "
        "the table has all."
    )


# --- words -------------------------------------------------------------------------------------------------------


def test_the_table_has_every_value_change_and_interval(known: Comparison) -> None:
    table = table_rows(known)
    assert table["heading"][:4] == [
        "mitigation",
        "width",
        "final loss [nat/token]",
        "final loss at the baseline's rate [nat/token]",
    ]
    rows = {tuple(row["names"]): dict(zip(known.metrics, row["cells"], strict=True)) for row in table["rows"]}
    assert list(rows)[:3] == [("none", "32"), ("none", "64"), ("better", "32")] and len(rows) == 8
    better, worse, base = rows["better", "32"], rows["worse", "64"], rows["none", "32"]
    assert better["final_loss"].value == "2.500 [2.500, 2.500] at 0.001"
    assert (better["final_loss"].change, better["final_loss"].verdict) == ("-0.500 [-0.500, -0.500]", "better")
    assert better["stable_rate"].value == "≥0.1 [0.1, 0.1]" and better["stable_rate"].change == "x10 [10, 10]"
    assert worse["deviation"].value == "∞ [∞, ∞]" and worse["deviation"].change == "+∞ [∞, ∞]"
    assert worse["recovery.weight_bit"].value == ">20 [∞, ∞]; back: 0% [0, 56] of 3"
    assert worse["deviation"].verdict == "worse" and rows["noise", "32"]["final_loss"].verdict == ""
    assert (base["final_loss"].change, base["final_loss"].verdict) == ("", "")
    assert better["step_time"].value == "–", "one pack was timed, of a busy machine or not"


def test_findings_name_what_can_be_told_at_the_largest_width(known: Comparison) -> None:
    stable, deviation, certainty = mitigation_findings(known)
    assert stable == (
        "Largest stable learning rate at width 64: raised by better x10 [10, 10] (final loss -0.500 [-0.500, -0.500]); "
        "noise x10 [10, 10] (final loss 0.000 [-0.621, 0.621]). "
        "No difference can be told for 1 other."
    )
    assert deviation == (
        "Worst deviation over the faults at width 64: lowered by better -0.50 [-0.50, -0.50]. "
        "Raised by worse +∞ [∞, ∞]. No difference can be told for 1 other."
    )
    assert "comparisons with the baseline show a change (95% interval): better at width 32 (final loss; " in certainty
    assert re.search(r"\), \d+ more\.", certainty)
    assert "3 seeds" in certainty


def test_times_are_drawn_where_they_can_be_told(known: Comparison) -> None:
    """Of one pack each they are the machine's noise as much as the mitigation's doing; so are close ones."""
    assert "step time" not in " ".join(
        text.get_text() for text in mitigation_map(given(comparison=known)).figure.axes[0].texts
    )
    table = known.table.copy()
    ends = {"better": (0.7, 1.2), "worse": (1.4, 1.6), "noise": (np.nan, np.nan)}
    for name, (low, high) in ends.items():
        is_it = table["mitigation"] == name
        for end, value in {"low": low, "high": high}.items():
            table.loc[is_it, [f"step_time_{end}", f"step_time_change_{end}"]] = value
    timed = replace(known, table=table)
    figure = mitigation_map(given(comparison=timed)).figure
    last = {name: words_at(figure, name)[-1] for name in ("none", *ends)}
    assert last == {"none": "1.00", "better": "–", "worse": "1.50", "noise": "–"}
    cells = {
        row["names"][0]: row["cells"][[*timed.metrics].index("step_time")].value for row in table_rows(timed)["rows"]
    }
    assert cells == {"none": "1.00", "better": "0.75 [0.70, 1.20]", "worse": "1.50 [1.40, 1.60]", "noise": "–"}
    assert "step time x0.75 [0.70, 1.20]" in mitigation_findings(timed)[0]


def test_findings_are_short_however_many_mitigations_there_are(many_rows: Comparison) -> None:
    lines = mitigation_findings(many_rows)
    assert len(lines) == 3 and " more. " in lines[1] and max(map(len, lines)) < 800


@pytest.mark.parametrize(
    ("ended", "seeds", "expected"),
    [
        ("trained", (0, 1), "no difference to the baseline can be told for qk_norm"),
        ("divergent", (0,), "nothing can be told from one seed"),
        ("divergent", (0, 1), "lowered by qk_norm x0.001 [0.001, 0.001]"),
    ],
    ids=["all stable", "one seed", "lowered"],
)
def test_findings_say_what_cannot_be_told(tmp_path: Path, ended: str, seeds: tuple, expected: str) -> None:
    """And always that the baseline trained at every rate here, so only larger ones would show more."""
    outcomes = {"none": "trained", "qk_norm": ended}
    comparison = Study(tmp_path).write(lambda t: Ending(outcome=outcomes[t.mitigation]), seeds=seeds).compare()
    first = mitigation_findings(comparison)[0]
    start = f"Largest stable learning rate at width 32: {expected}. The baseline trained at every"
    assert first.startswith(start)


# --- the legend --------------------------------------------------------------------------------------------------


def legend_of(figure: Figure) -> dict[str, str]:
    """What the legend says -> its sample; entries stand below the colour bar's words."""
    texts = figure.axes[0].texts
    (bar,) = [text for text in texts if text.get_text().startswith("against the baseline; full colour")]
    below = [text for text in texts if text.get_position()[1] > bar.get_position()[1]]
    samples = {text.get_position(): text.get_text() for text in below if text.get_horizontalalignment() == "center"}
    found = {}
    for text in below:
        x, y = text.get_position()
        if text.get_horizontalalignment() == "left":
            nearest = min(samples, key=lambda place: (abs(place[1] - y), x - place[0] if place[0] < x else np.inf))
            found[text.get_text()] = samples[nearest]
    return found


def test_the_legend_fits_where_mitigations_and_metrics_are_few(tmp_path: Path) -> None:
    """One mitigation, rate and width, without faults: two metrics, of which the legend is the widest part."""
    own = Study(tmp_path)
    comparison = own.write(lambda t: Ending(), mitigations=["none", "a"], seeds=[0], rates=(1e-2,)).compare()
    figure = mitigation_map(given(comparison=comparison)).figure
    assert synthetic.check_texts(figure) > 10
    samples = legend_of(figure)
    assert [*samples.values()] == ["1.2", "1.2"] and len(samples) == 2, "nothing is bold, marked or missing"


def test_the_legend_has_every_sign_and_look_that_is_there_and_no_other(known: Comparison, figure: Figure) -> None:
    words = legend_of(figure)
    assert set(words.values()) == {"1.2", "≥", "∞", ">"}
    assert {"the baseline", "became non-finite", "not back by the end of the run"} <= set(words)
    samples = [text.get_fontweight() for text in figure.axes[0].texts if text.get_text() == "1.2"]
    assert samples == ["bold", "normal", "bold"], "the baseline, pale and bold look like their cells"


def test_a_change_from_a_run_that_was_lost_is_no_white_cell(tmp_path: Path) -> None:
    """Where the baseline is lost and no other change is finite there is no full colour to measure it by."""
    own = Study(tmp_path)
    own.write(lambda t: LOST if t.mitigation == "none" and t.fault.name != "none" else Ending(), faults=[own.flip()])
    comparison = own.compare()
    assert full_colour(comparison, "deviation") is None and comparison.is_told("deviation").any()
    colour, weight = looks_at(mitigation_map(given(comparison=comparison)).figure, "qk_norm", 3)
    np.testing.assert_allclose(colour, COLOURS(1.0)[:3])
    assert weight == "bold"
