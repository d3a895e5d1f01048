"""`cross OUT TRIAL --from OTHER`: data, or state?"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from analysis.again.crossing import crossed
from analysis.again.sweep_folder import SweepFolder
from analysis.measures.evidence import evidence_of, offending
from analysis.measures.incidents import of_one, runs, worst
from harness.basics.printing import say
from harness.config import ConfigError

HELP = "feed the batches of an incident to another trial"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("trial", metavar="TRIAL", help="id of the trial, as the dataset has it")
    parser.add_argument("--from", dest="other", metavar="OTHER", required=True, help="id of the one that reads them")
    parser.add_argument("--data", metavar="PATH", type=Path, help="where the text lies, if it is not built in")


def run(options: argparse.Namespace) -> None:
    """Print the losses of both, and the verdict."""
    out, trial, other = options.out, options.trial, options.other
    folder = SweepFolder.open(out)
    for name in (trial, other):
        folder.check(name)
    (run,) = runs(folder.sweep, folder.setups, [trial])
    readings = folder.readings(options.data)
    reading = readings(trial)
    incident = worst(of_one(run, folder.logs.get(trial), is_asked=True, reading=reading))
    if incident is None:
        raise ConfigError(f"TRIAL={trial}: has no incident; allowed: a trial that `incidents OUT` lists")
    evidence = evidence_of(run, incident, reading)
    steps = offending(evidence, incident)
    found = crossed(reading, steps, readings(other), evidence.begin)
    say(f"Batches of steps {steps[0]} to {steps[-1]} of {trial}, read by {other} as it stands at step {found.step}:")
    for step, loss, norm in zip(found.steps, found.losses, found.norms, strict=True):
        say(f"  step {step}: loss {loss:.3f} nat/token, gradient norm {norm:.3g}")
    own, norms = np.median(found.own_losses), np.median(found.own_norms)
    span = f"{found.own_losses.min():.3f} to {found.own_losses.max():.3f}"
    say(f"Its own {len(found.own_losses)} batches around there: loss {own:.3f} ({span}), gradient norm {norms:.3g}")
    say(f"Verdict: {found.words}")
