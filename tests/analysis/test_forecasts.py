"""Forecasters in worlds whose law is known: who is right about the law finds it, and knows how sure that is."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.forecast_scores.scores import truths, widened
from analysis.forecast_scores.sealing import Sealed, check_enough, forecast_all, units_of, wanted_units
from analysis.forecasts.base import LEVELS, MIDDLE, Known, forecasters, rules
from analysis.forecasts.hierarchical import Hierarchical
from analysis.measures.forecast_targets import Observations, edges, observed_runs, parameters
from harness.basics import plugins
from harness.config import ConfigError

FIT = [(width, depth) for width in (16.0, 24.0, 32.0, 48.0, 64.0) for depth in (2.0, 4.0)]
NEAR = [(96.0, 2.0), (128.0, 4.0)]
RECIPES = [f"recipe {number}" for number in range(6)]
Law = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # of a recipe's number, width and depth


def world(
    target: str, law: Law, noise: float, draw: int, sizes: list[tuple[float, float]], seeds: int = 5
) -> Observations:
    """A number for each cell and seed, with noise of each seed's own."""
    generator = np.random.default_rng((draw, len(sizes)))
    rows = [(recipe, *size, np.nan, seed) for recipe in RECIPES for size in sizes for seed in range(seeds)]
    table = pd.DataFrame(rows, columns=["recipe", "width", "depth", "lr", "seed"])
    number = table["recipe"].str.split().str[1].astype(int)
    true = [
        float(law(int(n), np.array(w), np.array(d)))
        for n, w, d in zip(number, table["width"], table["depth"], strict=True)
    ]
    return Observations({target: table.assign(value=np.array(true) + noise * generator.standard_normal(len(table)))})


