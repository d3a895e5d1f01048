"""A campaign of bit flips
=======================

Which bits of which tensors break a run, and which are masked? A campaign draws faults from one
description, trains each beside its golden twin, and judges it against how far correct runs drift
apart by themselves.
"""

# %%
# Twenty-five flips at each of three sites. ``fault.samples`` draws them without repeats, and all that
# share a recipe share the steps before they strike.

import tempfile

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

import analysis
import sweeps

out = f"{tempfile.mkdtemp()}/flips"
words = [
    *("model.width=32", "model.depth=2", "model.head_dim=16", "model.context=32", "optim.lr=1e-2"),
    *("train.steps=60", "train.batch=4", "train.validate_every=30", "train.validate_tokens=4096", "schedule.warmup=10"),
    *("fault=bit_flip", "fault.site=weight,gradient,moment_2", "fault.samples=25", "fault.start=10", "fault.until=40"),
]
sweep = sweeps.run(words, out=out, progress=False)

# %%
# What became of each. ``masked`` means that the run came back to its twin, or that its loss never
# left what correct runs differ by.

judged = analysis.outcomes(sweep)
faulty = judged.sel(trial=(judged.fault == "bit_flip"))
rows = faulty[["struck_site", "struck_bit", "fault_outcome"]].to_dataframe().reset_index()
print(pd.crosstab(rows["struck_site"], rows["fault_outcome"]).to_string())

# %%
# Bit 31 is the sign, 23 to 30 are the exponent. The high bits of the exponent do the damage.

edges = {"low mantissa": 15, "high mantissa": 22, "exponent": 29, "top of exponent": 30, "sign": 31}
kinds = pd.cut(rows["struck_bit"].astype(float), [-1, *edges.values()], labels=list(edges))
shares = pd.crosstab(kinds, rows["fault_outcome"], normalize="index")
figure, panel = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
shares.plot.barh(stacked=True, ax=panel, color=sns.color_palette("colorblind"), legend=False)
panel.set(xlabel="share of faults", ylabel="bit that flipped")
figure.legend(loc="outside lower center", ncols=4)
plt.show()

# %%
# Every strike is recorded: where, when, and what it changed.

events = analysis.fault_events(out).sort_values("bit", ascending=False)
print(events[["site", "tensor", "bit", "step", "before", "after"]].head(6).to_string(index=False))

# %%
# ``stability-harness campaign OUT`` writes all of this with Wilson intervals, as a page.
