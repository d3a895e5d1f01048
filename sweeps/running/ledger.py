"""Who trains what: each trial once, however many commands train overlapping grids into one folder.

    <out>/locks/<pack>.lock       held by the process that trains the pack
    <out>/claims/ledger.jsonl     a line for each pack that was begun: its id, and the trials that it records
    <out>/claims/turn.lock        held while a process looks what is left for it, and says what it takes

A trial belongs to another pack if that one has said so and is locked, or complete. So what a killed process had claimed
is free again at once, and equal commands that are started side by side share their packs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass

from harness.storage.json_seal import is_sealed, sealed_json
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import is_complete
from sweeps.planning.packs import PackPlan, without
from sweeps.running.locks import Turn, is_locked, owned

LOCKS, LOCK = "locks", ".lock"
CLAIMS, LEDGER, TURN = "claims", "ledger.jsonl", "turn.lock"


@dataclass(frozen=True)
class Claim:
    """A pack that some process has begun, and the trials that it records."""

    pack: str
    trials: frozenset[str]


def lock_of(folder: ResultsPath, pack: str) -> ResultsPath:
    """The lock file of a pack in a results folder."""
    return folder / LOCKS / f"{pack}{LOCK}"


@contextlib.contextmanager
def claimed(folder: ResultsPath, pack: PackPlan) -> Iterator[PackPlan | None]:
    """What of a pack is this process' to train for as long as the block lasts; None if nothing is.

    That is the pack itself, or less: without the trials that others train, or have trained since it was planned.
    """
    with contextlib.ExitStack() as held:
        with Turn(folder / CLAIMS / TURN):
            part: PackPlan | None = without(pack, _taken(folder, pack))
            if part is not None and not held.enter_context(owned(lock_of(folder, part.id))):
                part = None
            if part is not None:
                claim(folder, Claim(part.id, frozenset(trial.id for trial in part.recorded)))
        yield part


def _taken(folder: ResultsPath, pack: PackPlan) -> set[str]:
    """The trials of a pack that belong to another one."""
    others = [claim for claim in claims_on(folder, {trial.id for trial in pack.recorded}) if claim.pack != pack.id]
    packs = {claim.pack for claim in others}
    held = {name for name in packs if is_locked(lock_of(folder, name)) or is_complete(folder.root, name)}
    return {trial for claim in others if claim.pack in held for trial in claim.trials}


def claims_on(folder: ResultsPath, trials: Set[str]) -> list[Claim]:
    """The claims that were ever made on some of these trials."""
    return [claim for claim in all_claims(folder) if claim.trials & trials]


def all_claims(folder: ResultsPath) -> list[Claim]:
    """Those that were ever made. What cannot be read of the ledger claims nothing."""
    return [claim for claim in lines_of(folder) if claim is not None]


def lines_of(folder: ResultsPath) -> list[Claim | None]:
    """What each line of the ledger claims; None of one that cannot be read, or is not as it was written.

    A last line without an end is being written, or what a killed process has left; it is left out.
    """
    try:
        lines = (folder / CLAIMS / LEDGER).read_bytes().split(b"\n")
    except OSError:
        return []
    return [_claim(line) for line in lines[:-1] if line]


def _claim(line: bytes) -> Claim | None:
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        has_seal, record = is_sealed(line), json.loads(line)
        pack, trials = record["pack"], record["trials"]
        is_right = isinstance(pack, str) and pack.isalnum() and all(isinstance(trial, str) for trial in trials)
        if is_right and (has_seal or record.keys() == {"pack", "trials"}):
            return Claim(pack, frozenset(trials))
    return None


def claim(folder: ResultsPath, claimed: Claim) -> None:
    """Add a line, whole: what a killed process has left of one before it is ended first."""
    (folder / CLAIMS).make_folder()
    line = sealed_json({"pack": claimed.pack, "trials": sorted(claimed.trials)})
    with os.fdopen((folder / CLAIMS / LEDGER).descriptor(os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line + b"\n")


def are_claimed(folder: ResultsPath, trials: Set[str]) -> bool:
    """Whether a process trains some of these now."""
    return any(is_locked(lock_of(folder, claim.pack)) for claim in claims_on(folder, trials))
