"""`stability-harness COMMAND ...`: what the package installs. Each command loads what it needs and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.basics.errors import PROGRAM, Parser
from harness.basics.version import version_line
from harness.config import ConfigError
from sweeps import current_folder
from sweeps.commands.ending import ended


@dataclass(frozen=True)
class Command:
    """What it does, in a line of the help; and how, given its arguments. Returns the exit status."""

    help: str
    run: Callable[[list[str]], int | None]


def main() -> int:
    """The console command. Returns the exit status."""
    current_folder.leave()
    return run(sys.argv[1:])


def run(arguments: Sequence[str]) -> int:
    """What the words after `stability-harness` ask for. Returns the exit status: 2 with a line on what is wrong."""
    return ended(lambda: _run(*arguments)) or 0


def _run(name: str = "", *rest: str) -> int | None:
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(version_line())
    elif name in COMMANDS:
        return COMMANDS[name].run(list(rest))
    else:
        said = f"{name}: no such command" if name else "no command given"
        raise ConfigError(f"{PROGRAM}: {said}; allowed: {', '.join(COMMANDS)}, --help, --version")
    return None


def _help() -> str:
    lines = [f"usage: {PROGRAM} COMMAND ...", "", "Faults, mitigations and training stability of small GPTs.", ""]
    lines += [f"  {name:<18}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", f"{PROGRAM} COMMAND --help says more; --version names the version."])


def _parser(name: str) -> Parser:
    return Parser(prog=f"{PROGRAM} {name}", description=COMMANDS[name].help)


def _sweep(arguments: list[str]) -> int | None:
    from sweeps.commands.sweep import command

    sys.argv = [PROGRAM, *arguments]  # where Hydra reads it
    return command(arguments)


def _on_folder(name: str, arguments: list[str]) -> int:
    """A command whose only argument is the folder of a sweep."""
    parser = _parser(name)
    parser.add_argument("out", metavar="OUT", help="results folder of a sweep")
    out = Path(parser.parse_args(arguments).out.removeprefix("out="))
    from harness.basics.terminal import Terminal
    from sweeps.commands import status

    return status.ACTS[name](out, Terminal())


def _list(arguments: list[str]) -> None:
    parser = _parser("list")
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help="of your own mitigations and faults")
    folder = parser.parse_args(arguments).config_dir
    from harness.basics.terminal import Terminal
    from sweeps.commands.catalogue import print_catalogue
    from sweeps.compose.places import check_folder

    check_folder(folder)
    print_catalogue(folder, Terminal())


def _analysis(name: str, arguments: list[str]) -> int:
    from analysis.__main__ import main

    return main([name, *arguments], PROGRAM)


def _coordinate_check(arguments: list[str]) -> None:
    from sweeps.commands.coordinate_check import check

    check(arguments, f"{PROGRAM} coordinate-check")


def _completion(arguments: list[str]) -> None:
    from sweeps.commands import completion

    parser = _parser("completion")
    parser.add_argument("shell", choices=completion.SCRIPTS, help=f'in a shell: eval "$({PROGRAM} completion bash)"')
    parser.add_argument("--line", help="print what may come at the end of this line")
    parser.add_argument("--breaks", default="", help="characters that end a word for the shell")
    options = parser.parse_args(arguments)
    if options.line is None:
        print(completion.SCRIPTS[options.shell], end="")
    else:
        print(*completion.completed(options.line, COMMANDS, options.breaks), sep="\n")


COMMANDS = {
    "sweep": Command("train a grid, a study or a search: KEY=VALUE[,VALUE...]", _sweep),
    "status": Command("what is done, runs, waits, has failed or was lost", partial(_on_folder, "status")),
    "cancel": Command("take a sweep's jobs out of Slurm's queue", partial(_on_folder, "cancel")),
    "list": Command("every mitigation and fault with one line and its paper", _list),
    "watch": Command("serve a page on this machine that follows a sweep", partial(_analysis, "watch")),
    "verify": Command("whether every file of a store is there as it was written", partial(_on_folder, "verify")),
    "report": Command("write figures and a page of a sweep, and say what was found", partial(_analysis, "report")),
    "campaign": Command("say what the faults of a sweep did, with figures and a page", partial(_analysis, "campaign")),
    "playbooks": Command("say what each playbook saves of the same incidents", partial(_analysis, "playbooks")),
    "detectors": Command("say how well detectors do on stored runs", partial(_analysis, "detectors")),
    "leaderboard": Command("put detectors on the same incidents", partial(_analysis, "leaderboard")),
    "lead": Command("say what leads loss spikes, and warns of divergence", partial(_analysis, "lead")),
    "provenance": Command("say where first non-finite values came from", partial(_analysis, "provenance")),
    "incidents": Command("every incident of a sweep: symptoms, alarms, outcome, cost", partial(_analysis, "incidents")),
    "postmortem": Command("write the post-mortem of a trial's incident", partial(_analysis, "postmortem")),
    "trial": Command("write a trial's page: curves, strikes, incidents, config", partial(_analysis, "trial")),
    "causes": Command("how often the inferred cause of incidents is the true one", partial(_analysis, "causes")),
    "cross": Command("feed the batches of an incident to another trial", partial(_analysis, "cross")),
    "figure": Command("write one figure of a sweep to a file", partial(_analysis, "figure")),
    "export": Command("hand runs, curves and reports to a tracker, or write tables", partial(_analysis, "export")),
    "coordinate-check": Command("whether every size changes equally in its first steps", _coordinate_check),
    "completion": Command("a script that completes these commands in bash, zsh or fish", _completion),
}
