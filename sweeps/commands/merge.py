"""`stability-harness merge OUT OUT ... --into OUT`: folders of one study as one, trial by trial, each checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from harness.basics.printing import count
from harness.config import ConfigError, Problems
from harness.storage.kept_rows import copy_pack
from harness.storage.kept_states import copy_states
from harness.storage.last_weights import copy_weights
from harness.storage.progress_files import PlannedIds, read_asked, write_plan
from harness.storage.records import Unreadable
from harness.storage.results_folder import ResultsPath
from harness.storage.store import open_store
from harness.storage.stored import STORE, WRITABLE, PackInfo, damage, is_complete, read_signal, read_store
from harness.storage.zarr_files import METADATA
from sweeps.running.ledger import Claim, claim, lock_of
from sweeps.running.locks import owned

CLOCKS = ("tokens_per_second", "step_seconds")  # signals that no two runs have alike


@dataclass(frozen=True)
class FinishedPacks:
    """A results folder that is merged: its finished packs."""

    out: Path
    study: str
    packs: Sequence[PackInfo]
    unfinished: int

    @classmethod
    def open(cls, out: Path) -> FinishedPacks:
        """Raises ConfigError for no results, and for damaged ones."""
        root, packs = read_store(out)
        known = list(packs)
        problems = Problems()
        if root["format"] not in WRITABLE:
            reason = f"holds a store of format {root['format']}, whose numbers may mean something else"
            problems.reasons[f"out={out}: {reason}; allowed: format {' or '.join(map(str, WRITABLE))}"] = None
        for pack in known:
            for _, words in damage(pack) if pack.complete else ():
                problems.reasons[f"{words}; allowed: a whole folder, see stability-harness verify"] = None
        problems.check()
        whole = [pack for pack in known if pack.complete]
        return cls(out, root["study"], whole, len(known) - len(whole))

    @property
    def rows(self) -> Mapping[str, tuple[PackInfo, int]]:
        """Where each trial is."""
        return {trial: (pack, row) for pack in self.packs for row, trial in enumerate(pack.attributes["ids"])}


def merge(outs: Sequence[Path], into: Path, console: Console) -> int:
    """Have the finished packs of several folders in one, byte for byte. Returns the exit status.

    A trial that several have has to be the same in each, bit for bit but for its clocks. Killed at any moment, the same
    command goes on. Raises ConfigError, before anything is written, if they do not go together.
    """
    if into.resolve() in [out.resolve() for out in outs]:
        raise ConfigError(f"--into {into}: is one of the folders that are merged; allowed: another one")
    sources = [FinishedPacks.open(out) for out in outs]
    there = [FinishedPacks.open(into)] if (into / STORE / METADATA).exists() else []
    if len({source.study for source in sources}) > 1:
        studies = ", ".join(f"{source.out}: {source.study}" for source in sources)
        raise ConfigError(f"OUT: their studies differ ({studies}); allowed: folders of one study")
    shared = _shared([*there, *sources])
    folder = open_store(into, sources[0].study)
    for source in sources:
        for pack in source.packs:
            _take(pack, folder)
        for trial in source.rows:
            copy_weights(source.out, folder, trial)
        copy_states(ResultsPath.at(source.out), folder, source.rows.keys())
        if source.unfinished:
            _say(console, f"{source.out}: {count(source.unfinished, 'pack')} not finished, left out")
    _plan_of([*there, *sources], folder)
    trials = {trial for source in sources for trial in source.rows}
    said = f"{count(len(trials), 'trial')} of {count(len(sources), 'folder')} in {into}"
    _say(console, f"{said}; {count(shared, 'trial')} in several, the same bit for bit" if shared else said)
    return 0


def _take(pack: PackInfo, folder: ResultsPath) -> None:
    """Have a pack there, unless it is. Raises ConfigError where it is trained at this moment."""
    with owned(lock_of(folder, pack.id)) as is_own:
        if not is_own:
            why = f"pack {pack.id} is trained at this moment"
            raise ConfigError(f"--into {folder}: {why}; allowed: the same command once it is done")
        if is_complete(folder.root, pack.id):
            return
        claim(folder, Claim(pack.id, frozenset(pack.attributes["ids"])))
        (folder / STORE / pack.id).remove_tree()  # of what was not finished
        copy_pack(pack, folder)


def _shared(sources: Sequence[FinishedPacks]) -> int:
    """How many trials several folders have. Raises ConfigError for those that are not the same."""
    first: dict[str, tuple[FinishedPacks, PackInfo, int]] = {}
    pairs: dict[tuple[Path, Path], Shared] = {}  # by the two packs, each of whose arrays is read once
    for source in sources:
        for trial, (pack, row) in source.rows.items():
            if trial not in first:
                first[trial] = source, pack, row
                continue
            other, its, its_row = first[trial]
            pair = pairs.setdefault((its.path, pack.path), Shared((other.out, source.out), (its, pack)))
            pair.rows.append((its_row, row))
    problems = Problems()
    for pair in pairs.values():
        for trial, what in pair.differing():
            where = f"trial {trial} is another one in {pair.outs[0]} and in {pair.outs[1]} ({what})"
            problems.reasons[f"OUT: {where}; allowed: folders that agree"] = None
    problems.check()
    return sum(len(pair.rows) for pair in pairs.values())


@dataclass
class Shared:
    """Two packs of two folders, and the rows in which they have the same trials."""

    outs: tuple[Path, Path]
    packs: tuple[PackInfo, PackInfo]
    rows: list[tuple[int, int]] = field(default_factory=list)

    def differing(self) -> Iterator[tuple[str, str]]:
        """The trials that are not the same in both, each with what is another one first; but for their clocks."""
        one, other = self.packs
        mine, its = (list(rows) for rows in zip(*self.rows, strict=True))
        left = dict(enumerate(one.attributes["ids"][row] for row in mine))
        for name in ("trials", "outcome", "nonfinite_step", "strikes"):
            for number, (row, its_row) in enumerate(self.rows):
                if number in left and one.attributes[name][row] != other.attributes[name][its_row]:
                    yield left.pop(number), name
        for name in sorted((one.arrays.keys() & other.arrays.keys()) - set(CLOCKS)):
            length = min(one.arrays[name]["shape"][1], other.arrays[name]["shape"][1])
            values = read_signal(one, name, 0, length)[mine], read_signal(other, name, 0, length)[its]
            is_same = (values[0] == values[1]) | (np.isnan(values[0]) & np.isnan(values[1]))
            for number in np.flatnonzero(~is_same.reshape(len(mine), -1).all(1)).tolist():
                if number in left:
                    yield left.pop(number), name


def _plan_of(sources: Sequence[FinishedPacks], folder: ResultsPath) -> None:
    """What the folders' last commands have asked for, together; the words are those of the folder itself."""
    trials: set[str] = {trial for source in sources for trial in source.rows}
    asked: dict[Path, PlannedIds] = {}
    for source in sources:
        with contextlib.suppress(Unreadable):
            asked[source.out.resolve()] = read_asked(source.out)
    questions = {plan.question for plan in asked.values()}
    own = asked.get(folder.root.resolve())
    trials.update(*(plan.trials for plan in asked.values()))
    write_plan(folder, trials, questions.pop() if len(questions) == 1 else "", own.words if own else None)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
