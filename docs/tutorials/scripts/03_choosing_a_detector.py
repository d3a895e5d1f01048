"""Choosing a detector, and its constants
======================================

A detector says at which step an alarm is due. Because what it needs is stored, any detector can be
asked afterwards, with any constants, about the same runs.
"""

# %%
# Faults that do damage, and clean runs for false alarms.

import tempfile

import matplotlib.pyplot as plt

import analysis
import sweeps

out = f"{tempfile.mkdtemp()}/watched"
words = [
    *("model.width=32", "model.depth=2", "model.head_dim=16", "model.context=64", "optim.lr=1e-2,3e-2"),
    *(
        "train.steps=100",
        "train.batch=8",
        "train.validate_every=50",
        "train.validate_tokens=4096",
        "schedule.warmup=15",
        "seed=range(4)",
    ),
    *("fault=none,weight_bit,rare_tokens,learning_rate_jump", "fault.start=60"),
]
sweep = sweeps.run(words, out=out, progress=False)

# %%
# Recall is a share of the incidents, with a Wilson interval; false alarms are per thousand clean
# steps. A hundred clean steps without an alarm do not make a rate of zero: the interval says so.

table = analysis.scored(sweep, ["combined", "skip_step", "loss_ratio", "spiky_loss"])
print(table.round(3).to_string(index=False))

# %%
# The same detector with other constants: more sigmas, fewer false alarms, and what they cost.

found = {}
for sigma in (2, 3, 4, 6, 8, 12):
    found[sigma] = analysis.scored(sweep, ["skip_step"], {"skip_step": {"sigma": sigma}}).iloc[0]
figure, panel = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
panel.errorbar(
    [row["false_alarms"] for row in found.values()],
    [row["recall"] for row in found.values()],
    yerr=[
        [row["recall"] - row["recall_low"] for row in found.values()],
        [row["recall_high"] - row["recall"] for row in found.values()],
    ],
    marker="o",
    capsize=3,
)
for sigma, row in found.items():
    panel.annotate(f"{sigma} sigma", (row["false_alarms"], row["recall"]), textcoords="offset points", xytext=(6, 4))
panel.set(xlabel="false alarms a thousand clean steps", ylabel="recall", ylim=(0, 1.05), title="skip_step")
plt.show()

# %%
# Constants that were chosen on these runs have to be judged on others: ``study=detectors_tune`` and
# ``study=detectors_test`` share no recipe, width, batch or text.
