"""The commands on results, as `python -m analysis`.

`report OUT` and `campaign OUT` write figures and a page, `figure NAME OUT FILE` one figure, `postmortem OUT TRIAL` what
was wrong with one trial, `trial OUT TRIAL` its curves, `export OUT --to TARGET` what others read; `watch OUT` serves a
page that follows a sweep; the others print what they find.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.export.command import add_export, export
from analysis.figures.files import check_picture, save_picture
from analysis.figures.registry import Needs, Results, figures
from analysis.incident_commands import RUN, add_commands
from analysis.measures.detectors import measured, options_of
from analysis.measures.leaderboard import scored
from analysis.measures.provenance import named, provenance
from analysis.page_commands import RUN_PAGES, add_page_commands
from analysis.reading.acted import idle_note
from analysis.reading.open_sweep import open_sweep
from analysis.reports.campaign import write_campaign
from analysis.reports.leaderboard import told_board, told_lead
from analysis.reports.playbooks import told_playbooks
from analysis.reports.postmortem import write_worst
from analysis.reports.report import write_report
from harness.basics.errors import Parser
from harness.basics.output import checked_output
from harness.basics.printing import complain, say, warn_in_one_line
from harness.config import ConfigError
from harness.config.fields import from_yaml
from harness.storage.results_folder import FolderLost

WITH_POSTMORTEMS = "also write the post-mortems of the N trials with the worst incidents"
CHOSEN = "detectors, all without any; and constants, detect.NAME.FIELD=VALUE"


def figure_names() -> list[str]:
    """Every figure that `figure NAME` draws."""
    return [*figures(*Needs)]


def main(arguments: Sequence[str] | None = None, program: str = "python -m analysis") -> int:
    """Exit status 0; or, with one line on it, 2 if something is wrong, 1 if the folder was lost meanwhile."""
    parser = Parser(prog=program, description="Figures and reports from stored results.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="write OUT/report.html, trials.html and figures; say what was found")
    campaign = commands.add_parser("campaign", help="the same for what faults did: OUT/campaign.html")
    figure = commands.add_parser("figure", help="write one figure to FILE (.svg, .pdf, .png)")
    figure.add_argument("name", metavar="NAME", choices=figure_names(), help=", ".join(figure_names()))
    detectors = commands.add_parser("detectors", help="say how well detectors do on stored runs, with any constants")
    board = commands.add_parser("leaderboard", help="put detectors on the same incidents and clean runs of a sweep")
    lead = commands.add_parser("lead", help="say what leads the spikes of a sweep, and what warns of divergence")
    books = commands.add_parser(
        "playbooks", help="say what each playbook saves of the same incidents, and what it costs"
    )
    provenances = commands.add_parser("provenance", help="say where first non-finite values came from")
    add_commands(commands)
    add_export(commands)
    add_page_commands(commands)
    report.add_argument("--postmortems", metavar="N", type=int, default=0, help=WITH_POSTMORTEMS)
    for command in (report, campaign, figure, detectors, provenances, board, lead, books):
        command.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    figure.add_argument("file", metavar="FILE", type=Path)
    board.add_argument("--figure", metavar="FILE", type=Path, help="draw recall against false alarms, too")
    books.add_argument("--per-hour", metavar="MONEY", type=float, help="what an hour of one trial costs")
    for command in (detectors, board):
        command.add_argument("chosen", metavar="NAME or KEY=VALUE", nargs="*", help=CHOSEN)
    provenances.add_argument("trial", metavar="TRIAL", nargs="?", help="the id of one trial, or how it begins")
    try:
        options = parser.parse_args(arguments)
    except ConfigError as error:
        complain(f"error: {error}")
        return 2
    warn_in_one_line()
    try:
        if options.command == "report":
            _report(options.out, options.postmortems)
        elif options.command in ACTS:
            ACTS[options.command](options)
        elif options.command == "detectors":
            _detectors(options.out, options.chosen)
        elif options.command == "leaderboard":
            say(*told_board(options.out, *_chosen(options.chosen), options.figure))
        elif options.command == "playbooks":
            say(*told_playbooks(options.out, options.per_hour))
        elif options.command == "lead":
            say(*told_lead(options.out))
        elif options.command == "provenance":
            _provenance(options.out, options.trial)
        else:
            _figure(options.name, options.out, options.file)
    except (ConfigError, FolderLost) as error:
        complain(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        picture = options.file if options.command == "figure" else vars(options).get("figure")
        target = f"out={options.out}" if picture is None else f"FILE={picture}"
        reason = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        complain(f"error: {target}: cannot be written ({reason}); allowed: a folder you may write to")
        return 2
    return 0


def _report(out: Path, postmortems: int) -> None:
    if postmortems < 0:
        raise ConfigError(f"--postmortems={postmortems}: not a number of trials; allowed: 0 or more")
    pages = write_worst(out, postmortems) if postmortems else []
    written = write_report(out)
    pictures = ", ".join(str(path) for path in written.figures) or "none; the report says why"
    say(*(line for page in pages for line in page.words[:1]))
    say(*written.findings, f"Trials: {written.trials}", f"Report: {written.html}", f"Figures: {pictures}")


def _campaign(out: Path) -> None:
    written = write_campaign(out)
    say(*written.table.to_string(index=False).split("\n"))
    say("Shares in percent with 95% Wilson intervals.")
    say(*(f"Note: {note}" for note in written.notes))
    say(*(f"{picture.name}: {picture.path or picture.caption}" for picture in written.pictures))
    say(f"Trials: {written.trials}", f"Page: {written.html}")


def _chosen(chosen: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The detectors of a command line, none for all, and the constants given to each. Raises ConfigError."""
    names = [text for text in chosen if "=" not in text]
    constants: dict[str, dict[str, Any]] = {}
    for text in chosen:
        key, is_given, value = text.partition("=")
        group, _, field = key.rpartition(".")
        if is_given and not group.startswith("detect."):
            raise ConfigError(f"{text}: unknown key; allowed: detect.NAME.FIELD=VALUE")
        if is_given:
            constants.setdefault(group.removeprefix("detect."), {})[field] = from_yaml(value)
    for name, fields in constants.items():
        options_of(name, fields)
        is_there = any(name in one.split("+") for one in names)
        names = names if is_there or not names else [*names, name]
    return names, constants


