"""A learning-rate range, and two norms
====================================

How far may the learning rate rise before a small GPT stops training, and how much does the loss
depend on it before that? The same rates with and without QK-norm, and with a norm on what each
branch gives, in three seeds each.
"""

# %%
# ``sweeps.run`` trains what ``stability-harness sweep`` would with the same words. Every combination
# of the values is a trial, and what is trained already is not trained again.

import tempfile

import matplotlib.pyplot as plt
import numpy as np

import analysis
import sweeps

out = f"{tempfile.mkdtemp()}/rates"
words = [
    *("model.width=32", "model.depth=2", "model.head_dim=16", "model.context=32"),
    *("train.steps=80", "train.batch=8", "train.validate_every=40", "train.validate_tokens=4096", "schedule.warmup=15"),
    *("mitigation=none,qk_norm,sandwich", "optim.lr=1e-2,1e-1,1,2.5,10", "seed=range(3)"),
]
sweep = sweeps.run(words, out=out, progress=False)
print(analysis.table(sweep).head(4).to_string())

# %%
# ``grid`` has the mean over seeds with its 95% interval for each combination. A run that diverged
# ends anywhere, so the axis stops at the loss at initialisation.

grid = analysis.grid(sweep, ["mitigation", "lr"])
initial = float(sweep.initial_validation_loss.mean())
figure, panel = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
for name, row in grid.groupby("mitigation"):
    row = row.squeeze("mitigation")
    (line,) = panel.plot(row["lr"], row["mean"], marker="o", label=name)
    panel.fill_between(row["lr"], row["low"], row["high"], color=line.get_color(), alpha=0.2)
panel.axhline(initial, color="grey", linestyle=":", label="at initialisation")
panel.set(xscale="log", ylim=(2.3, 1.1 * initial), xlabel="peak learning rate", ylabel="final loss [nat/token]")
panel.legend()
plt.show()

# %%
# The largest stable rate is the largest at which every seed trained, and at every smaller rate of
# the sweep, too. It is only as fine as the rates are.

for name in ("none", "qk_norm", "sandwich"):
    mine = sweep.sel(trial=sweep.mitigation == name)
    rates = np.unique(mine.lr)
    trains = [bool((mine.outcome[mine.lr == rate] == "trained").all()) for rate in rates]
    stable = rates[: trains.index(False)] if False in trains else rates
    print(f"{name:<9} largest stable rate {stable.max():g} of {', '.join(f'{rate:g}' for rate in rates)}")

# %%
# ``compare`` has each mitigation against the baseline, with intervals of the change. ``stable_rate`` is
# a ratio; ``sensitivity`` is how far the loss rises above its best over all rates.

table = analysis.compare(sweep).table
columns = [name for name in table if name.startswith(("sensitivity", "stable_rate")) and "idle" not in name]
print(table[["mitigation", *columns]].T.to_string(header=False))