def flat(recipe: int, width: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return np.asarray(0.3 * recipe)


def line(recipe: int, width: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return np.asarray(1 - 0.1 * recipe * np.log10(parameters(width, depth)))


def plane(recipe: int, width: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return np.asarray(1 - 0.1 * recipe * np.log10(width) + 0.2 * np.log10(depth))


def power(recipe: int, width: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return np.asarray(2 + 0.1 * recipe + 8 * parameters(width, depth) ** -0.4)


def pooled(recipe: int, width: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Recipes differ in level and, a little, in slope."""
    own = np.random.default_rng(recipe).standard_normal(3)
    return np.asarray(own[0] - (0.5 + 0.1 * own[1]) * np.log10(width) + (0.2 + 0.1 * own[2]) * np.log10(depth))


@pytest.mark.parametrize(
    ("name", "target", "law"),
    [
        ("persistence", "sensitivity", flat),
        ("line", "sensitivity", line),
        ("plane", "sensitivity", plane),
        ("power", "loss", power),
        ("hierarchical", "edge", pooled),
    ],
)
def test_who_knows_the_law_recovers_it_and_covers_it(name: str, target: str, law: Law) -> None:
    """95% intervals, widened by the error of the test seeds, hold the mean over test seeds in about 95 of 100."""
    inside, off, errors = [], [], []
    for draw in range(40):
        known = Known(world(target, law, 0.05, draw, FIT), tuple(FIT[-2:]))
        test = world(target, law, 0.05, draw, NEAR)
        units = test.tables[target].groupby(["recipe", "width", "depth"])["value"].agg(["mean", "sem"]).reset_index()
        said = forecasters()[name].forecast(target, known, units.assign(lr=np.nan))
        ends = widened(said, np.full(len(units), 0.05 / 5**0.5))
        inside += list((ends[:, 0] <= units["mean"]) & (units["mean"] <= ends[:, -1]))
        off += list(said[:, MIDDLE] - units["mean"])
        errors += list(units["sem"])
    assert 0.93 <= np.mean(inside) <= 0.975  # over 1,800 intervals 0.947 to 0.960
    assert abs(np.mean(off)) < 0.02 and np.std(off) < 4 * np.mean(errors)


def test_seeds_of_their_own_make_the_law_no_surer() -> None:
    shared = world("loss", power, 0.03, 0, FIT).tables["loss"]
    units = wanted_units(diverging(0, FIT), NEAR)
    units = units[units["lr"].isna() & units["recipe"].isin(RECIPES)].reset_index(drop=True)
    spans = []
    for table in (shared, its_own_seeds(shared)):
        said = forecasters()["power"].forecast("loss", Known(Observations({"loss": table})), units)
        spans.append(float(np.mean(said[:, -1] - said[:, 0])))
    assert 0.7 < spans[1] / spans[0] < 1.5


def test_who_is_wrong_about_the_law_is_not_covered() -> None:
    """Persistence in a world that changes: the coverage above is none that anything would have."""
    known, test = Known(world("edge", line, 0.01, 0, FIT)), world("edge", line, 0.01, 0, NEAR)
    units = test.tables["edge"].groupby(["recipe", "width", "depth"])["value"].mean().reset_index().assign(lr=np.nan)
    said = forecasters()["persistence"].forecast("edge", known, units)
    is_inside = (said[:, 0] <= units["value"]) & (units["value"] <= said[:, -1])
    assert is_inside[units["recipe"] == "recipe 0"].any() and not is_inside[units["recipe"] == "recipe 5"].any()


# --- divergence -----------------------------------------------------------------------------------------------------

RATES = 10.0 ** np.arange(-2, 1.01, 0.25)


def diverging(draw: int, sizes: list[tuple[float, float]], seeds: int = 6) -> Observations:
    """Logits that grow with rate and size; a run diverges where its own passes 1e4. Features tell it after a tenth."""
    generator = np.random.default_rng((draw, len(sizes)))
    rows = [
        (recipe, *size, rate, seed) for recipe in RECIPES for size in sizes for rate in RATES for seed in range(seeds)
    ]
    table = pd.DataFrame(rows, columns=["recipe", "width", "depth", "lr", "seed"])
    number = table["recipe"].str.split().str[1].astype(int)
    steady = 3.2 + 1.6 * np.log10(table["lr"]) + 0.7 * np.log10(table["width"] / 16) - 0.15 * number
    logits = steady + 0.15 * generator.standard_normal(len(table))
    lost = (logits > 4.0).astype(float)
    tables = {"early_logit": table.assign(value=logits), "divergent": table.assign(value=lost)}
    features = table.assign(initial_grad_norm=0.0, early_attention_logit_max=logits)
    return Observations(tables, features)


def brier(said: np.ndarray, table: pd.DataFrame, units: pd.DataFrame) -> float:
    keys = ["recipe", "width", "depth", "lr"]
    both = table.merge(units.assign(p=said[:, 0]), on=keys)
    assert len(both) == len(table)
    return float(((both["p"] - both["value"]) ** 2).mean())


@pytest.mark.parametrize("name", ["wortsman", "threshold", "logistic", "hierarchical"])
def test_probabilities_are_better_than_persistence_where_the_edge_moves(name: str) -> None:
    known, test = Known(diverging(0, FIT), tuple(FIT[-2:])), diverging(1, NEAR)
    units = wanted_units(known.observations, NEAR)
    units = units[units["lr"].notna()].reset_index(drop=True)
    scores = {
        other: brier(forecasters()[other].forecast("divergent", known, units), test.tables["divergent"], units)
        for other in (name, "persistence")
    }
    # These two know where the mean of a cell is, and nothing of how its runs differ.
    assert scores[name] < (0.95 if name in ("wortsman", "threshold") else 0.75) * scores["persistence"]


def test_the_largest_stable_rate_follows_from_logits() -> None:
    known = Known(diverging(0, FIT))
    units = pd.DataFrame(
        [(recipe, 128.0, 2.0, np.nan) for recipe in RECIPES], columns=["recipe", "width", "depth", "lr"]
    )
    said = forecasters()["wortsman"].forecast("edge", known, units)
    true = (4.0 - 3.2 - 0.7 * np.log10(8) + 0.15 * np.arange(6)) / 1.6
    assert np.abs(said[:, MIDDLE] - true).max() < 0.2


def test_rules_tell_from_the_beginning_of_a_run_what_becomes_of_it() -> None:
    """With the early logit nearly all, with the first step's signals what the rate tells."""
    known, test = Known(diverging(0, FIT)), diverging(1, NEAR)
    lost = test.tables["divergent"]["value"].to_numpy()
    right = {}
    for name, rule in rules().items():
        learned = rule.learned(known)
        assert learned is not None
        right[name] = float(((rule.says(learned, test.features) > 0.5) == lost).mean())
    assert right["early"] > 0.97 and 0.7 < right["init"] < right["early"]


THEIRS = '''"""The middle of everything."""

import numpy as np

from analysis.forecasts.base import Forecaster, student


class HalfWay(Forecaster):
    """One half."""

    about = "one half"
    targets = ("edge",)

    def forecast(self, target, known, wanted):
        return student(np.full(len(wanted), 0.5), 0.1, np.inf)
'''


# --- what is not a forecast -----------------------------------------------------------------------------------------


def its_own_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """As where sizes were trained by several sweeps: no seed is that of another size."""
    return table.assign(seed=table["seed"] + 100 * table["width"] + 10_000 * table["depth"])


@pytest.mark.parametrize("has_own_seeds", [False, True])
def test_every_forecaster_says_as_much_as_it_promises(has_own_seeds: bool) -> None:
    known = Known(diverging(0, FIT), tuple(FIT[-2:]))
    tables, features = {**known.observations.tables}, known.observations.features
    for target, law in (("edge", line), ("loss", power), ("sensitivity", plane), ("spikes", flat), ("harm", flat)):
        tables |= world(target, law, 0.05, 0, FIT).tables
    if has_own_seeds:
        tables = {target: its_own_seeds(table) for target, table in tables.items()}
        features = its_own_seeds(features)
    known = Known(Observations(tables, features), known.tune)
    units = wanted_units(known.observations, NEAR)
    said, learned = forecast_all(known, units)
    assert said.keys() == forecasters().keys() and learned.keys() == rules().keys()
    for name, forecaster in forecasters().items():
        assert said[name].keys() == set(forecaster.targets)
        for target, rows in said[name].items():
            places = units_of(units, target)
            values = np.array([rows[place] for place in places], float)
            assert np.isfinite(values).all(), (name, target)
            assert values.shape[1] == (1 if target == "divergent" else len(LEVELS))
            if target == "divergent":
                assert (values > 0).all() or name in ("wortsman",) and (values >= 0).all()
            else:
                assert (np.diff(values, axis=1) >= 0).all(), "quantiles rise"


def test_a_forecaster_comes_along_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point, as every part does; it is asked with the others."""
    (tmp_path / "half_way.py").write_text(THEIRS)
    entry = importlib.metadata.EntryPoint("half_way", "half_way", "stability_harness.forecasters")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    for made in (forecasters, plugins.modules):
        made.cache_clear()
    try:
        known = Known(world("edge", flat, 0.0, 0, FIT))
        known.observations.tables["divergent"] = diverging(0, FIT).tables["divergent"]  # type: ignore[index]
        said, _ = forecast_all(known, wanted_units(known.observations, NEAR))
        assert "line" in said and {row[3] for row in said["half_way"]["edge"] if row} == {0.5}
    finally:
        monkeypatch.undo()
        for made in (forecasters, plugins.modules):
            made.cache_clear()


def test_a_recipe_that_nobody_has_trained_is_not_forecast() -> None:
    known = Known(world("edge", line, 0.01, 0, FIT))
    unit = pd.DataFrame([("other", 128.0, 2.0, np.nan)], columns=["recipe", "width", "depth", "lr"])
    assert np.isnan(Hierarchical().forecast("edge", known, unit)).all()
    assert np.isnan(forecasters()["persistence"].forecast("edge", known, unit)).all()


def test_edges_are_bounded_by_the_rates_that_were_tried() -> None:
    stable = np.array([[True, True, True], [True, False, True], [False, False, False]])
    assert edges(np.array([-2.0, -1.0, 0.0]), stable) == pytest.approx([0.5, -1.5, -2.5])


# --- tables of others -----------------------------------------------------------------------------------------------


def table_of(**changes: Any) -> pd.DataFrame:
    rows = [
        {
            "width": width,
            "lr": lr,
            "seed": seed,
            "loss": 2 + 10 / width + (np.log10(lr) + 2) ** 2 / 10,
            "initial_loss": 5.0,
        }
        for width in (16, 32, 64)
        for lr in (1e-3, 1e-2, 1e-1, 1.0)
        for seed in range(2)
    ]
    return pd.DataFrame(rows).assign(**changes)


def test_a_table_of_runs_is_enough() -> None:
    table = table_of()
    table.loc[(table["lr"] == 1.0) & (table["width"] == 64), "loss"] = np.nan
    found = observed_runs(table.rename(columns=str.upper))
    by_width = found.tables["edge"].groupby("width")["value"].mean()
    assert by_width.to_list() == pytest.approx([0.5, 0.5, -0.5])
    assert found.tables["loss"].groupby("width")["value"].mean().loc[64] == pytest.approx(2 + 10 / 64)
    assert found.tables["divergent"]["value"].sum() == 2
    check_enough(found)


def test_curves_end_in_the_mean_of_their_last_steps() -> None:
    table = table_of()
    curves = pd.concat(
        [table.assign(step=step, run=table.index, loss=table["loss"] + (3 if step < 95 else 0)) for step in range(100)]
    )
    found = observed_runs(curves.drop(columns="initial_loss"))
    assert found.tables["loss"].groupby("width")["value"].mean().loc[32] == pytest.approx(2 + 10 / 32)


def test_models_known_by_their_parameters_alone() -> None:
    table = table_of().assign(parameters=lambda rows: 12 * rows["width"] ** 2).drop(columns="width")
    assert observed_runs(table).sizes == [(16.0, 1.0), (32.0, 1.0), (64.0, 1.0)]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (table_of().drop(columns="loss"), "column loss: is not there"),
        (table_of().drop(columns="width"), "columns width, parameters: none is there"),
        (table_of(lr="fast"), "column lr: fast is no number"),
        (table_of(lr=-1.0), "a value is not above 0"),
        (table_of(lr=1e-2), "no model with two learning rates"),
        (table_of(step=1), "column run: is not there"),
        (table_of().head(0), "the table has no row"),
    ],
)
def test_a_table_that_cannot_be_used(table: pd.DataFrame, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        observed_runs(table)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (table_of().query("width < 64"), "2 sizes to forecast from; allowed: 3"),
        (table_of().query("seed == 0"), "one seed to forecast from"),
        (table_of().assign(lr=lambda rows: rows["lr"] * rows["width"]), "sizes have 0 learning rates in common"),
    ],
)
def test_too_little_to_forecast_from(table: pd.DataFrame, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_enough(observed_runs(table))


def test_a_target_that_is_the_same_everywhere_tells_nothing() -> None:
    known = Known(diverging(0, FIT))
    units = wanted_units(known.observations, NEAR)
    sealed = Sealed({"units": [list(row) for row in units.itertuples(index=False)], "forecasts": {}, "rules": {}})
    test = diverging(1, NEAR)
    quiet = test.tables["divergent"].assign(value=0.0)
    assert truths(sealed, Observations(test.tables | {"divergent": quiet})).keys() == {"early_logit"}
