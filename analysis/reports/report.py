"""The report of a sweep: figures, tables and a few sentences, in one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
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
from analysis.measures.quality import are_policies, final_quality
from analysis.pages.static_page import TRIALS_PAGE, write_trials
from analysis.pages.trial_page import POSTMORTEMS
from analysis.reading.acted import idle_note
from analysis.reading.levels import word
from analysis.reading.loss_words import with_unit
from analysis.reports.about_sweep import AboutSweep
from analysis.reports.findings import findings, left_out_lines, outcome_counts, quality_lines
from analysis.reports.summary import summary
from analysis.reports.words import html_lines, markdown_block, markdown_text
from harness.basics.printing import printable
from harness.config import NO_FAULT
from harness.storage.results_folder import ResultsPath

DOTS_PER_INCH = 110
KEPT_IN_MEMORY = 2**28  # bytes of losses


@dataclass(frozen=True)
class Report:
    """Where the report is, and what it says in words."""

    html: Path
    figures: list[Path]
    summary: list[str]  # at most five sentences
    findings: list[str]  # all of them
    notes: list[str]  # what to beware of
    trials: Path  # the page of all trials beside it
    about: AboutSweep


@dataclass(frozen=True)
class Picture:
    """One figure as a file and as text for the page; both None where the caption says why there is none."""

    name: str
    needs: Needs | None
    caption: str
    path: Path | None = None
    base64: str | None = None
    points: str = ""  # axes under which the page of all trials shows the same trials


def write_report(out: Path | str, wheres: Sequence[str] = ()) -> Report:
    """Write `out`/figures/*.png, `out`/report.html and `out`/trials.html from the results in `out`, finished or not.

    With `wheres`, such as `mitigation=qk_norm`, figures and report are of those trials; trials.html has all.

    Raises ConfigError, a ValueError, if `out` holds no results, and OSError if it cannot be written to.
    """
    out = Path(out)
    results = Results.open(out, wheres)
    folder = ResultsPath.open(out)
    results = replace(results, sweep=with_losses(results.sweep))
    ds, compared, faults = results.sweep, results.comparison, fault_effects(results.sweep)
    of_quality = final_quality(ds)
    sentences = findings(ds, results.sensitivity, faults) + quality_lines(of_quality) + mitigation_findings(compared)
    short = summary(ds, results.sensitivity, faults, compared, of_quality)
    about = AboutSweep.of(out, ds, results.packs or (), wheres)
    notes = [*filter(None, [idle_note(ds)]), *left_out_lines(ds)]
    needs = [Needs.SWEEP, Needs.COMPARISON]
    needs += [Needs.GUARDS] if results.guard_signals else []
    needs += [Needs.POLICIES] if len(of_quality) or results.has_policies else []
    needs += [Needs.SEARCHES] if results.searches else []
    pictures = save_figures(results, out, *needs)
    if are_policies(ds):  # no line on why there is none of a figure that is about other objectives
        pictures = [picture for picture in pictures if picture.path]
    html = write_page(
        "report",
        folder,
        ds,
        about=about,
        summary=short,
        notes=notes,
        findings=[line for line in sentences if line not in (*short, *notes)],
        counts=outcome_counts(ds["outcome"].values),
        trials=ds.sizes["trial"],
        packs=len(np.unique(ds["pack"].values)),
        pictures={kind: [picture for picture in pictures if picture.needs == kind] for kind in Needs},
        has_mitigations=len(np.unique(ds["mitigation"].values)) > 1,
        mitigations=table_rows(compared),
        certainty=coverage(compared),
        idle=idle_note(ds),
        unlike_packs=UNLIKE_PACKS,
        quality=_quality_rows(of_quality),
        sensitivity=_sensitivity_rows(results.sensitivity),
        faults=_fault_rows(faults, ds),
        postmortems=_postmortems(folder, ds),
    )
    trials = write_trials(out) if wheres else write_trials(out, ds, results.packs)
    drawn = [picture.path for picture in pictures if picture.path]
    return Report(out / html, drawn, short, sentences, notes, trials, about)


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


def fault_effects(ds: xr.Dataset) -> pd.DataFrame:
    """One row a fault and mitigation: what the faults did, counted over their finished trials.

    Columns: fault, mitigation, `trials` (all of them), `outcomes` (outcome -> trials, unfinished ones too), and of the
    finished trials the number of `strikes`, and how many `changed` a value, fired `without_effect` (every strike wrote
    what was there) and `never_fired`; `with_twin`, those whose golden twin is finished too, of which `moved` have
    another loss than the twin and `lost` became non-finite where the twin did not; `worst_deviation` (the largest
    loss_t(faulty) - loss_t(golden) of those that did not, nat/token) and `worst_trial`, the trial it belongs to.
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
        worst = watched.loc[np.isfinite(watched["size"]), "worst_deviation"].dropna()
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


def _quality_rows(table: pd.DataFrame) -> dict[str, list[Any]]:
    heading = ["under", "mean quality at the end", "95% interval", "trials", "non-finite"]
    rows = [[one.under, *_with_interval(one), one.trials, one.lost] for one in table.itertuples()]
    return {"heading": heading, "rows": rows}


def _with_interval(row: Any) -> list[str]:
    value = "not known" if np.isnan(row.quality) else f"{row.quality:.4g}"
    return [value, "none: one seed" if np.isnan(row.low) else f"{row.low:.4g} to {row.high:.4g}"]


def _fault_rows(table: pd.DataFrame, sweep: xr.Dataset) -> dict[str, list[Any]]:
    heading = ["fault", "mitigation", "trials", "outcomes", "strikes", "changed a value", "fired without effect"]
    heading += [
        "never fired",
        "loss differs from golden",
        "non-finite, golden finite",
        with_unit(sweep, "worst deviation, if finite"),
    ]
    rows = []
    for row in table.itertuples():
        shares = ", ".join(f"{name} {count / row.trials:.0%}" for name, count in row.outcomes.items())
        size = f"{row.worst_deviation:+.3f}" if row.worst_deviation < 1e6 else f"{row.worst_deviation:+.3g}"
        worst = "" if np.isnan(row.worst_deviation) else f"{size} (trial {row.worst_trial})"
        counts = [row.strikes, row.changed, row.without_effect, row.never_fired, f"{row.moved} of {row.with_twin}"]
        rows.append([row.fault, row.mitigation, row.trials, shares, *counts, row.lost, worst])
    return {"heading": heading, "rows": rows}
