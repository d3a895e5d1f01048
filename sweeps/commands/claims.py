"""`stability-harness claims`: what is claimed of training, how it is tested, and what came of it.

claims [NAME ...]              a line for each, or all that is known of some
claims run NAME ... out=OUT    register them and train what is missing; --tag TAG, --all
claims parts                   all that take trials in parts of half an hour; run --all --part N
claims verdict OUT [NAME ...]  what the trials in OUT say
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath
from sweeps.claims.checks import CHECKS
from sweeps.claims.parts import parts
from sweeps.claims.registered import RegisteredClaim, chosen, claims
from sweeps.claims.registration import REGISTERED
from sweeps.claims.trained import EXPLORATORY, NOT_TRAINED, UNFINISHED, Recipes, Wanted, trials_of, verdicts
from sweeps.claims.verdicts import UNDECIDED, discovered
from sweeps.claims.words import compared, effect_words, has_to_happen, holds_if
from sweeps.commands.sweep import explained, sweep
from sweeps.compose.arguments import check_of_run
from sweeps.compose.overrides import out_word


def print_claims(names: Sequence[str], tag: str | None, folder: Path | None, console: Console) -> None:
    """Print a line for each claim, or all that is known of those that are named. Raises ConfigError."""
    found = chosen(list(names), tag, folder)
    if names:
        for claim in found:
            _print_one(claim, console)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("name", "verdict", "claim"):
        table.add_column(heading, no_wrap=heading != "claim")
    for claim in found:
        verdict = CHECKS[claim.check]().verdict if claim.check else "by trials"
        table.add_row(*map(Text, (claim.name, verdict, claim.claim)))
    console.print(table)


def print_parts(folder: Path | None, console: Console) -> None:
    """Print the parts of `run --all --part N`. Raises ConfigError."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("part", "about", "trials", "minutes", "claims"):
        table.add_column(heading, no_wrap=heading != "claims")
    for number, part in enumerate(parts(_by_trials(folder)), start=1):
        names = ", ".join(claim.name for claim in part.claims)
        table.add_row(*map(Text, (str(number), part.subject, str(part.trials), f"{part.minutes:.0f}", names)))
    console.print(table)
    console.print("minutes: a rough guess for two cores, without the second look at what is undecided", highlight=False)


def _by_trials(folder: Path | None) -> list[RegisteredClaim]:
    return [claim for claim in chosen([], None, folder) if claim.trials is not None]


def _of_part(number: int, folder: Path | None) -> list[RegisteredClaim]:
    found = parts(_by_trials(folder))
    if not 1 <= number <= len(found):
        raise ConfigError(f"--part {number}: there is none; allowed: 1 to {len(found)}, as `claims parts` lists them")
    return list(found[number - 1].claims)


def run_claims(
    given: Sequence[str],
    tag: str | None,
    is_all: bool,
    folder: Path | None,
    console: Console,
    *,
    part: int | None = None,
) -> int:
    """Register claims, train what they need in one sweep, and once more with twice the seeds what is undecided.

    Of what is `given`, `out=OUT` says where, and other words with `=` are for the run. Returns the exit status. Raises
    ConfigError before anything is written.
    """
    places = [word.removeprefix("out=") for word in given if word.startswith("out=")]
    words = [word for word in given if "=" in word and not word.startswith("out=")]
    names = [word for word in given if "=" not in word]
    if len(places) != 1:
        raise ConfigError(f"out: given {len(places)} times; allowed: once, such as out=results/claims")
    if (bool(names) or tag is not None) is is_all:
        told = "with NAME or --tag" if is_all else "missing, as NAME and --tag are"
        raise ConfigError(f"--all: {told}; allowed: NAME ..., --tag TAG, or --all")
    if part is not None and not is_all:
        raise ConfigError(f"--part {part}: of all claims alone; allowed: --all --part {part}")
    check_of_run(words)
    known = chosen(names, tag, folder) if part is None else _of_part(part, folder)
    tested = [claim for claim in known if claim.trials is not None]
    if bare := [claim.name for claim in known if names and claim.trials is None]:
        raise ConfigError(f"NAME={bare[0]}: is decided by arithmetic; allowed: claims {bare[0]}, without run")
    if not tested:
        raise ConfigError(f"--tag {tag}: none of its claims is decided by trials; allowed: another tag")
    left: Sequence[RegisteredClaim] = tested
    registered = _by_trials(folder)  # their trials may be shared
    recipes: Recipes = {}
    for times in (1, 2):
        trials = {trial.id: trial for claim in left for trial in trials_of(claim, times, recipes)}
        notes = [f"{count(len(left), 'claim')}, {count(len(trials), 'trial')} in all"]
        arguments = ["study=grid", out_word(places[0]), *words]
        with explained(arguments):
            status, settings = sweep(arguments, more=Wanted(list(trials.values()), notes, registered))
        if status or settings.plan or not settings.wait:
            return status
        left = [one.claim for one in verdicts(settings.out, left) if one.verdict == UNDECIDED]
        if not left:
            break
        if times == 1:
            console.print(f"{count(len(left), 'claim')} undecided: twice the seeds", highlight=False)
    return print_verdicts(settings.out, [claim.name for claim in tested], folder, console)


