"""Every figure
============

All figures by name, each with the command that draws it, from a few small sweeps. What one shows is said below it;
``stability-harness figure NAME OUT FILE --width 3.3in --font 8 --no-title`` fits it to a paper.
"""

# %%
# Two widths, three mitigations, and learning rates that reach beyond the edge, at three seeds.

import tempfile
from pathlib import Path

import sweeps
from sweeps.commands.console import run

folder = Path(tempfile.mkdtemp())
small = (
    "model.depth=2",
    "model.head_dim=8",
    "model.context=32",
    "train.batch=4",
    "idle=warn",
    "train.validate_tokens=2048",
)


def train(out: str, *words: str, warmup: int = 5) -> None:
    """A sweep of small models into a folder of that name."""
    sweeps.run([*small, f"schedule.warmup={warmup}", *words], out=folder / out, progress=False)


def draw(out: str, *names: str) -> None:
    """The command line, for each of these figures."""
    for name in names:
        print(f"\n$ stability-harness figure {name} {out} {name}.png")
        assert run(["figure", name, str(folder / out), str(folder / f"{name}.png")]) == 0, name


grid = ("model.width=16,32", "train.steps=60", "train.validate_every=30", "seed=range(3)", "optim.lr=1e-2,1e-1,1,4")
train("grid", *grid, "mitigation=none,qk_norm,sandwich")
draw("grid", "loss_against_rate", "largest_stable_rate", "sensitivity_against_width", "mitigation_map")

# %%
# Flipped bits in weights and in what modules give, and poisoned batches, under two decays of Adam's second moment.
# Trials with ``last_bit`` measure how far correct runs drift apart.

run_of = ("model.width=16", "train.steps=120", "train.validate_every=60", "optim.lr=1e-2")
train("flips", *run_of, "optim.beta2=0.9,0.99", "fault=rare_tokens,last_bit", "fault.start=70", "seed=range(4)")
flips = ("fault=bit_flip", "fault.site=weight,activation", "fault.samples=25", "fault.start=70")
train("flips", *run_of, "optim.beta2=0.99", *flips)
draw("flips", "faulty_against_golden", "outcome_shares", "deviation_curves", "recovery_against_beta2")

# %%
# The same faults by what was struck, and by what saw them.

draw("flips", "vulnerability_map", "module_flips", "detector_tradeoff", "loss_lead")

# %%
# What playbooks save, what a detector sees, and what warns of runs that diverge by themselves.

answers = ("fault=none,weight_bit,last_bit", "fault.start=80", "playbook=none,rerun", "detect=running_mean")
train("answers", *run_of, *answers, "seed=range(3)")
draw("answers", "playbooks_compared", "guard_signals")
train("edge", *run_of[:-1], "optim.lr=1e-2,1,2,4", "schedule.decay=constant", "seed=range(4)", warmup=60)
draw("edge", "early_warning", "spike_hazard")

# %%
# Policies, which are paid for a letter, with one step of the optimizer on each rollout and with four; and a policy that
# is trained on a learned reward, and what that does to the true one.

policy = ("objective.name=policy", "policy.reward=count", "policy.group=2", "policy.updates=1,4", "optim.lr=3e-2")
train("policies", "model.width=16", "train.steps=80", "seed=range(3)", *policy)
draw("policies", "quality_over_steps")
sampled = ("objective.name=policy", "policy.reward=quality", "policy.group=4", "policy.proxy=30,300")
train("learned", *sampled, *run_of[1:-1], "model.width=16", "optim.lr=3e-3", "seed=range(3)")
draw("learned", "gold_against_distance")

# %%
# Searches: the largest stable rate by bisection, and the front of two aims.

search = ("model.width=16", "train.steps=40", "mitigation=none,qk_norm")
train("edges", *search, "search=max_stable_lr", "search.tolerance=1.5")
draw("edges", "search_history")
front = ("search=pareto", "search.trials=6", "optim.clip=tag(log,interval(0.1,10))")
train("front", *search, *front, "fault=rare_tokens", "fault.start=20")
draw("front", "pareto_front")
