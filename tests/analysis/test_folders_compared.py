"""`compare OUT OUT`: pairs of trials that differ in one way, and what that changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.measures.folders_compared import folders_compared
from analysis.measures.statistics import mean_interval
from analysis.reports.folders import drawn_comparison, told_comparison
from harness.config import ConfigError, Trial
from tests.analysis import synthetic
from tests.analysis.synthetic import make_trial

SEEDS, SEGMENTS = range(3), 64


def noise(trial: Trial) -> np.ndarray:
    """What a seed adds to each segment, whatever else the trial has."""
    return np.random.default_rng(trial.seed).normal(0, 0.05, SEGMENTS)


def segments(trial: Trial) -> np.ndarray:
    """QK-norm loses 0.1 less at the higher rate, and nothing at the lower one."""
    gain = 0.1 if trial.mitigation == "qk_norm" and trial.optim.lr > 5e-3 else 0.0
    return 3 + trial.model.width / 100 - gain + noise(trial)


def written(out: Path, trials: Sequence[Trial], loss: Callable[[Trial], np.ndarray] = synthetic.flat_loss) -> Path:
    """Two packs, begun in another order than that of their names."""
    for half in (trials[1::2], trials[::2]):
        if half:
            synthetic.write_pack(
                out,
                half,
                loss,
                ends={"final_segment_loss": segments, "initial_segment_loss": segments},
                signals={"validation_loss": lambda trial: np.full(trial.train.steps, segments(trial).mean())},
            )
    return out


def grid(mitigation: str, widths: Sequence[int] = (32, 64), seeds: Sequence[int] = SEEDS) -> list[Trial]:
    rates = (1e-3, 1e-2)
    return [make_trial(w, lr, seed, mitigation) for w in widths for lr in rates for seed in seeds]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path / "plain", grid("none")), written(tmp_path / "normed", grid("qk_norm"))


def test_pairs_differ_in_what_all_trials_do(folders: tuple[Path, Path]) -> None:
    """And cells in the rest; the interval is that of differences on the same windows."""
    found = folders_compared(*folders)
    assert found.between["mitigation"] == ("none", "qk_norm") and found.alone == (0, 0)
    assert found.fields == ["width", "lr"] and len(found.table) == 4 and (found.table["pairs"] == 3).all()
    for row in found.table.to_dict("records"):
        assert row["one"] == pytest.approx(np.mean([3 + row["width"] / 100 + noise(make_trial(seed=s)) for s in SEEDS]))
        assert row["change"] == pytest.approx(-0.1 if row["lr"] == 1e-2 else 0, abs=1e-6)
        assert [row["low"], row["high"]] == pytest.approx([row["change"]] * 2, abs=1e-6), "their noise is the same"
        assert row["healthy_one"] == row["healthy_other"] == 3


def test_intervals_are_of_pairs(tmp_path: Path) -> None:
    """Where the noise of a seed is not that of its partner."""
    plain = written(tmp_path / "plain", grid("none", [32]))
    other = [replace(trial, train=replace(trial.train, batch=4)) for trial in grid("none", [32])]
    more = {trial.seed: np.random.default_rng(9 + trial.seed).normal(0.2, 0.1, SEGMENTS) for trial in other}
    synthetic.write_pack(
        tmp_path / "small",
        other,
        ends={"final_segment_loss": lambda trial: segments(trial) + more[trial.seed]},
        signals={"validation_loss": lambda t: np.full(t.train.steps, (segments(t) + more[t.seed]).mean())},
    )
    found = folders_compared(plain, tmp_path / "small")
    differences = np.array([more[seed] for seed in SEEDS])
    low, high = mean_interval(differences)
    for row in found.table.to_dict("records"):
        assert [row["change"], row["low"], row["high"]] == pytest.approx([differences.mean(), low, high], abs=1e-5)


def test_other_windows_are_no_pairs(tmp_path: Path) -> None:
    """Then the interval is for other seeds alone, of the whole losses."""
    plain = written(tmp_path / "plain", grid("none", [32]))
    other = [replace(trial, train=replace(trial.train, validate_tokens=4096)) for trial in grid("qk_norm", [32])]
    found = folders_compared(plain, written(tmp_path / "other", other))
    assert "train.validate_tokens" in found.between
    (row,) = (row for row in found.table.to_dict("records") if row["lr"] == 1e-2)
    assert [row["low"], row["high"]] == pytest.approx([-0.1, -0.1], abs=1e-5)


def test_trials_without_a_partner_are_left_out_and_counted(tmp_path: Path) -> None:
    one = written(tmp_path / "one", grid("none", [32]))
    other = written(tmp_path / "other", grid("qk_norm", [32, 64], range(2)))
    found = folders_compared(one, other)
    assert found.alone == (2, 4) and (found.table["pairs"] == 2).all()
    said = told_comparison(one, other)
    assert "Note: 2 trials of one without a partner, left out." in said
    assert "Note: 4 trials of other without a partner, left out." in said


def test_a_trial_that_was_lost_leaves_its_cell_without_a_change(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    def losses(trial: Trial) -> np.ndarray:
        loss = synthetic.flat_loss(trial)
        loss[9:] = np.nan if trial.seed == 1 and trial.model.width == 64 else loss[9:]
        return loss

    other = tmp_path / "lost"
    synthetic.write_pack(
        other, grid("qk_norm"), losses, ends={"final_segment_loss": lambda t: segments(t) + 0 * losses(t)[-1]}
    )
    found = folders_compared(folders[0], other)
    wide = found.table[found.table["width"] == 64]
    assert wide["change"].isna().all() and (wide["healthy_other"] == 2).all() and (wide["pairs"] == 3).all()
    assert found.table[found.table["width"] == 32]["change"].notna().all()
    said = "\n".join(told_comparison(folders[0], other))
    assert re.search(r"Of (\d+) pairs \1 trained in one folder and \d+ in the other\.", said)
    assert "Note: in 2 cells some runs were lost: healthy_one and healthy_other say how many trained." in said
    drawing = drawn_comparison(found)
    assert drawing.figure is not None and "2 cells left out" in drawing.caption


def test_what_they_were_trained_by_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the cause as well as a mitigation may."""
    one = written(tmp_path / "one", grid("none", [32]))
    monkeypatch.setitem(synthetic.ENVIRONMENT, "torch", "2.1")
    other = written(tmp_path / "other", grid("none", [32]))
    assert folders_compared(one, other).trained_by == {"torch": ("2.0", "2.1")}
    assert "  trained by torch: 2.0 and 2.1" in told_comparison(one, other)


