"""Null is a level of an axis, of numbers and of texts: in every table, figure, page and export.

Every table and figure is made twice, of a sweep in which an axis is null in a third of the trials, and of the same
sweep with another level in its place, which sorts as null does. Both have to say the same but for that one word.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
import xarray as xr
from matplotlib.figure import Figure
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import analysis
from analysis import open_sweep
from analysis.__main__ import main
from analysis.export.runs import Source
from analysis.figures.drawing import Drawing
from analysis.figures.registry import Needs, Results, figures
from analysis.measures.known_faults import KnownFaults
from analysis.measures.metrics import trial_table
from analysis.measures.mitigations import Comparison
from analysis.measures.playbooks import cases
from analysis.pages.overview import columns_of
from analysis.reading.levels import NULL, column, in_order, numbers, word
from analysis.reports.report import write_report
from tests.analysis import synthetic
from tests.analysis.exporting import export
from tests.sweeps import command

FIGURES = figures(*Needs)
# What stands in the place of null sorts as it does: after the other numbers, and where `none` stands among texts.
AXES: dict[str, tuple[str, list[Any], Any]] = {
    "optim.clip=null,0.5,1": ("clip", [0.5, 1.0], 777.0),
    "data.path=null,alpha,zeta": ("path", ["alpha", "zeta"], "nonf"),
}
EACH = "weight_bit", "fault.bit=30"
FOLDERS: dict[str, list[list[str]]] = {
    "sweep": [["fault=none,weight_bit", "mitigation=none,qk_norm", "optim.lr=1e-3,1e-2", "detect=finite"]],
    "campaign": [
        ["fault=weight_bit", "fault.bit=3,30", "optim.beta2=0.9,0.99"],
        ["fault=last_bit", "fault.start=4", "optim.beta2=0.9,0.99"],
        ["fault=bit_flip", "fault.site=activation", "fault.tensor=logits", "fault.elements=10,200", "fault.bits=4"],
    ],
    "spiking": [["fault=none,weight_bit", "optim.lr=1,3"]],
    "policies": [
        [
            "objective.name=policy",
            "policy.reward=count",
            "policy.count.token=3",
            "policy.group=1",
            "fault=none,weight_bit",
        ]
    ],
    "answered": [["playbook=none,ladder", "playbook.skip_batches.count=5", "fault=none,nan_gradient"]],
}


@pytest.fixture(scope="module", params=AXES)
def axis(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(axis: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real sweeps of tiny models, in which the axis has three levels."""
    place = tmp_path_factory.mktemp("null")
    for name, sweeps in FOLDERS.items():
        for words in sweeps:
            keys = {text.partition("=")[0] for text in words}
            usual = [text for text in ("fault.start=12", "seed=range(2)") if text.partition("=")[0] not in keys]
            ended = command.call(
                *command.tiny(f"out={place / name}", "train.steps=24", axis, *usual, *words, "--multirun")
            )
            assert ended.status == 0, ended.err
    return {name: place / name for name in FOLDERS}


@pytest.fixture(scope="module")
def pairs(axis: str, folders: dict[str, Path]) -> dict[str, tuple[Results, Results]]:
    """The results of each folder, and the same with another level where the axis is null."""
    name, _, other = AXES[axis]
    found = {}
    for folder, out in folders.items():
        results = Results.open(out)
        sweep = results.sweep.load()
        values = [other if value == NULL else value for value in sweep[name].values.tolist()]
        replaced = sweep.assign_coords({name: ("trial", np.array(values), sweep[name].attrs)})
        found[folder] = results, Results(replaced, results.events, out, results.packs)
    return found


# --- reading -----------------------------------------------------------------------------------------------------


