"""`python -m analysis`: `report OUT` and `campaign OUT` write figures and a page, `figure NAME OUT FILE` one figure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from analysis.figures.drawing import PICTURES
from analysis.figures.registry import Needs, Results, figures
from analysis.reading.acted import idle_note
from analysis.reports.campaign import write_campaign
from analysis.reports.report import write_report
from harness.basics.errors import Parser
from harness.basics.printing import say, warn_in_one_line
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost


def figure_names() -> list[str]:
    """Every figure that `figure NAME` draws."""
    return [*figures(*Needs)]


def main(arguments: Sequence[str] | None = None, program: str = "python -m analysis") -> int:
    """Exit status 0; or, with one line on it, 2 if something is wrong, 1 if the folder was lost meanwhile."""
    parser = Parser(prog=program, description="Figures and reports from stored results.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="write OUT/figures/*.png and OUT/report.html, and say what was found")
    campaign = commands.add_parser(
        "campaign", help="say what faults did; write OUT/figures/*.png and OUT/campaign.html"
    )
    figure = commands.add_parser("figure", help="write one figure to FILE (.svg, .pdf, .png)")
    figure.add_argument("name", metavar="NAME", choices=figure_names(), help=", ".join(figure_names()))
    for command in (report, campaign, figure):
        command.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    figure.add_argument("file", metavar="FILE", type=Path)
    try:
        options = parser.parse_args(arguments)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    warn_in_one_line()
    try:
        if options.command == "report":
            _report(options.out)
        elif options.command == "campaign":
            _campaign(options.out)
        else:
            _figure(options.name, options.out, options.file)
    except (ConfigError, FolderLost) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        target = f"FILE={options.file}" if options.command == "figure" else f"out={options.out}"
        reason = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        say(f"error: {target}: cannot be written ({reason}); allowed: a folder you may write to", file=sys.stderr)
        return 2
    return 0


def _report(out: Path) -> None:
    written = write_report(out)
    pictures = ", ".join(str(path) for path in written.figures) or "none; the report says why"
    say(*written.findings, f"Report: {written.html}", f"Figures: {pictures}")


def _campaign(out: Path) -> None:
    written = write_campaign(out)
    say(*written.table.to_string(index=False).split("\n"))
    say("Shares in percent with 95% Wilson intervals.")
    say(*(f"Note: {note}" for note in written.notes))
    say(*(f"{picture.name}: {picture.path or picture.caption}" for picture in written.pictures))
    say(f"Page: {written.html}")


def _figure(name: str, out: Path, file: Path) -> None:
    results, figure = Results.open(out), figures(*Needs)[name]
    drawing = figure(results)
    if figure.needs == Needs.OUTCOMES:
        say(*(f"note: {note}" for note in results.notes), file=sys.stderr)
    if drawing.figure is None:
        raise ConfigError(f"figure {name}: {drawing.caption}")
    if file.suffix not in PICTURES:
        raise ConfigError(f"{file}: unknown kind of file; allowed: {', '.join(PICTURES)}")
    # The same results give the same file, byte for byte.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        drawing.figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    mark = "" if figure.needs == Needs.SEARCHES else idle_note(results.sweep)
    say(f"Figure: {file}", " ".join(filter(None, (drawing.caption, mark))))


if __name__ == "__main__":
    sys.exit(main())
