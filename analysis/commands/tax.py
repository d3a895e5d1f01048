"""`tax OUT`: what measures cost, and at how many failures they pay."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reading.selection import add_where
from analysis.reports.tax import CostInputs, told_tax
from harness.basics.printing import say

HELP = "say what each mitigation costs, and when that pays"
PURPOSE = (
    "Times a few steps with each mitigation, or each level of another axis, and says what it costs and at how "
    "many failures that pays."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("--axis", default="mitigation", help="what is compared, such as playbook; default: mitigation")
    parser.add_argument("--against", metavar="LEVEL", default="none", help="the level without it; default: none")
    parser.add_argument("--rounds", metavar="N", type=int, default=10, help="of timed steps; default: 10; 0: none")
    parser.add_argument("--device", default="auto", help="where steps are timed: auto, cpu or cuda")
    parser.add_argument("--data", metavar="PATH", type=Path, help="where the text lies, if it is not built in")
    run = parser.add_argument_group("a real run")
    run.add_argument("--per-hour", metavar="PRICE", type=float, help="of a device and hour: tells the price")
    run.add_argument("--devices", metavar="N", type=float, default=1.0, help="that train; default: 1")
    run.add_argument("--seconds", metavar="S", type=float, help="of a step; default: as measured here")
    run.add_argument("--steps", metavar="N", type=float, help="of the run; default: as trained here")
    run.add_argument("--lost-steps", metavar="N", type=float, help="in an incident: tells how many it has to save")
    run.add_argument("--between-failures", metavar="HOURS", type=float, help="tells how often to save a checkpoint")
    run.add_argument("--write", metavar="S", type=float, help="of a checkpoint; default: as measured here")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Time a few steps of each, and print the tables."""
    names = ("per_hour", "devices", "seconds", "steps", "lost_steps", "between_failures", "write")
    inputs = CostInputs(**{name: getattr(options, name) for name in names})
    how = options.axis, options.against, options.rounds, inputs, options.device, options.data, options.where
    say(*told_tax(options.out, *how))
