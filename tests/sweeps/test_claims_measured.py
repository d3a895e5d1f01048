"""What claims compare: of rates, of signals and of faults; and what of it is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import analysis
from harness.config import ConfigError
from sweeps.claims import trained
from sweeps.claims.measured import AFTERMATH, METRICS, metric_of, with_outcomes
from sweeps.claims.registered import claims
from sweeps.claims.trained import trials_of
from sweeps.claims.verdicts import CONFIRMED, NOT_HERE
from tests.analysis.mitigated import Study, of_faults
from tests.sweeps import command
from tests.sweeps.test_claims_by_trials import MINE, ONE, TINY, call, own

# --- of rates ----------------------------------------------------------------------------------------------------


def rows(losses: dict[int, dict[float, float]]) -> pd.DataFrame:
    made = [(seed, lr, loss) for seed, by_rate in losses.items() for lr, loss in by_rate.items()]
    return pd.DataFrame(made, columns=["seed", "lr", "capped_loss"])


def test_the_best_rate_lies_where_a_parabola_is_lowest() -> None:
    """In the logarithm of the rate; and beyond the rates that were tried where it may."""
    rates = [0.01, 0.03, 0.1, 0.3]
    inside = {lr: 2 + (np.log(lr) - np.log(0.05)) ** 2 for lr in rates}
    falling, rising = ({lr: sign * lr for lr in rates} for sign in (-1.0, 1.0))
    found = METRICS["best_rate"].bounds(rows({1: inside, 2: falling, 3: rising, 4: dict.fromkeys(rates, 1.0)}))
    assert found.loc[1].tolist() == pytest.approx([np.log(0.05)] * 2)
    assert found.loc[2].tolist() == [np.log(0.1), np.inf] and found.loc[3].tolist() == [-np.inf, np.log(0.03)]
    assert found.loc[4].tolist() == [-np.inf, np.log(0.03)], "where all are equal nothing is known"
    equal = METRICS["best_rate"].bounds(rows({1: {0.01: 3.0, 0.1: 2.0, 1.0: 2.0}, 2: {0.01: 2.0, 0.1: 2.0, 1.0: 3.0}}))
    assert equal.loc[1].tolist() == pytest.approx([np.log(10**-0.5)] * 2), "half-way between two that are equal"


# --- of signals --------------------------------------------------------------------------------------------------

NAN = np.nan


def recorded(values: np.ndarray, dims: tuple[str, ...] = ("trial", "step"), steps: list[int] | None = None):
    """A sweep with one signal."""
    lengths = steps or [values.shape[1]] * len(values)
    return xr.Dataset({"x": (dims, values)}, coords={"steps": ("trial", np.array(lengths))})


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("largest(x)", [1.0, -8.0, 2.0, NAN], 8.0),
        ("mean(x)", [1.0, -3.0, NAN, np.inf], 2.0),
        ("last(x)", [9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3.0),
        ("last(x)", [9.0, *[NAN] * 30, 4.0, *[NAN] * 8], 4.0),
        ("last(x)", [9.0, *[NAN] * 29], NAN),
        ("when_largest(x)", [1.0, 2.0, 7.0, 3.0], 0.5),
        ("when_largest(x)", [NAN, NAN, NAN, NAN], NAN),
        ("end_over_best(x)", [1.0, NAN, 4.0, 3.0, 2.0], 0.5),
        ("end_over_best(x)", [*[1.0] * 20, *[2.0] * 20, *[1.0, 1.4]], 0.6),
        ("end_over_best(x)", [NAN, NAN], NAN),
        ("above(x, 1.5)", [1.0, 2.0, NAN, 1.5], 1 / 3),
        ("above(x, 1.5)", [NAN, NAN, NAN, NAN], NAN),
        ("rises(x, 1.2)", [2.0, 2.5, 1.0, 1.1, 1.3], 0.5),
        ("rises(x, 1e1)", [2.0, 2.5, 1.0, 1.1, 1.3], 0.0),
    ],
)
def test_a_number_of_each_trial(text: str, values: list[float], expected: float) -> None:
    metric = metric_of(text)
    assert metric.summary is not None and metric.unit == ("ratio" if metric.is_ratio else "share")
    (found,) = metric.summary.of(recorded(np.array([values])))
    assert (np.exp(found) if metric.is_ratio else found) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("values", "quality", "expected"),
    [
        ([0.0, 2.0, 6.0, 1.0, 9.0], [1.0, 2.0, 4.0, 7.0, 8.0], 3.0),  # half-way from the second to the third
        ([0.0, NAN, 2.0, 6.0], [1.0, 9.0, 2.0, 4.0], 3.0),
        ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], NAN),  # never there
        ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0], NAN),  # beyond it from the start
        ([NAN, NAN, NAN], [1.0, 2.0, 3.0], NAN),
    ],
)
def test_quality_where_a_signal_first_reaches_a_number(
    values: list[float], quality: list[float], expected: float
) -> None:
    summary = metric_of("quality_at(x, 4)").summary
    assert summary is not None
    sweep = recorded(np.array([values])).assign(quality=(("trial", "step"), np.array([quality])))
    assert np.exp(summary.of(sweep)) == pytest.approx([expected], nan_ok=True)
    with pytest.raises(ConfigError, match=r"quality_at\(x, 4\): the trials have no such signal"):
        summary.of(sweep.drop_vars("quality"))


def test_padding_is_no_part_of_a_shorter_run() -> None:
    """Its end is its own, and what follows is not looked at."""
    values = np.arange(1.0, 13.0).reshape(1, -1).repeat(2, axis=0)
    summary = metric_of("last(x)").summary
    assert summary is not None
    long, short = np.exp(summary.of(recorded(values, steps=[12, 6])))
    assert (long, short) == pytest.approx((10.0, 4.0))
    when = metric_of("when_largest(x)").summary
    assert when is not None and when.of(recorded(values, steps=[12, 6])) == pytest.approx([11 / 12, 5 / 6])


def test_a_spike_lies_apart_from_the_last_thousand_values() -> None:
    """Against numpy, window by window, also behind a value of 1e6 and where one was not measured."""
    draw = np.random.default_rng(0)
    values = draw.normal(3.0, 0.1, (3, 1300))
    values[0, [60, 400, 1200]] = 9.0, 1e6, 0.0
    values[1, 100:120] = np.nan
    values[2, :] = 2.0
    values[2, 700] = 5.0
    expected = []
    for row in values:
        spikes = known = 0
        for step in range(len(row)):
            last = row[max(0, step - 1000) : step]
            last = last[np.isfinite(last)]
            if len(last) >= 50 and last.std() > 0 and np.isfinite(row[step]):
                known += 1
                spikes += abs(row[step] - last.mean()) >= 7 * last.std()
        expected.append(spikes / known)
    found = metric_of("spikes(x, 7)").summary
    assert found is not None and found.of(recorded(values)) == pytest.approx(expected, abs=1e-12)
    assert expected[0] > 0 and expected[1] == 0


def test_of_layers_the_largest_and_the_last_over_the_first() -> None:
    """A model of fewer layers has padding behind its own."""
    values = np.array([[[1.0, 2.0, 8.0], [1.0, -9.0, 4.0]], [[2.0, 6.0, NAN], [2.0, 10.0, NAN]]])
    sweep = recorded(values, ("trial", "step", "layer"))
    largest, ends = metric_of("largest(x)").summary, metric_of("last_over_first(x)").summary
    assert largest is not None and ends is not None
    assert np.exp(largest.of(sweep)) == pytest.approx([9.0, 10.0])
    assert np.exp(ends.of(sweep)) == pytest.approx([6.0, 4.0]), "the median over steps"
    assert np.isnan(ends.of(recorded(values[..., 0]))).all()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("larges(x)", "metric=larges(x): unknown metric"),
        ("above(x)", "metric=above(x): lacks its number; allowed: such as above(x, 1.5)"),
        ("mean(x, 2)", "metric=mean(x, 2): takes no number; allowed: such as mean(x)"),
        ("above(x, 1-2)", "metric=above(x, 1-2): 1-2 is no number"),
        ("loss", "metric=loss: unknown metric; did you mean lost?"),
    ],
)
def test_a_metric_that_is_none(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        metric_of(text)
    assert str(error.value).startswith(reason)


def test_a_signal_that_trials_lack() -> None:
    summary = metric_of("mean(y)").summary
    assert summary is not None
    with pytest.raises(ConfigError, match=r"mean\(y\): the trials have no such signal; allowed: x"):
        summary.of(recorded(np.ones((1, 3))))


def test_seeds_that_lack_a_trial_are_left_out() -> None:
    """A mean over fewer rates is another number."""
    table = pd.DataFrame({"seed": [1, 1, 2, 3, 3], "mean(x)": [1.0, 3.0, 5.0, 7.0, NAN]})
    assert metric_of("mean(x)").bounds(table)["low"].to_dict() == {1: 2.0}


# --- of faults ---------------------------------------------------------------------------------------------------


def test_numbers_of_faults() -> None:
    table = pd.DataFrame(
        [
            *((1, "masked", 0.0, NAN, 0.0), (1, "lingering", 1.0, NAN, NAN)),
            *((2, "idle", 0.0, NAN, NAN), (2, "non-finite", 4.0, 17.0, NAN)),
            (3, "unjudged", NAN, NAN, NAN),
            (4, "lingering", 1e-3, NAN, 0.0),
        ],
        columns=["seed", "fault_outcome", "deviation_max", "nonfinite_step", "settling_steps"],
    )
    assert METRICS["harmed"].bounds(table)["low"].to_dict() == {1: 0.5, 2: 1.0, 4: 0.0}, "a trace is no harm"
    assert METRICS["nonfinite"].bounds(table)["low"].to_dict() == {1: 0.0, 2: 0.5}, "3 has fewer trials"
    found = METRICS["deviation"].bounds(table)
    assert found.loc[1].tolist() == pytest.approx([np.log(1e-3) / 2] * 2), "nothing counts as a thousandth of a nat"
    assert found.loc[2, "low"] == pytest.approx((np.log(1e-3) + np.log(4)) / 2) and found.loc[2, "high"] == np.inf
    pd.testing.assert_frame_equal(
        METRICS["aftermath"].bounds(table.rename(columns={"deviation_max": AFTERMATH})), found
    )


def test_the_loss_on_a_poisoned_batch_is_no_part_of_its_aftermath(tmp_path: Path) -> None:
    """It rises by 6 nat there, and by 0.5 on the batches after it; of a flipped weight every step counts."""
    study = Study(tmp_path / "out")
    rises = {0: 6.0, 1: 6.0, 2: 6.0, 3: 0.5, 4: 0.2}
    study.write(of_faults(lambda trial: rises), ("none",), [study.poison(3), study.flip()], rates=(1e-2,), seeds=(0,))
    found = with_outcomes(study.sweep, [METRICS["aftermath"]])
    by_fault = dict(zip(found["fault"].values.tolist(), found[AFTERMATH].values.tolist(), strict=True))
    assert (by_fault["rare_tokens"], by_fault["weight_bit"]) == pytest.approx((0.5, 6.0))
    assert by_fault["none"] != by_fault["none"]


@pytest.mark.parametrize(("fault", "is_poison"), [("random_tokens", True), ("weight_bit", False)])
def test_of_poisoned_batches_there_is_no_deviation(fault: str, is_poison: bool, tmp_path: Path) -> None:
    changes = {"of": {"fault": fault}, "against": None, "claimed": "below", "threshold": 2.0, "unit": "ratio"}
    words = [*TINY, f"fault=last_bit,{fault}", "fault.start=2"]
    for metric in ("deviation", "aftermath"):
        claim = claims(own(tmp_path, **changes, sweep=words, metric=metric))["mine"]
        if is_poison and metric == "deviation":
            with pytest.raises(
                ConfigError, match="metric=deviation: is that of the loss on a poisoned batch, .* aftermath"
            ):
                trials_of(claim)
        else:
            assert trials_of(claim)


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"of": {"mitigation": "qk_nrom"}}, "claim=mine: of: mitigation=qk_nrom: no trial has it; allowed: none, qk"),
        ({"against": {"widht": 16}}, "claim=mine: against: widht=16: unknown key; did you mean width? allowed keys: "),
        ({"against": {"seed": 100}}, "claim=mine: of=mitigation=qk_norm: shares 3 trials with seed=100"),
        ({"cells": ["widht"]}, "claim=mine: cells: widht: is no coordinate of these trials; allowed: "),
    ],
)
def test_arms_and_cells_that_no_trial_has(tmp_path: Path, changes: dict, reason: str) -> None:
    """Before anything is trained."""
    with pytest.raises(ConfigError) as error:
        trials_of(claims(own(tmp_path, **changes))["mine"])
    assert any(line.startswith(reason) for line in error.value.reasons), error.value.reasons


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threshold": 0.0}, "threshold=0.0: no margin; allowed: above 0"),
        ({"metric": "best_rate", "unit": "ratio", "threshold": 1.0}, "threshold=1.0: no margin; allowed: above 1"),
        ({"metric": "largest(grad_norm)"}, "unit=nat/token: not that of largest(grad_norm); allowed: ratio"),
        ({"against": {}}, "against={}: not keys and values"),
    ],
)
def test_thresholds_and_units(tmp_path: Path, changes: dict, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        claims(own(tmp_path, **changes))
    assert any(reason in line for line in error.value.reasons), error.value.reasons


def test_a_registration_does_not_depend_on_what_follows_from_the_rest(tmp_path: Path) -> None:
    """A unit is that of the metric; without another arm it is the claim's own."""
    one = claims(own(tmp_path))["mine"].registration
    assert claims(own(tmp_path, threshold=4.0))["mine"].registration != one
    alone = {"against": None, "metric": "largest(grad_norm)", "unit": "1"}
    names = {claims(own(tmp_path, **alone | {"unit": unit}))["mine"].registration for unit in ("1", "2")}
    assert len(names) == 2


