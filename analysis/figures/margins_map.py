"""How often a recipe fails without each of its parts, and without each pair of them, as a picture."""

from __future__ import annotations

import numpy as np

from analysis.figures.drawing import Drawing, page
from analysis.measures.margins import Margins
from harness.basics.printing import count


def margins_map(found: Margins) -> Drawing:
    """The share of failed runs: on the diagonal without that part, elsewhere without both; a ring: more than expected.

    Expected is what two parts that break a recipe independently of each other would give.
    """
    size = len(found.parts)
    shares = np.full((size, size), np.nan)
    for row, one in enumerate(found.parts):
        shares[row, row] = found.share(one).mean
        for column, other in enumerate(found.parts[:row]):
            if (other, one) in found.pairs:
                shares[row, column] = found.share(other, one).mean
    with page(0.62 * size + 3.4, 0.5 * size + 2.6, "Runs that fail without parts of the recipe") as figure:
        panel = figure.subplots()
        image = panel.imshow(shares, cmap="Reds", vmin=0, vmax=1, aspect="auto")
        panel.grid(False)
        panel.set_xticks(range(size), list(found.parts), rotation=35, ha="right")
        panel.set_yticks(range(size), list(found.parts))
        panel.set(xlabel="left out", ylabel="left out")
        for row, column in zip(*np.nonzero(np.isfinite(shares)), strict=True):
            share = shares[row, column]
            colour = _on(share)
            panel.text(int(column), int(row), f"{share:.0%}", ha="center", va="center", color=colour, size=8)
        for (one, other), is_found in found.discoveries.items():
            if is_found:
                place = found.parts.index(one), found.parts.index(other)
                colour = _on(found.share(one, other).mean)
                panel.plot(*place, "o", markersize=26, markerfacecolor="none", markeredgecolor=colour)
        figure.colorbar(image, ax=panel, label="share of runs", fraction=0.04, pad=0.02)
    whole, ones, twos = found.share(), found.share_of(1), found.share_of(2)
    caption = (
        f"The whole recipe fails in {whole.mean:.0%} of its runs, with one part out in {ones.mean:.0%} "
        f"[{ones.low:.0%}, {ones.high:.0%}], with two in {twos.mean:.0%} [{twos.low:.0%}, {twos.high:.0%}]; 95% "
        f"bootstrap intervals over {found.failed.shape[1]} seeds, {count(found.stresses, 'condition')}."
    )
    return Drawing(figure, caption)


def _on(share: float) -> str:
    """A colour that can be read on that of a cell."""
    return "white" if share > 0.55 else "0.15"
