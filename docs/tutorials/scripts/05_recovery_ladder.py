"""
A recovery ladder
=================

What is done at an alarm decides what an incident costs. The same flipped bit of a weight under four
playbooks: ``none``; ``ladder``, which skips the update, and only later does more; ``palm``, which goes
back to a snapshot and skips batches; and ``repair``, which runs the step again.
"""

# %%
# The run is short, so the snapshots of ``palm`` are closer together than published.

import tempfile

import matplotlib.pyplot as plt
import numpy as np

import analysis
import sweeps

out = f"{tempfile.mkdtemp()}/ladder"
words = [
    *("model.width=32", "model.depth=2", "model.head_dim=16", "model.context=32", "optim.lr=1e-2"),
    *(
        "train.steps=240",
        "train.batch=8",
        "train.validate_every=120",
        "train.validate_tokens=4096",
        "schedule.warmup=15",
        "seed=range(2)",
    ),
    *("fault=none,weight_bit", "fault.start=200", "fault.tensor=blocks.*.feedforward.down", "fault.bit=30"),
    *("playbook=none,ladder,palm,repair", "playbook.snapshot.every=10", "playbook.snapshot.kept=4"),
    *("playbook.roll_back.back=20", "playbook.skip_batches.count=10", "idle=warn"),
]
sweep = sweeps.run(words, out=out, progress=False)

# %%
# Against its golden twin each faulty run shows what was lost. Skipping an update is of no use here: the
# weight was broken before that step. Going back saves the run, on other batches than its twin's.
# ``repair`` notices that the step does not repeat itself, and ends bit for bit as if nothing had happened.

names = ("none", "ladder", "palm", "repair")
for name in names:
    mine = sweep.sel(trial=(sweep.fault == "weight_bit") & (sweep.playbook == name))
    twins = sweep.sel(trial=mine.golden.values)
    away = mine.final_validation_loss.values - twins.final_validation_loss.values
    told = ", ".join(f"{one:+.3f}" for one in away)
    print(f"{name:<7} {', '.join(map(str, mine.outcome.values)):<21} final loss away from the twin's: {told}")

# %%

figure, panel = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name in names:
    is_mine = (sweep.fault == "weight_bit") & (sweep.playbook == name) & (sweep.seed == 0)
    run = sweep.isel(trial=np.flatnonzero(is_mine)[0])
    panel.plot(run.step, run.loss, label=name, linewidth=1)
panel.axvline(200, color="grey", linestyle=":")
panel.set(xlabel="step", ylabel="training loss [nat/token]", xlim=(150, 240))
panel.legend(title="playbook")
plt.show()

# %%
# What each did, and at which cost.

columns = ["first", "last", "symptoms", "action", "outcome", "steps"]
found = analysis.incidents(out, wheres=["fault=weight_bit", "seed=0"])
print(found[columns].to_string(index=False))

# %%
# ``stability-harness playbooks OUT`` has what each saves of the same incidents, with intervals;
# ``study=playbook`` compares all of them.
