"""The pages of the reference on figures, on the dataset and on errors, told by the code itself."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import xarray as xr

import sweeps
from analysis.figures.registry import Needs, figures
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost
from harness.storage.stored import DamagedStore
from sweeps.commands.notebook import SweepFailed
from sweeps.running.processes import RankFailed

FROM = {
    Needs.SWEEP: "any sweep; `report` has it",
    Needs.GUARDS: "a sweep whose guards or readings show signals; `report` has it",
    Needs.POLICIES: "a sweep with `objective.name=policy`; `report` has it",
    Needs.SEARCHES: "a sweep with `search=NAME`; `report` has it",
    Needs.COMPARISON: "a sweep over mitigations; `report` has it",
    Needs.OUTCOMES: "a sweep with faults, such as `study=campaign`; `campaign` has it",
    Needs.INCIDENTS: "a sweep with incidents, such as `study=detectors`",
}
STATUSES = """| status | when |
|---|---|
| 0 | all was done |
| 1 | packs have failed, a file is damaged, or what was asked for did not hold |
| 2 | wrong input: one line for each reason on standard error, and nothing is changed |
| 130 | after Ctrl-C; the same command goes on |
| 143 | after SIGTERM; the same command goes on |
"""
TINY = ["model.width=16", "model.depth=1", "model.head_dim=8", "model.context=16", "train.batch=2", "train.steps=6"]
TINY += ["train.validate_tokens=16", "train.validate_between=16", "schedule.warmup=2", "data.source=zipf"]
TINY += ["data.vocabulary=32", "data.length=2000", "fault=none,weight_bit", "fault.start=2", "hydra.launcher.workers=1"]


def figures_page() -> str:
    """Every figure by name: what it shows, and of which sweeps."""
    lines = ["# Figures", "", "`stability-harness figure NAME OUT FILE` writes one, as `.svg`, `.pdf` or `.png`;"]
    lines += ["`--width 3.3in --font 8 --no-title` fits it to a paper. The last of the"]
    lines += ["[tutorials](../tutorials/index.rst) draws them all.", "", "| name | shows | of |", "|---|---|---|"]
    for name, figure in figures(*Needs).items():
        module = sys.modules[figure.draw.__module__]
        lines.append(f"| `{name}` | {_first(module.__doc__ or '')} | {FROM[figure.needs]} |")
    return "\n".join(lines) + "\n"


def dataset_page() -> str:
    """Every variable and coordinate of a sweep's dataset, from one that is trained for it."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = sweeps.run(TINY, out=Path(folder) / "out", progress=False)
        sweep.load()
    lines = ["# The dataset", "", "`analysis.open_sweep(OUT)` is one `xarray.Dataset`, read when it is asked for."]
    lines += ["Trials that end early, or have fewer steps, layers or ranks than others, are filled with NaN;"]
    lines += ["`steps` says how many steps a trial has. Axes of a sweep that are not here (a field of a mitigation,"]
    lines += ["say) are coordinates of their own.", "", "## Measured", ""]
    lines += _table(sweep, [str(name) for name in sweep.data_vars])
    lines += ["", "Readings that are not on by default add [their own](../detection.md).", "", "## Coordinates", ""]
    lines += _table(sweep, [str(name) for name in sweep.coords])
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """What is raised, and with which status commands end."""
    lines = ["# Errors", "", "Each error is a line with the key, the value and what is allowed.", "", STATUSES]
    lines += ["In Python:", "", "| error | is a | when |", "|---|---|---|"]
    for error in (ConfigError, DamagedStore, SweepFailed, FolderLost, RankFailed):
        base = error.__mro__[1].__name__
        lines.append(f"| `{error.__module__}.{error.__name__}` | `{base}` | {_first(error.__doc__ or '')} |")
    return "\n".join(lines) + "\n"


def _table(sweep: xr.Dataset, names: list[str]) -> list[str]:
    rows = ["| name | along | units | what |", "|---|---|---|---|"]
    for name in names:
        about = sweep[name].attrs
        along = ", ".join(map(str, sweep[name].dims))
        rows.append(f"| `{name}` | {along} | {about.get('units', '')} | {_cell(about.get('long_name', ''))} |")
    return rows


def _first(text: str) -> str:
    """The first paragraph, on one line."""
    return _cell(" ".join(text.strip().partition("\n\n")[0].split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
