"""How likely a run's first spike is, against the time since its warm-up began."""

from __future__ import annotations

import pandas as pd

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES
from analysis.measures.hazard import BEFORE, NEAR, PER, RISE, first_spikes, hazard_ratio, spans

LEAST = 3  # spikes of a rate, below which it has no line of its own


@drawn_from(Needs.INCIDENTS, place=6)
def spike_hazard(results: Results) -> Drawing:
    """First spikes in a thousand steps of runs that had none, a line a learning rate, with exact intervals."""
    sweep = results.sweep
    runs = first_spikes(sweep)
    if runs.empty or not runs["spike"].notna().any():
        kind = f"that warms up and was finite for {BEFORE} steps is finished"
        why = f"no run without a fault {kind if runs.empty else 'spikes'}"
        return Drawing(None, f"No figure: {why}.")
    rates = sweep["lr"].values[runs["trial"]]
    counts = runs["spike"].notna().groupby(rates).sum()
    shown = list(counts.index[counts >= LEAST])[-MOST_SERIES:]
    groups = {f"{rate:g}": runs[rates == rate] for rate in shown} or {"all": runs}
    with page(7.2, 5.0) as figure:
        panel = figure.subplots()
        panel.axvspan(*NEAR, color="0.92", zorder=0)
        for position, (name, look) in enumerate(looks(list(groups)).items()):
            table = spans(groups[name])
            middle = (table["low"] + table["high"]) / 2 + 0.02 * (position - len(groups) / 2) * table["high"]
            reach = abs(table[["hazard_low", "hazard_high"]].to_numpy().T - table["hazard"].to_numpy())
            panel.errorbar(middle, table["hazard"], reach, **look, capsize=3, label=f"learning rate {name}")
        panel.set_xscale("symlog", linthresh=1.0, linscale=1.0)
        ticks = [0, 0.5, 1, 2, 4, 7, 12, 20]
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_xlim(0, max(spans(part)["high"].max() for part in groups.values()))
        panel.set_yscale("symlog", linthresh=1.0)
        panel.set_ylim(bottom=0)
        panel.set(title="Hazard of the first spike", xlabel="steps, in multiples of the warm-up")
        panel.set_ylabel(f"first spikes in {PER:,} steps without one so far")
        legend_below(figure, panel.get_legend_handles_labels()[0])
    return Drawing(figure, _caption(runs, len(counts) - len(shown) if shown else 0))


def _caption(runs: pd.DataFrame, left_out: int) -> str:
    ratio = hazard_ratio(runs)
    near = f"{ratio.near} of them at {NEAR[0]:g} to {NEAR[1]:g} times the warm-up (grey)"
    if ratio.value == ratio.value:
        near += f": {ratio.value:.2g} times the hazard of all else [{ratio.low:.2g}, {ratio.high:.2g}]"
    rates = f" Not shown: {left_out} learning rates with fewer than {LEAST} spikes." if left_out else ""
    return (
        f"{int(runs['spike'].notna().sum())} of {len(runs)} runs without a fault spiked: a loss of more than {RISE:g} "
        f"times the median of the {BEFORE} before, or one that is not finite. {near}. Bars are exact 95% intervals of "
        f"a Poisson rate.{rates}"
    )
