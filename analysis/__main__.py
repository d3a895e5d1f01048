"""`python -m analysis report OUT`: figures and an HTML report from the results in OUT."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from analysis.report import write_report
from harness.config import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Figures and reports from stored results.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="write OUT/figures/*.png and OUT/report.html, and say what was found")
    report.add_argument("out", metavar="OUT", help="results folder of a sweep")
    out = parser.parse_args(arguments).out
    try:
        written = write_report(out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        print(f"error: out={out}: cannot be written ({reason}); allowed: a folder you may write to", file=sys.stderr)
        return 2
    print(*written.findings, sep="\n")
    print(f"Report: {written.html}")
    print("Figures:", ", ".join(str(path) for path in written.figures) or "none; the report says why")
    return 0


if __name__ == "__main__":
    sys.exit(main())
