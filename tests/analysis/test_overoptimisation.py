"""Gold reward against the distance from the start: the law that is found again, its bins, and what is drawn of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis import open_sweep
from analysis.figures.registry import Needs, Results, figures
from analysis.measures.overoptimisation import BINS, basis, distance_curves
from harness.storage.store import Signal
from tests.analysis import synthetic

STEPS = 60
SIGNALS = {name: Signal(("trial", "step"), "1", name) for name in ("quality", "reference_kl", "proxy")}
DISTANCE = np.linspace(0, 6, STEPS)
LAWS = {16: (0.3, 0.2), 32: (0.5, 0.3)}  # alpha, beta by the width of the model


def gold(trial: synthetic.Trial) -> np.ndarray:
    alpha, beta = LAWS[trial.model.width]
    d = DISTANCE
    return 0.5 + d * (alpha + 0.01 * trial.seed) - beta * d * np.log(np.maximum(d, 1e-9))


def written(out: Path, seeds: int = 3, read: tuple[str, ...] = tuple(SIGNALS)) -> Path:
    trials = [synthetic.make_trial(width, 1e-2, seed, steps=STEPS) for width in LAWS for seed in range(seeds)]
    curves = {
        "quality": gold,
        "reference_kl": lambda trial: DISTANCE**2,
        "proxy": lambda trial: np.linspace(1, 3, STEPS),
    }
    own = {name: SIGNALS[name] for name in read}
    synthetic.write_pack(out, trials, signals={name: curves[name] for name in read}, guarded=own)
    return out


def test_the_law_is_found_again(tmp_path: Path) -> None:
    curves = distance_curves(open_sweep(written(tmp_path / "out")))
    assert [curve.name for curve in curves] == ["width = 16", "width = 32"]
    for curve, (alpha, beta) in zip(curves, LAWS.values(), strict=True):
        assert curve.law is not None and curve.proxy is not None and curve.runs == 3
        assert curve.law.alpha == pytest.approx((alpha + 0.01, alpha + 0.01 - 0.0248, alpha + 0.01 + 0.0248), abs=1e-4)
        assert curve.law.beta == pytest.approx((beta,) * 3, abs=1e-4)
        assert 0.95 < curve.law.r_squared < 1  # alphas differ
        assert len(curve.distance) == BINS and curve.distance[0] == pytest.approx(3 / 16)
        # 60 places in 16 bins, of which the first one has four.
        assert curve.proxy[0].tolist() == pytest.approx([2 / 59 * 1.5] * 3, rel=1e-5)
        assert (curve.gold[1:, 1] < curve.gold[1:, 0]).all() and (curve.gold[1:, 0] < curve.gold[1:, 2]).all()


def test_at_the_start_nothing_is_gained() -> None:
    assert basis(np.array([0.0, 1.0])).tolist() == [[0, 0], [1, 0]]


def test_the_figure_has_a_line_an_arm_and_says_the_law(tmp_path: Path) -> None:
    drawing = figures(Needs.POLICIES)["gold_against_distance"].draw(Results.open(written(tmp_path / "out")))
    assert drawing.figure is not None
    labels = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert labels == ["width = 16", "width = 32", "learned reward", "fit d (alpha - beta log d)"]
    assert "width = 32: alpha 0.51 [0.485, 0.535], beta 0.3 [0.3, 0.3]" in drawing.caption


def test_one_run_has_no_law_and_a_policy_without_a_proxy_no_dashes(tmp_path: Path) -> None:
    out = written(tmp_path / "out", seeds=1, read=("quality", "reference_kl"))
    drawing = figures(Needs.POLICIES)["gold_against_distance"].draw(Results.open(out))
    assert drawing.figure is not None
    labels = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert labels == ["width = 16", "width = 32"] and "2 without a fit" in drawing.caption


def test_without_policies_there_is_none(tmp_path: Path) -> None:
    synthetic.write_pack(tmp_path / "out", [synthetic.make_trial()])
    results = Results.open(tmp_path / "out")
    assert not results.has_policies
    drawing = figures(Needs.POLICIES)["gold_against_distance"].draw(results)
    assert drawing.figure is None and drawing.caption.startswith("No figure: no finished policy")
