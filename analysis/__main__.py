"""The commands on results, as `python -m analysis`: one file each in `analysis/commands/`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.basics import plugins
from harness.basics.errors import Parser
from harness.basics.output import checked_output
from harness.basics.printing import complain, sentence, warn_in_one_line
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost


def main(arguments: Sequence[str] | None = None, program: str = "python -m analysis") -> int:
    """Exit status 0; or, with one line on it, 2 if something is wrong, 1 if the folder was lost meanwhile."""
    parser = Parser(prog=program, description="Figures and reports from stored results.")
    of_commands = parser.add_subparsers(dest="command", required=True)
    words = sys.argv[1:] if arguments is None else list(arguments)
    command: Any = None
    try:
        texts = plugins.texts("commands", "HELP")
        parsers = {name: of_commands.add_parser(name, help=text) for name, text in texts.items()}
        if words and (name := words[0]) in texts:
            command = plugins.module("commands", name)  # loads what it needs and no more
            parsers[name].description = getattr(command, "PURPOSE", sentence(texts[name]))
            command.add_arguments(parsers[name])
            options = parsers[name].parse_args(words[1:], argparse.Namespace(command=name))
        else:
            options = parser.parse_args(words)
    except ConfigError as error:
        complain(f"error: {error}")
        return 2
    warn_in_one_line()
    try:
        command.run(options)
    except (ConfigError, FolderLost) as error:
        complain(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        return _not_written(options, error)
    return 0


def _not_written(options: argparse.Namespace, error: OSError) -> int:
    """One line on what could not be written."""
    picture = options.file if options.command == "figure" else vars(options).get("figure")
    target = f"out={options.out}" if picture is None else f"FILE={picture}"
    reason = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
    complain(f"error: {target}: cannot be written ({reason}); allowed: a folder you may write to")
    return 2


if __name__ == "__main__":
    with checked_output():
        sys.exit(main())
