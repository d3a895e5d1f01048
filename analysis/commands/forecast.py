"""`forecast OUT`: what small models tell of larger ones, sealed before those are trained, and scored after."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reading.selection import add_where
from analysis.reports.forecast import DEFAULT, told_forecast, told_from_table, told_seal
from analysis.reports.forecast_scores import told_scores, told_turns
from harness.basics.printing import say
from harness.config import ConfigError

HELP = "forecast the stability of larger models, and score forecasts"
PURPOSE = (
    "Forecasts the stability of larger models from a sweep of small ones, seals forecasts before the larger ones "
    "are trained, and scores sealed forecasts afterwards."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "out", metavar="OUT", type=Path, nargs="?", help="results folder of a sweep over sizes and rates"
    )
    parser.add_argument(
        "--fit", metavar="KEY=VALUE[,VALUE]", action="append", default=[], help="trials to forecast from; default: all"
    )
    parser.add_argument(
        "--predict", metavar="KEY=N[,N]", action="append", default=[], help="sizes to forecast: width=N, depth=N"
    )
    parser.add_argument(
        "--tune",
        metavar="KEY=VALUE[,VALUE]",
        action="append",
        default=[],
        help="of --fit, the sizes that rehearsals hold back; default: the widest",
    )
    parser.add_argument(
        "--seal", metavar="FILE", type=Path, help="write the forecasts down, before their sizes are trained"
    )
    parser.add_argument("--score", metavar="FILE", type=Path, help="score the forecasts of a sealed file")
    parser.add_argument("--turns", action="store_true", help="say which pairs of recipes turn around over sizes")
    parser.add_argument("--from", metavar="FILE", type=Path, dest="table", help="a table of runs (CSV) in place of OUT")
    parser.add_argument(
        "--by", metavar="NAME", default=DEFAULT, help=f"forecaster whose forecasts are printed; default: {DEFAULT}"
    )
    parser.add_argument("--figures", metavar="FOLDER", type=Path, help="draw them into this folder, too")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print forecasts or scores. Raises ConfigError for options that do not go together."""
    _check(options)
    if options.table is not None:
        say(*told_from_table(options.table, options.predict, options.by))
    elif options.turns:
        say(*told_turns(options.out, options.where, options.figures))
    elif options.score is not None:
        say(*told_scores(options.out, options.score, options.where, options.figures))
    elif options.seal is not None:
        say(*told_seal(options.out, options.fit, options.predict, options.tune, options.seal, options.by))
    else:
        say(*told_forecast(options.out, options.fit, options.predict, options.tune, options.by))


def _check(options: argparse.Namespace) -> None:
    if (options.out is None) == (options.table is None):
        raise ConfigError("forecast: takes OUT or --from FILE, one of them")
    modes = [name for name in ("seal", "score", "turns") if getattr(options, name)]
    if len(modes) > 1 or (options.table is not None and (modes or options.fit or options.tune)):
        raise ConfigError("forecast: --from, --seal, --score and --turns do not go together; allowed: one of them")
    tells = options.score is not None or options.turns
    if not tells and not options.predict:
        raise ConfigError("forecast: --predict is missing; allowed: --predict width=N[,N], or --score FILE")
    if not tells and (options.figures is not None or options.where):
        why = "--figures and --where go with --score and --turns"
        raise ConfigError(f"forecast: {why}; allowed: --fit for trials to forecast from")
