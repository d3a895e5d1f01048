"""The inferred against the true causes of incidents, as a picture."""

from __future__ import annotations

import numpy as np

from analysis.figures.drawing import Drawing, page
from analysis.measures.confusion import Confusion


def confusion_matrix(found: Confusion) -> Drawing:
    """A row a true cause, a column an inferred one: counts, over shares of the row as colour."""
    counts = found.matrix.to_numpy()
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    right, total, low, high = found.right()
    size = len(found.matrix.columns)
    with page(0.85 * size + 3.6, 0.5 * len(counts) + 3.0, "Inferred against true cause") as figure:
        panel = figure.subplots()
        image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        panel.grid(False)
        panel.set_xticks(range(size), list(found.matrix.columns), rotation=35, ha="right")
        rows = [f"{name} (n = {n})" for name, n in zip(found.matrix.index, totals[:, 0], strict=True)]
        panel.set_yticks(range(len(counts)), rows)
        panel.set(xlabel="inferred from the evidence", ylabel="true cause")
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.55 else "0.15"
            panel.text(int(column), int(row), str(counts[row, column]), ha="center", va="center", color=colour)
        figure.colorbar(image, ax=panel, label="share of the row", fraction=0.04, pad=0.02)
    interval = f"{right / total:.0%} [{low:.0%}, {high:.0%}]"
    caption = f"{right} of {total} causes are right: {interval}, 95% Wilson interval; faults whose damage can be seen."
    return Drawing(figure, caption)
