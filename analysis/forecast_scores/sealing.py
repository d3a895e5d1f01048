"""Forecasts in a file that cannot be changed unnoticed: what was known, what was said, and by which code."""

from __future__ import annotations

import datetime
import hashlib
import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.forecasts.base import LEVELS, Known, Size, forecasters, rules
from analysis.measures import forecast_targets
from analysis.measures.forecast_targets import AT as AT
from analysis.measures.forecast_targets import TARGETS, UNIT, Observations, observed
from analysis.reading.selection import selected
from harness.basics.printing import count
from harness.basics.version import version
from harness.config import ConfigError

FORMAT = 1
SEAL = "seal"
COVERAGE = (0.70, 0.90)  # of 80% intervals
REGISTERED = {
    "coverage_80": list(COVERAGE),
    "skill": "interval above 0 over persistence and over wortsman, for at least three targets",
    "decisions": "share of resolved pairs at least 0.80, with its lower end above 0.65",
}
"""The marks, chosen before anything was forecast."""


@dataclass(frozen=True)
class Sealed:
    """What a sealed file says. `forecasts` and `rules` are by forecaster and target."""

    tree: Mapping[str, Any]

    @property
    def units(self) -> pd.DataFrame:
        """A row for each cell at each rate that was forecast, and one with no rate for each cell."""
        return pd.DataFrame(self.tree["units"], columns=UNIT).astype({"width": float, "depth": float, "lr": float})

    def quantiles(self, forecaster: str, target: str) -> np.ndarray | None:
        """[units, levels], of a share [units, 1], NaN for what it did not forecast; None: it said nothing at all."""
        rows = self.tree["forecasts"].get(forecaster, {}).get(target)
        if rows is None:
            return None
        width = 1 if TARGETS[target].is_share else len(LEVELS)
        return np.array([row or [None] * width for row in rows], float)

    @property
    def names(self) -> list[str]:
        """The forecasters."""
        return list(self.tree["forecasts"])

    @property
    def at(self) -> float:
        """Share of the run after which early signals are read."""
        return float(self.tree["at"])

    @property
    def code_is_ours(self) -> bool:
        """Whether the forecasters are those that are installed here."""
        return bool(self.tree["code"] == code_hash())


def sizes_of(wheres: Sequence[str]) -> list[Size]:
    """From `width=96,128` and `depth=2,4` every size of those. Raises ConfigError."""
    given: dict[str, list[float]] = {}
    for where in wheres:
        key, has_value, text = where.partition("=")
        if not has_value or key not in ("width", "depth"):
            raise ConfigError(f"--predict {where:.60}: is not width=N or depth=N; allowed: width=N[,N], depth=N[,N]")
        try:
            given[key] = [float(word) for word in text.split(",")]
        except ValueError:
            raise ConfigError(f"--predict {where:.60}: not numbers; allowed: {key}=N[,N]") from None
        if min(given[key]) <= 0 or not np.isfinite(given[key]).all():
            raise ConfigError(f"--predict {where:.60}: out of range; allowed: numbers above 0")
    if "width" not in given:
        raise ConfigError("--predict: has no width; allowed: --predict width=N[,N], and maybe --predict depth=N[,N]")
    return list(itertools.product(given["width"], given.get("depth", [])))


def wanted_units(known: Observations, sizes: Sequence[Size]) -> pd.DataFrame:
    """Every recipe and rate of the observations at each of these sizes, and each cell by itself."""
    table = known.tables["divergent"]
    recipes, rates = sorted(table["recipe"].unique()), sorted(table["lr"].unique())
    rows = [(recipe, *size, rate) for size in sizes for recipe in recipes for rate in (*rates, np.nan)]
    return pd.DataFrame(rows, columns=UNIT)