def test_null_is_a_level_of_the_dataset(axis: str, folders: dict[str, Path]) -> None:
    name, levels, _ = AXES[axis]
    for out in folders.values():
        sweep = open_sweep(out)
        assert in_order(sweep[name].values) == sorted(
            [*levels, NULL], key=lambda level: (isinstance(level, str), level)
        )
    sweep = open_sweep(folders["sweep"])
    golden = sweep.isel(trial=np.flatnonzero(sweep["fault"].values == "none"))
    grid = golden.set_index(trial=[name, "lr", "seed", "mitigation"]).unstack("trial")
    assert grid.sizes[name] == 3 and int(grid["complete"].notnull().sum()) == golden.sizes["trial"] == 24
    for level in (*levels, NULL):
        assert grid.sel({name: level})["final_loss"].notnull().all()


def test_a_text_that_reads_like_null_is_told_from_it() -> None:
    levels = column([None, "none", "'none'", "null", "x"])
    assert levels.tolist() == ["none", "'none'", "''none''", "null", "x"]
    assert column(["none", "x"]).tolist() == ["none", "x"], "no null, nothing to tell it from"


def test_numbers_beside_null_are_numbers() -> None:
    values = column([None, 0.5, 1, np.nan])
    assert values.dtype == object and [word(level) for level in in_order(values)] == ["0.5", "1", "none", "absent"]
    np.testing.assert_array_equal(numbers(values), [np.nan, 0.5, 1, np.nan])


# --- tables ------------------------------------------------------------------------------------------------------


def tables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function of `analysis` that makes a table, or an object that has one, from a dataset."""
    for module in pkgutil.walk_packages(analysis.__path__, "analysis."):
        if module.name.endswith("__main__"):
            continue
        for name, function in vars(importlib.import_module(module.name)).items():
            is_own = inspect.isfunction(function) and function.__module__ == module.name and not name.startswith("_")
            signature = inspect.signature(function) if is_own else None
            if signature is not None and re.search("DataFrame|Comparison", str(signature.return_annotation)):
                first = next(iter(signature.parameters.values()), None)
                if first is not None and "Dataset" in str(first.annotation):
                    yield f"{module.name.removeprefix('analysis.')}.{name}", function


TABLES = dict(tables())
DETECTORS = ["finite", "combined"]
TIMES = ["microseconds"]  # of the computation itself


def given(name: str, sweep: xr.Dataset, axis: str) -> list[tuple[Any, ...]]:
    """What a table's function wants after the dataset, as often as it is called."""
    detectors = DETECTORS
    if name == "measures.statistics.rates":
        return [(), ([axis],), ([axis, "fault", "seed"],)]
    if name == "measures.metrics.lr_sensitivity":
        return [(), (["width", "mitigation", axis],), (None, "training", "mean")]
    if name == "measures.module_flips.flips":
        return [({},)]
    if name == "measures.leaderboard.scored":
        return [(detectors, {})]
    if name in ("measures.leaderboard.leaderboard", "measures.leaderboard.tradeoff"):
        return [(KnownFaults.of(sweep), detectors)]
    if name in ("measures.lead.leads", "measures.early_warning.warning_table"):
        return [(detectors,)]
    if name == "measures.playbooks.by_fault":
        return [("ladder",)]
    if name == "measures.mitigated_faults.felt_faults":
        table = trial_table(sweep)
        table["place"] = table.groupby([axis, "mitigation"], dropna=False).ngroup()
        return [(table.assign(who=table["seed"], wanted=True),)]
    if name == "figures.labels.labelled":
        return [(pd.DataFrame({"trial": []}),)]
    return [()]