def test_a_signal_that_no_trial_has_measured_decides_nothing(tmp_path: Path, capsys) -> None:
    """Nor does it say that nothing happened at this scale."""
    changes = {"metric": "last(second_moment_norm)", "unit": "ratio", "threshold": 2.0}
    folder, out = own(tmp_path, **changes, sweep=[*MINE["sweep"], "optim.name=sgd"]), tmp_path / "out"
    said = call(capsys, "run", "mine", f"out={out}", "--config-dir", str(folder), ONE)[1]
    (one,) = trained.verdicts(out, [claims(folder)["mine"]])
    assert one.verdict == "not measured: last(second_moment_norm)"
    assert NOT_HERE not in " ".join(said.split())


@pytest.mark.parametrize(
    ("metric", "more", "reason"),
    [
        (
            "last(attention_entropy)",
            "signals.attention_entropy=0",
            "signals.attention_entropy=0 never reads it; allowed: ",
        ),
        ("last(output_logz)", "train.steps=6", "the trials have no such signal; allowed: activation_kurtosis, "),
        (
            "largest(alarm_combined)",
            "detect=finite",
            "the trials have no such signal; allowed: activation_kurtosis, ",
        ),
        ("last(moe_load)", "train.steps=6", "the trials have no such signal; allowed: "),
    ],
)
def test_a_signal_that_no_trial_will_have(tmp_path: Path, metric: str, more: str, reason: str) -> None:
    """Of the metric or of the control: said before anything is trained."""
    sweep = [*(word for word in MINE["sweep"] if not word.startswith(more.partition("=")[0])), more]
    for changes in ({"metric": metric}, {"control": MINE["control"] | {"metric": metric}}):
        changes |= {"unit": "ratio", "threshold": 2.0} if "metric" in changes else {}
        claim = claims(own(tmp_path, **changes, sweep=sweep))["mine"]
        with pytest.raises(ConfigError) as refused:
            trials_of(claim)
        key = "metric" if "metric" in changes else "control.metric"
        assert f"claim=mine: {key}={metric}: {reason}" in str(refused.value)


