"""Sealed forecasts: what a seal refuses, what a score is, which of two recipes is better, and what turns around."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from analysis import open_sweep
from analysis.__main__ import main
from analysis.figures.forecasts import turning_pairs
from analysis.forecast_scores.decisions import Ranked, decision, reversals
from analysis.forecast_scores.scores import scored, truths, weighted_interval_score, widened
from analysis.forecast_scores.sealing import Sealed, read_seal, seal, seal_of
from analysis.forecasts.base import LEVELS
from analysis.measures.forecast_targets import Observations, observed
from harness.config import ConfigError, Trial
from tests.analysis import synthetic

RATES = (0.01, 0.1, 1.0, 10.0)
FIT = (16, 32, 64)
SEEDS = range(3)


def edge_of(trial: Trial) -> float:
    """QK-norm is stable up to a rate of about 2, without it the edge falls with width: 1.6, 0.8, 0.4, 0.2."""
    base = 2.0 if trial.mitigation == "qk_norm" else 1.6 * 16 / trial.model.width
    return base * 10 ** (0.05 * (trial.seed - 1))


def write(out: Path, widths: tuple[int, ...] = FIT) -> Path:
    """Two recipes at these widths, losses with a floor; what is at a rate above its edge has diverged."""

    def loss(trial: Trial) -> np.ndarray:
        is_lost = trial.optim.lr > edge_of(trial)
        final = 4.9 if is_lost else 2 + 8 / trial.model.width + 0.1 * abs(np.log10(trial.optim.lr) + 1)
        return np.array([synthetic.INITIAL, *[final + 0.01 * trial.seed] * 39])

    for mitigation, width in itertools.product(("none", "qk_norm"), widths):
        trials = [synthetic.make_trial(width, rate, seed, mitigation) for rate in RATES for seed in SEEDS]
        logits = {
            "attention_logit_max": lambda trial: np.full((40, 2), 3e3 * trial.optim.lr * trial.model.width / 16),
            "grad_norm": lambda trial: np.full(40, 1 + trial.optim.lr),
        }
        synthetic.write_pack(
            out,
            trials,
            loss,
            outcome=lambda trial: "divergent" if trial.optim.lr > edge_of(trial) else "trained",
            signals=logits,
            measured=(*synthetic.READ, "attention_logit_max"),
        )
    return out


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sizes to forecast from."""
    return write(tmp_path_factory.mktemp("known") / "out")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Forecasts that were sealed, and the folder in which their size was trained afterwards."""
    folder = tmp_path_factory.mktemp("both")
    out = write(folder / "out")
    seal(out, open_sweep(out), [], ["width=128"], [], folder / "seal.json")
    return write(out, (128,)), folder / "seal.json"


def test_targets_are_read_from_trials(known: Path) -> None:
    found = observed(open_sweep(known))
    assert found.sizes == [(16.0, 2.0), (32.0, 2.0), (64.0, 2.0)]
    edges = found.tables["edge"].groupby(["recipe", "width"])["value"].mean().unstack()
    assert edges.loc["none"].to_list() == pytest.approx([0.5, -0.5, -0.5])
    assert edges.loc["qk_norm"].to_list() == pytest.approx([0.5] * 3)
    logits = found.tables["early_logit"].query("width == 32 and lr == 0.1")["value"]
    assert logits.to_list() == pytest.approx([np.log10(600)] * 6, rel=1e-5)
    losses = found.tables["loss"].query("recipe == 'none'").groupby("width")["value"].mean()
    assert losses.to_list() == pytest.approx([2.51, 2.26, 2.135], rel=1e-5)
    assert {"initial_grad_norm", "early_attention_logit_max"} <= set(found.features)


def test_a_seal_holds_what_was_said_and_what_was_known(both: tuple[Path, Path]) -> None:
    sealed = read_seal(both[1])
    assert sealed.code_is_ours and set(sealed.units["width"]) == {128.0}
    assert sealed.tree["tune"] == [[64.0, 2.0]] and "early" in sealed.tree["rules"]
    quantiles = sealed.quantiles("hierarchical", "edge")
    assert quantiles is not None and len(quantiles) == len(sealed.units)


def test_scores_are_told_with_figures(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = both
    assert main(["forecast", str(out), "--score", str(file), "--figures", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert read_seal(file).tree["seal"] in printed and "Sizes (width x depth): 128 x 2" in printed
    assert "skill over persistence" in printed and printed.count("Registered:") == 3
    names = {path.stem for path in tmp_path.glob("*.svg")}
    assert names == {"forecast_edge", "forecast_loss", "forecast_reliability", "forecast_decisions"}
    assert "Note:" not in printed


def test_what_turns_around_is_told_of_any_sweep(
    known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forecast", str(known), "--turns", "--figures", str(tmp_path)]) == 0
    assert "No pair of recipes turns around" in capsys.readouterr().out
    assert main(["forecast", str(known), "--turns", "--score", "x"]) == 2
    assert "--turns do not go together" in capsys.readouterr().err


def changed(file: Path, to: Path, change: Callable[[dict], object], is_sealed: bool = False) -> Path:
    tree = json.loads(file.read_text())
    change(tree)
    if is_sealed:
        tree["seal"] = seal_of(tree)
    to.write_text(json.dumps(tree))
    return to


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree["forecasts"]["line"]["edge"][4].__setitem__(0, 0.123), "was changed after it was sealed"),
        (lambda tree: tree["registered"].__setitem__("coverage_80", [0, 1]), "was changed after it was sealed"),
        (lambda tree: tree.pop("seal"), "is no sealed forecast"),
    ],
)
def test_a_seal_that_was_changed_is_refused(
    change: Callable[[dict], object], words: str, both: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_seal(changed(both[1], tmp_path / "changed.json", change))


def test_trials_that_are_older_than_the_seal_are_left_out(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = changed(
        both[1],
        tmp_path / "later.json",
        lambda tree: tree.update(sealed_at="2099-01-01T00:00:00+00:00"),
        is_sealed=True,
    )
    assert main(["forecast", str(both[0]), "--score", str(later)]) == 2
    assert "has no trial of a forecast size that was begun after the seal" in capsys.readouterr().err


def test_other_code_than_was_sealed_is_told(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(both[1], tmp_path / "other.json", lambda tree: tree.update(code="0" * 64), is_sealed=True)
    assert main(["forecast", str(both[0]), "--score", str(other)]) == 0
    assert "Note: the forecasters that are installed are not those" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--predict", "width=64", "--seal", "s.json"], "width 64 depth 2 is among the sizes to forecast from"),
        (["--fit", "width=16,32", "--predict", "width=128"], "2 sizes to forecast from; allowed: 3 at least"),
        (["--predict", "depth=4"], "--predict: has no width"),
        (["--predict", "width=wide"], "--predict width=wide: not numbers"),
        (["--predict", "width=-4"], "out of range"),
        (["--predict", "lr=1"], "is not width=N or depth=N"),
        ([], "--predict is missing"),
        (["--predict", "width=128", "--by", "oracle"], "--by oracle: unknown; allowed: hierarchical, line"),
        (["--fit", "seed=0", "--predict", "width=128"], "one seed to forecast from"),
        (["--fit", "lr=0.1", "--predict", "width=128"], "fewer than two learning rates"),
        (["--score", "missing.json"], "missing.json"),
        (["--score", "a", "--seal", "b"], "do not go together"),
        (["--predict", "width=128", "--figures", "x"], "--figures and --where go with --score and --turns"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["forecast", str(known), *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == "" and not list(tmp_path.iterdir())


def test_a_seal_without_its_store(both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", str(tmp_path / "gone"), "--score", str(both[1])]) == 2
    printed = capsys.readouterr()
    assert f"out={tmp_path / 'gone'}" in printed.err and printed.err.count("\n") == 1


def test_what_is_trained_already_cannot_be_sealed(both: tuple[Path, Path], tmp_path: Path) -> None:
    """The leak: sizes that have results, whether they are among those to forecast from or not."""
    out, file = both
    with pytest.raises(ConfigError, match="has finished trials of width 128 depth 2"):
        seal(out, open_sweep(out), ["width=16,32,64"], ["width=128"], [], tmp_path / "late.json")
    with pytest.raises(ConfigError, match="is there already"):
        seal(out, open_sweep(out), [], ["width=256"], [], file)
    assert not (tmp_path / "late.json").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n1,2,3\n", "is no table: its first line has 2 columns, line 3 has 3"),
        (b"# A page\n\nwords\na, comma\n", "is no table: its first line has 1 column, line 4 has 2"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is no text in UTF-8"),
        (b"", "is empty"),
        (b'a,b\n"1,2\n', "is no table"),
    ],
)
def test_a_file_that_is_no_table_of_runs(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert main(["forecast", "--from", str(tmp_path / "file"), "--predict", "width=3"]) == 2
    told = capsys.readouterr().err
    assert told == f"error: --from {tmp_path / 'file'}: {said}; allowed: a CSV file, a row for each run\n"


def test_a_table_is_forecast_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"parameters": n, "lr": lr, "seed": seed, "loss": 9.0 if lr > 1e5 / n else 2 + 1e5 / n, "initial_loss": 5.0}
        for n in (1e5, 3e5, 1e6)
        for lr in (0.01, 0.1, 1.0)
        for seed in range(2)
    ]
    file = tmp_path / "runs.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    assert main(["forecast", "--from", str(file), "--predict", "parameters=3e6", "--by", "line"]) == 0
    assert "all runs" in capsys.readouterr().out
    assert main(["forecast", "--from", str(file), "--predict", "width=3"]) == 2
    assert "the table knows parameters alone; allowed: parameters=N" in capsys.readouterr().err
    assert main(["forecast", "--from", str(tmp_path / "none.csv"), "--predict", "width=3"]) == 2
    assert "none.csv: No such file" in capsys.readouterr().err


# --- scores ---------------------------------------------------------------------------------------------------------


def normal(mean: np.ndarray, deviation: float) -> np.ndarray:
    return mean[:, None] + deviation * norm.ppf(LEVELS)


def test_the_interval_score_is_that_of_its_source() -> None:
    """Bracher et al. 2021, equation 2: K central intervals with weights a / 2, and the median with 1 / 2."""
    quantiles, y = np.array([[-2.0, -1.2, -0.6, 0.1, 0.8, 1.3, 2.1]]), 1.5
    total = 0.5 * abs(y - 0.1)
    for alpha, low, high in ((0.5, -0.6, 0.8), (0.2, -1.2, 1.3), (0.05, -2.0, 2.1)):
        total += alpha / 2 * ((high - low) + 2 / alpha * max(low - y, 0) + 2 / alpha * max(y - high, 0))
    assert weighted_interval_score(quantiles, np.array([y])) == pytest.approx([total / 3.5])


def sealed_of(units: pd.DataFrame, **said: np.ndarray) -> Sealed:
    forecasts = {name: {"edge": values.tolist()} for name, values in said.items()}
    return Sealed({"units": [list(row) for row in units.itertuples(index=False)], "forecasts": forecasts, "rules": {}})


def simulated(seeds: int, recipes: int = 60) -> tuple[pd.DataFrame, Observations, np.ndarray]:
    """What is true of many recipes, and numbers of seeds around it with a deviation of 0.2."""
    generator = np.random.default_rng(seeds)
    true = generator.standard_normal(recipes)
    units = pd.DataFrame({"recipe": [f"r{n}" for n in range(recipes)], "width": 64.0, "depth": 2.0, "lr": np.nan})
    rows = [
        {**unit, "seed": seed, "value": mean + 0.2 * generator.standard_normal()}
        for unit, mean in zip(units.to_dict("records"), true, strict=True)
        for seed in range(seeds)
    ]
    return units, Observations({"edge": pd.DataFrame(rows)}), true


def test_a_forecaster_that_knows_its_error_is_covered_and_has_skill() -> None:
    units, observations, true = simulated(5, recipes=300)
    missed = 0.1 * np.random.default_rng(1).standard_normal(len(true))
    sealed = sealed_of(units, good=normal(true + missed, 0.1), persistence=normal(true + 0.4, 0.1))
    found = {one.forecaster: one for one in scored(sealed, truths(sealed, observations)["edge"], pd.DataFrame())}
    for nominal, (share, low, high) in found["good"].coverage.items():
        assert share == pytest.approx(nominal, abs=0.06) and low < nominal < high + 0.03
    skill = found["good"].skill["persistence"]
    assert 0.5 < skill[1] < skill[0] < skill[2] < 0.9 and "persistence" not in found["persistence"].skill
    assert found["persistence"].coverage[0.8][0] < 0.1, "what is far off is not covered"
    assert found["floor"].score > 0


def test_the_error_of_few_test_seeds_widens_intervals() -> None:
    quantiles = normal(np.zeros(1), 0.3)
    assert widened(quantiles, np.array([0.4])) == pytest.approx(normal(np.zeros(1), 0.5))
    assert widened(quantiles, np.array([0.0])) == pytest.approx(quantiles)


# --- decisions ------------------------------------------------------------------------------------------------------


def ranked(points: list[float], truth: list[float], noise: float = 0.01, target: str = "edge") -> Ranked:
    generator = np.random.default_rng(0)
    values = np.array(truth)[:, None] + noise * generator.standard_normal((len(truth), 5))
    return Ranked(target, (64.0, 2.0), tuple(f"r{n}" for n in range(len(truth))), values, np.array(points))


def test_pairs_are_told_rightly_or_not() -> None:
    right = decision([ranked([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0])])
    assert right.pairs == right.resolved == 6 and right.accuracy[0] == right.tau == 1
    wrong = decision([ranked([3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0])])
    assert wrong.accuracy[0] == 0 and wrong.tau == -1 and np.isnan(wrong.regret), "regret is of losses"
    losses = [decision([ranked(said, [0.0, 1.0, 2.0, 3.0], target="loss")]) for said in ([0, 1, 2, 3], [3, 2, 1, 0])]
    assert [one.regret for one in losses] == pytest.approx([0, 3], abs=0.05)
    alike = decision([ranked([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 3.0])])
    assert alike.accuracy[0] == 0.5, "a tie is half right"


def test_pairs_that_cannot_be_told_apart_are_not_resolved() -> None:
    found = decision([ranked([0.0, 1.0, 2.0, 3.0], [0.0, 0.001, 0.002, 3.0], noise=0.1)])
    assert found.resolved == 3 and found.on_resolved[0] == 1 and found.accuracy[0] <= 1


def of_sizes(law: Callable[[int, float], float], noise: float = 0.02) -> Observations:
    generator = np.random.default_rng(0)
    rows = [
        {"recipe": f"r{n}", "width": w, "depth": 2.0, "lr": np.nan, "seed": seed}
        | {"value": law(n, w) + noise * generator.standard_normal()}
        for n in range(5)
        for w in (16.0, 32.0, 64.0, 128.0)
        for seed in range(4)
    ]
    return Observations({"loss": pd.DataFrame(rows)})


def test_what_turns_around_is_found_and_nothing_else() -> None:
    """r4 is best at 16 and worst at 128; the others keep their order."""
    observations = of_sizes(lambda n, w: 0.1 * n + (np.log2(w / 16) - 0.5) * (n == 4))
    found = reversals(observations, "loss")
    assert {(one.one, one.other) for one in found} <= {(f"r{n}", "r4") for n in range(4)} and len(found) >= 2
    assert all(one.slope < 0 and one.small[0] > 0 > one.large[0] for one in found)
    assert turning_pairs(found, observations).figure is not None
    assert not reversals(of_sizes(lambda n, w: 0.1 * n + 0.3 * np.log2(w)), "loss")
    assert not reversals(of_sizes(lambda n, w: 0.1 * n + 0.01 * n * np.log2(w)), "loss"), "the order stays"