def test_the_same_folder_twice(folders: tuple[Path, Path]) -> None:
    found = folders_compared(folders[0], folders[0])
    assert found.between == {} and (found.table["change"] == 0).all()
    assert "  no field differs in all trials: the same configurations, trained twice" in told_comparison(
        folders[0], folders[0]
    )


def test_the_command(capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["compare", *map(str, folders), "--figure", str(tmp_path / "changes.svg")]) == 0
    said = capsys.readouterr().out
    assert "  mitigation: none and qk_norm\n" in said
    assert "Of 4 cells with an interval 2 are lower in the other folder, 0 higher, and 2 neither" in said
    drawn = (tmp_path / "changes.svg").read_text()
    assert "width=32, lr=0.01" in drawn and f"Figure: {tmp_path / 'changes.svg'}" in said


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda tmp: written(tmp / "other", grid("none", [32], [7])), "no trial of one has a partner in the other"),
        (lambda tmp: tmp, "holds no results"),
    ],
)
def test_nothing_to_compare(tmp_path: Path, make: Callable[[Path], Path], reason: str) -> None:
    one = written(tmp_path / "one", grid("none", [32]))
    with pytest.raises(ConfigError, match=re.escape(reason)):
        told_comparison(one, make(tmp_path))


def test_a_name_that_is_no_picture_is_refused_first(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"changes\.jpg: unknown kind of file"):
        told_comparison(*folders, Path("changes.jpg"))


def test_runs_that_nobody_validated_are_compared_by_their_training_losses(tmp_path: Path) -> None:
    """As those of one's own loop; a single pair has a change, and no interval."""

    def loss(trial: Trial) -> np.ndarray:
        return np.full(trial.train.steps, 3.0 - 0.2 * (trial.mitigation == "qk_norm"))

    nothing = {name: lambda trial: np.full(SEGMENTS, np.nan) for name in ("final_segment_loss", "initial_segment_loss")}
    never = {"validation_loss": lambda trial: np.full(trial.train.steps, np.nan)}
    places = [tmp_path / name for name in ("none", "qk_norm")]
    for place in places:
        synthetic.write_pack(place, [make_trial(32, 1e-3, 0, place.name)], loss, ends=nothing, signals=never)
    found = folders_compared(*places)
    assert found.compared == "training"
    assert found.table["change"].item() == pytest.approx(-0.2) and np.isnan(found.table["low"].item())
    lines = told_comparison(*places)
    assert any(line.startswith("final training loss in nat/token, mean over seeds") for line in lines)
    assert drawn_comparison(found).figure is not None


def test_policies_are_compared_by_what_their_completions_are_worth(tmp_path: Path) -> None:
    def policy(mitigation: str, seed: int) -> Trial:
        trial = make_trial(32, 1e-3, seed, mitigation)
        return replace(trial, extras=(*trial.extras, ("objective", replace(trial.objective, name="policy"))))

    def loss(trial: Trial) -> np.ndarray:
        return np.full(trial.train.steps, -0.5 - 0.25 * (trial.mitigation == "qk_norm") - 0.01 * trial.seed)

    places = [written(tmp_path / name, [policy(name, seed) for seed in SEEDS], loss) for name in ("none", "qk_norm")]
    found = folders_compared(*places)
    assert found.compared == "quality" and found.table["change"].item() == pytest.approx(0.25)
    assert any("mean quality of the last completions, mean over seeds" in line for line in told_comparison(*places))
