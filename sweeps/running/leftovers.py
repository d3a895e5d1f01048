"""What killed sweeps have left in a results folder, and nobody needs any more."""

from __future__ import annotations

import re
from collections.abc import Set

from harness.storage.progress_files import ERRORS, PROGRESS
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import is_complete
from sweeps.planning.packs import PACK_ID
from sweeps.running.job import CHECKPOINTS
from sweeps.running.ledger import LOCKS, all_claims, lock_of
from sweeps.running.locks import is_locked


def remove_leftovers(folder: ResultsPath, running: Set[str], complete: Set[str]) -> None:
    """Remove what a killed sweep has left of packs that do not run any more, or all of whose trials are `complete`.

    Only what has a name that a sweep gives: anything else is somebody's own.
    """
    for entry, pack in _of_packs(folder / PROGRESS, rf"({PACK_ID})\.json|\.({PACK_ID})\.json\.[0-9a-f]{{32}}"):
        if pack not in running and not is_locked(lock_of(folder, pack)):
            entry.unlink()
    for entry, _ in _of_packs(folder / ERRORS, rf"\.({PACK_ID})\.txt\.[0-9a-f]{{32}}"):  # was being written
        entry.unlink()
    ended = [*_of_packs(folder / CHECKPOINTS, f"({PACK_ID})"), *_of_packs(folder / LOCKS, rf"({PACK_ID})\.lock")]
    settled = {claim.pack for claim in all_claims(folder) if claim.trials <= complete} if ended else set()
    for entry, pack in ended:
        if (pack in settled or is_complete(folder.root, pack)) and not is_locked(lock_of(folder, pack)):
            entry.remove_tree()
            entry.unlink()


def _of_packs(folder: ResultsPath, pattern: str) -> list[tuple[ResultsPath, str]]:
    """What is in a folder with names of this pattern, and the pack, which is the one group that has matched."""
    matches = ((entry, re.fullmatch(pattern, entry.name)) for entry in folder.entries())
    return [(entry, match[match.lastindex or 0]) for entry, match in matches if match]
