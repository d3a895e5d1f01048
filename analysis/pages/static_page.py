"""`OUT/trials.html` and `OUT/trials/ID.html`: the trials of a sweep in one file that is opened from the disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from analysis.again.batches import unknown_trial
from analysis.pages.document import one_file
from analysis.pages.overview import columns_of, finals, worth
from analysis.pages.plain import json_text
from analysis.pages.trial_page import Detail, trial_pages
from analysis.reading.open_sweep import dataset_of
from harness.basics.printing import count, label
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import PackInfo, read_store

TRIALS_PAGE, TRIALS = "trials.html", "trials"
MOST_PAGES, MOST_BYTES = 400, 20_000_000  # of trials with curves, and of the text of their pages
SMALL = Detail(first=400, others=100)


def write_trials(out: Path | str, sweep: xr.Dataset | None = None, packs: Sequence[PackInfo] | None = None) -> Path:
    """Write `out`/trials.html: every trial of the results, and the curves of those that are likeliest to be asked for.

    `sweep` is that of `open_sweep` and `packs` those that it was made of, if they were read already. Raises
    ConfigError, a ValueError, if `out` holds no results, and OSError if it cannot be written to.
    """
    if sweep is None or packs is None:
        attributes, found = read_store(Path(out))
        packs = list(found)
        sweep = dataset_of(attributes, packs)
    else:
        attributes = {name: sweep.attrs[name] for name in ("format", "study")}
    return _written(Path(out), attributes, packs, sweep, None)


def write_trial(out: Path | str, trial: str) -> Path:
    """Write `out`/trials/TRIAL.html: the same page with that trial's curves alone, as many points as the live one has.

    Raises ConfigError for a trial that there is not, and as `write_trials` does.
    """
    attributes, found = read_store(Path(out))
    packs = list(found)
    sweep = dataset_of(attributes, packs)
    if trial not in sweep["trial"].values:
        raise unknown_trial(Path(out), trial, iter(map(str, sweep["trial"].values)))
    return _written(Path(out), attributes, packs, sweep, trial)


def _written(
    out: Path, attributes: dict[str, Any], packs: Sequence[PackInfo], sweep: xr.Dataset, only: str | None
) -> Path:
    losses = finals(sweep)
    order = [str(trial) for trial in sweep["trial"].values[worth(sweep, losses["final_loss"])]]
    # Those that another process has begun since the sweep was opened, or a pack that was replaced, are not asked for.
    stored = {trial for pack in packs for trial in pack.attributes["ids"]}
    wanted = [trial for trial in order if trial in stored] if only is None else [only]
    filled = _filled(out, attributes, packs, wanted, SMALL if only is None else Detail())
    left = sweep.sizes["trial"] - len(filled["pages"])
    for page in filled["pages"].values():
        if only is not None and page.get("postmortem"):
            page["postmortem"] = f"../{page['postmortem']}"
    data = {
        "is_live": False,
        "only": only,
        "title": f"{label(str(sweep.attrs['study']))}: trials",
        "note": _note(len(filled["pages"]), left) if only is None else f"This file has the curves of {only} alone.",
        "overview": columns_of(sweep, **losses),
        **filled,
    }
    folder = ResultsPath.open(out)
    place = folder / TRIALS_PAGE if only is None else folder / TRIALS / f"{only}.html"
    place.parent.make_folder()
    place.write(one_file(data).encode())
    return out.joinpath(*place.names)


def _filled(
    out: Path, attributes: dict[str, Any], packs: Sequence[PackInfo], trials: Sequence[str], detail: Detail
) -> dict[str, Any]:
    """`pages`, `curves` and `rests`, the fields at defaults, of the first of `trials`, as far as there is room."""
    pages: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    rests: dict[str, int] = {}
    size = 0
    for found in trial_pages(out, attributes, packs, trials[:MOST_PAGES], detail):
        for trial, page in found.pages.items():
            if "config" in page:
                rest = json_text(page["config"]["rest"])
                page["config"]["rest"] = rests.setdefault(rest, len(rests))
            names = [name for name in (trial, page.get("golden")) if name in found.curves and name not in curves]
            own = {name: found.curves[name] for name in names}
            size += len(json_text([page, own]))
            if size > MOST_BYTES and pages:
                return {"pages": pages, "curves": curves, "rests": list(map(json.loads, rests))}
            pages[trial] = page
            curves |= own
    return {"pages": pages, "curves": curves, "rests": list(map(json.loads, rests))}


def _note(pages: int, left: int) -> str:
    if not left:
        return "Every trial has its curves here."
    return (
        f"{count(pages, 'trial')} of {pages + left} have their curves here: first those that did not end as trained or "
        "had incidents, then those whose fault changed them for good, from the highest final loss down, then their "
        f"golden twins, then the others. The rest, {count(left, 'trial')}, are in the figure and the list alone: "
        "`stability-harness trial OUT ID` writes the page of any of them."
    )
