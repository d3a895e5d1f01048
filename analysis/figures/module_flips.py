"""Flipped bits in what a module gives: what they break, and what is seen of it, by module and number of elements."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.drawing import Drawing, page
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.detectors import alarms, measured
from analysis.measures.module_flips import flips, sizes_of
from harness.basics.printing import count

SHOWN = ("combined", "skip_step", "finite")  # detectors, as far as they are there


@drawn_from(Needs.INCIDENTS, place=3)
def module_flips(results: Results) -> Drawing:
    """A map of the share that is damaging, and of what each detector sees: modules down, elements to the right."""
    sweep = results.sweep
    names = [name for name in SHOWN if name in measured(sweep)]
    table = flips(sweep, {name: alarms(sweep, name)["alarm"].values for name in names})
    if table.empty:
        return Drawing(None, "No figure: no finished fault struck so many elements of an activation.")
    sizes, maps = sizes_of(results.out), {"damaging": "final loss moved, or not finite"}
    maps |= {name: f"seen by {name}" for name in names}
    modules, columns = list(dict.fromkeys(table["module"])), len(maps)
    with page(3.4 + 2.5 * columns, 0.42 * len(modules) + 2.0, "Flipped bits in a module's output") as figure:
        panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
        for panel, (column, title) in zip(panels, maps.items(), strict=True):
            _draw(panel, table, column, modules)
            panel.set_title(title, fontsize="medium")
            panel.set(xlabel="elements", ylabel="")
        panels[0].set_yticklabels([_labelled(module, sizes) for module in modules], rotation=0)
    each = count(int(table["flips"].median()), "fault")
    return Drawing(
        figure,
        f"Bits flipped in so many elements of a module's output at one step: the share [%] of some {each} a cell that "
        "moved the final loss by more than ten clean envelopes or ended in NaN, and the share that detectors saw. "
        "Beside each module: how many elements its output has in all blocks.",
    )


def _draw(panel: Axes, table: pd.DataFrame, column: str, modules: list[str]) -> None:
    grid = 100 * table.pivot(index="module", columns="elements", values=column).reindex(modules)
    sns.heatmap(grid, ax=panel, vmin=0, vmax=100, cmap="rocket_r", annot=True, fmt=".0f", cbar=False, linewidths=0.5)


def _labelled(module: str, sizes: Mapping[str, int]) -> str:
    return f"{module} ({sizes[module]:,})" if module in sizes else module