def test_signals_of_readings_and_detectors_are_known_beforehand(tmp_path: Path) -> None:
    both = {"largest(alarm_combined)": "detect=combined", "last(attention_entropy)": "signals.attention_entropy=2"}
    for metric, more in both.items():
        claim = claims(own(tmp_path, metric=metric, unit="ratio", threshold=2.0, sweep=[*MINE["sweep"], more]))["mine"]
        assert trials_of(claim)


def test_a_part_registers_all_claims_whose_trials_it_may_train(tmp_path: Path, capsys) -> None:
    """Or a claim that shares trials with one that was trained before would be exploratory."""
    folder, out = own(tmp_path), tmp_path / "out"
    (folder / "claim" / "other.yaml").write_text(
        (folder / "claim" / "mine.yaml").read_text().replace("as well", "better")
    )
    words = (f"out={out}", "--config-dir", str(folder), ONE)
    assert call(capsys, "run", "mine", *words)[0] == 0
    status, said, _ = call(capsys, "run", "other", *words)
    assert status == 0 and "0 to train" in said and "exploratory" not in said
    said = call(capsys, "verdict", str(out), "--config-dir", str(folder))[1]
    assert "mine" in said and "other" in said and "qk_norm_costs_nothing" not in said


def test_a_metric_that_means_something_else_is_another_registration(tmp_path: Path, monkeypatch) -> None:
    """Of the claim's metric and of its control's; or a metric could be changed once its trials are seen."""
    claim = claims(own(tmp_path))["mine"]
    before = claim.registration
    for name in ("best_loss", "nonfinite", "lost"):
        with monkeypatch.context() as patch:
            patch.setitem(METRICS, name, dataclasses.replace(METRICS[name], version=9))
            assert (claim.registration != before) is (name != "lost"), name
    assert claim.registration == before


