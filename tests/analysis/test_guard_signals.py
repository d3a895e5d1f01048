"""What guards declare reaches the report by itself: a panel a signal, medians over seeds, strikes marked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from analysis import fault_events, open_sweep
from analysis.figures.guard_signals import STRIKE, guard_signals
from analysis.figures.registry import Results
from analysis.reports.report import write_report
from examples.guard.loss_alarm import LossAlarm
from harness.config import Trial
from harness.storage.store import Signal
from tests.analysis import synthetic

DECLARED = {
    name: Signal(("trial", "step"), signal.units, signal.long_name) for name, signal in LossAlarm.signals.items()
}
(NAME,) = DECLARED
START, STEPS = 20, 40


def above(trial: Trial) -> np.ndarray:
    """Falls with the steps, rises at a strike, and has the seed's number in it."""
    values = 0.1 * np.cos(np.arange(STEPS) / 3) + trial.seed**2 / 10
    if trial.fault.name != "none":
        values[START : START + 4] += 3.0
    return values


def write(out: Path, guarded: dict[str, Signal], **signals: Callable[[Trial], np.ndarray]) -> Results:
    """Two mitigations with guards that show `signals`, at two rates and with two faults; and one without a guard."""
    faults = (None, synthetic.WeightBit(start=START), synthetic.RareTokens(start=30, duration=3))
    for mitigation, declared in {"none": guarded, "calm": guarded, "unguarded": {}}.items():
        trials = [
            synthetic.make_trial(lr=lr, seed=seed, mitigation=mitigation, fault=fault, steps=STEPS)
            for lr, seed, fault in product((1e-2, 1e-1), range(3), faults)
        ]
        shown = {"guarded": declared, "signals": signals if declared else {}}
        options = {"faults": synthetic.strike_events, "measured": synthetic.READ, "block": STEPS}
        synthetic.write_pack(out, trials, synthetic.training_curve, **shown, **options)
    return Results(open_sweep(out), fault_events(out))


def test_a_line_is_the_median_over_seeds_of_a_mitigation_and_fault(tmp_path: Path) -> None:
    """At the rate that is best without a fault; trials without a guard have no line."""
    results = write(tmp_path, DECLARED, **{NAME: above})
    drawing = guard_signals(results)
    (panel,) = drawing.figure.axes
    assert (panel.get_title(), panel.get_xlabel()) == ("training loss over its running mean", "step")
    assert panel.get_ylabel() == "loss_above_mean\n[nat/token]"
    faults = ("none", "rare_tokens", "weight_bit")
    names = [f"mitigation: {name}, fault = {fault}" for name in ("none", "calm") for fault in faults]
    assert synthetic.legend_words(drawing.figure) == [*names, "strike"]
    curves = {line.get_color(): line.get_ydata() for line in panel.lines if len(line.get_ydata()) == STEPS}
    assert len(curves) == len(names), "a colour a line"
    assert [line.get_linestyle() for line in panel.lines[: len(names)]] == ["-", "--", "--"] * 2
    for curve, fault in zip(curves.values(), faults * 2, strict=True):
        trial = synthetic.make_trial(seed=1, steps=STEPS, fault=None if fault == "none" else synthetic.LastBit())
        np.testing.assert_allclose(curve, above(trial), rtol=1e-6, err_msg=fault)
    assert sorted(line.get_xdata()[0] for line in panel.lines if line.get_color() == STRIKE) == [START, 30]
    assert "18 trials of width 32 at learning rate 0.01" in drawing.caption
    assert synthetic.check_texts(drawing.figure)


def test_every_signal_has_a_panel_that_can_be_read(tmp_path: Path) -> None:
    """Also where its names are long, it spikes or was never finite, and mitigations are many."""
    declared = DECLARED | {
        "spiky": Signal(("trial", "step"), "1", "a signal that is small but for a spike, and has many words"),
        "never_known": Signal(("trial", "step"), "1", "nothing at all"),
    }
    unknown = np.full(STEPS, np.nan)
    signals = {NAME: above, "spiky": lambda trial: above(trial) ** 9 - 0.01, "never_known": lambda trial: unknown}
    results = write(tmp_path, declared, **signals)
    for number in range(9):
        trials = [synthetic.make_trial(lr=1e-2, mitigation=f"mitigation_{number}", steps=STEPS)]
        synthetic.write_pack(tmp_path, trials, synthetic.training_curve, guarded=declared, signals=signals)
    drawing = guard_signals(Results(open_sweep(tmp_path), results.events))
    assert [panel.get_yscale() for panel in drawing.figure.axes[:3]] == ["linear", "linear", "symlog"]
    assert synthetic.check_texts(drawing.figure) and "5 mitigations with higher final losses" in drawing.caption


@pytest.mark.parametrize("has_guards", [True, False])
def test_the_report_shows_them_where_there_are_any(tmp_path: Path, has_guards: bool) -> None:
    results = write(tmp_path, DECLARED if has_guards else {}, **{NAME: above})
    made = write_report(tmp_path)
    page = made.html.read_text(encoding="utf-8")
    assert ("guard_signals.png" in [path.name for path in made.figures]) == has_guards == ("<h2>Guards" in page)
    assert (guard_signals(results).figure is not None) == has_guards


def test_strikes_at_different_steps_are_not_marked(tmp_path: Path) -> None:
    trials = [
        synthetic.make_trial(seed=seed, steps=STEPS, fault=synthetic.WeightBit(start=20 + seed)) for seed in range(2)
    ]
    synthetic.write_pack(tmp_path, trials, guarded=DECLARED, signals={NAME: above})
    figure = guard_signals(Results(open_sweep(tmp_path))).figure
    assert synthetic.legend_words(figure) == ["mitigation: none"] and not figure.axes[0].patches
