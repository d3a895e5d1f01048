"""What the command `forecast` says, in lines: forecasts of larger models, and how right sealed ones were."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

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
from analysis.forecast_scores.scores import FLOOR, Scored, Truth, said_of, scored, truths
from analysis.forecast_scores.sealing import (
    AT,
    COVERAGE,
    SEAL,
    Sealed,
    check_enough,
    data_hash,
    forecast_all,
    known_of,
    read_seal,
    seal,
    sizes_of,
    units_of,
    wanted_units,
    widest,
)
from analysis.forecasts.base import LEVELS, MIDDLE, Known, forecasters
from analysis.measures.forecast_targets import CELL, Observations, observed, observed_runs
from analysis.reading.open_sweep import open_sweep, open_with_packs
from analysis.reading.selection import selected
from analysis.reports.printed import table_lines
from harness.basics.printing import count, label
from harness.config import ConfigError

DEFAULT = "hierarchical"
LOW, HIGH = LEVELS.index(0.1), LEVELS.index(0.9)
FEWEST_SKILLED = 3  # targets
SHOWN = ("edge", "loss", "sensitivity")
SAID = (
    "In brackets 80% intervals for the mean over many seeds. largest stable rate: bounded by the rates tried. "
    "A forecast goes beyond everything that was trained: train the size, and score it."
)
SCORE_SAID = (
    "score: weighted interval score, of `divergent` the Brier score; lower is better. 50, 80, 95%: how many means over "
    "test seeds lie within such an interval, which their own error widens. skill: 1 - score / that of the reference, "
    "over units both have forecast, with 95% bootstrap intervals over recipes and seeds. floor: half of the test seeds "
    "forecast the other half."
)


def told_forecast(out: Path, fit: Sequence[str], predict: Sequence[str], tune: Sequence[str], by: str) -> list[str]:
    """A line for each recipe and size. Raises ConfigError."""
    _check_name(by)
    with _named(f"out={out}"):
        known, sizes = known_of(open_sweep(out), fit, predict, tune, AT)
    return _forecast_lines(known, wanted_units(known.observations, sizes), by)


def told_from_table(file: Path, predict: Sequence[str], by: str) -> list[str]:
    """The same from a table of runs. Raises ConfigError."""
    _check_name(by)
    try:
        table = pd.read_csv(file)
    except OSError as error:
        raise ConfigError(f"--from {file}: {error.strerror}; allowed: a CSV file") from None
    except (ValueError, pd.errors.ParserError) as error:
        raise ConfigError(f"--from {file}: {str(error).splitlines()[0]}; allowed: a CSV file") from None
    with _named(f"--from {file}"):
        observations = observed_runs(table)
        check_enough(observations)
        has_widths = "width" in [str(name).strip().lower() for name in table]
        sizes = sizes_of(_of_parameters(predict) if not has_widths else _with_depth(predict, observations))
    known = Known(observations, tuple(widest(observations)))
    return _forecast_lines(known, wanted_units(observations, sizes), by)


def _of_parameters(predict: Sequence[str]) -> list[str]:
    """`parameters=N` as the width of one block of so many. Raises ConfigError."""
    found = []
    for where in predict:
        key, _, text = where.partition("=")
        if key != "parameters":
            raise ConfigError(f"--predict {where:.60}: the table knows parameters alone; allowed: parameters=N[,N]")
        try:
            found += [f"{(float(word) / 12) ** 0.5!r}" for word in text.split(",")]
        except ValueError:
            raise ConfigError(f"--predict {where:.60}: not numbers; allowed: parameters=N[,N]") from None
    return [f"width={','.join(found)}", "depth=1"]


def _with_depth(predict: Sequence[str], observations: Observations) -> list[str]:
    depths = sorted({depth for _, depth in observations.sizes})
    has_depth = any(where.startswith("depth=") for where in predict)
    return [*predict, *([] if has_depth else [f"depth={','.join(f'{depth:g}' for depth in depths)}"])]


def _check_name(by: str) -> None:
    if by not in forecasters():
        raise ConfigError(f"--by {label(by)}: unknown; allowed: {', '.join(forecasters())}")


class _named:
    """Reasons that are told of a key."""

    def __init__(self, key: str):
        self._key = key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            reasons = (r if r.startswith("--") or r.startswith("out=") else f"{self._key}: {r}" for r in error.reasons)
            raise ConfigError(*reasons) from None


def _forecast_lines(known: Known, units: pd.DataFrame, by: str) -> list[str]:
    said, _ = forecast_all(known, units)
    if by not in said:
        raise ConfigError(f"--by {by}: says nothing of what was observed; allowed: {', '.join(said) or 'none'}")
    return [*_forecast_table(Sealed({"units": _rows(units), "forecasts": said}), by), "", SAID]


def _rows(units: pd.DataFrame) -> list[list[object]]:
    return [list(row) for row in units.itertuples(index=False)]


def _forecast_table(sealed: Sealed, by: str) -> list[str]:
    """Of each cell the largest stable rate, the loss at the best rate, and LR sensitivity."""
    units, rows = sealed.units, []
    cells = units_of(units, "edge")
    forecast = {target: sealed.quantiles(by, target) for target in SHOWN}
    for place in cells:
        cell = units.iloc[place]
        row: dict[str, object] = {name: f"{cell[name]:g}" if name != "recipe" else label(cell[name]) for name in CELL}
        for target, values in forecast.items():
            quantiles = None if values is None else values[place]
            row["largest stable rate" if target == "edge" else target] = _told(quantiles, is_log=target == "edge")
        rows.append(row)
    lines = [f"forecaster: {by} ({forecasters()[by].about})", ""]
    if any(values is not None for values in forecast.values()):
        lines += [*table_lines(pd.DataFrame(rows)), ""]
    return [*lines, *_probability_table(sealed, by)]


def _probability_table(sealed: Sealed, by: str) -> list[str]:
    """How likely a run does not train, a row a cell and a column a rate; empty where nothing is said of it."""
    values = sealed.quantiles(by, "divergent")
    if values is None:
        return []
    units = sealed.units.assign(p=values[:, 0])
    units = units.iloc[units_of(sealed.units, "divergent")]
    table = units.pivot_table(index=CELL, columns="lr", values="p", sort=False).reset_index()
    table.columns = [name if isinstance(name, str) else f"{name:g}" for name in table.columns]
    shown = table.assign(recipe=[label(recipe) for recipe in table["recipe"]])
    rates = [name for name in shown if name not in CELL]
    shown = shown.assign(**{name: [f"{p:.2f}" for p in shown[name]] for name in rates})
    return ["Probability that a run does not train, by learning rate:", *table_lines(shown)]


def _told(quantiles: np.ndarray | None, is_log: bool) -> str:
    if quantiles is None or np.isnan(quantiles).any():
        return "-"
    middle, low, high = (10**quantiles if is_log else quantiles)[[MIDDLE, LOW, HIGH]]
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def told_seal(
    out: Path, fit: Sequence[str], predict: Sequence[str], tune: Sequence[str], file: Path, by: str
) -> list[str]:
    """Seal forecasts, and say what they are. Raises ConfigError."""
    _check_name(by)
    with _named(f"out={out}"):
        sealed = seal(out, open_sweep(out), fit, predict, tune, file)
    lines = _forecast_table(sealed, by) if by in sealed.names else []
    cells = len(units_of(sealed.units, "edge"))
    names = ", ".join([*sealed.names, *sealed.tree["rules"]])
    return [
        *lines,
        "",
        SAID,
        f"{count(cells, 'cell')} forecast by {names}.",
        f"Sealed in {file}: {sealed.tree[SEAL]}",
    ]


# --- scores ---------------------------------------------------------------------------------------------------------


def told_scores(out: Path, file: Path, wheres: Sequence[str] = (), figures: Path | None = None) -> list[str]:
    """Tables of scores, of decisions and of what turns around, and the registered marks. Raises ConfigError."""
    sealed = read_seal(file)
    before, after, notes = _before_and_after(sealed, out)
    known = observed(selected(before, sealed.tree["fit"]), sealed.at)
    if data_hash(known) != sealed.tree["data"]:
        notes.append("Note: the trials that were forecast from are not those that the folder has now.")
    with _named(f"out={out}"):
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


def _score_lines(results: Sequence[Scored]) -> list[str]:
    rows = []
    for one in results:
        row: dict[str, object] = {"target": one.target, "forecaster": one.forecaster, "units": one.units}
        row["score"] = f"{one.score:.3g}" + (f" (log {one.log_score:.3g})" if one.log_score == one.log_score else "")
        for nominal in (0.5, 0.8, 0.95):
            inside = one.coverage.get(nominal)
            row[f"{nominal:.0%}"] = "-" if inside is None else f"{inside[0]:.0%} [{inside[1]:.0%}, {inside[2]:.0%}]"
        for reference in ("persistence", "wortsman"):
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
    }


def _decision_lines(decided: dict[str, Decision]) -> list[str]:
    rows = [_decision_row(name, one) for name, one in decided.items()]
    words = f"Which of two recipes is better, by {', '.join(DECIDED)}. A random guess is right in 50%:"
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
        yield f"Registered: 80% intervals hold {low:.0%} to {high:.0%}: {share:.0%}, {_met(low <= share <= high)}."
    skilled = [
        one.target
        for one in own
        if one.skill and all(one.skill.get(name, (0.0, 1.0, 0.0))[1] > 0 for name in ("persistence", "wortsman"))
    ]
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
    folder.mkdir(parents=True, exist_ok=True)
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
    for name, drawing in drawings.items():
        if drawing.figure is not None:
            file = folder / f"{name}.svg"
            save_picture(drawing.figure, file, name)
            yield f"Figure: {file} {drawing.caption}"
