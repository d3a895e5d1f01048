"""Why did my GRPO run collapse?
=============================

A policy is trained twice, with the same seeds and data. One run learns its task in thirty rollouts;
the other wanders up and down and does not stay. Nothing in its configuration of the loss differs.
What is wrong is planted: its sampler has the weights of 32 rollouts ago, as when weights are not
sent to the machines that sample. The signals say so before the reward does.
"""

# %%
# The task is to write one token of 64. ``policy.sampler_lag=32`` is the plant.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import analysis
import sweeps
from analysis.__main__ import main

folder = Path(tempfile.mkdtemp())
common = [
    *("objective.name=policy", "policy.reward=count", "policy.count.token=32", "policy.group=8", "policy.prompt=8"),
    *("model.width=32", "model.depth=2", "model.head_dim=16", "model.context=23", "train.batch=32"),
    *("data.source=zipf", "data.vocabulary=64", "data.length=20000", "optim.lr=1e-2", "schedule.warmup=5"),
    *("schedule.decay=constant", "train.steps=120", "train.validate_every=120", "train.validate_tokens=1024"),
    *("train.validate_between=1024", "seed=0,1", "detect=policy_mismatch+policy_reward"),
]
out = str(folder / "runs")
sweeps.run([*common, "policy.sampler_lag=0,32"], out=out, progress=False)
runs = analysis.open_sweep(out)

# %%
# The reward alone: something is wrong, and it could be anything.

colours = {0: "tab:blue", 32: "tab:orange"}
_, panel = plt.subplots(figsize=(8, 3), layout="constrained")
for trial in range(runs.sizes["trial"]):
    lag = int(runs["sampler_lag"][trial])
    panel.plot(runs["quality"][trial], color=colours[lag], label=f"lag {lag}" if runs["seed"][trial] == 0 else None)
panel.set(xlabel="rollout", ylabel="mean quality")
panel.legend(bbox_to_anchor=(1.02, 1), loc="upper left")
plt.show()

# %%
# Four suspects, each with a signal of its own: the policy moves too far in a step (``step_kl``), its
# variety is gone (``token_entropy``), it has left the start (``reference_kl``), or sampler and
# trainer disagree (``mismatch_max``, the largest difference of log p of a token, 0 where they are
# one). Only the last one differs before the reward does.

_, panels = plt.subplots(1, 4, figsize=(12, 2.8), layout="constrained")
for panel, signal in zip(panels, ("step_kl", "token_entropy", "reference_kl", "mismatch_max"), strict=True):
    for trial in range(runs.sizes["trial"]):
        panel.plot(runs[signal][trial, :60], color=colours[int(runs["sampler_lag"][trial])])
    panel.set(xlabel="rollout", title=signal)
plt.show()

# %%
# Two detectors have watched. ``policy_mismatch`` has its alarm at the third rollout, forty before the
# reward says anything; ``policy_reward`` waits for half of a gain to be lost, and sees none.

for name in ("policy_mismatch", "policy_reward"):
    for trial in range(runs.sizes["trial"]):
        alarms = runs[f"alarm_{name}"][trial].values.nonzero()[0]
        first = f"first at rollout {alarms[0]}" if len(alarms) else "none"
        print(f"{name:16} lag {int(runs['sampler_lag'][trial]):2}, seed {int(runs['seed'][trial])}: {first}")

# %%
# Three answers. A truncated importance weight lives with the old weights; a stronger penalty holds
# the policy near its start; and at the first alarm ``match_sampler`` has the sampler be the trainer.

ladder = "playbook.ladder=[{detector: policy_mismatch, action: match_sampler, limit: 1}]"
answers = {
    "truncated weights": ["policy.correction=token_truncate"],
    "penalty": ["policy.beta=0.1"],
    "match_sampler": [ladder],
}
ends = {"none": runs.isel(trial=(runs["sampler_lag"] == 32).values)}
for name, words in answers.items():
    own = str(folder / name.replace(" ", "_"))
    sweeps.run([*common, "policy.sampler_lag=32", *words], out=own, progress=False)
    ends[name] = analysis.open_sweep(own)
_, panel = plt.subplots(figsize=(8, 3), layout="constrained")
for name, found in ends.items():
    panel.plot(found["quality"].mean("trial"), label=name)
panel.set(xlabel="rollout", ylabel="mean quality, mean of two seeds")
panel.legend(bbox_to_anchor=(1.02, 1), loc="upper left")
plt.show()

# %%
# What was done, and when, is in the log of incidents.

main(["incidents", str(folder / "match_sampler")])

# %%
# Two seeds of a small task are an example, and no finding: ``study=rl_mismatch`` has more of both.
