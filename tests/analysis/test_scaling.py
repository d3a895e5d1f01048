"""Laws over sizes: slopes and exponents that are known, intervals that cover, and what is foretold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis import open_sweep
from analysis.__main__ import main
from analysis.measures.scaling import Scaling, line, offset_law, scalings
from harness.config import ConfigError
from tests.analysis import synthetic

SIZES = np.array([16.0, 32.0, 64.0, 128.0, 256.0])


def scaling(values: np.ndarray, metric: str = "loss", sizes: np.ndarray = SIZES) -> Scaling:
    return Scaling({"mitigation": "none"}, metric, "width", sizes[: len(values)], values)


def seeds(
    law: Callable[[np.ndarray], np.ndarray], noise: float, count: int = 8, draw: int = 0, sizes: int = 5
) -> np.ndarray:
    """[sizes, seeds]: the law, what each seed adds at all sizes, and noise."""
    rng = np.random.default_rng(draw)
    own = rng.normal(0, noise, count)
    return law(SIZES[:sizes])[:, None] + own + rng.normal(0, noise, (sizes, count))


def floor(x: np.ndarray) -> np.ndarray:
    return 1.5 + 2.0 * (x / 16) ** -0.5


# --- laws -----------------------------------------------------------------------------------------------------------


def test_a_law_that_is_one_is_found() -> None:
    c, a, b = offset_law(SIZES / 16, floor(SIZES)[:, None])
    assert (c[0], a[0]) == pytest.approx((1.5, 2.0), abs=0.03) and b[0] == pytest.approx(0.5, rel=0.02)
    start, slope = line(np.log2(SIZES), (3 - 0.25 * np.log2(SIZES))[:, None])
    assert (start[0], slope[0]) == pytest.approx((3, -0.25))


def test_slopes_are_per_doubling_and_factors_of_what_is_a_ratio() -> None:
    rises = scaling(seeds(lambda x: 0.1 * np.log2(x), 0.001), "sensitivity").slope()
    assert rises.value == pytest.approx(0.1, abs=0.005) and rises.low < rises.value < rises.high
    halves = scaling(seeds(lambda x: -np.log(x), 0.001), "stable_rate").slope()
    assert halves.value == pytest.approx(0.5, rel=0.01) and halves.low < halves.value < halves.high


def test_what_lies_beyond_follows_the_law() -> None:
    one = scaling(seeds(floor, 0.002))
    beyond = one.at(1024)
    assert one.law == "c + a x^-b" and beyond.value == pytest.approx(float(floor(np.array(1024.0))), abs=0.05)
    assert beyond.low < beyond.value < beyond.high
    c, b = one.parameters() or (None, None)
    assert c is not None and b is not None and c.low < 1.5 < c.high and b.low < 0.5 < b.high
    assert (beyond.high - beyond.low) > (one.at(64).high - one.at(64).low)


def test_of_three_sizes_there_is_a_line_alone() -> None:
    one = scaling(seeds(floor, 0.002, sizes=3))
    assert one.law == "a + b log2 x" and one.parameters() is None
    said, measured, holds = one.foretold()
    assert holds is False or measured == pytest.approx(said.value, abs=0.3), "two sizes always lie on a line"


def test_the_largest_size_is_foretold_from_the_others() -> None:
    said, measured, holds = scaling(seeds(floor, 0.002)).foretold()
    assert holds is True and said.value == pytest.approx(measured, abs=0.03)

    def breaks(x: np.ndarray) -> np.ndarray:
        return floor(x) + 0.5 * (x > 128)

    said, measured, holds = scaling(seeds(breaks, 0.002)).foretold()
    assert holds is False and measured - said.value == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("seed_count", [8, 16])
def test_intervals_of_slopes_cover_the_truth(seed_count: int) -> None:
    """Of 400 studies; a bootstrap over few seeds is a little too narrow, which is said."""
    covered = 0
    for draw in range(400):
        slope = scaling(seeds(lambda x: -0.2 * np.log2(x), 0.02, seed_count, draw), "sensitivity").slope()
        covered += slope.low <= -0.2 <= slope.high
    assert 0.84 <= covered / 400 <= 0.99


def test_a_law_that_holds_is_seldom_said_not_to() -> None:
    wrong = [
        scaling(seeds(lambda x: 0.1 * np.log2(x), 0.02, 8, draw), "sensitivity").foretold()[2] for draw in range(200)
    ]
    assert wrong.count(False) / 200 < 0.2 and None not in wrong


def test_one_seed_has_no_interval() -> None:
    one = scaling(seeds(floor, 0.0, count=1))
    assert np.isnan(one.slope().low) and np.isnan(one.at(512).low) and one.foretold()[2] is None


# --- of stored runs -------------------------------------------------------------------------------------------------

RATES = (1e-3, 1e-2, 1e-1, 1.0)


def written(out: Path, widths: tuple[int, ...] = (32, 64, 128, 256)) -> Path:
    """Losses on a law, best at 1e-2; QK-norm is stable up to one rate more, and at the largest width none is."""

    def loss(trial: synthetic.Trial) -> np.ndarray:
        far = abs(np.log10(trial.optim.lr) + 2)
        final = 1 + 2 * (trial.model.width / 32) ** -0.5 + 0.1 * far**2 + 0.01 * trial.seed
        return np.array([synthetic.INITIAL, *[final] * 39], float)

    def outcome(trial: synthetic.Trial) -> str:
        edge = 0.5 if trial.mitigation == "qk_norm" else 0.05
        return "trained" if trial.optim.lr <= edge else "divergent"

    for mitigation in ("none", "qk_norm"):
        for width in widths:
            trials = [synthetic.make_trial(width, lr, seed, mitigation) for lr in RATES for seed in range(3)]
            gradients = {"grad_norm": lambda trial: np.full(40, 64.0 / trial.model.width)}
            synthetic.write_pack(out, trials, loss, outcome=outcome, signals=gradients, measured=synthetic.READ)
    return out


def test_each_metric_is_read_of_each_seed(tmp_path: Path) -> None:
    sweep = open_sweep(written(tmp_path / "out"))
    by_metric = {name: scalings(sweep, name) for name in ("loss", "stable_rate", "best_rate", "sensitivity")}
    for found in by_metric.values():
        assert [one.arm["mitigation"] for one in found] == ["none", "qk_norm"]
        assert all(one.sizes.tolist() == [32, 64, 128, 256] and one.values.shape == (4, 3) for one in found)
    loss, _ = by_metric["loss"]
    assert loss.means == pytest.approx(1.01 + 2 * (loss.sizes / 32) ** -0.5)
    none, normed = by_metric["stable_rate"]
    assert np.exp(none.means) == pytest.approx(10**-1.5) and np.exp(normed.means) == pytest.approx(10**-0.5)
    assert np.exp(by_metric["best_rate"][0].means) == pytest.approx(1e-2)
    assert by_metric["sensitivity"][0].means == pytest.approx(0.1 * (1 + 0 + 1 + 4) / 4, rel=1e-4)
    (largest, _) = scalings(sweep, "largest(grad_norm)")
    assert largest.slope().value == pytest.approx(0.5, rel=1e-6)


def test_parameters_are_an_axis_for_widths_and_depths(tmp_path: Path) -> None:
    sweep = open_sweep(written(tmp_path / "out"))
    weights = {
        str(trial): int(width) ** 2 for trial, width in zip(sweep["trial"].values, sweep["width"].values, strict=True)
    }
    found = scalings(sweep, "loss", "parameters", weights)
    assert found[0].sizes.tolist() == [1024, 4096, 16384, 65536] and len(found) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["los"],
            "METRIC=los: unknown; did you mean loss? allowed: loss, stable_rate, best_rate, sensitivity, largest(",
        ),
        (["largest(norm)"], "METRIC=largest(norm): no such signal; allowed: "),
        (["--against", "lr"], "--against lr: no size; allowed: width"),
        (["--against", "depth"], "at 3 values of depth, and at all of them; allowed: a sweep over more of them"),
        (["--to", "-5"], "--to -5: out of range; allowed: a size above 0"),
        (["--figure", "x.doc"], "x.doc"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = written(tmp_path / "out")
    assert main(["scaling", str(out), *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_the_command_tells_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = written(tmp_path / "out"), tmp_path / "loss.svg"
    assert main(["scaling", str(out), "--to", "128", "--to", "1024", "--figure", str(picture)]) == 0
    printed = capsys.readouterr().out
    head = printed.splitlines()[0].split()
    assert head[:4] == ["arm", "width", "seeds", "slope"] and "1024" in head
    assert printed.count("extrapolated") == 2, "of both arms at 1024, and not at 128"
    assert "c + a x^-b" in printed and picture.stat().st_size > 1000
    assert "Dashed: beyond the largest size that was trained, 256." in printed
    assert main(["scaling", str(out), "stable_rate", "--where", "mitigation=none"]) == 0
    assert "the factor with each doubling of width" in capsys.readouterr().out


def test_seeds_beyond_the_rates_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are stable at every rate have no number, and do not count."""

    def outcome(trial: synthetic.Trial) -> str:
        return "trained" if trial.seed == 0 or trial.optim.lr < 1e-1 else "divergent"

    out = tmp_path / "out"
    for width in (32, 64, 128):
        trials = [synthetic.make_trial(width, lr, seed) for lr in RATES for seed in range(3)]
        synthetic.write_pack(out, trials, outcome=outcome, measured=synthetic.READ)
    assert main(["scaling", str(out), "stable_rate"]) == 0
    assert "2" in capsys.readouterr().out.splitlines()[1].split()
    with pytest.raises(ConfigError):
        scalings(open_sweep(out), "nothing")
