"""What each playbook saves of the same incidents, and what it costs."""

from __future__ import annotations

import numpy as np

from analysis.figures.drawing import Drawing, page
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.playbooks import LIMIT, NOTHING, ORACLE, cases, playbooks
from harness.basics.printing import count
from harness.config import NO_FAULT

KEPT, COST, SPREAD = "#4da88f", "#dd7442", "0.35"
LEAST, MOST = 1e-4, 1e6  # standard deviations, as drawn


@drawn_from(Needs.INCIDENTS, place=4)
def playbooks_compared(results: Results) -> Drawing:
    """Three panels with a line each playbook: what it keeps, how far from the golden run, and at what cost in steps."""
    try:
        table = playbooks(results.sweep)
    except ValueError as error:
        return Drawing(None, f"No figure: {error}.")
    if len(table) < 2:
        return Drawing(None, "No figure: it wants several playbooks of the same incidents.")
    table = table.sort_values(["kept", "steps_lost"], ascending=[False, True], na_position="last").reset_index(
        drop=True
    )
    lost = int(table.loc[table["playbook"] == NOTHING, "lost"].iloc[0])
    rows = cases(results.sweep)
    rows = rows[(rows["fault"] != NO_FAULT.name) & (rows["changes"] > 0)]
    with page(12, 0.5 * len(table) + 1.9, "What playbooks save") as figure:
        panels = figure.subplots(1, 3, sharey=True)
        place = np.arange(len(table))
        kept = 100 * table["kept"]
        whiskers = np.abs([kept - 100 * table["kept_low"], 100 * table["kept_high"] - kept])
        panels[0].barh(place, kept, height=0.6, color=KEPT, linewidth=0)
        panels[0].errorbar(kept, place, xerr=np.nan_to_num(whiskers), fmt="none", ecolor=SPREAD, capsize=3)
        panels[0].set(xlabel=f"kept, of {lost} that are lost without [%]", xlim=(0, 105))
        generator = np.random.default_rng(0)
        for line, name in enumerate(table["playbook"]):
            here = rows[rows["playbook"] == name]
            size = (here["deviation"].abs() / here["spread"]).to_numpy()
            size = np.clip(size[np.isfinite(size)], LEAST, MOST)
            spots = line + generator.uniform(-0.25, 0.25, len(size))
            panels[1].plot(size, spots, ".", color=SPREAD, alpha=0.4, markersize=4)
        panels[1].axvline(LIMIT, color=COST, linestyle=":")
        panels[1].set(xscale="log", xlabel="final deviation [deviations of seeds]")
        cost = table["steps_lost"].to_numpy(dtype=float)
        whiskers = np.abs([cost - table["steps_lost_low"], table["steps_lost_high"] - cost])
        panels[2].errorbar(cost, place, xerr=np.nan_to_num(whiskers), fmt="o", color=COST, capsize=3)
        panels[2].set(xlabel="steps lost by an answered incident", xscale="symlog", xlim=(0, None))
        panels[0].set_yticks(place, [str(name) for name in table["playbook"]])
        panels[0].set_ylim(len(table) - 0.5, -0.5)
        for panel in panels:
            panel.grid(False, axis="y")
    caption = (
        f"{count(int(table['incidents'].iloc[0]), 'incident')} under each playbook. Kept: finite, and no more than "
        f"{LIMIT:g} standard deviations of seeds worse than the golden run (dotted); 95% Wilson intervals. Points: "
        f"every incident that stayed finite, those without any deviation at {LEAST:g}, those beyond {MOST:g} there. "
        "Steps lost: trained in vain or "
        f"skipped, mean and 95% bootstrap interval; {ORACLE} knows the fault."
    )
    return Drawing(figure, caption)