def frames(made: Any) -> Iterator[pd.DataFrame]:
    for part in made if isinstance(made, tuple) else [made]:
        if isinstance(part, Comparison):
            part = part.table
        if isinstance(part, xr.Dataset):
            part = part.coords.to_dataset().drop_dims([dim for dim in part.dims if dim != "trial"]).to_dataframe()
        if isinstance(part, pd.DataFrame):
            yield part.reset_index(drop=True)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_it(axis: str, pairs: dict[str, tuple[Results, Results]], name: str) -> None:
    column_name, levels, other = AXES[axis]
    made = 0
    for folder, (null, number) in pairs.items():
        if name.startswith("measures.playbooks") and folder != "answered":
            continue
        judged = null.judged, number.judged
        for more, others in zip(*(given(name, sweep, column_name) for sweep in judged), strict=True):
            found, expected = (list(frames(TABLES[name](*args))) for args in ((judged[0], *more), (judged[1], *others)))
            for table, wanted in zip(found, expected, strict=True):
                if column_name in table:
                    told = set(table[column_name].map(word))
                    if len(wanted):
                        assert told == {*map(word, levels), NULL}, folder
                    wanted[column_name] = [NULL if level == other else level for level in wanted[column_name]]
                for text in wanted.select_dtypes(include=["object", "str"]):
                    wanted[text] = [say(cell) if isinstance(cell, str) else cell for cell in wanted[text]]
                made += len(table)
                table, wanted = (part.drop(columns=TIMES, errors="ignore") for part in (table, wanted))
                pd.testing.assert_frame_equal(table, wanted, check_dtype=False, check_column_type=False)
    assert made, "nothing was made, so nothing was tested"


def say(text: str) -> str:
    """The words of a sweep that has another level in the place of null, with null in its place."""
    return re.sub(r"\b(777|nonf)\b", NULL, text)


# --- figures -----------------------------------------------------------------------------------------------------


def search(out: Path, axis: str) -> Results:
    """Two cells of a search over mitigations, one with null and one without, and a search over the axis."""
    key, _, values = axis.partition("=")
    synthetic.write_pack(out, [synthetic.make_trial()])
    (out / "search").mkdir()
    storage = JournalStorage(JournalFileBackend(str(out / "search" / "journal.jsonl")))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    spaces = {f"{key}={value}": ("mitigation", ["none", "qk_norm"]) for value in values.split(",")}
    for cell, (name, choices) in (spaces | {"all": (key, values.split(","))}).items():
        study = optuna.create_study(storage=storage, study_name=cell, directions=["minimize"] * 2)
        for attribute, value in {"kind": "pareto", "cell": cell, "objectives": ["loss [nat]", "worst [nat]"]}.items():
            study.set_user_attr(attribute, value)
        for number, choice in enumerate(choices):
            study.enqueue_trial({name: choice})
            trial = study.ask({name: CategoricalDistribution(choices)})
            study.tell(trial, [number, 9 - number])
    return Results.open(out)


def texts(drawing: Drawing) -> list[str]:
    figure = drawing.figure
    assert isinstance(figure, Figure)
    return sorted([*(text.get_text() for text in synthetic.drawn_texts(figure)), drawing.caption])


def shapes(figure: Figure) -> list[tuple[Any, ...]]:
    """What is drawn in each panel: how many points each line and each group of dots has."""
    return [
        (
            [len(line.get_xdata()) for line in panel.lines],
            [len(dots.get_offsets()) for dots in panel.collections],
            len(panel.patches),
        )
        for panel in figure.axes
    ]


@pytest.mark.parametrize("name", [name for name, one in FIGURES.items() if one.needs != Needs.SEARCHES])
def test_every_figure_has_it(axis: str, pairs: dict[str, tuple[Results, Results]], name: str) -> None:
    column_name, levels, other = AXES[axis]
    for null, number in pairs.values():
        found, expected = FIGURES[name](null), FIGURES[name](number)
        assert (found.figure is None) == (expected.figure is None)
        if found.figure is None or expected.figure is None:
            assert found.caption == say(expected.caption)
            continue
        assert texts(found) == sorted(map(say, texts(expected)))
        assert shapes(found.figure) == shapes(expected.figure)
        told = "\n".join(texts(found))
        assert not re.search(r"\b(nan|None|null|absent)\b", told)
        if re.search(rf"\b{column_name}\b.*\b{word(levels[0])}\b", told):
            assert re.search(rf"\b{column_name}(?: ?= ?| ){NULL}\b", told) or f"{NULL}" in told.split("\n")
        return  # the first folder of which there is one
    raise AssertionError("no folder has this figure")


