"""Reading a post-mortem
=====================

A bit of a weight flips in one of two runs. What was wrong, what gave it away, what did it cost, and
what was the cause? The post-mortem answers from the evidence that was stored.
"""

# %%

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import analysis
import sweeps

out = f"{tempfile.mkdtemp()}/incident"
words = [
    *("model.width=48", "model.depth=2", "model.head_dim=16", "model.context=64", "optim.lr=1e-2"),
    *(
        "train.steps=120",
        "train.batch=8",
        "train.validate_every=60",
        "train.validate_tokens=4096",
        "schedule.warmup=15",
    ),
    *("fault=none,weight_bit", "fault.start=80", "fault.tensor=blocks.*.feedforward.down", "fault.bit=30"),
]
sweep = sweeps.run(words, out=out, progress=False)

# %%
# Until the strike the two runs are equal bit for bit. What differs afterwards is the fault's doing.

figure, panel = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for trial in sweep.trial.values:
    run = sweep.sel(trial=trial)
    panel.plot(run.step, run.loss, label=str(run.fault.values))
panel.axvline(80, color="grey", linestyle=":", label="strike")
panel.set(xlabel="step", ylabel="training loss [nat/token]")
panel.legend()
plt.show()

# %%
# The incident, as the table of all incidents has it.

incidents = analysis.incidents(out)
print(incidents[["trial", "first", "last", "symptoms", "detectors", "outcome", "steps"]].to_string(index=False))

# %%
# And its post-mortem, here as text; ``stability-harness postmortem OUT TRIAL`` writes the same page as
# HTML with its figures.

trial = incidents["trial"].iloc[0]
analysis.write_postmortem(out, trial)
text = (Path(out) / "postmortems" / f"{trial}.md").read_text()
print(text[:2500])
