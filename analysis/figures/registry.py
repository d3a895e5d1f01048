"""The figures by name: each is one function in a file of its own in this folder, and finds itself.

    @drawn_from(Needs.SWEEP, place=5)
    def loss_against_depth(results: Results) -> Drawing:

An installed package may bring one along (harness/basics/plugins.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path

import pandas as pd
import xarray as xr

from analysis.figures.drawing import Drawing
from analysis.figures.labels import labelled
from analysis.measures import metrics
from analysis.measures.mitigations import Comparison, compare
from analysis.measures.outcomes import outcomes_and_notes
from analysis.measures.quality import without_policies
from analysis.reading.open_sweep import TAKEN, events_of, open_with_packs
from analysis.reading.searches import History, read_searches
from analysis.reading.selection import with_company
from harness.basics import plugins
from harness.storage.stored import PackInfo


class Needs(StrEnum):
    """What of `Results` a figure is drawn from, and with that where it stands.

    The page of the campaign has those of outcomes, the report all others.
    """

    SWEEP = "sweep"
    GUARDS = "guards"
    POLICIES = "policies"
    SEARCHES = "searches"
    COMPARISON = "comparison"
    OUTCOMES = "outcomes"
    INCIDENTS = "incidents"  # on no page: they replay every detector


@dataclass(frozen=True)
class Results:
    """A sweep as `open_sweep` gives it, its fault events if they are known, and what is made of them when asked for."""

    sweep: xr.Dataset
    events: pd.DataFrame | None = None
    out: Path | None = None  # the folder, for the searches in it
    packs: Sequence[PackInfo] | None = None  # those of the store that the sweep was made of

    @classmethod
    def open(cls, out: Path, wheres: Sequence[str] = ()) -> Results:
        """Those in folder `out` that `wheres` choose, with labels for texts.

        Raises ConfigError as `open_sweep` and `analysis.reading.selection` do.
        """
        sweep, packs = open_with_packs(out)
        events = events_of(packs)
        if wheres:
            sweep = with_company(sweep, wheres)
            events = events[events["trial"].isin(sweep["trial"].values)]
        return cls(*labelled(sweep, events), out, packs)

    @cached_property
    def comparison(self) -> Comparison:
        return compare(self.sweep)

    @cached_property
    def sensitivity(self) -> pd.DataFrame:
        """`metrics.lr_sensitivity`; of no policies, whose validation loss is not what they are trained for."""
        return metrics.lr_sensitivity(without_policies(self.sweep))

    @property
    def guard_signals(self) -> list[str]:
        """The variables [trial, step] that guards declared (`harness/guards/base.py`)."""
        return sorted(str(name) for name in self.sweep.data_vars if name not in TAKEN)

    @property
    def has_policies(self) -> bool:
        """Whether some trial has sampled what it trained on."""
        return "reference_kl" in self.sweep.data_vars

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


@dataclass(frozen=True)
class Registered:
    """A figure: its name is that of its function, and `place` orders those with the same needs.

    `points`, such as `x=lr&y=final_loss&colour=mitigation`, are axes of the page of all trials (analysis/pages) under
    which it shows the same trials.
    """

    draw: Callable[[Results], Drawing]
    needs: Needs
    place: int
    points: str = ""

    def __call__(self, results: Results) -> Drawing:
        return self.draw(results)


def drawn_from(needs: Needs, place: int, points: str = "") -> Callable[[Callable[[Results], Drawing]], Registered]:
    """Make a function a figure."""
    return lambda draw: Registered(draw, needs, place, points)


@cache
def figures(*needs: Needs) -> dict[str, Registered]:
    """Those with one of `needs`, in this order, by name."""
    registered = [
        figure
        for module in plugins.modules("figures").values()
        for figure in vars(module).values()
        if isinstance(figure, Registered) and figure.draw.__module__ == module.__name__ and figure.needs in needs
    ]
    registered.sort(key=lambda figure: (needs.index(figure.needs), figure.place))
    return {figure.draw.__name__: figure for figure in registered}
