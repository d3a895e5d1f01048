"""`causes OUT`: inferred causes against true ones."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from analysis.figures.confusion_matrix import confusion_matrix
from analysis.measures.confusion import confusion
from analysis.reports.printed import table_lines
from analysis.reports.report import DOTS_PER_INCH
from harness.basics.printing import count, say
from harness.storage.results_folder import ResultsPath

HELP = "how often the inferred cause of incidents is the true one"
PURPOSE = (
    "Compares the cause that a post-mortem infers for each incident with the fault that was injected. "
    "Prints the table of both and writes it as a figure."
)
PICTURE = "causes.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("--data", metavar="PATH", type=Path, help="where the text lies, if it is not built in")


def run(options: argparse.Namespace) -> None:
    """Print the matrix, and draw it."""
    found = confusion(options.out, options.data)
    say(*table_lines(found.matrix, index=True))
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
