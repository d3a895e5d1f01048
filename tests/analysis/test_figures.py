"""The figures: that they hold what they should, say what they are, and that nothing in them overlaps."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path

import matplotlib
import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from matplotlib.figure import Figure

from analysis import fault_events, open_sweep
from analysis.figures.faulty_against_golden import faulty_against_golden, representative
from analysis.figures.loss_against_rate import loss_against_rate
from analysis.figures.registry import Needs, Results, figures
from analysis.figures.sensitivity_against_width import sensitivity_against_width
from analysis.figures.strikes import strikes
from analysis.measures import metrics
from analysis.reading.acted import Acting
from harness.config import Fault
from tests.analysis import synthetic
from tests.analysis.mitigated import Ending, Study

FIGURES = figures(Needs.SWEEP)


@pytest.fixture(scope="module")
def sweep(realistic: Path) -> tuple[xr.Dataset, pd.DataFrame]:
    return open_sweep(realistic).load(), fault_events(realistic)


@pytest.fixture(scope="module")
def drawn(sweep) -> dict[str, Figure]:
    return {name: draw(Results(*sweep)).figure for name, draw in FIGURES.items()}


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    return buffer.getvalue()


# --- every figure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_every_panel_has_data_and_every_axis_a_label(drawn, name: str) -> None:
    figure = drawn[name]
    assert figure.axes
    for panel in figure.axes:
        assert any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in panel.lines)
    assert any(panel.get_title() for panel in figure.axes)
    unit = "learning rate" if name == "largest_stable_rate" else "[nat/token]"
    assert any(unit in panel.get_ylabel() for panel in figure.axes)
    assert any(panel.get_xlabel() for panel in figure.axes)
    assert synthetic.legend_words(figure)


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_lies_on_another_or_outside(drawn, name: str) -> None:
    assert synthetic.check_texts(drawn[name]) > 8


@pytest.mark.parametrize("name", FIGURES)
def test_drawing_again_gives_the_same_picture_and_changes_no_global_setting(sweep, name: str) -> None:
    backend, others = matplotlib.get_backend(), matplotlib.pyplot.get_fignums()
    assert png(FIGURES[name](Results(*sweep)).figure) == png(FIGURES[name](Results(*sweep)).figure)
    assert synthetic.settings() == synthetic.SETTINGS and matplotlib.get_backend() == backend
    assert matplotlib.pyplot.get_fignums() == others


# --- loss against learning rate ----------------------------------------------------------------------------------


def test_rates_have_a_panel_a_width_and_a_line_a_mitigation(sweep, drawn) -> None:
    figure, (ds, _) = drawn["loss_against_rate"], sweep
    assert [panel.get_title() for panel in figure.axes] == ["width 32", "width 64", "width 128"]
    assert all(panel.get_xscale() == "log" for panel in figure.axes)
    texts = synthetic.legend_words(figure)
    assert texts[:2] == ["mitigation: none", "mitigation: qk_norm"]
    assert "non-finite trial, drawn at the loss at initialisation" in texts
    plain, normed = figure.axes[0].lines[:2]
    table = metrics.trial_table(metrics.clean_trials(ds))
    means = table[(table["width"] == 32) & (table["mitigation"] == "qk_norm")].groupby("lr")["capped_loss"].mean()
    np.testing.assert_allclose(normed.get_ydata(), means, rtol=1e-6)
    assert plain.get_ydata()[-1] > normed.get_ydata()[-1] + 1


def test_nonfinite_trials_are_crosses_at_the_loss_at_initialisation(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(lr=lr, seed=seed) for lr in (1e-3, 1e-2, 1e-1) for seed in (0, 1)]

    def loss(trial) -> np.ndarray:
        values = synthetic.flat_loss(trial)
        if trial.optim.lr == 1e-1 and trial.seed == 0:
            values[9:] = np.nan
        return values

    synthetic.write_pack(tmp_path, trials, loss)
    drawing = loss_against_rate(Results(open_sweep(tmp_path)))
    dots, crosses = drawing.figure.axes[0].collections
    assert len(dots.get_offsets()) == 5
    np.testing.assert_allclose(crosses.get_offsets(), [[1e-1, synthetic.INITIAL]])
    assert "the 1 trial that became non-finite" in drawing.caption and "2 seeds" in drawing.caption
    assert len(drawing.figure.axes[0].lines) == 2, "the mean, and the loss at initialisation"
    np.testing.assert_allclose(drawing.figure.axes[0].lines[0].get_ydata(), [3, 2, (3 + 5) / 2])


def test_the_loss_at_initialisation_is_left_out_where_nothing_comes_near_it(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(lr=lr) for lr in (1e-3, 1e-2)]
    synthetic.write_pack(tmp_path, trials)
    drawing = loss_against_rate(Results(open_sweep(tmp_path)))
    assert (
        synthetic.legend_words(drawing.figure) == ["mitigation: none"] and "none became non-finite" in drawing.caption
    )
    assert drawing.figure.axes[0].get_ylim()[1] < 4 < synthetic.INITIAL


STARTS = {
    "with the baseline": (("none", "deep", "wild"), ["loss at initialisation, mitigation: none"], 5.0),
    "without it": (("deep", "wild"), ["loss at initialisation, mean over mitigations"], 8.0),
    "alone": (("wild",), ["loss at initialisation"], 9.0),
}


@pytest.mark.parametrize(("mitigations", "words", "level"), STARTS.values(), ids=STARTS)
def test_the_loss_at_initialisation_is_the_baselines(tmp_path: Path, mitigations, words, level) -> None:
    """Mitigations may start at losses of their own; where the baseline is not in the sweep the legend says so."""
    starts = {"none": 5.0, "deep": 7.0, "wild": 9.0}
    trials = [synthetic.make_trial(lr=lr, mitigation=name) for name in mitigations for lr in (1e-3, 1e-2)]

    def loss(trial) -> np.ndarray:
        values = synthetic.flat_loss(trial)
        values[0] = starts[trial.mitigation]
        if trial.optim.lr == 1e-2:
            values[9:] = np.nan
        return values

    synthetic.write_pack(tmp_path, trials, loss)
    figure = loss_against_rate(Results(open_sweep(tmp_path))).figure
    assert figure.axes[0].lines[-1].get_ydata() == pytest.approx([level, level])
    assert [text for text in synthetic.legend_words(figure) if text.startswith("loss at")] == words


def test_other_axes_of_the_sweep_make_lines_of_their_own(tmp_path: Path) -> None:
    for depth in (1, 2):
        trials = [synthetic.make_trial(lr=lr, depth=depth) for lr in (1e-3, 1e-2)]
        synthetic.write_pack(tmp_path, trials)
    figure = loss_against_rate(Results(open_sweep(tmp_path))).figure
    assert synthetic.legend_words(figure)[:2] == ["mitigation: none, depth = 1", "mitigation: none, depth = 2"]


# --- sensitivity -------------------------------------------------------------------------------------------------


def test_sensitivity_shows_the_table(sweep, drawn) -> None:
    panel = drawn["sensitivity_against_width"].axes[0]
    table = metrics.lr_sensitivity(sweep[0])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["32", "64", "128"]
    words = synthetic.legend_words(drawn["sensitivity_against_width"])
    assert words == ["mitigation: none", "mitigation: qk_norm"]
    for container, mitigation in zip(panel.containers, ("none", "qk_norm"), strict=True):
        own = table[table["mitigation"] == mitigation]
        line, _, (bars,) = container
        np.testing.assert_allclose(line.get_ydata().astype(float), own["sensitivity"])
        reach = [(low, high) for (_, low), (_, high) in bars.get_segments()]
        np.testing.assert_allclose(reach, own[["low", "high"]], atol=1e-12)


def test_different_ranges_of_rates_are_said_in_the_caption(tmp_path: Path) -> None:
    for mitigation, rates in (("none", (1e-3, 1e-2)), ("qk_norm", (1e-3, 1e-1))):
        synthetic.write_pack(tmp_path, [synthetic.make_trial(lr=lr, mitigation=mitigation) for lr in rates])
    caption = sensitivity_against_width(Results(open_sweep(tmp_path))).caption
    assert "cannot be compared" in caption and "one seed, so no intervals" in caption


# --- faulty against golden ---------------------------------------------------------------------------------------


def test_a_row_a_fault_and_a_column_a_mitigation_with_the_strike_marked(drawn) -> None:
    figure = drawn["faulty_against_golden"]
    titles = [panel.get_title().strip() for panel in figure.axes if panel.get_title()]
    assert titles == [
        f"{fault}, mitigation: {mitigation}"
        for fault in ("rare_tokens", "weight_bit")
        for mitigation in ("none", "qk_norm")
    ]
    notes = [text.get_text() for panel in figure.axes for text in panel.texts]
    assert "strike at steps 60 to 67" in notes[0] and "strike at step 60" in notes[2]
    assert all("width 64, lr 0.01, seed 1" in note for note in notes)
    for panel in figure.axes:
        assert any(line.get_xdata()[0] == 60 == line.get_xdata()[-1] for line in panel.lines), "the strike"
        assert panel.patches, "its span"
    for left, right in zip(figure.axes[::2], figure.axes[1::2], strict=True):
        assert left.get_ylim() == right.get_ylim(), "mitigations are compared on one scale"


def test_the_curves_are_those_of_the_twins(sweep, drawn) -> None:
    ds, _ = sweep
    golden, faulty = drawn["faulty_against_golden"].axes[0].lines[:2]
    chosen = ds.isel(trial=np.flatnonzero((ds.fault == "rare_tokens") & (ds.mitigation == "none") & (ds.width == 64)))
    chosen = chosen.isel(trial=np.flatnonzero((chosen.lr == 1e-2) & (chosen.seed == 1)))
    np.testing.assert_allclose(faulty.get_ydata(), chosen["loss"].values[0])
    np.testing.assert_allclose(golden.get_ydata(), ds["loss"].sel(trial=chosen["golden"].values[0]).values)
    np.testing.assert_array_equal(golden.get_ydata()[:60], faulty.get_ydata()[:60])


def test_which_trial_is_shown() -> None:
    rows = [
        # width, rate, golden's id, its loss, size, id
        (32, 1e-2, "g0", 1.0, 99, "a"),
        (64, 1e-3, "g1", 2.0, 9, "b"),
        (64, 1e-2, "g2", 1.4, 1, "c"),
        (64, 1e-2, "g3", 1.8, np.inf, "e"),
        (64, 1e-2, "g3", 1.8, np.inf, "d"),
        (64, 1e-1, "g4", np.nan, 99, "f"),
        (128, 1e-2, "g5", 1.0, 99, "g"),
    ]
    table = pd.DataFrame(rows, columns=["width", "lr", "golden", "golden_loss", "size", "trial"])
    assert representative(table)["trial"] == "d"
    assert representative(table[table["width"] > 32])["trial"] == "d", "the lower of two widths"
    assert representative(table.iloc[:0]) is None


AFTER = np.arange(30, 94)  # steps of the 64 events that the store keeps
STRIKES = {
    "as planned": ({"fault_duration": 3}, None, [(30, 32)]),
    "where the events say": ({"fault_duration": 3, "strikes": 4}, [39, 35, 36, 36], [(35, 36), (39, 39)]),
    "never": ({"fault_duration": 3}, [], []),
    "to the end": ({"fault_duration": np.nan}, None, [(30, 99)]),
    "in a sweep without durations": ({}, None, [(30, 99)]),
    "until it froze": ({"fault_duration": 500, "nonfinite_step": 50}, None, [(30, 50)]),
    "now and then": ({"fault_duration": 10, "fault_period": 4}, None, [(30, 30), (34, 34), (38, 38)]),
    "beyond the events that are kept": ({"fault_duration": np.nan}, AFTER, [(30, 99)]),
    "no further than all events": ({"fault_duration": np.nan, "strikes": 64}, AFTER, [(30, 93)]),
}


@pytest.mark.parametrize(("fields", "steps", "expected"), STRIKES.values(), ids=STRIKES)
def test_when_a_fault_struck(fields: dict, steps, expected: list[tuple[int, int]]) -> None:
    known = {"trial": "x", "fault_start": 30, "steps": 100, "nonfinite_step": np.nan, "strikes": 70}
    others = pd.DataFrame({"trial": ["y"], "step": [31]})
    events = None if steps is None else pd.concat([pd.DataFrame({"trial": "x", "step": steps}), others])
    assert strikes(pd.Series(known | fields, dtype=object), events) == expected


def test_a_fault_that_never_fired_and_one_that_blew_up(tmp_path: Path) -> None:
    idle = synthetic.make_trial(fault=synthetic.RareTokens(start=20))
    lost = synthetic.make_trial(fault=synthetic.WeightBit(start=20))

    def loss(trial) -> np.ndarray:
        values = synthetic.flat_loss(trial)
        if trial.fault.name == "weight_bit":
            values[20:30], values[30:] = 1e6, np.nan
        return values

    synthetic.write_pack(
        tmp_path,
        synthetic.with_golden([idle, lost]),
        loss,
        faults=lambda t: synthetic.strike_events(t) if t is lost else [],
    )
    figure = faulty_against_golden(Results(open_sweep(tmp_path), fault_events(tmp_path))).figure
    never, _, blown, _ = figure.axes
    assert "never fired" in never.texts[0].get_text() and not never.patches
    assert blown.get_yscale() == "log" and never.get_yscale() == "linear"
    crosses = [line for line in blown.lines if line.get_marker() == "x"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in crosses] == [(29, 1e6)]
    assert "strike at step 20, non-finite from step 30" in blown.texts[0].get_text()


# --- nothing to draw ---------------------------------------------------------------------------------------------


def test_of_many_mitigations_those_with_the_lowest_values_are_shown(tmp_path: Path) -> None:
    names = ["none", *(f"m{number:02}" for number in range(20))]
    study = Study(tmp_path)

    def ending(trial) -> Ending:
        size = 20 - names.index(trial.mitigation)
        return Ending(2 + size * trial.optim.lr, deviation={} if trial.fault.name == "none" else {1: size})

    study.write(ending, mitigations=names, faults=[study.flip()], widths=(32, 64), seeds=(0, 1))
    results = Results(open_sweep(tmp_path).load(), fault_events(tmp_path))
    drawn = {name: draw(results) for name, draw in FIGURES.items()}
    shown = {"loss_against_rate": 10, "sensitivity_against_width": 10, "faulty_against_golden": 4}
    better = {"largest_stable_rate": "lower rates"}
    for name, drawing in drawn.items():
        assert synthetic.check_texts(drawing.figure)
        left_out = f"{21 - shown.get(name, 10)} mitigations with {better.get(name, 'higher values')}"
        assert drawing.caption.endswith(f" Not shown: {left_out}."), name
    for name in ("loss_against_rate", "sensitivity_against_width"):
        lines = [text.removeprefix("mitigation: ") for text in synthetic.legend_words(drawn[name].figure)]
        assert lines[:10] == ["none", *names[-9:]]
    titles = [panel.get_title() for panel in drawn["faulty_against_golden"].figure.axes]
    assert titles[:4] == [f"weight_bit, mitigation: {name}" for name in ["none", *names[-3:]]]
    panel = drawn["sensitivity_against_width"].figure.axes[0]
    own = np.array([container[0].get_xdata() for container in panel.containers])
    assert own[:, 0].max() < own[:, 1].min(), "no series reaches the next width"


def test_of_a_grid_with_further_axes_half_of_the_lines_are_without_a_mitigation(tmp_path: Path) -> None:
    axes = {"beta2": (0.9, 0.95, 0.99), "eps": (1e-10, 1e-9, 1e-8), "weight_decay": (0.01, 0.1)}
    grid = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    trials = [
        synthetic.make_trial(width, lr, mitigation=mitigation, **own)
        for width, lr, mitigation, own in product((32, 64), (1e-3, 1e-2), ("none", "qk_norm"), grid)
    ]
    synthetic.write_pack(tmp_path, trials)
    results = Results(open_sweep(tmp_path).load(), fault_events(tmp_path))
    others = dict.fromkeys(("loss_against_rate", "sensitivity_against_width"), "higher values")
    for name, kind in (others | {"largest_stable_rate": "lower rates"}).items():
        drawing = FIGURES[name](results)
        assert synthetic.check_texts(drawing.figure)
        words = [text.removeprefix("mitigation: ") for text in synthetic.legend_words(drawing.figure)][:10]
        assert [text.split(",")[0] for text in words] == ["none"] * 5 + ["qk_norm"] * 5
        assert drawing.caption.endswith(f" Not shown: 26 combinations with {kind}."), name


def test_without_what_it_needs_a_figure_is_none_and_says_why(tmp_path: Path) -> None:
    synthetic.write_pack(tmp_path, [synthetic.make_trial()])
    results = Results(open_sweep(tmp_path), fault_events(tmp_path))
    reasons = {name: draw(results) for name, draw in FIGURES.items()}
    assert all(drawing.figure is None for drawing in reasons.values())
    assert "1 learning rate" in reasons["loss_against_rate"].caption
    assert "two learning rates" in reasons["sensitivity_against_width"].caption
    assert "no faults" in reasons["faulty_against_golden"].caption


def test_names_in_two_columns_have_room_under_a_single_panel(tmp_path: Path) -> None:
    names = ["none", "scaled_embedding", "attention_temperature", "screen_repetition", "sequence_reshape"]
    trials = [synthetic.make_trial(lr=lr, mitigation=name) for name in names for lr in (1e-3, 1e-2)]
    synthetic.write_pack(tmp_path, trials)
    figure = loss_against_rate(Results.open(tmp_path)).figure
    assert synthetic.check_texts(figure) > 8


# --- signs -------------------------------------------------------------------------------------------------------


def test_every_figure_says_what_its_signs_mean(tmp_path: Path) -> None:
    """A picture is handed on without its caption: a dagger, and the arrows of the edge, are in its legend."""
    faults = [Fault(), synthetic.WeightBit(start=20)]

    def acting(trial) -> Acting:
        return Acting({}, {"model.qk_norm": "why"} if trial.mitigation == "qk_norm" else {}, "all alike")

    for mitigation in ("none", "qk_norm"):
        trials = [
            synthetic.make_trial(lr=lr, seed=seed, mitigation=mitigation, fault=fault, steps=60)
            for lr, seed, fault in product((1e-3, 1e-2), (0, 1), faults)
        ]
        synthetic.write_pack(tmp_path, trials, synthetic.training_curve, faults=synthetic.strike_events, acting=acting)
    results, marked = Results.open(tmp_path), []
    for name, draw in figures(*Needs).items():
        figure = draw(results).figure
        if figure is None:
            continue
        texts = [text.get_text() for text in synthetic.drawn_texts(figure)]
        if any("†" in text for text in texts):
            marked.append(name)
            assert any("did not act as named" in text for text in texts), name
        assert synthetic.check_texts(figure)
    assert {"loss_against_rate", "largest_stable_rate", "sensitivity_against_width", "mitigation_map"} <= {*marked}
    assert {"faulty_against_golden", "deviation_curves"} <= {*marked}
    assert "↑ every seed stable at every rate" in synthetic.legend_words(
        figures(*Needs)["largest_stable_rate"](results).figure
    )


def test_a_legend_under_one_narrow_panel_fits(tmp_path: Path) -> None:
    """What it says of lost trials is wider than two columns of the panel."""

    def loss(trial) -> np.ndarray:
        values = synthetic.flat_loss(trial)
        values[9:] = np.nan if trial.optim.lr == 1e-1 else values[9:]
        return values

    synthetic.write_pack(tmp_path, [synthetic.make_trial(lr=lr) for lr in (1e-3, 1e-2, 1e-1)], loss)
    figure = loss_against_rate(Results(open_sweep(tmp_path))).figure
    assert "non-finite trial, drawn at the loss at initialisation" in synthetic.legend_words(figure)
    assert synthetic.check_texts(figure)