# --- from end to end ---------------------------------------------------------------------------------------------

FAULTY = {
    "sweep": [*TINY, "fault=last_bit,nan_gradient", "fault.start=2"],
    "metric": "harmed",
    "of": {"fault": "nan_gradient"},
    "against": {"fault": "last_bit"},
    "claimed": "above",
    "threshold": 0.5,
    "unit": "share",
    "control": {"metric": "nonfinite", "above": -1.0, "because": "there is none"},
}


def test_claims_of_one_arm_and_of_faults(tmp_path: Path, capsys) -> None:
    """And of a part of the trials nothing is said."""
    folder, out = own(tmp_path, **FAULTY), tmp_path / "out"
    command.write_yaml(folder, "claim/alone.yaml", (folder / "claim" / "mine.yaml").read_text())
    alone = {"sweep": [*TINY], "of": {"mitigation": "none"}, "against": None, "metric": "mean(learning_rate)"}
    alone |= {"claimed": "above", "threshold": 1e-5, "unit": "1"}
    alone["control"] = {"metric": "mean(loss)", "above": 1.0, "because": "there has to be a loss"}
    (folder / "claim" / "alone.yaml").write_text((own(tmp_path / "b", **alone) / "claim" / "mine.yaml").read_text())
    words = (f"out={out}", "--config-dir", str(folder), ONE)
    status, said, err = call(capsys, "run", "mine", "alone", *words)
    assert status == 0, err
    both = trained.verdicts(out, [claims(folder)[name] for name in ("mine", "alone")])
    assert [one.verdict for one in both] == [CONFIRMED, CONFIRMED] and not any(one.is_exploratory for one in both)
    (cell,) = both[0].cells
    assert (cell.judged.mean, cell.judged.low, cell.judged.high) == (1.0, 1.0, 1.0)
    (cell,) = both[1].cells
    sweep = analysis.open_sweep(out)
    clean = sweep.sel(trial=sweep.fault == "none")
    assert cell.judged.mean == pytest.approx(float(np.exp(np.log(clean.learning_rate.mean("step")).mean())), rel=1e-5)
    assert cell.control == pytest.approx(float(np.exp(np.log(clean.loss.mean("step")).mean())), rel=1e-5)
    # With more seeds in the claim the folder holds a part of its trials.
    own(tmp_path, **FAULTY, seeds=8)
    said = call(capsys, "verdict", str(out), "mine", "--config-dir", str(folder))[1]
    assert "unfinished: 8 of 16 trials" in " ".join(said.split()) and "confirmed" not in said
    said = call(capsys, "verdict", str(out), "--config-dir", str(folder))[1]
    assert said.startswith("1 claim unfinished: mine\n") and "alone" in said
