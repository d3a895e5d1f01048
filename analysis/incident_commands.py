"""The commands on incidents: `incidents`, `postmortem`, `causes` and `cross`."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.again.crossing import crossed
from analysis.again.sweep_folder import SweepFolder
from analysis.figures.confusion_matrix import confusion_matrix
from analysis.measures.confusion import confusion
from analysis.measures.evidence import evidence_of, offending
from analysis.measures.incidents import incidents, of_one, runs, worst
from analysis.reports.postmortem import write_postmortem
from analysis.reports.report import DOTS_PER_INCH
from harness.basics.printing import count, say
from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath

COST = "cost.per_hour=NUMBER, cost.currency=NAME"
PICTURE = "causes.png"
NOT_TIMED = "in time and money not known: the time of some step was not measured"


@dataclass(frozen=True)
class Cost:
    """What an hour of training costs."""

    per_hour: float = 0.0
    currency: str = ""


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of these commands."""
    listed = commands.add_parser("incidents", help="every incident of a sweep: symptoms, alarms, outcome and cost")
    post = commands.add_parser("postmortem", help="write a trial's post-mortem: OUT/postmortems/TRIAL.html and .md")
    causes = commands.add_parser("causes", help="how often the inferred cause of incidents is the true one")
    cross = commands.add_parser("cross", help="feed the batches of an incident to another trial: data, or state?")
    for command in (listed, post, causes, cross):
        command.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    for command in (post, cross):
        command.add_argument("trial", metavar="TRIAL", help="id of the trial, as the dataset has it")
    cross.add_argument("--from", dest="other", metavar="OTHER", required=True, help="id of the one that reads them")
    for command in (post, causes, cross):
        command.add_argument("--data", metavar="PATH", type=Path, help="where the text lies, if it is not built in")
    for command in (listed, post):
        command.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=COST)


def cost_of(settings: Sequence[str]) -> Cost:
    """From `cost.per_hour=2.5 cost.currency=EUR`. Raises ConfigError."""
    given = {}
    for text in settings:
        key, _, value = text.partition("=")
        if key not in ("cost.per_hour", "cost.currency"):
            raise ConfigError(f"{text:.60}: unknown key; allowed: {COST}")
        given[key] = value
    text = given.get("cost.per_hour", "0")
    try:
        per_hour = float(text)
    except ValueError:
        per_hour = math.nan
    if not (per_hour >= 0 and math.isfinite(per_hour)):
        raise ConfigError(f"cost.per_hour={text:.40}: not a price; allowed: a number, 0 or more")
    return Cost(per_hour, given.get("cost.currency", ""))


def _incidents(options: argparse.Namespace) -> None:
    cost = cost_of(options.settings)
    table = incidents(options.out, cost.per_hour)
    if table.empty:
        say("No incident: no symptom, no alarm, and every consistency check holds.")
        return
    shown = table.drop(columns=["loss_before", "loss_after", "tokens"])
    say(*shown.to_string(index=False, float_format="{:.3g}".format, na_rep="-").split("\n"))
    counted = f"{count(len(table), 'incident')} of {count(table['trial'].nunique(), 'trial')}"
    seconds, money = (table[name].sum(skipna=False) for name in ("seconds", "money"))
    spent = f"{seconds:.3g} s, {money:.4g} {cost.currency}".rstrip() if seconds == seconds else NOT_TIMED
    say(f"{counted}; cost: {count(table['steps'].sum(), 'step')}, {spent}.")


def _postmortem(options: argparse.Namespace) -> None:
    cost = cost_of(options.settings)
    written = write_postmortem(options.out, options.trial, cost.per_hour, cost.currency, options.data)
    say(*written.words, f"Page: {written.html}", f"Markdown: {written.markdown}")


def _causes(options: argparse.Namespace) -> None:
    found = confusion(options.out, options.data)
    say(*found.matrix.to_string().split("\n"))
    for is_sure, of in ((False, "Right"), (True, "Right, of incidents with a sure sign")):
        right, total, low, high = found.right(is_sure)
        share = f" = {right / total:.1%} [{low:.1%}, {high:.1%}], 95% Wilson interval" if total else ""
        say(f"{of}: {right} of {total}{share}.")
    for row in found.types.itertuples():
        interval = f"[{row.low:.1%}, {row.high:.1%}]"
        share = f" = {row.share:.1%} {interval}" if row.incidents else ""
        say(f"Type {row.type}: {row.count} of {row.incidents}{share}")
    if found.left_out:
        say(f"Left out, because no cause is defined for them: {count(found.left_out, 'fault')}.")
    say("Counted: finished faults that loss, gradient norm or a non-finite value shows, against golden twins.")
    drawing = confusion_matrix(found)
    folder = ResultsPath.open(options.out) / "figures"
    folder.make_folder()
    drawn = io.BytesIO()
    assert drawing.figure is not None
    drawing.figure.savefig(drawn, dpi=DOTS_PER_INCH)
    (folder / PICTURE).write(drawn.getvalue())
    say(f"Figure: {options.out / 'figures' / PICTURE}")


def _cross(options: argparse.Namespace) -> None:
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


RUN: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "incidents": _incidents,
    "postmortem": _postmortem,
    "causes": _causes,
    "cross": _cross,
}
