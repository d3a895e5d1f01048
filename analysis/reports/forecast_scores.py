"""What `forecast --score` and `--turns` say, in lines: how right sealed forecasts were, and what turns around."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from analysis.figures.drawing import Drawing
from analysis.figures.files import save_picture
from analysis.figures.forecasts import accuracy_against_cost, forecast_bands, reliability, turning_pairs
from analysis.forecast_scores.decisions import (
    DECIDED,
    Decision,
    Ranked,
    Reversal,
    by_size,
    cost_ratio,
    decision,
    of_forecasters,
    reversals,
)
from analysis.forecast_scores.scores import FLOOR, REFERENCES, Scored, Truth, said_of, scored, truths
from analysis.forecast_scores.sealing import (
    COVERAGE,
    SEAL,
    Sealed,
    data_hash,
    read_seal,
)
from analysis.measures.forecast_targets import Observations, observed
from analysis.reading.open_sweep import open_sweep, open_with_packs
from analysis.reading.selection import selected
from analysis.reports.forecast import DEFAULT, told_of
from analysis.reports.printed import table_lines
from harness.basics.printing import count, label
from harness.config import ConfigError

FEWEST_SKILLED = 3  # targets
SCORE_SAID = (
    "score: weighted interval score, of `divergent` the Brier score; lower is better. 50, 80, 95%: how many means over "
    "test seeds lie within such an interval, which their own error widens. skill: 1 - score / that of the reference, "
    "over units both have forecast, with 95% bootstrap intervals over recipes and seeds. floor: half of the test seeds "
    "forecast the other half."
)


def told_scores(out: Path, file: Path, wheres: Sequence[str] = (), figures: Path | None = None) -> list[str]:
    """Tables of scores, of decisions and of what turns around, and the registered marks. Raises ConfigError."""
    sealed = read_seal(file)
    before, after, notes = _before_and_after(sealed, out)
    known = observed(selected(before, sealed.tree["fit"]), sealed.at)
    if data_hash(known) != sealed.tree["data"]:
        notes.append("Note: the trials that were forecast from are not those that the folder has now.")
    with told_of(f"out={out}"):
        test = observed(selected(after, wheres), sealed.at)
    truth = truths(sealed, test)
    if not truth:
        raise ConfigError(
            f"out={out}: no cell has two finished seeds of one target yet; allowed: more trials of {file}"
        )
    said = {target: said_of(sealed, one, test.features) for target, one in truth.items()}
    results = [row for one in truth.values() for row in scored(sealed, one, test.features)]
    small = _small_sizes(truth, known)
    decided = {name: decision(parts) for name, parts in of_forecasters(said, truth).items() if parts}
    both = Observations({target: pd.concat([known.tables[target], test.tables[target]]) for target in truth})
    turned = [one for target in DECIDED for one in reversals(both, target)]
    sizes = ", ".join(f"{width:g} x {depth:g}" for width, depth in test.sizes)
    lines = [f"Sealed {sealed.tree['sealed_at']}, {sealed.tree[SEAL]}", f"Sizes (width x depth): {sizes}", *notes, ""]
    lines += [*_score_lines(results), "", SCORE_SAID, "", *_decision_lines(decided), ""]
    lines += [*_small_lines(small), "", *_reversal_lines(turned), "", *_mark_lines(results, decided)]
    if figures is not None:
        lines += ["", *_draw(figures, sealed, (known, test, both), truth, said, small, turned)]
    return lines


def _before_and_after(sealed: Sealed, out: Path) -> tuple[xr.Dataset, xr.Dataset, list[str]]:
    """The trials that were begun before the seal, those of forecast sizes begun after it, and what is to be said."""
    sweep, packs = open_with_packs(out)
    notes = [] if sealed.code_is_ours else ["Note: the forecasters that are installed are not those that were sealed."]
    sealed_at = datetime.datetime.fromisoformat(sealed.tree["sealed_at"])
    early = [p.id for p in packs if datetime.datetime.fromisoformat(str(p.attributes["created"])) < sealed_at]
    is_early = np.isin(sweep["pack"].values, early)
    forecast = set(zip(sealed.units["width"], sealed.units["depth"], strict=True))
    sizes = zip(sweep["width"].values.astype(float), sweep["depth"].values.astype(float), strict=True)
    is_forecast = np.array([size in forecast for size in sizes], bool)
    if (is_early & is_forecast).any():
        number = count(int((is_early & is_forecast).sum()), "trial")
        notes.append(f"Note: {number} of forecast sizes, begun before the seal, left out.")
    places = np.flatnonzero(is_early & ~is_forecast), np.flatnonzero(~is_early & is_forecast)
    if not len(places[1]):
        raise ConfigError(f"out={out}: has no trial of a forecast size that was begun after the seal; allowed: some")
    return sweep.isel(trial=places[0]), sweep.isel(trial=places[1]), notes


def told_turns(out: Path, wheres: Sequence[str] = (), figures: Path | None = None) -> list[str]:
    """Which pairs of recipes turn around from the smallest size of a sweep to the largest. Raises ConfigError."""
    with told_of(f"out={out}"):
        observations = observed(selected(open_sweep(out), wheres))
    turned = [one for target in DECIDED for one in reversals(observations, target)]
    sizes = ", ".join(f"{width:g} x {depth:g}" for width, depth in observations.sizes)
    lines = [f"Sizes (width x depth): {sizes}", "", *_reversal_lines(turned)]
    if figures is not None:
        lines += ["", *_saved(figures, {"forecast_reversals": turning_pairs(turned, observations)})]
    return lines


def _score_lines(results: Sequence[Scored]) -> list[str]:
    rows = []
    for one in results:
        row: dict[str, object] = {"target": one.target, "forecaster": one.forecaster, "units": one.units}
        row["score"] = f"{one.score:.3g}" + (f" (log {one.log_score:.3g})" if one.log_score == one.log_score else "")
        for nominal in (0.5, 0.8, 0.95):
            inside = one.coverage.get(nominal)
            row[f"{nominal:.0%}"] = "-" if inside is None else f"{inside[0]:.0%} [{inside[1]:.0%}, {inside[2]:.0%}]"
        for reference in REFERENCES:
            skill = one.skill.get(reference)
            is_known = skill is not None and skill[0] == skill[0] and one.forecaster != FLOOR
            row[f"skill over {reference}"] = (
                f"{skill[0]:.2f} [{skill[1]:.2f}, {skill[2]:.2f}]" if is_known and skill else "-"
            )
        rows.append(row)
    return table_lines(pd.DataFrame(rows))


def _decision_row(name: str, found: Decision) -> dict[str, object]:
    def told(interval: tuple[float, float, float]) -> str:
        value, low, high = interval
        return "-" if value != value else f"{value:.0%} [{low:.0%}, {high:.0%}]"

    return {
        "told by": name,
        "pairs": found.pairs,
        "right": told(found.accuracy),
        "resolved": found.resolved,
        "right of them": told(found.on_resolved),
        "tau-b": f"{found.tau:.2f}",
        "regret": "-" if found.regret != found.regret else f"{found.regret:.3f}",
    }


def _decision_lines(decided: dict[str, Decision]) -> list[str]:
    rows = [_decision_row(name, one) for name, one in decided.items()]
    words = f"Which of two recipes is better, by {', '.join(DECIDED)}. A random guess is right in 50%; "
    words += "regret: by how much the recipe said to have the lowest loss is worse, nat/token:"
    return [words, *table_lines(pd.DataFrame(rows))] if rows else []


Small = list[tuple[str, float, Decision]]


def _small_sizes(truth: dict[str, Truth], known: Observations) -> Small:
    """How well each trained size says by itself which recipe is better at the sizes forecast, and its cost."""
    parts: dict[tuple[float, float], list[Ranked]] = {}
    for target in DECIDED:
        if target in truth:
            for size, found in by_size(truth[target], known).items():
                parts.setdefault(size, []).extend(found)
    wanted = [size for one in truth.values() for size in zip(one.units["width"], one.units["depth"], strict=True)]
    largest = max(wanted, key=lambda size: cost_ratio(size, (1.0, 1.0)))
    return [
        (f"{size[0]:g} x {size[1]:g}", cost_ratio(size, largest), decision(found))
        for size, found in sorted(parts.items(), key=lambda item: cost_ratio(item[0], largest))
        if found
    ]


def _small_lines(small: Small) -> list[str]:
    rows = [_decision_row(name, one) | {"cost": f"{cost:.1%}"} for name, cost, one in small]
    if not rows:
        return []
    words = "The same by what one smaller size has shown; cost: its parameters over those of the largest size forecast:"
    return [words, *table_lines(pd.DataFrame(rows).rename(columns={"told by": "width x depth"}))]


def _reversal_lines(turned: Sequence[Reversal]) -> list[str]:
    if not turned:
        return ["No pair of recipes turns around from the smallest size to the largest at 10% false discoveries."]
    rows = [
        {
            "target": one.target,
            "recipes": f"{label(one.one)} - {label(one.other)}",
            "smallest size": _ends(one.small),
            "largest size": _ends(one.large),
        }
        for one in turned
    ]
    words = "What turns around from the smallest size to the largest, at 10% false discoveries; not yet on other seeds:"
    return [words, *table_lines(pd.DataFrame(rows))]


def _ends(interval: tuple[float, float, float]) -> str:
    return f"{interval[0]:.3g} [{interval[1]:.3g}, {interval[2]:.3g}]"


def _mark_lines(results: Sequence[Scored], decided: dict[str, Decision]) -> Iterator[str]:
    """The registered marks, of our forecaster."""
    own = [one for one in results if one.forecaster == DEFAULT]
    low, high = COVERAGE
    inside = [(one.coverage[0.8][0], one.units) for one in own if one.coverage]
    if inside:
        share = sum(value * units for value, units in inside) / sum(units for _, units in inside)
        ends = min(value for value, _ in inside), max(value for value, _ in inside)
        of_all = f"{share:.0%} of all units ({ends[0]:.0%} to {ends[1]:.0%} by target)"
        yield f"Registered: 80% intervals hold {low:.0%} to {high:.0%}: {of_all}; {_met(low <= share <= high)}."
    skilled = [one.target for one in own if all(name in one.skill and one.skill[name][1] > 0 for name in REFERENCES)]
    words = ", ".join(skilled) or "none"
    is_met = len(skilled) >= FEWEST_SKILLED
    yield f"Registered: skill above 0 over both references for {FEWEST_SKILLED} targets: {words}; {_met(is_met)}."
    if DEFAULT in decided:
        value, lowest, _ = decided[DEFAULT].on_resolved
        is_met = value >= 0.80 and lowest > 0.65
        told = f"{value:.0%}, at least {lowest:.0%}; {_met(is_met)}"
        yield f"Registered: resolved pairs right in 80%, at least 65%: {told}."


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _draw(
    folder: Path,
    sealed: Sealed,
    observations: tuple[Observations, Observations, Observations],  # known, test, and both
    truth: dict[str, Truth],
    said: dict[str, dict[str, np.ndarray]],
    small: Small,
    turned: Sequence[Reversal],
) -> Iterator[str]:
    known, test, both = observations
    drawings = {
        f"forecast_{target}": forecast_bands(sealed, DEFAULT, target, known, test)
        for target in ("edge", "loss")
        if target in truth
    }
    if "divergent" in truth:
        drawings["forecast_reliability"] = reliability(truth["divergent"], said["divergent"])
    if small:
        drawings["forecast_decisions"] = accuracy_against_cost(small)
    drawings["forecast_reversals"] = turning_pairs(turned, both)
    return _saved(folder, drawings)


def _saved(folder: Path, drawings: Mapping[str, Drawing]) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        if drawing.figure is not None:
            file = folder / f"{name}.svg"
            save_picture(drawing.figure, file, name)
            yield f"Figure: {file} {drawing.caption}"
