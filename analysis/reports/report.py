"""The report of a sweep: figures, tables and a few sentences, in one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import xarray as xr

from analysis.figures.mitigation_words import coverage, mitigation_findings, table_rows
from analysis.figures.registry import Needs, Results, figures
from analysis.measures import metrics
from analysis.measures.mitigations import UNLIKE_PACKS
from analysis.pages.static_page import TRIALS_PAGE, write_trials
from analysis.pages.trial_page import POSTMORTEMS
from analysis.reading.acted import BASELINE, idle_note
from analysis.reading.levels import word
from analysis.reading.open_sweep import UNFINISHED
from analysis.reports.words import html_lines, markdown_block, markdown_text
from harness.basics.printing import count, printable
from harness.config import NO_FAULT
from harness.storage.results_folder import ResultsPath

DOTS_PER_INCH = 110
MOST_MITIGATIONS = 3  # with more of them, sentences say what holds for all, and the tables the rest
KEPT_IN_MEMORY = 2**28  # bytes of losses


@dataclass(frozen=True)
class Report:
    """Where the report is, and what it says in words."""

    html: Path
    figures: list[Path]
    findings: list[str]
    trials: Path  # the page of all trials beside it


@dataclass(frozen=True)
class Picture:
    """One figure as a file and as text for the page; both None where the caption says why there is none."""

    name: str
    needs: Needs | None
    caption: str
    path: Path | None = None
    base64: str | None = None
    points: str = ""  # axes under which the page of all trials shows the same trials


def write_report(out: Path | str) -> Report:
    """Write `out`/figures/*.png, `out`/report.html and `out`/trials.html from the results in `out`, finished or not.

    Raises ConfigError, a ValueError, if `out` holds no results, and OSError if it cannot be written to.
    """
    out = Path(out)
    results = Results.open(out)
    folder = ResultsPath.open(out)
    results = replace(results, sweep=with_losses(results.sweep))
    ds, compared, faults = results.sweep, results.comparison, fault_effects(results.sweep)
    sentences = findings(ds, results.sensitivity, faults) + mitigation_findings(compared)
    needs = [Needs.SWEEP, Needs.COMPARISON]
    needs += [Needs.GUARDS] if results.guard_signals else []
    needs += [Needs.SEARCHES] if results.searches else []
    pictures = save_figures(results, out, *needs)
    html = write_page(
        "report",
        folder,
        ds,
        findings=sentences,
        counts=outcome_counts(ds["outcome"].values),
        trials=ds.sizes["trial"],
        packs=len(np.unique(ds["pack"].values)),
        pictures={kind: [picture for picture in pictures if picture.needs == kind] for kind in Needs},
        has_mitigations=len(np.unique(ds["mitigation"].values)) > 1,
        mitigations=table_rows(compared),
        certainty=coverage(compared),
        idle=idle_note(ds),
        unlike_packs=UNLIKE_PACKS,
        sensitivity=_sensitivity_rows(results.sensitivity),
        faults=_fault_rows(faults),
        postmortems=_postmortems(folder, ds),
    )
    trials = write_trials(out, ds, results.packs)
    return Report(out / html, [picture.path for picture in pictures if picture.path], sentences, trials)


def _postmortems(folder: ResultsPath, sweep: xr.Dataset) -> list[str]:
    """The trials of which a post-mortem stands beside the report."""
    known = set(sweep["trial"].values)
    files = [entry for entry in (folder / POSTMORTEMS).entries() if entry.name.endswith(".html")]
    return sorted(entry.stem for entry in files if entry.stem in known)


def with_losses(sweep: xr.Dataset) -> xr.Dataset:
    """`sweep` with its losses in memory, since every figure and table reads them: those of steps up to 256 MiB."""
    kept = [name for name in metrics.READ if "step" not in sweep[name].dims]
    kept += ["loss"] if sweep["loss"].nbytes <= KEPT_IN_MEMORY else []  # of validation losses few are read, if any
    return sweep.assign({name: sweep[name].compute() for name in kept})


def write_page(name: str, folder: ResultsPath, sweep: xr.Dataset, **content: Any) -> str:
    """Write the page `name` on a sweep, into which text is put as text, whatever it holds. Gives the file's name."""
    known = {key: json.loads(sweep.attrs[key]) for key in ("corpus", "environment")}
    (folder / f"{name}.html").write(rendered(f"{name}.html", sweep, **known, **content).encode())
    return f"{name}.html"


def rendered(page: str, sweep: xr.Dataset, **content: Any) -> str:
    """The text of a page, HTML or Markdown, by the name of its template."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=page.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=(lambda value: printable(value) if type(value) is str else value) if page.endswith(".html") else None,
    )
    environment.filters["plain"] = markdown_text
    words = {"plain": markdown_text, "quoted": markdown_block, "lines_of": html_lines}
    return environment.get_template(f"{page}.j2").render(
        study=sweep.attrs["study"], trials_page=TRIALS_PAGE, **words, **content
    )


def save_figures(results: Results, out: Path, *needs: Needs) -> list[Picture]:
    """Draw those with these needs to `out`/figures; one that there is no longer is removed: none is out of date."""
    folder = ResultsPath.open(out) / "figures"
    folder.make_folder()
    pictures = []
    for name, figure in figures(*needs).items():
        drawing = figure(results)
        file = folder / f"{name}.png"
        if drawing.figure is None:
            file.unlink()
            pictures.append(Picture(name, figure.needs, drawing.caption))
        else:
            drawn = io.BytesIO()
            drawing.figure.savefig(drawn, dpi=DOTS_PER_INCH)
            file.write(drawn.getvalue())
            shown = base64.b64encode(drawn.getvalue()).decode()
            pictures.append(
                Picture(name, figure.needs, drawing.caption, out / "figures" / file.name, shown, figure.points)
            )
    return pictures


# --- tables ------------------------------------------------------------------------------------------------------


def outcome_counts(outcomes: np.ndarray) -> dict[str, int]:
    """Outcome -> number of trials, the most frequent first."""
    counts = pd.Series(outcomes, dtype=object).value_counts()
    return {str(name): int(count) for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}


def fault_effects(ds: xr.Dataset) -> pd.DataFrame:
    """One row a fault and mitigation: what the faults did, counted over their finished trials.

    Columns: fault, mitigation, `trials` (all of them), `outcomes` (outcome -> trials, unfinished ones too), and of the
    finished trials the number of `strikes`, and how many `changed` a value, fired `without_effect` (every strike wrote
    what was there) and `never_fired`; `with_twin`, those whose golden twin is finished too, of which `moved` have
    another loss than the twin and `lost` became non-finite where the twin did not; `worst_deviation` (the largest
    loss_t(faulty) - loss_t(golden), nat/token) and `worst_trial`, the trial it belongs to.
    """
    faulty = ds[["fault"]].isel(trial=np.flatnonzero(ds["fault"].values != NO_FAULT.name))
    names = ("trial", "fault", "mitigation", "outcome", "complete", "strikes", "changes")
    trials = pd.DataFrame({name: faulty[name].values for name in names})
    deviations = metrics.deviation_table(ds).set_index("trial")
    columns = ["fault", "mitigation", "trials", "outcomes", "strikes", "changed", "without_effect", "never_fired"]
    columns += ["with_twin", "moved", "lost"]
    rows = []
    for (fault, mitigation), group in trials.groupby(["fault", "mitigation"], sort=True):
        finished = group[group["complete"]]
        watched = deviations.reindex(finished["trial"]).dropna(subset=["size"])
        worst = watched["worst_deviation"].dropna()
        has_fired, has_changed = finished["strikes"] > 0, finished["changes"] > 0
        values = [fault, mitigation, len(group), outcome_counts(group["outcome"].to_numpy()), finished["strikes"].sum()]
        values += [has_changed.sum(), (has_fired & ~has_changed).sum(), (~has_fired).sum()]
        values += [len(watched), (watched["size"] > 0).sum(), np.isinf(watched["size"]).sum()]
        worst_trial = worst.idxmax() if len(worst) else ""
        rows.append([*values, worst.max() if len(worst) else np.nan, worst_trial])
    return pd.DataFrame(rows, columns=[*columns, "worst_deviation", "worst_trial"])


def _sensitivity_rows(table: pd.DataFrame) -> dict[str, list[Any]]:
    axes = metrics.group_axes(table)
    heading = [*axes, "LR sensitivity [nat/token]", "95% interval", "not capped", "seeds", "rates", "best rate"]
    heading += ["best loss [nat/token]"]
    rows = []
    for _, row in table.iterrows():
        interval = "none: one seed" if np.isnan(row["low"]) else f"{row['low']:.3f} to {row['high']:.3f}"
        is_defined = not np.isnan(row["sensitivity"])
        numbers = [f"{row['sensitivity']:.3f}", interval] if is_defined else ["not defined", ""]
        numbers.append(f"{row['uncapped']:.3f}" if np.isfinite(row["uncapped"]) else "a run was lost" * is_defined)
        rates = f"{row['rates']}: {row['lowest_rate']:g} to {row['highest_rate']:g}"
        best = [f"{row['best_rate']:g}", f"{row['best_loss']:.3f}"] if is_defined else ["", ""]
        rows.append([*(word(row[axis]) for axis in axes), *numbers, row["seeds"], rates, *best])
    return {"heading": heading, "rows": rows}


def _fault_rows(table: pd.DataFrame) -> dict[str, list[Any]]:
    heading = ["fault", "mitigation", "trials", "outcomes", "strikes", "changed a value", "fired without effect"]
    heading += ["never fired", "loss differs from golden", "non-finite, golden finite", "worst deviation [nat/token]"]
    rows = []
    for row in table.itertuples():
        shares = ", ".join(f"{name} {count / row.trials:.0%}" for name, count in row.outcomes.items())
        size = f"{row.worst_deviation:+.3f}" if row.worst_deviation < 1e6 else f"{row.worst_deviation:+.3g}"
        worst = "" if np.isnan(row.worst_deviation) else f"{size} (trial {row.worst_trial})"
        counts = [row.strikes, row.changed, row.without_effect, row.never_fired, f"{row.moved} of {row.with_twin}"]
        rows.append([row.fault, row.mitigation, row.trials, shares, *counts, row.lost, worst])
    return {"heading": heading, "rows": rows}


# --- what was found, in words ------------------------------------------------------------------------------------


def findings(ds: xr.Dataset, sensitivity: pd.DataFrame, faults: pd.DataFrame) -> list[str]:
    """A few sentences on a sweep: how its trials ended, what each mitigation did to LR sensitivity, what faults did.

    `sensitivity` is its `metrics.lr_sensitivity`, `faults` its `fault_effects`.
    """
    lines = [
        f"{count(ds.sizes['trial'], 'trial')}: {_counted(ds['outcome'])}." if ds.sizes["trial"] else "No trials yet."
    ]
    lines += [note] if (note := idle_note(ds)) else []
    lines += _left_out_lines(ds)
    if ds.sizes["trial"]:
        lines += _clean_lines(ds) + _sensitivity_lines(sensitivity) + _fault_lines(faults)
    return lines


def _counted(outcomes: xr.DataArray | pd.Series) -> str:
    return ", ".join(f"{count} {name}" for name, count in outcome_counts(outcomes.to_numpy()).items())


def _left_out_lines(ds: xr.Dataset) -> list[str]:
    """What of the user's files no trial has read, a line for each corpus."""
    lines = []
    for corpus in json.loads(ds.attrs["corpus"]):
        if isinstance(left := corpus.get("left_out"), dict):
            what = f"files: {left.get('files')}, bytes: {left.get('bytes')}, the first: {left.get('first')}"
            lines.append(f"Left out of data.path={corpus.get('path')}: {what} ({left.get('why')}).")
    return lines


def _clean_lines(ds: xr.Dataset) -> list[str]:
    """How the trials without a fault ended, for each mitigation, if they did not all end alike."""
    clean = metrics.clean_trials(ds[["fault"]])
    table = pd.DataFrame({name: clean[name].values for name in ("mitigation", "outcome")})
    table = table[table["outcome"] != UNFINISHED]
    if table["outcome"].nunique() < 2:
        return []
    groups = table.groupby("mitigation", sort=True)["outcome"]
    counts = "; ".join(f"{mitigation}: {_counted(outcomes)}" for mitigation, outcomes in groups)
    return [f"Without a fault, by mitigation: {counts}."] if len(groups) <= MOST_MITIGATIONS else []


def _sensitivity_lines(table: pd.DataFrame) -> list[str]:
    axes = metrics.group_axes(table)
    table = table[table["sensitivity"].notna()]
    if table.empty:
        return ["LR sensitivity needs two learning rates or more, finished without a fault, and validation losses."]
    has_width = table["width"].notna().any()  # attached runs have none
    widest = table[table["width"] == table["width"].max()] if has_width else table
    others = [axis for axis in axes if axis != "mitigation"]
    if widest["mitigation"].nunique() > MOST_MITIGATIONS:
        return [_sensitivity_range(widest, others)]
    is_plain = widest["mitigation"] == BASELINE
    pairs = widest[~is_plain].merge(widest[is_plain], on=others, suffixes=("", "_without"))
    pairs = pairs.sort_values("mitigation", kind="stable").drop_duplicates("mitigation")
    if len(pairs):
        return [_comparison(pair["mitigation"], pair, others) for _, pair in pairs.iterrows()]
    rows = [row for _, row in widest.iterrows()]
    return [f"{row['mitigation']}: LR sensitivity {_place(row, others)} {_value(row)}." for row in rows]


def _sensitivity_range(widest: pd.DataFrame, others: list[str]) -> str:
    """The lowest and the highest of many mitigations, and the recipe without one."""
    rows = widest.sort_values("sensitivity", kind="stable")
    named = {f"lowest with {rows['mitigation'].iloc[0]}": rows.iloc[0]}
    named |= {f"highest with {rows['mitigation'].iloc[-1]}": rows.iloc[-1]}
    plain = rows[rows["mitigation"] == BASELINE]
    named |= {"without any": plain.iloc[0]} if len(plain) else {}
    values = "; ".join(f"{name} {_place(row, others)} {_value(row)}" for name, row in named.items())
    return f"LR sensitivity of {widest['mitigation'].nunique()} mitigations: {values}."


def _comparison(mitigation: str, pair: pd.Series, others: list[str]) -> str:
    without = pair[["sensitivity_without", "low_without", "high_without"]]
    without.index = ["sensitivity", "low", "high"]
    text = f"{mitigation}: LR sensitivity {_place(pair, others)} {_value(pair)} against {_value(without)} without"
    is_same_range = all(pair[name] == pair[f"{name}_without"] for name in ("lowest_rate", "highest_rate", "rates"))
    if not is_same_range:
        return f"{text}; their learning rates differ, so the two cannot be compared."
    if np.isnan(pair["low"]) or np.isnan(without["low"]):
        return f"{text}; one seed, so no interval."
    is_apart = pair["high"] < without["low"] or pair["low"] > without["high"]
    return f"{text}{'' if is_apart else '; the intervals overlap'}."


def _place(row: pd.Series, axes: list[str]) -> str:
    place = ", ".join(f"{axis} {word(row[axis])}" for axis in axes if axis != "width" or row[axis] == row[axis])
    return f"at {place}" if place else "is"


def _value(row: pd.Series) -> str:
    interval = "" if np.isnan(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['sensitivity']:.2f}{interval}"


def _fault_lines(table: pd.DataFrame) -> list[str]:
    """A sentence a fault and mitigation, or, if there are many mitigations, a fault."""
    if table["mitigation"].nunique() <= MOST_MITIGATIONS:
        return [_fault_line(row, f"mitigation {row.mitigation}") for row in table.itertuples()]
    lines = []
    for _, group in table.groupby("fault", sort=True):
        total = group.iloc[0].copy()
        for name in ("trials", "strikes", "without_effect", "never_fired", "with_twin", "moved", "lost"):
            total[name] = group[name].sum()
        total["outcomes"] = {UNFINISHED: sum(outcomes.get(UNFINISHED, 0) for outcomes in group["outcomes"])}
        worst = group.sort_values("worst_deviation", kind="stable", na_position="first").iloc[-1]
        total[["worst_deviation", "worst_trial"]] = worst[["worst_deviation", "worst_trial"]]
        lines.append(_fault_line(total, f"{len(group)} mitigations"))
    return lines


def _fault_line(row: Any, mitigation: str) -> str:
    parts = [f"{row.moved} of {row.with_twin} trials moved away from their golden twin"]
    if not np.isnan(row.worst_deviation):
        size = f"{row.worst_deviation:+.2f}" if row.worst_deviation < 1e6 else f"{row.worst_deviation:+.2g}"
        parts.append(f"the worst by {size} nat/token (trial {row.worst_trial})")
    others = {
        "became non-finite, unlike the twin": row.lost,
        "never fired": row.never_fired,
        "fired without effect": row.without_effect,
        UNFINISHED: row.outcomes.get(UNFINISHED, 0),
    }
    parts += [f"{number} {what}" for what, number in others.items() if number]
    return f"Fault {row.fault}, {mitigation}: {'; '.join(parts)}."
