"""Follows a sweep in a thread of its own while somebody looks at it, and answers what a page asks."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.again.batches import stored_trials
from analysis.pages.curves import curve, largest
from analysis.pages.following import MOST_MOVED, Overview, Store, progress_of
from analysis.pages.plain import shown
from analysis.pages.trial_page import (
    EVERY_STEP,
    FAILURES,
    IncidentRows,
    incidents_by_trial,
    opened,
    told_incident,
    trial_page,
)
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost
from harness.storage.stored import PackInfo, is_once, read_signal

EVERY_SECONDS = 1.0  # between two looks, if these are quick
SHARE = 0.2  # of the time, at most, that is spent on looking, and on incidents: the machine is there to train
IDLE_SECONDS = 20.0  # after the last question nobody is looking
INCIDENT_SECONDS = 0.3  # of a look, for incidents, at least one part of a pack
MOST_INCIDENTS = 200
MOST_CURVES, POINTS = 20, 1000
KEPT_BYTES = 2**26  # of signals that were read
RUN_BYTES = 2**26  # of the signals of trials in which incidents are looked for at once


class Follower:
    """`news`, `curves` and `trial` may be asked for by several threads; `run` is for one."""

    def __init__(self, out: Path):
        """Raises ConfigError if `out` is no results folder."""
        self.store = Store(out)
        self.overview = Overview()
        self._columns: dict[str, Any] | None = None
        self._news: dict[str, Any] = {"version": 0, "beat": 0, "message": "", "progress": None, "incidents": []}
        self._news |= {"moved": [], "signals": [], "unread": 0}
        self._moved: dict[str, None] = {}  # the last is the one that moved last
        self._steps: dict[str, int] = {}
        self._unread: dict[str, None] = {}  # packs in which incidents are still to be looked for, the last one first
        self._incidents: dict[str, list[dict[str, Any]]] = {}  # by trial, the last one that was looked at last
        self._looked: dict[str, int] = {}  # pack -> up to which step incidents were looked for; -1: it failed
        self._looking = ""  # the pack in which they are being looked for, if any
        self._forgotten: set[str] = set()  # trials whose incidents are kept no more
        self._signals: OrderedDict[tuple[str, str], tuple[PackInfo, np.ndarray]] = OrderedDict()
        self._packs: Sequence[PackInfo] = ()
        self._overview_due = self._incidents_due = self._seen_in = 0.0
        self._is_stale = False
        self._lock, self._wanted, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self._asked_at = 0.0

    # --- asked by a page ---------------------------------------------------------------------------------------

    def news(self, version: int) -> dict[str, Any]:
        """How far the sweep is; with `overview` if it is another than that of `version`."""
        self._asked_at = time.monotonic()
        self._wanted.set()
        with self._lock:
            is_new = self._columns is not None and self._news["version"] != version
            return self._news | ({"overview": self._columns} if is_new else {})

    def curves(self, signal: str, trials: Sequence[str]) -> dict[str, Any]:
        """`curves`: trial -> curve, of those that have the signal. Raises DamagedStore, a ConfigError."""
        stored, found, unit = stored_trials(self._packs), {}, "1"
        for trial in trials[:MOST_CURVES]:
            pack = stored.get(trial)
            if pack is None or signal not in pack.arrays:
                continue
            unit = shown(pack.arrays[signal]["attributes"].get("units", "1"))
            values = self._read(pack, signal)[pack.attributes["ids"].index(trial)]
            known = np.flatnonzero(np.isfinite(values))
            end = pack.steps if pack.complete else int(known[-1]) + 1 if len(known) else 0
            found[trial] = curve(values[:end], POINTS, signal in EVERY_STEP)
        return {"curves": found, "unit": unit}

    def trial(self, trial: str) -> dict[str, Any]:
        """Its `trial_page`, from what was last seen of the store. Raises ConfigError."""
        return trial_page(self.store.out, self.store.attributes, self._packs, trial, self._told(trial))

    def _told(self, trial: str) -> IncidentRows | None:
        """Its incidents as the other thread has found them, for to find them takes long; None if it will not."""
        pack = stored_trials(self._packs).get(trial)
        if pack is None or trial in self._forgotten:
            return None
        looked, is_due = self._looked.get(pack.id, -1), pack.id in self._unread or pack.id == self._looking
        if looked < 0:
            return IncidentRows({}, "They are still being looked for.") if is_due else None
        rows = [{key: one[key] for key in one if key != "trial"} for one in self._incidents.get(trial, ())]
        return IncidentRows({trial: rows}, f"Looked for up to step {looked}." if is_due else "")

    def _read(self, pack: PackInfo, signal: str) -> np.ndarray:
        """[R, steps] up to the last that is stored; those that were asked for last are kept."""
        key = (pack.id, signal)
        with self._lock:
            # A pack that was read again may have gone back: what was read before is not its own any more.
            if key in self._signals and self._signals[key][0] is pack:
                self._signals.move_to_end(key)
                return self._signals[key][1]
        values = largest(read_signal(pack, signal, 0, pack.attributes["steps_done"]))
        with self._lock:
            self._signals[key] = pack, values
            self._signals.move_to_end(key)
            while len(self._signals) > 1 and sum(kept.nbytes for _, kept in self._signals.values()) > KEPT_BYTES:
                self._signals.popitem(last=False)
        return values

    # --- the thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look again and again, as long as somebody asks, until `end`."""
        while not self._ended.is_set():
            self._wanted.wait()
            if time.monotonic() - self._asked_at > IDLE_SECONDS:
                self._wanted.clear()
                continue
            begun = time.monotonic()
            self.look(self._incidents_due <= begun)
            self._ended.wait(max(EVERY_SECONDS, self._seen_in * (1 / SHARE - 1)))

    def end(self) -> None:
        self._ended.set()
        self._wanted.set()

    def look(self, finds_incidents: bool = True) -> None:
        """See what is new and tell it; after that look for incidents, which takes longer.

        What is wrong with the folder is told on the page, and looked at again the next time.
        """
        begun = time.monotonic()
        self._tell(self._see)
        seen = time.monotonic()
        self._seen_in = seen - begun
        if finds_incidents:
            self._tell(self._find_incidents)
            found = time.monotonic()
            self._incidents_due = found + (found - seen) * (1 / SHARE - 1)

    def _tell(self, look: Callable[[], dict[str, Any]]) -> None:
        try:
            changes = look()
        except (ConfigError, FolderLost, OSError) as error:
            changes = {"message": shown(str(error))}
        except FAILURES as error:  # of a store that no sweep has written
            changes = {"message": shown(f"The store cannot be read: {type(error).__name__}: {error}")}
        with self._lock:
            self._news = self._news | changes

    def _see(self) -> dict[str, Any]:
        changed = self.store.refresh()
        self._packs = list(self.store.packs.values())
        is_first = not self._steps and not self._unread
        for name in changed:
            self._note(name, is_first)
        self._is_stale |= bool(changed) or self._columns is None
        changes: dict[str, Any] = {"message": self._message(), "progress": progress_of(self.store)}
        if self._is_stale and time.monotonic() >= self._overview_due:
            begun = time.monotonic()
            columns = self.overview.columns(self.store)
            self._overview_due = time.monotonic() + (time.monotonic() - begun) / SHARE
            self._is_stale = False
            with self._lock:
                self._columns = columns
                changes["version"] = self._news["version"] + 1
        signals = {name for pack in self._packs for name, array in pack.arrays.items() if not is_once(array)}
        return changes | {
            "beat": self._news["beat"] + bool(changed),
            "moved": list(reversed(self._moved)),
            "signals": sorted(map(shown, signals)),
            "unread": self._trials_unread(),
        }

    def _note(self, name: str, is_first: bool) -> None:
        """A pack has changed: its trials have moved if there are more steps, and may have new incidents."""
        pack = self.store.packs.get(name)
        if pack is None:
            return
        done = pack.attributes["steps_done"]
        has_moved = not pack.complete if is_first else done > self._steps.get(name, -1)
        self._steps[name] = done
        if not done:
            return
        self._unread.pop(name, None)
        self._unread = self._unread | {name: None} if has_moved else {name: None} | self._unread
        if has_moved:
            for trial in pack.attributes["ids"]:
                self._moved.pop(trial, None)
                self._moved[trial] = None
            for trial in list(self._moved)[:-MOST_MOVED]:
                del self._moved[trial]

    def _message(self) -> str:
        damaged = [f"{text} (left out)" for text in self.store.damaged.values()]
        more = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        return "; ".join(damaged[:3]) + more

    def _trials_unread(self) -> int:
        return sum(len(pack.attributes["ids"]) for pack in self._packs if pack.id in self._unread)

    def _find_incidents(self) -> dict[str, Any]:
        """In the packs that moved last first, for as long as a look may take."""
        last = time.monotonic() + INCIDENT_SECONDS
        while self._unread and time.monotonic() < last:
            name = self._looking = next(reversed(self._unread))
            del self._unread[name]
            if name not in self.store.packs:
                continue
            pack = self.store.packs[name]
            try:
                for trial, found in self._incidents_in(pack):
                    self._incidents.pop(trial, None)
                    self._forgotten.discard(trial)
                    if found:
                        self._incidents[trial] = found
                self._looked[name] = pack.attributes["steps_done"]
            except FAILURES:
                self._looked[name] = -1  # its trials say why, where they are opened
        self._looking = ""
        for trial in list(self._incidents)[: -MOST_INCIDENTS or None]:
            self._forgotten.add(trial)
            del self._incidents[trial]
        kept = [one for trial in reversed(self._incidents) for one in self._incidents[trial]]
        return {"incidents": kept[:MOST_INCIDENTS], "unread": self._trials_unread()}

    def _incidents_in(self, pack: PackInfo) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        golden = set(pack.attributes["golden"]) - set(pack.attributes["ids"])
        twins = [other for other in self._packs if golden & set(other.attributes["ids"])] if golden else []
        sweep = opened(self.store.out, self.store.attributes, [pack, *twins[:1]])
        trial_bytes = sum(values.nbytes for values in sweep.sweep.data_vars.values()) // sweep.sweep.sizes["trial"]
        at_once = max(1, RUN_BYTES // max(1, trial_bytes))
        trials = pack.attributes["ids"]
        for begin in range(0, len(trials), at_once):
            for trial, found in incidents_by_trial(sweep, trials[begin : begin + at_once]).items():
                yield trial, [{"trial": trial, **told_incident(one)} for one in found]
