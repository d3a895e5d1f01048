"""Forecasting a larger model
==========================

Three small sizes are trained over a range of learning rates. What rate will a model of twice the
largest width bear? The forecast is sealed first; then that model is trained, and says who was right.
"""

# %%
# Three sizes, two recipes, rates up to far beyond what trains, three seeds.

import tempfile
from pathlib import Path

import sweeps
from analysis.__main__ import main

folder = Path(tempfile.mkdtemp())
out = str(folder / "sizes")
common = [
    *("model.depth=2", "model.head_dim=8", "model.context=32", "train.batch=4", "train.steps=100"),
    *("schedule.warmup=10", "train.validate_every=100", "train.validate_tokens=4096", "mitigation=none,sandwich"),
    "optim.lr=0.01,0.1,0.3,1,2,3,5,10",
]
sweeps.run([*common, "model.width=16,24,32", "seed=range(3)"], out=out, progress=False)

# %%
# What comes next is twice as wide as anything that was trained. The file holds what every
# forecaster says, and hashes of the trials and of the code.

seal = str(folder / "seal.json")
main(["forecast", out, "--predict", "width=64", "--seal", seal])

# %%
# Now the wide model is trained, with other seeds, and the forecasts are scored. *Skill* is how much
# better than "nothing changes" a forecaster was; *floor* is what half of the seeds say of the others.

sweeps.run([*common, "model.width=64", "seed=range(10,13)"], out=out, progress=False)
main(["forecast", out, "--score", seal])
main(["figure", "loss_against_rate", out, str(folder / "rates.png")])

# %%
# With two recipes and one size intervals of skill are wide. ``study=forecast`` has twelve recipes,
# ten sizes, and the findings say what came of it.
#
# Runs of your own are a table with a row each; see the how-to guide.