def _detectors(out: Path, chosen: Sequence[str]) -> None:
    names, constants = _chosen(chosen)
    sweep = open_sweep(out)
    table = scored(sweep, names or measured(sweep), constants)
    say(*table.to_string(index=False, float_format="{:.3g}".format, na_rep="-").split("\n"))
    say("Recall in shares of incidents, latency in steps, false alarms per 1,000 clean steps; 95% Wilson intervals.")


def _provenance(out: Path, trial: str | None) -> None:
    sweep = open_sweep(out)
    table = provenance(sweep)
    if trial is not None:
        found = table[table["trial"].str.startswith(trial)]
        if len(found) != 1:
            why = f"begins the ids of {len(found)} trials" if len(found) else "no trial that was not finite"
            allowed = ", ".join(table["trial"]) or "none, because all were finite"
            raise ConfigError(f"TRIAL={trial}: {why} in out={out}; allowed: {allowed}")
        say(*(f"{name:<16}{value}" for name, value in found.iloc[0].items() if not pd.isna(value) and value != ""))
        return
    if table.empty:
        say("Every trial was finite.")
        return
    shown = ["trial", "fault", "step", "direction", "site", "tensor", "head", "index", "value", "cause", "format"]
    words = table[[*shown, "blamed", "blamed_index", "evidence"]].astype(object)
    say(*words.where(words.notna(), "").to_string(index=False).split("\n"))
    say("How often the blamed tensor is the struck one, in shares with 95% Wilson intervals:")
    say(*named(sweep).to_string(index=False, float_format="{:.3g}".format, na_rep="-").split("\n"))


def _figure(name: str, out: Path, file: Path) -> None:
    results, figure = Results.open(out), figures(*Needs)[name]
    drawing = figure(results)
    if drawing.figure is None:
        raise ConfigError(f"figure {name}: {drawing.caption}")
    check_picture(file)
    if figure.needs == Needs.OUTCOMES:
        complain(*(f"note: {note}" for note in results.notes))
    save_picture(drawing.figure, file, name)
    mark = "" if figure.needs == Needs.SEARCHES else idle_note(results.sweep)
    say(f"Figure: {file}", " ".join(filter(None, (drawing.caption, mark))))


ACTS = {**RUN, **RUN_PAGES, "campaign": lambda options: _campaign(options.out), "export": export}


if __name__ == "__main__":
    with checked_output():
        sys.exit(main())
