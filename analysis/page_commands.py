"""The commands for pages on trials: `watch` and `trial`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from analysis.pages.server import serving
from analysis.pages.static_page import write_trial
from harness.basics.printing import complain, say
from harness.config import ConfigError

LAST_PORT = 65535


def add_page_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of these commands."""
    watch = commands.add_parser("watch", help="serve a page on this machine that follows a sweep while it trains")
    trial = commands.add_parser("trial", help="write the page of one trial: OUT/trials/TRIAL.html")
    for command in (watch, trial):
        command.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    watch.add_argument("--port", metavar="N", default="0", help="of 127.0.0.1 (default: one that is free)")
    trial.add_argument("trial", metavar="TRIAL", help="id of the trial, as the dataset has it")


def _watch(options: argparse.Namespace) -> None:
    port = options.port
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= LAST_PORT):
        raise ConfigError(f"--port={port:.20}: not a port; allowed: 1 to {LAST_PORT}, or 0 for a free one")
    with serving(options.out, int(port)) as server:
        try:
            say(f"Watching {options.out} at {server.address} (Ctrl-C ends it)")
            # Who starts it reads the address from a pipe.
            print(end="", flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            complain("interrupted")
            sys.stdout.flush()
            sys.stderr.flush()
            # Threads that look at the store may be inside of libraries, out of which the interpreter's own end would
            # tear them with an abort; there is nothing that they have to finish.
            os._exit(130)


def _trial(options: argparse.Namespace) -> None:
    say(f"Page: {write_trial(options.out, options.trial)}")


RUN_PAGES: Mapping[str, Callable[[argparse.Namespace], None]] = {"watch": _watch, "trial": _trial}