def forecast_all(known: Known, units: pd.DataFrame) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every forecaster says of every target that was observed, by name; and the rules that were learned."""
    said: dict[str, Any] = {}
    for name, forecaster in forecasters().items():
        for target in forecaster.targets:
            if target not in known.observations.tables:
                continue
            places = units_of(units, target)
            quantiles = forecaster.forecast(target, known, units.iloc[places].reset_index(drop=True))
            if np.isfinite(quantiles).any():
                said.setdefault(name, {})[target] = _spread(quantiles, places, len(units))
    learned = {name: rule.learned(known) for name, rule in rules().items()}
    return said, {name: rule for name, rule in learned.items() if rule is not None}


def units_of(units: pd.DataFrame, target: str) -> np.ndarray:
    """The places of those that a target has a number for."""
    return np.flatnonzero(units["lr"].notna() == TARGETS[target].by_rate)


def _spread(values: np.ndarray, places: np.ndarray, number: int) -> list[list[float | None]]:
    """A row for each unit, empty ones for those of other targets; NaN as JSON has it."""
    rows: list[list[float | None]] = [[] for _ in range(number)]
    for place, row in zip(places, values.tolist(), strict=True):
        rows[place] = [None if value != value else value for value in row]
    return rows


def seal(
    out: Path,
    sweep: xr.Dataset,
    fit: Sequence[str],
    predict: Sequence[str],
    tune: Sequence[str],
    file: Path,
    at: float = AT,
) -> Sealed:
    """Forecast the sizes of `predict` from the trials of `fit`, and write that down.

    `tune` chooses among the sizes of `fit` those that are held back in rehearsals; none: the widest. Raises ConfigError
    where a trial of those sizes has ended, and for a file that is there.
    """
    if file.exists():
        raise ConfigError(f"--seal {file}: is there already, and a seal is made once; allowed: a new file")
    known, sizes = known_of(sweep, fit, predict, tune, at)
    is_there = [size for size in sizes if size in observed_sizes(sweep)]
    if is_there:
        words = ", ".join(f"width {width:g} depth {depth:g}" for width, depth in is_there)
        raise ConfigError(f"--predict: {out} has finished trials of {words}; allowed: sizes that are not trained yet")
    units = wanted_units(known.observations, sizes)
    said, learned = forecast_all(known, units)
    tree = {
        "format": FORMAT,
        "version": version(),
        "sealed_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "registered": REGISTERED,
        "code": code_hash(),
        "data": data_hash(known.observations),
        "fit": list(fit),
        "tune": [list(size) for size in known.tune],
        "predict": list(predict),
        "at": at,
        "levels": list(LEVELS),
        "units": [[None if value != value else value for value in row] for row in units.itertuples(index=False)],
        "forecasts": said,
        "rules": learned,
    }
    tree[SEAL] = seal_of(tree)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree, indent=0, allow_nan=False) + "\n")
    return Sealed(tree)


def known_of(
    sweep: xr.Dataset, fit: Sequence[str], predict: Sequence[str], tune: Sequence[str], at: float
) -> tuple[Known, list[Size]]:
    """What may be known, and the sizes that are wanted. Raises ConfigError."""
    observations = observed(selected(sweep, fit), at)
    predict = [*predict, *([] if any(where.startswith("depth=") for where in predict) else [_depths(observations)])]
    sizes = sizes_of(predict)
    if overlap := [size for size in sizes if size in observations.sizes]:
        words = ", ".join(f"width {width:g} depth {depth:g}" for width, depth in overlap)
        raise ConfigError(f"--predict: {words} is among the sizes to forecast from; allowed: other sizes")
    check_enough(observations)
    held_back = observed(selected(sweep, [*fit, *tune]), at).sizes if tune else widest(observations)
    return Known(observations, tuple(held_back)), sizes


def check_enough(observations: Observations) -> None:
    """Raises ConfigError for too few sizes, seeds or common rates."""
    table = observations.tables["divergent"]
    if len(observations.sizes) < 3:
        raise ConfigError(f"{count(len(observations.sizes), 'size')} to forecast from; allowed: 3 at least")
    if table["seed"].nunique() < 2:
        raise ConfigError(
            "one seed to forecast from, so nothing says how sure a forecast is; allowed: 2 seeds at least"
        )
    common = set.intersection(*(set(part["lr"]) for _, part in table.groupby(["width", "depth"])))
    if len(common) < 2:
        raise ConfigError(
            f"sizes have {count(len(common), 'learning rate')} in common; allowed: 2 at least that all sizes have"
        )


def widest(observations: Observations) -> list[Size]:
    """The sizes of the largest width; none where that would leave fewer than two."""
    width = max(size[0] for size in observations.sizes)
    found = [size for size in observations.sizes if size[0] == width]
    return found if len(observations.sizes) - len(found) > 1 else []


def _depths(observations: Observations) -> str:
    return "depth=" + ",".join(f"{depth:g}" for depth in sorted({depth for _, depth in observations.sizes}))


def observed_sizes(sweep: xr.Dataset) -> set[Size]:
    """The sizes of which a trial has ended."""
    ended = sweep["complete"].values.astype(bool)
    return set(zip(sweep["width"].values[ended].astype(float), sweep["depth"].values[ended].astype(float), strict=True))


def read_seal(file: Path) -> Sealed:
    """A sealed file. Raises ConfigError for none, and for one that was changed after it was sealed."""
    try:
        tree = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"--score {file}: {error.strerror}; allowed: a file that --seal has written") from None
    except ValueError:
        tree = None
    if not isinstance(tree, dict) or SEAL not in tree or tree.get("format") != FORMAT:
        raise ConfigError(
            f"--score {file}: is no sealed forecast of this version; allowed: one that --seal has written"
        )
    if tree[SEAL] != seal_of(tree):
        raise ConfigError(
            f"--score {file}: was changed after it was sealed; allowed: the file as --seal has written it"
        )
    return Sealed(tree)


def seal_of(tree: Mapping[str, Any]) -> str:
    """SHA-256 of all that is sealed."""
    rest = {name: value for name, value in tree.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def data_hash(observations: Observations) -> str:
    """SHA-256 of the observations."""
    sha = hashlib.sha256()
    for name in sorted(observations.tables):
        table = observations.tables[name].sort_values([*UNIT, "seed"], kind="stable")
        sha.update(f"{name}\n{table[[*UNIT, 'seed', 'value']].to_csv(index=False)}".encode())
    return sha.hexdigest()


def code_hash() -> str:
    """SHA-256 of the sources of all forecasters, and of what they forecast."""
    kinds = [*forecasters().items(), *rules().items()]
    modules = {inspect.getsourcefile(type(one)) for _, one in kinds} | {forecast_targets.__file__}
    folder = Path(__file__).parents[1] / "forecasts"
    files = {Path(module) for module in modules if module} | set(folder.glob("*.py"))
    sha = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        sha.update(file.read_bytes())
    return sha.hexdigest()
