"""The figures by name: each is one function in a file of its own in this folder, and finds itself.

    @drawn_from(Needs.SWEEP, place=5)
    def loss_against_depth(results: Results) -> Drawing:

An installed package may bring one along (harness/basics/plugins.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from analysis.figures.drawing import Drawing
from analysis.figures.results import Results
from harness.basics import plugins


class Needs(StrEnum):
    """What of `Results` a figure is drawn from, and with that where it stands: the page of the campaign has those of
    outcomes, the report all others.
    """

    SWEEP = "sweep"
    SEARCHES = "searches"
    COMPARISON = "comparison"
    OUTCOMES = "outcomes"


@dataclass(frozen=True)
class Registered:
    """A figure: its name is that of its function, and `place` orders those with the same needs."""

    draw: Callable[[Results], Drawing]
    needs: Needs
    place: int

    def __call__(self, results: Results) -> Drawing:
        return self.draw(results)


def drawn_from(needs: Needs, place: int) -> Callable[[Callable[[Results], Drawing]], Registered]:
    """Make a function a figure."""
    return lambda draw: Registered(draw, needs, place)


@cache
def figures(*needs: Needs) -> dict[str, Registered]:
    """Those with one of `needs`, in this order, by name."""
    found = [
        figure
        for module in plugins.modules("figures").values()
        for figure in vars(module).values()
        if isinstance(figure, Registered) and figure.draw.__module__ == module.__name__ and figure.needs in needs
    ]
    return {own.draw.__name__: own for own in sorted(found, key=lambda own: (needs.index(own.needs), own.place))}
