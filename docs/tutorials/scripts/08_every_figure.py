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
small = ("model.depth=2", "model.head_dim=8", "model.context=32", "train.batch=4", "schedule.warmup=5", "idle=warn")


def draw(of: str, *names: str) -> None:
    """The command line, for each of these figures."""
    for name in names:
        print(f"$ stability-harness figure {name} {of} {name}.png")
        assert run(["figure", name, str(folder / of), str(folder / f"{name}.png")]) == 0, name


words = [*small, "model.width=16,32", "train.steps=60", "train.validate_every=30", "seed=range(3)"]
words += ["mitigation=none,qk_norm,sandwich", "optim.lr=1e-2,1e-1,1,4"]
grid = sweeps.run(words, out=folder / "grid", progress=False)
draw("grid", "loss_against_rate", "largest_stable_rate", "sensitivity_against_width", "mitigation_map")

# %%
# Flipped bits in what modules give and in weights, and poisoned batches, under two decays of Adam's second moment.
# Trials with ``last_bit`` measure how far correct runs drift apart.

words = [*small, "model.width=16", "train.steps=120", "train.validate_every=60", "optim.lr=1e-2", "seed=range(4)"]
words += ["optim.beta2=0.9,0.99", "fault.start=70,90"]
flips = ["fault=bit_flip,rare_tokens,last_bit", "fault.site=weight,activation"]
sweeps.run([*words, "fault=rare_tokens,last_bit"], out=folder / "flips", progress=False)
for site in ("weight", "activation"):
    sweeps.run([*words, "fault=bit_flip", f"fault.site={site}"], out=folder / "flips", progress=False)
draw("flips", "faulty_against_golden", "outcome_shares", "deviation_curves", "recovery_against_beta2")

# %%
# The same, by what was struck and by what saw it.

draw("flips", "vulnerability_map", "module_flips", "detector_tradeoff", "loss_lead")
