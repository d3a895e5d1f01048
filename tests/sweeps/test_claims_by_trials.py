"""Claims that trials decide: their files, what is compared, verdicts on simulated truth, and a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import analysis
from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath
from sweeps.claims import trained, verdicts
from sweeps.claims.measured import METRICS, metric_of
from sweeps.claims.registered import claims
from sweeps.claims.trained import Recipes, registration_of, trials_of
from sweeps.claims.verdicts import CONFIRMED, NOT_HERE, REFUTED, UNDECIDED, discoveries, interval, judge, together
from sweeps.commands import console
from tests.sweeps import command

TINY = [
    f"{key}={value}" for key, value in command.TINY.items() if not key.startswith(("hydra.", "pack.", "telemetry."))
]
MINE = {
    "claim": "A tiny model with QK-norm trains as well",
    "source": "Nobody et al.",
    "tags": ["own"],
    "sweep": [*TINY, "optim.lr=1e-9,1e-3,1e30", "mitigation=none,qk_norm"],
    "cells": ["width"],
    "metric": "best_loss",
    "of": {"mitigation": "qk_norm"},
    "against": {"mitigation": "none"},
    "claimed": "within",
    "threshold": 5.0,
    "unit": "nat/token",
    "seeds": 4,
    "control": {"metric": "nonfinite", "above": 0.2, "because": "a rate has to be too large"},
}
ONE = "hydra.launcher.workers=1"


def own(folder: Path, **changes: object) -> Path:
    """A folder with a claim `mine`, which has these values in place of its own; None: without the key."""
    (folder / "claim").mkdir(parents=True, exist_ok=True)
    tree = {key: value for key, value in (MINE | changes).items() if value is not None}
    (folder / "claim" / "mine.yaml").write_text(yaml.safe_dump(tree))
    return folder


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = console.run(["claims", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


# --- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [4, 8])
def test_verdicts_on_simulated_truth(seeds: int) -> None:
    """A null is confirmed in at most 2.5% of 4,000, twice the margin found in at least 90%, 95% of intervals hold it.

    Seeds differ by ten times what is measured, so that only pairs can tell.
    """
    rng, margin, runs = np.random.default_rng(seeds), 1.0, 4000
    told = {}
    covered = []
    for effect in (margin, 2 * margin):
        found = []
        for _ in range(runs):
            seed = rng.normal(0, 10, 2 * seeds)
            of, against = (seed + rng.normal(0, 0.5, 2 * seeds) for _ in range(2))
            differences = of + effect - against
            found.append(judge(differences, differences, "above", margin, seeds).verdict)
            low, high = interval(differences[:seeds], 0.95)
            covered.append(low <= effect <= high)
        told[effect] = {verdict: found.count(verdict) / runs for verdict in (CONFIRMED, REFUTED, UNDECIDED)}
    allowed = 3 * (0.025 * 0.975 / runs) ** 0.5  # of the simulation itself
    assert told[margin][CONFIRMED] <= 0.025 + allowed and told[margin][REFUTED] <= 0.025 + allowed, told
    assert told[2 * margin][CONFIRMED] >= 0.9 and told[2 * margin][REFUTED] <= 0.005, told
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.parametrize(
    ("values", "claimed", "threshold", "expected"),
    [
        ([-1.0, -1.1, -0.9, -1.0], "below", 0.0, CONFIRMED),
        ([1.0, 1.1, 0.9, 1.0], "below", 0.0, REFUTED),
        ([1.0, 1.1, 0.9, 1.0], "above", 0.0, CONFIRMED),
        ([1.0, 1.1, 0.9, 1.0], "above", 1.0, UNDECIDED),
        ([0.01, -0.01, 0.02, -0.02], "within", 0.5, CONFIRMED),
        ([2.0, 2.1, 1.9, 2.0], "within", 0.5, REFUTED),
        ([-2.0, -2.1, -1.9, -2.0], "within", 0.5, REFUTED),
        ([0.5, 0.6, 0.4, 0.5], "within", 0.5, UNDECIDED),
        ([np.nan, 1.0, 1.0, 1.0], "above", 0.0, UNDECIDED),
        ([1.0], "above", 0.0, UNDECIDED),
        ([], "above", 0.0, UNDECIDED),
    ],
)
def test_a_verdict(values: list[float], claimed: str, threshold: float, expected: str) -> None:
    assert judge(np.array(values), np.array(values), claimed, threshold, 4).verdict == expected


def test_the_p_value_is_that_of_the_verdicts_side() -> None:
    """So that what is refuted clearly is a discovery, too."""
    values = np.array([1.0, 1.1, 0.9, 1.0])
    refuted, confirmed = (judge(values, values, claimed, 0.0, 4) for claimed in ("below", "above"))
    assert (refuted.verdict, confirmed.verdict) == (REFUTED, CONFIRMED) and refuted.p == confirmed.p < 0.01
    open_below = judge(np.full(4, -np.inf), values, "below", 0.0, 4)
    assert open_below.verdict == UNDECIDED and np.isnan(open_below.mean) and open_below.low == -np.inf


def test_a_second_look_takes_twice_the_seeds_and_no_more() -> None:
    noisy = np.array([2.0, -1.5, 2.5, -1.0])
    assert judge(noisy, noisy, "above", 0.0, 4).verdict == UNDECIDED
    clear = np.concatenate([noisy, np.full(4, 2.0)])
    more = np.concatenate([clear, np.full(8, -9.0)])
    judged = judge(more, more, "above", 0.0, 4)
    assert judged.pairs == 8 and judged.mean == pytest.approx(clear.mean()), "what comes after is not looked at"
    assert judge(clear[:7], clear[:7], "above", 0.0, 4).pairs == 4


def test_an_effect_within_what_a_grid_can_tell_is_undecided() -> None:
    """Eight seeds that agree on neighbouring rates say no more than that the edge moved by at most two steps."""
    low, high = np.zeros(8), np.full(8, np.log(4.0))
    judged = judge(low, high, "above", 0.0, 8)
    assert judged.verdict == UNDECIDED and (judged.low, judged.high) == pytest.approx((0.0, np.log(4.0)))
    assert judge(low + 1, high + 1, "above", 0.0, 8).verdict == CONFIRMED


@pytest.mark.parametrize(
    ("low", "high", "claimed", "expected"),
    [
        (1.0, np.inf, "above", CONFIRMED),
        (1.0, np.inf, "below", REFUTED),
        (-1.0, np.inf, "below", UNDECIDED),
        (-1.0, np.inf, "within", UNDECIDED),
        (-np.inf, -1.0, "below", CONFIRMED),
        (-np.inf, 1.0, "above", UNDECIDED),
        (-np.inf, np.inf, "above", UNDECIDED),
    ],
)
def test_an_edge_beyond_the_rates_that_were_tried(low: float, high: float, claimed: str, expected: str) -> None:
    """One seed of eight is enough: what lies beyond the grid may be anywhere."""
    lows, highs = np.full(8, max(low, -1.0)), np.full(8, min(high, 1.0))
    lows[3], highs[3] = low, high
    assert judge(lows, highs, claimed, 0.5, 8).verdict == expected


def test_claims_over_cells_and_many_claims_at_once() -> None:
    assert together([CONFIRMED, CONFIRMED]) == CONFIRMED
    assert together([CONFIRMED, REFUTED]) == UNDECIDED == together([CONFIRMED, UNDECIDED])
    assert together([NOT_HERE, REFUTED]) == REFUTED and together([NOT_HERE]) == NOT_HERE == together([])
    p = [0.001, 0.9, 0.02, 0.2, float("nan")]
    assert discoveries(p) == [True, False, True, False, False]
    assert discoveries([0.06, 0.06]) == [True, True] and discoveries([]) == []


# --- what is compared --------------------------------------------------------------------------------------------


def table(rows: list[tuple[int, float, float, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["seed", "lr", "capped_loss", "outcome"])


def test_the_numbers_of_each_seed() -> None:
    rows = table(
        [
            *((100, 0.1, 3.0, "trained"), (100, 0.2, 2.0, "trained"), (100, 0.4, 5.0, "divergent")),
            *((101, 0.1, 3.0, "trained"), (101, 0.2, 5.0, "divergent"), (101, 0.4, 4.0, "trained")),
            (102, 0.1, 3.0, "trained"),  # lacks rates
        ]
    )
    named = ("best_loss", "sensitivity", "lost", "stable_rate")
    bounds = {name: METRICS[name].bounds(rows) for name in named}
    values = {name: found["low"].to_dict() for name, found in bounds.items()}
    assert all((bounds[name]["low"] == bounds[name]["high"]).all() for name in named[1:3])
    assert bounds["best_loss"]["high"].to_dict() == {100: 3.0, 101: 3.0}, "at the rate that is best on average"
    assert (bounds["best_loss"]["low"] == -np.inf).all(), "which is the first: a better one may lie below"
    assert values["sensitivity"] == pytest.approx({100: 10 / 3 - 2, 101: 4 - 3})
    assert values["lost"] == pytest.approx({100: 1 / 3, 101: 1 / 3})
    assert values["stable_rate"] == pytest.approx({100: np.log(0.2), 101: np.log(0.1)}), "with all smaller ones"
    assert bounds["stable_rate"]["high"].to_dict() == pytest.approx({100: np.log(0.4), 101: np.log(0.2)})
    ends = table([(seed, lr, 1.0, end) for seed, end in ((1, "divergent"), (2, "trained")) for lr in (0.1, 0.2)])
    found = METRICS["stable_rate"].bounds(ends)
    assert found.loc[1].tolist() == [-np.inf, np.log(0.1)] and found.loc[2].tolist() == [np.log(0.2), np.inf]


def test_the_largest_rate_below_a_loss_is_looked_for_from_the_best_one_on() -> None:
    """Lower rates may be too slow; what is lower again behind a gap does not count, nor what was lost."""
    losses = {
        1: (3.3, 2.6, 2.9, 3.2, 2.8),  # from 0.2 to 0.4
        2: (3.3, 3.2, 3.3, 3.3, 3.3),  # nowhere
        3: (2.9, 2.8, 2.8, 2.7, 2.6),  # beyond the last
        4: (2.5, 2.6, np.nan, 2.6, 2.6),  # lost at 0.4
    }
    rates = (0.1, 0.2, 0.4, 0.8, 1.6)
    rows = [
        (seed, lr, 5.0 if np.isnan(loss) else loss, "divergent" if np.isnan(loss) else "trained")
        for seed, of_seed in losses.items()
        for lr, loss in zip(rates, of_seed, strict=True)
    ]
    metric = metric_of("rate_below(3.0)")
    found = np.exp(metric.bounds(table(rows)))
    assert metric.is_ratio and metric.unit == "ratio"
    for seed, ends in {1: (0.4, 0.8), 2: (0.0, 0.1), 3: (1.6, np.inf), 4: (0.2, 0.4)}.items():
        assert found.loc[seed].tolist() == pytest.approx(list(ends)), seed
    with pytest.raises(ConfigError, match=r"metric=rate_below: unknown metric.*rate_below\(LOSS\)"):
        metric_of("rate_below")


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metric": "los"}, "metric=los: unknown metric; did you mean lost?"),
        ({"control": None}, "control: is missing; allowed: claim, source, tags, sweep, cells, metric"),
        ({"control": {"metric": "lost"}}, "control.above: is missing; allowed: metric, above, because"),
        ({"control": MINE["control"] | {"metric": "x"}}, "control.metric=x: unknown control.metric"),
        ({"unit": "share"}, "unit=share: not that of best_loss; allowed: nat/token"),
        ({"unit": None}, "unit: is missing"),
        ({"claimed": "lower"}, "claimed=lower: unknown; allowed: below, above, within"),
        ({"seeds": 2}, "seeds=2: out of range; allowed: 4 to 64"),
        ({"seeds": 4.5}, "seeds=4.5: not a whole number"),
        ({"threshold": "1"}, "threshold='1': not a number"),
        ({"sweep": ["seed=1"]}, "sweep: has a seed, an out or a study"),
        ({"sweep": [3]}, "sweep=[3]: not words"),
        ({"of": {"mitigation": "none"}}, "the same as against; allowed: two arms"),
        ({"metric": "stable_rate", "unit": "ratio", "threshold": 0.0}, "threshold=0.0: no margin; allowed: above 1"),
        ({"extra": 1}, "extra: unknown key"),
        ({"slope": 2}, "slope=2: not text"),
        ({"control": MINE["control"] | {"of": "none"}}, "control.of='none': not keys and values"),
    ],
)
def test_a_bad_claim_is_a_line_for_each_reason(tmp_path: Path, changes: dict, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        claims(own(tmp_path, **changes))
    assert any(reason in line and "mine.yaml" in line for line in error.value.reasons), error.value.reasons


def test_a_cell_that_cannot_run_is_told(tmp_path: Path, capsys) -> None:
    folder = own(tmp_path, sweep=["model.width=30", "mitigation=none,qk_norm"])
    status, said, err = call(capsys, "run", "mine", f"out={tmp_path / 'out'}", "--config-dir", str(folder))
    assert status == 2 and said == "" and "claim=mine: model.width=30: not divisible" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "qk_norm_sensitivity"), "out: given 0 times; allowed: once"),
        (("run", "fp16_range", "out=o"), "NAME=fp16_range: is decided by arithmetic"),
        (("run", "--tag", "costs", "out=o"), "--tag costs: none of its claims is decided by trials"),
        (("run", "nope", "out=o"), "claim=nope: unknown claim"),
        (
            ("run", "qk_norm_sensitivity", "--part", "1", "out=o"),
            "--part 1: of all claims alone; allowed: --all --part",
        ),
        (("run", "out=o"), "--all: missing, as NAME and --tag are; allowed: NAME ..., --tag TAG, or --all"),
        (("run", "--all", "--tag", "costs", "out=o"), "--all: with NAME or --tag; allowed: NAME ..., "),
        (("verdict", "/nowhere"), "/nowhere"),
        (("run", "qk_norm_sensitivity", "out=o", "optim.lr=1"), "optim.lr=1: is not of the run"),
        (("run", "qk_norm_sensitivity", "out=o", "study=depth"), "study=depth: is not of the run"),
    ],
)
def test_wrong_words(capsys, words: tuple[str, ...], said: str) -> None:
    status, _, err = call(capsys, *words)
    assert status == 2 and said in err


def test_ours_can_be_planned_and_share_trials() -> None:
    known = [claim for claim in claims().values() if claim.trials is not None]
    recipes: Recipes = {}
    both = {claim.name: trials_of(claim, 2, recipes) for claim in known}
    trials = {
        claim.name: {trial.id for trial in both[claim.name] if trial.seed < 100 + claim.trials.seeds} for claim in known
    }
    assert len(known) >= 6 and len(set().union(*trials.values())) < 0.8 * sum(map(len, trials.values()))
    for claim in known:
        seeds = {trial.seed for trial in both[claim.name]}
        assert seeds == set(range(100, 100 + 2 * claim.trials.seeds)), "fresh ones"
        assert 2 * len(trials[claim.name]) == len(both[claim.name])
    assert {trial.id for trial in trials_of(known[0])} == trials[known[0].name]


def test_an_arm_that_cannot_act_is_refused(tmp_path: Path) -> None:
    folder = own(tmp_path, sweep=[*TINY, "mitigation=none,zclip"], of={"mitigation": "zclip"})
    with pytest.raises(ConfigError, match="claim=mine: mitigation=zclip: .* nothing is clipped in 6 steps"):
        trials_of(claims(folder)["mine"])


def test_null_is_a_level_as_on_the_command_line(tmp_path: Path) -> None:
    folder = own(tmp_path, sweep=[*TINY, "optim.clip=null,1"], of={"clip": 1}, against={"clip": None})
    test = claims(folder)["mine"].trials
    assert test is not None and (test.of, test.against) == (("clip=1",), ("clip=null",))


def test_a_claim_may_be_of_parts_beside_it(tmp_path: Path) -> None:
    folder = own(tmp_path, sweep=[*TINY, "mitigation=none,mine"], of={"mitigation": "mine"})
    command.write_yaml(folder, "mitigation/mine.yaml", "optim: {clip: 0.5}\n")
    claim = claims(folder)["mine"]
    assert {trial.mitigation for trial in trials_of(claim)} == {"none", "mine"}
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "claim").mkdir(parents=True)
    (elsewhere / "claim" / "mine.yaml").write_text((folder / "claim" / "mine.yaml").read_text())
    command.write_yaml(elsewhere, "mitigation/mine.yaml", "optim: {clip: 0.5}\n")
    assert claims(elsewhere)["mine"].registration == claim.registration, "wherever its file is"


# --- from end to end ---------------------------------------------------------------------------------------------


def test_a_claim_is_registered_trained_and_judged(tmp_path: Path, capsys) -> None:
    folder, out = own(tmp_path), tmp_path / "out"
    words = ("run", "mine", f"out={out}", "--config-dir", str(folder), ONE)
    status, said, err = call(capsys, *words)
    assert status == 0, err
    assert "24 trials in all" in said and "confirmed" in said and "exploratory" not in said
    claim = claims(folder)["mine"]
    known = registration_of(ResultsPath.open(out), claim)
    assert known is not None and known.registration == claim.registration
    page = (out / "claims.md").read_text()
    assert "**confirmed**. Source: Nobody et al." in page and claim.registration in page
    assert (out / "figures" / "claim_mine.png").read_bytes()[:4] == b"\x89PNG"
    # The effect is the difference of the means, seed by seed.
    sweep = analysis.open_sweep(out)
    small = sweep.sel(trial=sweep.lr == 1e-3)
    losses = {name: small.final_validation_loss.values[small.mitigation.values == name] for name in ("none", "qk_norm")}
    (verdict,) = trained.verdicts(out, [claim])
    (cell,) = verdict.cells
    assert cell.judged.mean == pytest.approx(losses["qk_norm"].mean() - losses["none"].mean(), abs=1e-6)
    lost = (sweep.outcome.values == "non-finite")[sweep.mitigation.values == "none"]
    assert cell.control == pytest.approx(lost.mean()) == pytest.approx(1 / 3) and cell.is_acting
    assert cell.judged.pairs == 4
    # Again: nothing is trained, and the same is said.
    status, again, _ = call(capsys, *words)
    assert status == 0 and "0 to train" in again
    assert call(capsys, "verdict", str(out), "mine", "--config-dir", str(folder))[0] == 0
    # What is registered and not known, and what takes no trials, is said.
    status, said, err = call(capsys, "verdict", str(out))
    assert status == 2 and "mine: registered here, and no claim that is known (--config-dir)" in said
    assert "has no claim with all of its trials; allowed: claims run NAME" in err
    status, _, err = call(capsys, "verdict", str(out), "fp16_range")
    assert status == 2 and "NAME=fp16_range: is decided by arithmetic; allowed: claims fp16_range" in err
    assert console.run(["verify", str(out)]) == 0


def test_what_is_older_than_its_registration_is_exploratory(tmp_path: Path, capsys) -> None:
    """Trials that were there before, and a claim whose text or threshold was changed since."""
    folder, out = own(tmp_path), tmp_path / "out"
    sweep = command.call("study=grid", f"out={out}", *MINE["sweep"], "seed=range(100,104)", ONE)
    assert sweep.status == 0, sweep.err
    words = ("run", "mine", f"out={out}", "--config-dir", str(folder), ONE)
    assert "confirmed (exploratory)" in call(capsys, *words)[1]
    fresh = tmp_path / "fresh"
    words = ("run", "mine", f"out={fresh}", "--config-dir", str(folder), ONE)
    assert "exploratory" not in call(capsys, *words)[1]
    own(tmp_path, threshold=4.0)
    assert "confirmed (exploratory)" in call(capsys, "verdict", str(fresh), "mine", "--config-dir", str(folder))[1]


def test_without_the_failure_of_the_control_nothing_is_refuted(tmp_path: Path, capsys) -> None:
    folder, out = own(tmp_path, sweep=[*TINY, "optim.lr=1e-3,2e-3", "mitigation=none,qk_norm"]), tmp_path / "out"
    said = call(capsys, "run", "mine", f"out={out}", "--config-dir", str(folder), ONE)[1]
    assert NOT_HERE in said and ": too little" in said and "refuted" not in said


def test_undecided_takes_twice_the_seeds_once(tmp_path: Path, capsys) -> None:
    folder, out = own(tmp_path, claimed="below", threshold=0.0), tmp_path / "out"
    said = call(capsys, "run", "mine", f"out={out}", "--config-dir", str(folder), ONE)[1]
    if "undecided: twice the seeds" in said:
        assert set(analysis.open_sweep(out).seed.values) == set(range(100, 108))
    else:
        assert set(analysis.open_sweep(out).seed.values) == set(range(100, 104))


def test_a_damaged_registration_is_named(tmp_path: Path, capsys) -> None:
    folder, out = own(tmp_path), tmp_path / "out"
    words = ("--config-dir", str(folder))
    assert call(capsys, "run", "mine", f"out={out}", *words, ONE)[0] == 0
    file = out / "registered" / "mine.json"
    record = json.loads(file.read_text())
    file.write_text(file.read_text().replace(record["registration"], "0" * 16))
    status, _, err = call(capsys, "verdict", str(out), "mine", *words)
    assert status == 2 and str(file) in err
    assert console.run(["verify", str(out)]) == 1
    assert str(file) in capsys.readouterr().out


def test_the_levels_of_both_looks_are_five_percent_together() -> None:
    assert sum(verdicts.LOOKS) < 0.05 and verdicts.LOOKS[0] < verdicts.LOOKS[1]
