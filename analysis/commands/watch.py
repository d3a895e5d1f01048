"""`watch OUT`: a page that follows a sweep."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from analysis.pages.server import serving
from harness.basics.printing import complain, say
from harness.config import ConfigError

HELP = "serve a page on this machine that follows a sweep"
PURPOSE = "Serves a page on this machine that follows a sweep while it trains. Ctrl-C ends it; the sweep goes on."
LAST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("--port", metavar="N", default="0", help="of 127.0.0.1 (default: one that is free)")


def run(options: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
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
