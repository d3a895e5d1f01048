"""`stability-harness COMMAND ...`: what the package installs. Each command loads what it needs and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from harness.basics import plugins
from harness.basics.errors import PROGRAM, Parser, nearest
from harness.basics.version import version_line
from harness.config import ConfigError
from sweeps import current_folder
from sweeps.commands.ending import ended

GROUPS = {
    "Train": ("sweep", "demo", "status", "cancel", "list", "coordinate-check"),
    "Look": ("watch", "report", "figure", "trial", "compare", "diff"),
    "Explain": ("campaign", "incidents", "postmortem", "causes", "cross", "provenance", "lead"),
    "Judge": ("claims", "detectors", "forecast", "leaderboard", "margins", "playbooks", "scaling", "tax"),
    "Share": ("export",),
    "Manage": ("verify", "retry", "extend", "merge", "remove", "completion"),
}


@dataclass(frozen=True)
class Command:
    """What it does, in a line of the help; how, given its arguments, returning the exit status; and what for."""

    help: str
    run: Callable[[list[str]], int | None]
    purpose: str = ""  # of its own page of help; of commands on results their module has it


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
    elif command := OWN.get(name) or commands().get(name):  # what others bring is no matter to a sweep
        return command.run(list(rest))
    else:
        said = f"{name}: no such command; {nearest(name, commands())}" if name else "no command given; "
        raise ConfigError(f"{PROGRAM}: {said}allowed: {', '.join(commands())}, --help, --version")
    return None


def _help() -> str:
    known = commands()
    lines = [f"usage: {PROGRAM} COMMAND ...", "", "Faults, mitigations and training stability of small GPTs."]
    for title, names in grouped().items():
        lines += ["", f"{title}:", *(f"  {name:<18}{known[name].help}" for name in names)]
    return "\n".join([*lines, "", f"{PROGRAM} COMMAND --help says more; --version names the version."])


def grouped() -> dict[str, list[str]]:
    """The names of all commands by what they are for; those that others bring come last."""
    known, shown = commands(), {name for names in GROUPS.values() for name in names}
    others = [name for name in known if name not in shown]
    groups = {title: [name for name in names if name in known] for title, names in GROUPS.items()}
    return groups | ({"Others": others} if others else {})


def _parser(name: str) -> Parser:
    return Parser(prog=f"{PROGRAM} {name}", description=OWN[name].purpose)


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


def _merge(arguments: list[str]) -> int:
    parser = _parser("merge")
    parser.add_argument("outs", metavar="OUT", type=Path, nargs="+", help="results folders of one study")
    parser.add_argument("--into", metavar="OUT", type=Path, required=True, help="a results folder, new or not")
    options = parser.parse_args(arguments)
    from harness.basics.terminal import Terminal
    from sweeps.commands.merge import merge

    return merge(options.outs, options.into, Terminal())


def _remove(arguments: list[str]) -> int:
    parser = _parser("remove")
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    from analysis.reading.selection import add_where

    add_where(parser)
    options = parser.parse_args(arguments)
    from harness.basics.terminal import Terminal
    from sweeps.commands.remove import remove

    return remove(options.out, options.where, options.yes, Terminal())


def _retry(arguments: list[str]) -> int | None:
    parser = _parser("retry")
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("more", metavar="KEY=VALUE", nargs="*", help="words for the sweep, as of a launcher")
    options = parser.parse_args(arguments)
    from sweeps.commands.retry import words_again

    return _sweep(words_again(options.out, options.more))


def _extend(arguments: list[str]) -> int | None:
    parser = _parser("extend")
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep with keep=state")
    parser.add_argument("--steps", metavar="N", type=int, required=True, help="train.steps of the longer trials")
    parser.add_argument("more", metavar="KEY=VALUE", nargs="*", help="words for the run, as of a launcher")
    from analysis.reading.selection import add_where

    add_where(parser)
    options = parser.parse_intermixed_args(arguments)
    from sweeps.commands.extend import extend

    return extend(options.out, options.steps, options.where, options.more)


def _demo(arguments: list[str]) -> int | None:
    parser = _parser("demo")
    parser.add_argument("out", metavar="OUT", nargs="?", default="stability-demo", help="default: ./stability-demo")
    out = parser.parse_args(arguments).out
    return _sweep(["study=quickstart", f"out={out}"]) or _analysis("report", [out])


def _list(arguments: list[str]) -> None:
    parser = _parser("list")
    parser.add_argument("groups", metavar="GROUP", nargs="*", help="such as study, mitigation, fault; default: all")
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help="of your own mitigations and faults")
    options = parser.parse_intermixed_args(arguments)
    from harness.basics.terminal import Terminal
    from sweeps.commands.catalogue import HEADINGS, group_called, print_catalogue
    from sweeps.compose.places import check_folder

    check_folder(options.config_dir)
    groups = dict.fromkeys(map(group_called, options.groups)) or HEADINGS
    print_catalogue(options.config_dir, Terminal(), [*groups])


def _claims(arguments: list[str]) -> int | None:
    act = arguments[0] if arguments[:1] in (["run"], ["verdict"], ["parts"]) else ""
    parser = Parser(prog=f"{PROGRAM} claims {act}".rstrip(), description=OWN["claims"].purpose)
    if act == "verdict":
        parser.add_argument("out", metavar="OUT", type=Path, help="results folder of claims run")
        parser.add_argument("--page", metavar="FILE", type=Path, help="a page whose table of verdicts takes them, too")
    what = {"": "all that is known of these; default: a line for each", "run": "which"}
    if act != "parts":
        told = what.get(act, "which; default: all registered there")
        parser.add_argument("names", metavar="NAME", nargs="*", help=told)
    if act in ("", "run"):
        parser.add_argument("--tag", metavar="TAG", help="those with it, such as formats, optimizers or learning_rate")
    if act == "run":
        parser.add_argument("--all", action="store_true", help="all that take trials: hours")
        parser.add_argument("--part", type=int, metavar="N", help="of all, those of this part: see claims parts")
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help="with claims of your own, in DIR/claim/")
    options = parser.parse_intermixed_args(arguments[1:] if act else arguments)
    from harness.basics.terminal import Terminal
    from sweeps.commands import claims

    if act == "verdict":
        return claims.print_verdicts(options.out, options.names, options.config_dir, Terminal(), options.page)
    if act == "run":
        return claims.run_claims(
            options.names, options.tag, options.all, options.config_dir, Terminal(), part=options.part
        )
    if act == "parts":
        claims.print_parts(options.config_dir, Terminal())
        return None
    claims.print_claims(options.names, options.tag, options.config_dir, Terminal())
    return None


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
        print(*completion.completed(options.line, commands(), options.breaks), sep="\n")


OWN = {
    "sweep": Command("train a grid, a study or a search: KEY=VALUE[,VALUE...]", _sweep),
    "status": Command(
        "what is done, runs, waits, has failed or was lost",
        partial(_on_folder, "status"),
        "Says how many trials of a sweep are done, run, wait, have failed or were lost. Changes nothing.",
    ),
    "cancel": Command(
        "take a sweep's jobs out of Slurm's queue",
        partial(_on_folder, "cancel"),
        "Takes the jobs of a sweep out of Slurm's queue. What is trained stays; the same sweep goes on from there.",
    ),
    "retry": Command(
        "train what has failed or is missing, by the same command",
        _retry,
        "Repeats the command of a sweep, so that trials that have failed or are missing are trained.",
    ),
    "extend": Command(
        "have finished trials go on to more steps: --steps N",
        _extend,
        "Trains finished trials of a sweep with keep=state further, up to N steps, in the same folder.",
    ),
    "merge": Command(
        "have the trials of several folders in one, each checked",
        _merge,
        "Copies the trials of several results folders of one study into one folder, and checks every file.",
    ),
    "remove": Command(
        "take trials out of a folder for good: --where KEY=VALUE",
        _remove,
        "Removes trials from a results folder for good, after asking.",
    ),
    "demo": Command(
        "train a small study and report on it, in two minutes",
        _demo,
        "Trains the study quickstart (72 small GPTs, some two minutes) and writes its report: a first look.",
    ),
    "list": Command(
        "studies, recipes, mitigations, faults ..., a line each",
        _list,
        "Lists what can be chosen by name on the command line of sweep, a line each with its paper.",
    ),
    "claims": Command(
        "what is claimed of training, and what is right about it",
        _claims,
        "Published claims about training: lists them, trains what tests them (run) and says which hold (verdict).",
    ),
    "verify": Command(
        "whether every file of a store is there as it was written",
        partial(_on_folder, "verify"),
        "Checks that every file of a results folder is there and is as it was written. Changes nothing.",
    ),
    "coordinate-check": Command("whether every size changes equally in its first steps", _coordinate_check),
    "completion": Command(
        "a script that completes these commands in bash, zsh or fish",
        _completion,
        "Prints a script with which a shell completes these commands, their options, keys and values.",
    ),
}


@cache
def commands() -> dict[str, Command]:
    """Every command by name: those that train and look after sweeps, then those on results (`analysis/commands/`)."""
    texts = plugins.texts("commands", "HELP", reserved=OWN)
    return OWN | {name: Command(text, partial(_analysis, name)) for name, text in texts.items()}
