"""What a campaign of faults found: a table by site, its figures, and a page of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.figures.labels import labelled_sweep
from analysis.figures.registry import Needs, Results
from analysis.measures.incidents import LEFT
from analysis.measures.judged_faults import site_labels
from analysis.measures.outcomes import IDLE, OUTCOMES, SILENT, UNJUDGED, VISIBLE
from analysis.measures.statistics import rates, studied, wilson_interval
from analysis.pages.static_page import write_trials
from analysis.reading.loss_words import unit
from analysis.reading.open_sweep import UNFINISHED, open_with_packs
from analysis.reading.selection import with_company
from analysis.reports.report import Picture, save_figures, with_losses, write_page
from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath

ALL = "all sites"


@dataclass(frozen=True)
class CampaignReport:
    """Where the page is, and what it says: a table of words, remarks on the data, and figures with their captions."""

    html: Path
    table: pd.DataFrame
    meanings: list[str]  # of words in the table
    notes: list[str]
    pictures: list[Picture]
    trials: Path  # the page of all trials beside it


def write_campaign(out: Path | str, wheres: Sequence[str] = ()) -> CampaignReport:
    """Write `out`/figures/*.png, `out`/campaign.html and `out`/trials.html from the results in `out`, finished or not.

    With `wheres`, such as `fault_bit=30`, of those trials alone; trials.html has all.

    Raises ConfigError, a ValueError, if `out` holds no results or none of its trials has a fault to study, and OSError
    if it cannot be written to.
    """
    out = Path(out)
    opened, packs = open_with_packs(out)
    sweep = labelled_sweep(with_company(opened, wheres))
    folder = ResultsPath.open(out)
    if not studied(sweep).sizes["trial"]:
        raise ConfigError(f"out={out}: its sweep has no faulty trial; allowed: a folder with trials that have a fault")
    results = Results(with_losses(sweep))
    table = site_table(results.judged)
    notes = [*([f"Only trials with {' and '.join(wheres)}."] if wheres else []), *_remarks(table), *results.notes]
    pictures = save_figures(results, out, Needs.OUTCOMES)
    texts = in_words(table)
    rows = {"heading": list(texts.columns), "rows": texts.to_numpy().tolist()}
    meant = meanings(results.judged)
    html = write_page("campaign", folder, sweep, notes=notes, meanings=meant, table=rows, pictures=pictures)
    trials = write_trials(out) if wheres else write_trials(out, results.judged, packs)
    return CampaignReport(out / html, texts, meant, notes, pictures, trials)


def site_table(judged: xr.Dataset) -> pd.DataFrame:
    """One row a site and one of all: what became of the faults of a sweep with `analysis.measures.outcomes`.

    Columns: site; `trials`, the judged ones; for each outcome NAME its count, and as `NAME_low` and `NAME_high` the 95%
    Wilson interval of its share; the same for `silent`, of the `watched` trials, which are those with a golden twin
    whose fault changed something;
    `zeros`, those that struck a number that was zero in the fault's format, of the `known_zeros` of which that is
    known; how many are `idle`, `unfinished` or `unjudged`.
    """
    faulty = studied(judged)
    faulty = faulty.assign_coords(site_of_fault=("trial", site_labels(faulty)))
    by_site = rates(faulty, by=["site_of_fault"]).rename(columns={"site_of_fault": "site"})
    long = pd.concat([by_site, rates(faulty).assign(site=ALL)])
    rows = []
    for site, group in long.groupby("site", sort=False):
        faults = faulty if site == ALL else faulty.isel(trial=np.flatnonzero(faulty["site_of_fault"].values == site))
        row: dict[str, Any] = {"site": site, "trials": int(group["trials"].iloc[0])}
        for rate in group.itertuples():
            row |= {rate.outcome: rate.count, f"{rate.outcome}_low": rate.low, f"{rate.outcome}_high": rate.high}
        seen = faults["visibility"].values[faults["fault_outcome"].values != IDLE]
        silent = int((seen == SILENT).sum())
        watched = silent + int((seen == VISIBLE).sum())
        low, high = wilson_interval(silent, watched)
        row |= {"silent": silent, "silent_low": float(low), "silent_high": float(high), "watched": watched}
        zeros = faults["struck_zero"].values
        row |= {"zeros": float((zeros > 0).sum()), "known_zeros": int((~np.isnan(zeros)).sum())}
        rows.append(row | {name: int((faults["fault_outcome"] == name).sum()) for name in (IDLE, UNFINISHED, UNJUDGED)})
    return pd.DataFrame(rows)


def in_words(table: pd.DataFrame) -> pd.DataFrame:
    """`site_table` as it is printed: counts, and shares with their intervals in percent."""
    texts = pd.DataFrame({"site": table["site"], "N": table["trials"]})
    for name in (*OUTCOMES, SILENT):
        counts = table[[name, "watched" if name == SILENT else "trials", f"{name}_low", f"{name}_high"]]
        texts[name] = [
            f"{number} = {number / total:.0%} [{100 * low:.0f}, {100 * high:.0f}]" if total else "-"
            for number, total, low, high in counts.itertuples(index=False)
        ]
    pairs = zip(table["zeros"], table["known_zeros"], strict=True)
    zeros = [f"{number / known:.0%} of {known}" if known else "-" for number, known in pairs]
    return texts.assign(zeros=zeros, idle=table[IDLE])


def meanings(judged: xr.Dataset) -> list[str]:
    """What words of the table mean, with the limits that hold here."""
    limits = judged["envelope_final"].values
    limits = limits[np.isfinite(limits)]
    units = unit(judged)
    span = f" (here {_span(limits.min(), limits.max(), units)})" if len(limits) else ""
    return [
        f"Lingering: the loss ended farther from its golden twin than one changed last bit drives clean runs{span}. "
        f"That need not hurt; an incident that is called lingering left more than {f'{LEFT:g} {units}'.rstrip()}.",
        "Zeros: share of the faults that struck a number that was zero in the fault's format, of those of which it is "
        "known.",
    ]


def _span(low: float, high: float, units: str) -> str:
    between = f"{low:.1g}" if f"{low:.1g}" == f"{high:.1g}" else f"{low:.1g} to {high:.1g}"
    return f"{between} {units}".rstrip()


def _remarks(table: pd.DataFrame) -> list[str]:
    whole = table[table["site"] == ALL].iloc[0]
    remarks = {
        UNFINISHED: "unfinished, and not counted",
        UNJUDGED: "without a golden run to judge by, and not counted",
        IDLE: "idle: never fired, or wrote what was there, and not counted",
    }
    return [f"{count(int(whole[name]), 'fault')} {text}." for name, text in remarks.items() if whole[name]]