def print_verdicts(
    out: Path, names: Sequence[str], folder: Path | None, console: Console, page: Path | None = None
) -> int:
    """Print what the trials in a folder say of claims, all that were registered there if none is named, and a page.

    Verdicts go into the table of another `page`, too, if one is given.

    Raises ConfigError.
    """
    known = {claim.name: claim for claim in chosen(list(names), None, folder) if claim.trials is not None}
    if bare := [name for name in names if name not in known]:
        raise ConfigError(f"NAME={bare[0]}: is decided by arithmetic; allowed: claims {bare[0]}, without verdict")
    there = [entry.stem for entry in (ResultsPath.open(out) / REGISTERED).entries()]
    if strange := [name for name in there if name not in known and not names]:
        told = f"{', '.join(strange)}: registered here, and no claim that is known (--config-dir)"
        console.print(told, highlight=False, soft_wrap=True)
    listed = names or [name for name in there if name in known]
    from sweeps.claims.findings import write_findings  # with what draws, which a list of claims does without
    from sweeps.claims.page import write_page

    found = [one for one in verdicts(out, [known[name] for name in listed]) if names or one.verdict != NOT_TRAINED]
    parts = [] if names else [one for one in found if one.verdict.startswith(UNFINISHED)]
    found = [one for one in found if one not in parts]
    if parts:  # of which others may have trained what they share
        told = ", ".join(one.claim.name for one in parts)
        console.print(f"{count(len(parts), 'claim')} unfinished: {told}", highlight=False, soft_wrap=True)
    if not found:
        raise ConfigError(f"out={out}: has no claim with all of its trials; allowed: claims run NAME out={out}")
    are_found = discovered([one.p for one in found])
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("name", "verdict", "cell", "effect [95%]", "seeds", "control"):
        table.add_column(heading, no_wrap=heading == "seeds", overflow="fold")
    for one, is_found in zip(found, are_found, strict=True):
        told = f"{one.verdict}{f' ({EXPLORATORY})' if one.is_exploratory else ''}{'' if is_found else ' *'}"
        for number, cell in enumerate(one.cells):
            head = (one.claim.name, told) if not number else ("", "")
            control = f"{cell.control:.3g}{'' if cell.is_acting else ': too little'}"
            table.add_row(*map(Text, (*head, cell.cell, effect_words(cell), str(cell.judged.pairs), control)))
        if not one.cells:
            table.add_row(*map(Text, (one.claim.name, told, "", "", "", "")))
    console.print(table)
    console.print("*: not among the discoveries at 10% false ones (Benjamini & Hochberg 1995)", highlight=False)
    console.print(f"Page: {write_page(out, found)}", highlight=False, soft_wrap=True)
    if page is not None:
        figure = write_findings(page, found, claims(folder))
        console.print(f"Table: {page}, {figure}", highlight=False, soft_wrap=True)
    return 0


def _print_one(claim: RegisteredClaim, console: Console) -> None:
    lines = {"claim": claim.claim, "source": claim.source, "opposite": claim.opposite}
    if claim.check:
        answer = CHECKS[claim.check]()
        lines["verdict"] = f"{answer.verdict}: {answer.words}"
        lines["numbers"] = ", ".join(f"{name} = {value:.6g}" for name, value in answer.numbers.items())
    if (test := claim.trials) is not None:
        lines["sweep"] = " ".join(test.sweep)
        lines["test"] = compared(test)
        lines["holds if"] = f"{holds_if(test)}, in each {', '.join(test.cells)}, {test.seeds} seeds"
        lines["control"] = has_to_happen(test)
    lines |= {"tags": ", ".join(claim.tags), "registration": claim.registration}
    console.print(claim.name)
    for name, text in lines.items():
        if text:
            console.print(f"  {name:<13}{text}", soft_wrap=True)
