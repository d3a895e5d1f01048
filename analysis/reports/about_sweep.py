"""What a report says of a sweep before its results: what was asked, varied and trained, when, by what and how."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from analysis.measures.tidy import axes_of
from analysis.reading.levels import in_order, word
from harness.basics.printing import count, printable
from harness.config import NO_FAULT
from harness.storage.progress_files import read_asked
from harness.storage.records import Unreadable
from harness.storage.stored import PackInfo

PROGRAM = "stability-harness"
MOST_LEVELS, MOST_AXES = 8, 4  # of an axis, and of a title, that are named


@dataclass(frozen=True)
class AboutSweep:
    """The head of a report, in words; what is not known is empty."""

    title: str  # what the study asks, or what was varied
    selected: str  # which trials, if not all
    varied: tuple[str, ...]  # an axis with its levels
    size: str
    date: str  # of the first and the last pack, UTC
    version: str  # of the harness, with the commit
    command: str  # that trained it last
    next_command: str

    @classmethod
    def of(cls, out: Path, sweep: xr.Dataset, packs: Sequence[PackInfo], wheres: Sequence[str] = ()) -> AboutSweep:
        """Of a results folder, and of the trials of its sweep that `wheres` have chosen."""
        asked, words = _asked(out)
        varied = tuple(f"{axis}: {_levels(sweep[axis].values)}" for axis in axes_of(sweep))
        axes = _first([axis for axis in axes_of(sweep) if axis != "seed"], MOST_AXES)
        title = asked or (f"{sweep.attrs['study']}: {axes}" if axes else sweep.attrs["study"])
        names = {str(name) for name in np.unique(sweep["mitigation"].values)}
        size = f"{count(sweep.sizes['trial'], 'trial')} in {count(len(np.unique(sweep['pack'].values)), 'pack')}"
        if len(names) > 1:
            size += f", {count(len(names - {'none'}), 'mitigation')} beside the recipe as it is"
        command = shlex.join([PROGRAM, "sweep", *words]) if words else ""
        selected = f"{' and '.join(wheres)}, and what is compared with these trials" if wheres else ""
        return cls(
            printable(title),
            printable(selected),
            varied,
            size,
            _dates(packs),
            _versions(sweep),
            printable(command),
            _next(out, sweep),
        )


def _asked(out: Path) -> tuple[str, tuple[str, ...]]:
    """What the study of the last command asks, and the command's words; empty in a store that does not say."""
    try:
        asked = read_asked(out)
    except Unreadable:
        return "", ()
    return asked.question, asked.words or ()


def _levels(values: np.ndarray) -> str:
    return _first([word(level) for level in in_order(values)], MOST_LEVELS)


def _first(words: Sequence[str], most: int) -> str:
    more = len(words) - most
    return ", ".join(words) if more <= 0 else f"{', '.join(words[:most])} and {more} more"


def _dates(packs: Sequence[PackInfo]) -> str:
    days = sorted({str(pack.attributes["created"])[:10] for pack in packs})
    return " to ".join(days if len(days) < 3 else [days[0], days[-1]])


def _versions(sweep: xr.Dataset) -> str:
    known = json.loads(sweep.attrs["environment"])
    found = {
        " ".join(str(each[name]) for name in ("harness", "commit") if isinstance(each, dict) and name in each)
        for each in known
    }
    return ", ".join(sorted(filter(None, found)))


def _next(out: Path, sweep: xr.Dataset) -> str:
    """A command that looks further into what is there."""
    has_faults = bool((sweep["fault"] != NO_FAULT.name).any())
    return shlex.join([PROGRAM, "incidents" if has_faults else "watch", str(out)])