@pytest.mark.parametrize("name", figures(Needs.SEARCHES))
def test_figures_of_searches_have_it(axis: str, tmp_path: Path, name: str) -> None:
    key, _, _ = axis.partition("=")
    results = search(tmp_path, axis)
    cells = [history.cell for history in results.searches]
    assert sum(f"{key}={NULL}" == cell for cell in cells) == 1 and not any("null" in cell for cell in cells)
    points = {point for history in results.searches for point in history.points["point"]}
    assert f"{key}={NULL}" in points
    assert f"{key}={NULL}" in synthetic.legend_words(FIGURES[name](results).figure)


# --- pages and exports -------------------------------------------------------------------------------------------


def test_pages_have_it(axis: str, folders: dict[str, Path]) -> None:
    name, levels, _ = AXES[axis]
    report = write_report(folders["sweep"])
    page = report.html.read_text()
    for heading in ("Learning-rate sensitivity", "Mitigations"):
        rows = page.partition(heading)[2]
        assert re.search(rf"<t[dh][^>]*>\s*{NULL}\s*</t[dh]>", rows)
    sensitivity = re.findall(r"<tr>.*?</tr>", page, re.S)
    for level in (*levels, NULL):
        assert any(f">{word(level)}<" in re.sub(r"\s+", "", row) for row in sensitivity)
    assert ">nan<" not in re.sub(r"\s+", "", page)
    shown = columns_of(open_sweep(folders["sweep"]))["columns"][name]
    assert shown["words"] == [str(level) for level in in_order(column([None, *levels]))]
    assert shown["is_setting"] and len(set(shown["values"])) == 3
    assert '"none"' in report.trials.read_text()


@pytest.mark.parametrize("target", ["csv", "parquet", "netcdf"])
def test_files_have_it(axis: str, folders: dict[str, Path], tmp_path: Path, target: str) -> None:
    """As its word, which pandas takes for no missing value; grouping what was read keeps it."""
    name, levels, _ = AXES[axis]
    sweep = open_sweep(folders["sweep"])
    (tmp_path / "place").mkdir()
    main(["export", str(folders["sweep"]), "--to", target, "--into", str(tmp_path / "place")])
    if target == "netcdf":
        (file,) = (tmp_path / "place").glob("*.nc")
        with xr.open_dataset(file, engine="h5netcdf") as opened:
            values = opened[name].values.astype(str).tolist()
            assert opened.groupby(name).count().sizes[name] == 3
    else:
        (file,) = (tmp_path / "place").glob(f"*/trials.{target}")
        trials = pd.read_csv(file) if target == "csv" else pd.read_parquet(file)
        values = trials[name].tolist()
        assert trials.groupby(name).size().tolist() == [16, 16, 16]
    assert values == [str(value) for value in sweep[name].values.tolist()]
    assert {*values} == {*map(str, levels), NULL}


@pytest.mark.parametrize("words", [NULL, "null", f"{NULL},0.5,alpha"])
def test_trials_with_null_can_be_chosen(axis: str, folders: dict[str, Path], tmp_path: Path, words: str) -> None:
    name, levels, _ = AXES[axis]
    chosen = words if "," not in words else f"{NULL},{word(levels[0])}"
    export(folders["sweep"], "csv", "--where", f"{name}={chosen}", "--into", str(tmp_path / "place"))
    (file,) = (tmp_path / "place").glob("*/trials.csv")
    assert len(pd.read_csv(file)) == 16 * (1 + ("," in words))


def test_trackers_have_it(axis: str, folders: dict[str, Path], tmp_path: Path) -> None:
    key, _, _ = axis.partition("=")
    runs = Source.open(folders["sweep"], [], "loss", False).runs()
    assert sum(run.parameters[key] == NULL for run in runs) == 16


def test_playbooks_have_cases_of_each_level(axis: str, pairs: dict[str, tuple[Results, Results]]) -> None:
    null, number = pairs["answered"]
    assert len(cases(null.sweep)) == len(cases(number.sweep)) > 0
