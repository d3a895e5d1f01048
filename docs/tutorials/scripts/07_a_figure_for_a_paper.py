"""A figure for a paper
====================

One column wide, in the type of the page, with intervals, and written as a PDF.
"""

# %%

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import seaborn as sns

import analysis
import sweeps

folder = Path(tempfile.mkdtemp())
words = [
    *("model.width=16,32,64", "model.depth=2", "model.head_dim=16", "model.context=32"),
    *("train.steps=60", "train.batch=4", "train.validate_every=30", "train.validate_tokens=4096", "schedule.warmup=10"),
    *("mitigation=none,mup", "optim.lr=3e-3,1e-2,3e-2,1e-1", "seed=range(3)", "model.base_width=16", "idle=warn"),
]
sweep = sweeps.run(words, out=folder / "widths", progress=False)

# %%
# ``grid`` gives mean and interval for each cell; the rest is matplotlib.

grid = analysis.grid(sweep, ["mitigation", "width", "lr"])
with plt.rc_context({"font.size": 8, "font.family": "serif", "axes.spines.top": False, "axes.spines.right": False}):
    figure, panels = plt.subplots(1, 2, figsize=(5.5, 2.1), sharey=True, layout="constrained")
    colours = sns.color_palette("colorblind")
    for panel, name in zip(panels, grid["mitigation"].values, strict=True):
        for colour, width in zip(colours, grid["width"].values, strict=False):
            cell = grid.sel(mitigation=name, width=width)
            panel.plot(cell["lr"], cell["mean"], color=colour, marker=".", label=f"width {width}")
            panel.fill_between(cell["lr"], cell["low"], cell["high"], color=colour, alpha=0.2, linewidth=0)
        panel.set(xscale="log", xlabel="peak learning rate", title={"none": "standard"}.get(str(name), str(name)))
    panels[0].set_ylabel("final loss [nat/token]")
    panels[1].legend(frameon=False)
    figure.savefig(folder / "figure.pdf")
    plt.show()
print(f"{(folder / 'figure.pdf').stat().st_size:,} bytes of PDF")
