"""`stability-harness remove OUT --where KEY=VALUE`: trials that are wanted no more, gone from the store for good."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from analysis.reading.open_sweep import dataset_of
from analysis.reading.selection import selected
from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage.kept_rows import write_rows
from harness.storage.kept_states import remove_states
from harness.storage.last_weights import remove_weights
from harness.storage.progress_files import read_asked, write_plan
from harness.storage.records import Unreadable
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import STORE, PackInfo, is_complete, read_pack, read_store
from sweeps.planning.packs import pack_id
from sweeps.running.ledger import Claim, claim, lock_of
from sweeps.running.locks import owned


def remove(out: Path, wheres: Sequence[str], is_sure: bool, console: Console) -> int:
    """Remove the trials of which every condition holds. Returns the exit status: 1 if it was not agreed to.

    Golden twins stay as long as a trial that stays has them. Killed at any moment, it leaves each trial whole or
    gone, and the same command goes on. Raises ConfigError, before anything is changed.
    """
    if not wheres:
        raise ConfigError("--where: none given; allowed: one or more, such as --where mitigation=mup")
    folder = ResultsPath.open(out)
    attributes, packs = read_store(out)
    known = list(packs)
    sweep = dataset_of(attributes, known)
    chosen = set(selected(sweep, wheres)["trial"].values.tolist())
    stays = ~np.isin(sweep["trial"].values, sorted(chosen))
    twins = chosen & set(sweep["golden"].values[stays].tolist())
    gone = chosen - twins
    if twins:
        _say(console, f"{count(len(twins), 'golden twin')} of trials that stay will stay, too")
    touched = [pack for pack in known if gone.intersection(pack.attributes["ids"])]
    gone = _without_unfinished(touched, gone, console)
    if not gone:
        _say(console, "nothing to remove")
        return 0
    if not _is_agreed(f"remove {len(gone)} of {count(sweep.sizes['trial'], 'trial')} from {out} for good", is_sure):
        return 1
    for pack in touched:
        _remove(folder, pack, gone)
    _forget(folder, out, gone)
    remove_states(folder, set(sweep["trial"].values.tolist()) - gone)
    _say(console, f"removed {count(len(gone), 'trial')}; {sweep.sizes['trial'] - len(gone)} left in {out}")
    return 0


def _without_unfinished(touched: Sequence[PackInfo], gone: set[str], console: Console) -> set[str]:
    """Less the trials of packs that are not finished, unless all of the pack goes."""
    kept: set[str] = set()
    for pack in touched:
        if not pack.complete and not gone.issuperset(pack.attributes["ids"]):
            kept |= gone.intersection(pack.attributes["ids"])
    if kept:
        _say(
            console,
            f"{count(len(kept), 'trial')} of packs that are not finished will stay with the rest of their packs",
        )
    return gone - kept


def _is_agreed(question: str, is_sure: bool) -> bool:
    if is_sure:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("--yes: not given, and nobody can be asked; allowed: --yes")
    return input(f"{question}? [y/N] ").strip().lower() in ("y", "yes")


def _remove(folder: ResultsPath, pack: PackInfo, gone: Collection[str]) -> None:
    """Have a pack without these trials: first the others as a pack of their own, then the whole one is taken away."""
    rows = [row for row, trial in enumerate(pack.attributes["ids"]) if trial not in gone]
    if len(rows) == len(pack.attributes["ids"]):
        return
    left = [pack.attributes["ids"][row] for row in rows]
    with owned(lock_of(folder, pack.id)) as is_own:
        now = read_pack(pack.place)
        if not is_own or now is None or now.attributes["ids"] != pack.attributes["ids"]:
            raise ConfigError(
                f"out={folder}: pack {pack.id} is trained or changed at this moment; allowed: once it is done"
            )
        if rows and not is_complete(folder.root, pack_id(left)):
            claim(folder, Claim(pack_id(left), frozenset(left)))
            write_rows(now, rows, pack_id(left))
        aside = f".{pack.id}.removed"
        (folder / STORE / aside).remove_tree()
        pack.place.rename(aside)
        (folder / STORE / aside).remove_tree()


def _forget(folder: ResultsPath, out: Path, gone: Collection[str]) -> None:
    """Nobody asks for these trials any more, and no weights of theirs are left."""
    for trial in gone:
        remove_weights(folder, trial)
    try:
        asked = read_asked(out)
    except Unreadable:
        return
    write_plan(folder, set(asked.trials) - set(gone), asked.question, asked.words)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
