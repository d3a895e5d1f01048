"""`export OUT --to TARGET`: what others read."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.export.registry import targets
from analysis.export.runs import Source
from analysis.reading.selection import add_where
from harness.basics.printing import say
from harness.config import ConfigError

DEFAULT = Path("export")  # in the current folder: trackers put several sweeps beside each other


HELP = "hand runs, curves and reports to a tracker, or write tables"
PURPOSE = (
    "Writes the runs of a sweep for another program: a tracker such as MLflow, TensorBoard or Weights & Biases, "
    "or tables (CSV, Parquet, NetCDF)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep, finished or not")
    names = "; ".join(f"{name}: {target.about}" for name, target in targets().items())
    parser.add_argument("--to", metavar="TARGET", choices=targets(), required=True, help=names)
    add_where(parser)
    parser.add_argument("--signals", metavar="NAME[,NAME]", help="curves that are exported; by default all")
    parser.add_argument("--into", metavar="PLACE", type=Path, help="folder; by default ./export/TARGET")
    parser.add_argument("--incidents", action="store_true", help="also those that `incidents OUT` finds afterwards")


def run(options: argparse.Namespace) -> None:
    """Hand it over, and print where it is."""
    place = Path(options.into or DEFAULT / options.to)
    _check_place(place, options.out)
    target = targets()[options.to]()
    source = Source.open(options.out, options.where, options.signals, options.incidents)
    try:
        place.mkdir(parents=True, exist_ok=True)
        said = target.write(source, place)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        raise ConfigError(f"--into {place}: cannot be written ({reason}); allowed: a folder of your own") from None
    say(*said)


def _check_place(place: Path, out: Path) -> None:
    """Raises ConfigError for a place in a results folder, which may be a stranger's, with links in it."""
    if place.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"--into {place}: lies in the results folder; allowed: a folder outside of {out}")
