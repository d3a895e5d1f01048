"""When runs spike for the first time: by hand, and of stored runs, counted from the end of their warm-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import open_sweep
from analysis.figures.registry import Needs, Results, figures
from analysis.measures.hazard import BEFORE, NEAR, first_spike, first_spikes, hazard_ratio, spans
from tests.analysis import synthetic

NEVER = float("nan")
STEPS, WARMUP = 60, 20


def flat(**spikes: float) -> np.ndarray:
    values = np.full(STEPS, 3.0)
    for step, value in spikes.items():
        values[int(step[1:])] = value
    return values


def test_a_spike_is_a_fifth_above_the_median_of_the_ten_before() -> None:
    assert first_spike(flat(s30=3.61), NEVER) == 30
    assert np.isnan(first_spike(flat(s30=3.59), NEVER))
    assert np.isnan(first_spike(flat(s5=9.0), NEVER)), "nothing is usual yet"
    assert first_spike(flat(s29=1.0, s30=3.61), NEVER) == 30, "one low loss is no measure"
    assert first_spike(np.linspace(3, 12, STEPS), NEVER) == BEFORE, "what rises that fast is one"
    assert np.isnan(first_spike(np.linspace(3, 4, STEPS), NEVER))


def test_what_is_not_finite_or_was_dropped() -> None:
    lost = flat()
    lost[40:] = np.nan
    assert first_spike(lost, 40.0) == 40
    lost[38] = 9.0
    assert first_spike(lost, 40.0) == 38
    assert first_spike(flat(s30=np.inf), NEVER) == 30
    dropped = flat(s31=9.0)
    dropped[::2] = np.nan
    assert first_spike(dropped, NEVER) == 31
    assert first_spike(np.full(STEPS, np.nan), 0.0) == 0


def runs(*spikes: float, warmup: int = WARMUP) -> pd.DataFrame:
    watched = [STEPS if np.isnan(spike) else spike + 1 for spike in spikes]
    return pd.DataFrame({"trial": range(len(spikes)), "warmup": warmup, "spike": spikes, "watched": watched})


def test_a_run_is_at_risk_up_to_its_first_spike() -> None:
    table = spans(runs(12.0, 25.0, NEVER), (0.0, 0.5, 1.0, 2.0, 3.0, 9.0))
    assert table["low"].tolist() == [0.5, 1.0, 2.0], "nobody is at risk before step 10 or watched beyond step 60"
    assert table["steps"].tolist() == [3 + 10 + 10, 6 + 20, 20]
    assert table["spikes"].tolist() == [1, 1, 0]
    assert table["hazard"].tolist() == pytest.approx([1000 / 23, 1000 / 26, 0])
    assert (table["hazard_low"] <= table["hazard"]).all() and (table["hazard"] < table["hazard_high"]).all()
    assert table["hazard_high"][2] == pytest.approx(1000 * 3.689 / 20, rel=1e-3)  # of no event, Garwood


def test_where_no_spike_can_be_seen_nobody_is_at_risk() -> None:
    """The first ten steps, which would make the hazard elsewhere look smaller than it is."""
    (row,) = spans(runs(NEVER, 4.0, 15.0), (0.0, 1.0)).itertuples()
    assert (row.steps, row.spikes) == (10 + 6, 1)


def test_warm_ups_of_other_lengths_are_laid_one_upon_the_other() -> None:
    both = pd.concat([runs(20.0), runs(40.0, warmup=40)])
    assert spans(both, (0.0, 1.0, 2.0))["spikes"].tolist() == [0, 2]


def test_the_ratio_of_hazards_has_its_exact_interval() -> None:
    near = [float(step) for step in (17, 18, 20, 22, 24, 28)]
    ratio = hazard_ratio(runs(*near, 40.0, NEVER, NEVER))
    assert (ratio.near, ratio.elsewhere) == (6, 1)
    low, high = NEAR
    at_risk = sum(min(spike + 1, high * WARMUP) - low * WARMUP for spike in near) + 3 * (high - low) * WARMUP
    rest = sum(low * WARMUP - BEFORE for _ in range(9)) + (41 - 30) + 2 * (STEPS - 30)
    assert ratio.value == pytest.approx(6 / at_risk / (1 / rest))
    assert ratio.low < ratio.value < ratio.high and ratio.low > 1
    assert np.isnan(hazard_ratio(runs(NEVER, NEVER)).value)
    everything = hazard_ratio(runs(18.0, 19.0))
    assert everything.value == np.inf and 0 < everything.low < everything.high == np.inf


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_of_constant_hazards_the_interval_of_the_ratio_covers_it(factor: float) -> None:
    """400 sweeps of 40 runs: it is exact, so it covers in at least 95%, less three standard errors."""
    rng, covered = np.random.default_rng(0), 0
    hazard = np.full(STEPS, 0.01)
    hazard[int(NEAR[0] * WARMUP) : int(NEAR[1] * WARMUP)] *= factor
    for _ in range(400):
        struck = rng.random((40, STEPS)) < hazard
        struck[:, :BEFORE] = False
        ratio = hazard_ratio(runs(*np.where(struck.any(1), struck.argmax(1), np.nan)))
        covered += ratio.low <= factor <= ratio.high
    assert covered / 400 >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 400)


# --- of stored runs -------------------------------------------------------------------------------------------------


def written(out: Path, spikes: dict[int, int], lr: float = 1e-2) -> Path:
    """Trials by seed with a spike at a step; the rate rises for 20 steps, and the fault of one is not counted."""

    def loss(trial: synthetic.Trial) -> np.ndarray:
        at = spikes.get(trial.seed)
        return flat(**{f"s{at}": 9.0} if at is not None else {})

    rate = np.minimum(np.arange(1, STEPS + 1) / WARMUP, 1)
    trials = [synthetic.make_trial(32, lr, seed, steps=STEPS) for seed in range(8)]
    trials.append(synthetic.make_trial(32, lr, 0, fault=synthetic.WeightBit(start=3), steps=STEPS))
    signals = {"learning_rate": lambda trial: lr * rate, "dropped": lambda trial: np.zeros(STEPS)}
    synthetic.write_pack(out, trials, loss, signals=signals)
    return out


def test_first_spikes_of_a_store(tmp_path: Path) -> None:
    found = first_spikes(open_sweep(written(tmp_path / "out", {1: 25, 2: 40})))
    assert len(found) == 8 and (found["warmup"] == WARMUP).all()
    assert found["spike"].dropna().tolist() == [25, 40] and sorted(found["watched"])[:2] == [26, 41]


def test_the_figure_has_a_line_a_rate_and_says_how_much_more_there_is(tmp_path: Path) -> None:
    out = written(tmp_path / "out", dict.fromkeys(range(5), 25))
    written(out, {1: 50}, lr=1e-1)
    drawing = figures(Needs.INCIDENTS)["spike_hazard"].draw(Results.open(out))
    assert drawing.figure is not None
    labels = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert labels == ["learning rate 0.01"]
    assert drawing.caption.startswith("6 of 16 runs without a fault spiked")
    assert "5 of them at 0.8 to 1.5 times the warm-up" in drawing.caption
    assert drawing.caption.endswith("Not shown: 1 learning rates with fewer than 3 spikes.")


def test_without_a_spike_there_is_none(tmp_path: Path) -> None:
    drawing = figures(Needs.INCIDENTS)["spike_hazard"].draw(Results.open(written(tmp_path / "out", {})))
    assert drawing.figure is None and drawing.caption == "No figure: no run without a fault spikes."


def test_runs_lost_before_a_spike_can_be_seen_are_in_no_figure(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(32, 1e-2, seed, steps=STEPS) for seed in range(4)]
    rate = np.minimum(np.arange(1, STEPS + 1) / WARMUP, 1)
    signals = {"learning_rate": lambda trial: rate, "dropped": lambda trial: np.zeros(STEPS)}
    synthetic.write_pack(tmp_path / "out", trials, lambda trial: flat(s4=np.nan), signals=signals)
    drawing = figures(Needs.INCIDENTS)["spike_hazard"].draw(Results.open(tmp_path / "out"))
    said = "No figure: no run without a fault that warms up and was finite for 10 steps is finished."
    assert drawing.figure is None and drawing.caption == said
