"""`python -m analysis`: `report OUT` and `campaign OUT` write figures and a page, `figure NAME OUT FILE` one figure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from analysis.figures.campaign_figures import CAMPAIGN_FIGURES
from analysis.figures.drawing import PICTURES, Drawing
from analysis.figures.labels import labelled
from analysis.figures.mitigation_map import MITIGATION_FIGURES
from analysis.figures.search_figures import SEARCH_FIGURES
from analysis.figures.sweep_figures import FIGURES
from analysis.measures.mitigations import compare
from analysis.measures.outcomes import outcomes_and_notes
from analysis.reading.acted import idle_note
from analysis.reading.open_sweep import open_with_events
from analysis.reading.searches import read_searches
from analysis.reports.campaign import write_campaign
from analysis.reports.report import write_report
from harness.basics.command_line import Parser
from harness.basics.printing import say, warn_in_one_line
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost


def figure_names() -> list[str]:
    """Every figure that `figure NAME` draws."""
    return [*FIGURES, *SEARCH_FIGURES, *MITIGATION_FIGURES, *CAMPAIGN_FIGURES]


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


def _drawing(name: str, out: Path) -> tuple[Drawing, str]:
    """The figure, and what is to be known of the mitigations in it."""
    sweep, events = labelled(*open_with_events(out))
    if name in SEARCH_FIGURES:
        return SEARCH_FIGURES[name](read_searches(out)), ""
    note = idle_note(sweep)
    if name in FIGURES:
        return FIGURES[name](sweep, events), note
    if name in MITIGATION_FIGURES:
        return MITIGATION_FIGURES[name](compare(sweep)), note
    judged, notes = outcomes_and_notes(sweep)
    say(*(f"note: {note}" for note in notes), file=sys.stderr)
    return CAMPAIGN_FIGURES[name](judged), note


def _figure(name: str, out: Path, file: Path) -> None:
    drawing, note = _drawing(name, out)
    if drawing.figure is None:
        raise ConfigError(f"figure {name}: {drawing.caption}")
    if file.suffix not in PICTURES:
        raise ConfigError(f"{file}: unknown kind of file; allowed: {', '.join(PICTURES)}")
    # The same results give the same file, byte for byte.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        drawing.figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    say(f"Figure: {file}", " ".join(filter(None, (drawing.caption, note))))


if __name__ == "__main__":
    sys.exit(main())
