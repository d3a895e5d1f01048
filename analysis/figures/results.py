"""What of a results folder is drawn: every figure is given one `Results`, and takes of it what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import xarray as xr

from analysis.figures.labels import labelled
from analysis.measures import metrics
from analysis.measures.mitigations import Comparison, compare
from analysis.measures.outcomes import outcomes_and_notes
from analysis.reading.open_sweep import open_with_events
from analysis.reading.searches import History, read_searches


@dataclass(frozen=True)
class Results:
    """A sweep as `open_sweep` gives it, its fault events if they are known, and what is made of them when asked for."""

    sweep: xr.Dataset
    events: pd.DataFrame | None = None
    out: Path | None = None  # the folder, for the searches in it

    @classmethod
    def open(cls, out: Path) -> Results:
        """Those in folder `out`, with labels for texts. Raises ConfigError as `open_sweep` does."""
        return cls(*labelled(*open_with_events(out)), out)

    @cached_property
    def comparison(self) -> Comparison:
        return compare(self.sweep)

    @cached_property
    def sensitivity(self) -> pd.DataFrame:
        """`metrics.lr_sensitivity`."""
        return metrics.lr_sensitivity(self.sweep)

    @cached_property
    def searches(self) -> Sequence[History]:
        """Raises ConfigError for a journal that is damaged."""
        return read_searches(self.out) if self.out else []

    @property
    def judged(self) -> xr.Dataset:
        """The sweep with `analysis.measures.outcomes`."""
        return self._outcomes[0]

    @property
    def notes(self) -> list[str]:
        """What the outcomes have to say about the clean envelope, a line each."""
        return self._outcomes[1]

    @cached_property
    def _outcomes(self) -> tuple[xr.Dataset, list[str]]:
        return outcomes_and_notes(self.sweep)
