"""How far each trial has gone to a tracker, so that every export adds what is new and nothing twice.

    <place>/exported-<id of the results folder>.json    a `Mark` for each trial that is there, and the digests of pages

A trial is marked once the tracker has it. What was under way when an export was killed is named there before it begins,
and is taken away again by the next one. A finished trial whose mark is that of all it has is not read again. Of an
unfinished one the steps that the tracker has are read and compared: if they are still what the store has, the others
are added; if not, since a row has gone back to an earlier step or the pack was trained anew, the run is made anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import filelock

from analysis.export.names import is_name, text
from analysis.export.pages import digest, postmortem, sweep_pages
from analysis.export.registry import Target
from analysis.export.runs import MeasuredCurve, Source, TrackedRun, checksum
from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage.records import Missing, Unreadable, read_record

MOST_BYTES = 2**28  # of the marks
SAVE_EVERY = 50  # trials
NEW, LONGER, ANEW = "new", "continued", "made anew"


@dataclass(frozen=True)
class Mark:
    """What a tracker has of a trial: so many steps, with these checksums, under the tracker's own name for the run."""

    handle: str
    steps: int
    curves: int
    facts: int
    complete: bool


@dataclass(frozen=True)
class Marks:
    """Of a sweep in a place. `open` are trials of which it may have a part, with the handle of an older mark or ""."""

    marks: dict[str, Mark] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    name: str = ""  # of the sweep there; an earlier version has written none


class Tracker(Target):
    """A target that has runs, to which curves are added."""

    finished_only: ClassVar[bool] = False  # whether a run cannot be gone on with
    errors: tuple[type[Exception], ...] = ()  # of its library, where it cannot write; known once it is open

    # --- what a tracker says ---------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, source: Source, place: Path) -> bool:
        """Be ready to write into the folder `place`; imports the library. Gives whether it has the sweep already."""

    @abstractmethod
    def has(self, handle: str) -> bool:
        """Whether a run that is to be changed is still there."""

    @abstractmethod
    def remove(self, trial: str, handle: str) -> None:
        """Take away what there is of a trial, if there is anything; its handle is "" where that is not known."""

    @abstractmethod
    def put(self, run: TrackedRun, curves: Sequence[MeasuredCurve], handle: str | None) -> str:
        """Add these points to the run of that handle, or to a new one; of a complete one all else. Gives the handle."""

    @abstractmethod
    def put_page(self, name: str, content: bytes, handle: str | None) -> None:
        """A page on the run of that handle, or on the whole sweep."""

    def close(self) -> None:
        """Everything was put."""

    @abstractmethod
    def words(self, place: Path) -> str:
        """Where it is, and how it is looked at."""

    # --- what is done ----------------------------------------------------------------------------------------------

    def write(self, source: Source, place: Path) -> list[str]:
        """See `Target`."""
        file = place / f"exported-{source.id}.json"
        with _held(file.with_suffix(".lock"), place):
            state = _read(file)
            if file.exists():
                source = source.under(state.name if is_name(state.name) else source.former_name)
            is_there = self.open(source, place)
            state = dataclasses.replace(state if is_there else Marks(), name=source.name)
            try:
                for trial, handle in state.open.items():
                    self._remove(trial, handle, state)
                state.open.clear()
                done = self._put_runs(source, state, file)
                pages = self._put_pages(source, state, file)
            except self.errors as error:
                reason = f"{type(error).__name__}: {text(str(error))}"
                raise ConfigError(f"--into {place}: {reason}; allowed: a place that the tracker can write to") from None
            finally:
                self.close()
        total = source.sweep.sizes["trial"]
        told = ", ".join(f"{done[how]} {how}" for how in (NEW, LONGER, ANEW) if done[how]) or "nothing new"
        told += f", {count(pages, 'page')}" if pages else ""
        return [f"{count(total, 'trial')}: {told}.", self.words(place)]

    def _put_runs(self, source: Source, state: Marks, file: Path) -> Counter[str]:
        """How many runs were added, gone on with and made anew."""
        done: Counter[str] = Counter()
        runs = source.runs()
        due = [number for number, run in enumerate(runs) if self._is_due(run, state)]
        curves = source.curves(due, [runs[number].steps for number in due])
        for begin in range(0, len(due), SAVE_EVERY):
            group = [runs[number] for number in due[begin : begin + SAVE_EVERY]]
            state.open.update(
                {run.trial: state.marks[run.trial].handle if run.trial in state.marks else "" for run in group}
            )
            _write(file, state)
            for run in group:
                if how := self._put(run, next(curves), state):
                    done[how] += 1
            state.open.clear()
        _write(file, state)
        return done

    def _is_due(self, run: TrackedRun, state: Marks) -> bool:
        if self.finished_only and not run.complete:
            return False
        mark = state.marks.get(run.trial)
        if mark is not None and mark.complete and mark.facts == run.checksum:
            return False
        if mark is not None and not self.has(mark.handle):
            del state.marks[run.trial]
        return True

    def _put(self, run: TrackedRun, curves: list[MeasuredCurve], state: Marks) -> str | None:
        """Bring one run up to date, and mark it. Gives what was done, None for nothing."""
        mark, how = state.marks.get(run.trial), NEW
        now = Mark("", run.steps, checksum(curves), run.checksum, run.complete)
        if mark is not None:
            if dataclasses.replace(mark, handle="") == now:
                return None
            earlier = [series.between(0, mark.steps) for series in curves]
            if mark.complete or run.steps < mark.steps or checksum(earlier) != mark.curves:
                self._remove(run.trial, mark.handle, state)
                mark, how = None, ANEW
            else:
                curves, how = [series.between(mark.steps, run.steps) for series in curves], LONGER
        handle = self.put(run, [series for series in curves if len(series.steps)], mark.handle if mark else None)
        state.marks[run.trial] = dataclasses.replace(now, handle=handle)
        return how

    def _remove(self, trial: str, handle: str, state: Marks) -> None:
        """Take away what there is of a trial, and know nothing of it any more."""
        self.remove(trial, handle)
        state.marks.pop(trial, None)
        for place in [place for place in state.pages if place.startswith((f"{trial}/", f"{handle or trial}/"))]:
            del state.pages[place]

    def _put_pages(self, source: Source, state: Marks, file: Path) -> int:
        """How many pages were new, or others than before."""
        number = 0
        for name, content, handle in _pages(source, state):
            place = f"{handle or ''}/{name}"
            if state.pages.get(place) != digest(content):
                self.put_page(name, content, handle)
                state.pages[place] = digest(content)
                number += 1
        if number:
            _write(file, state)
        return number


def _pages(source: Source, state: Marks) -> Iterator[tuple[str, bytes, str | None]]:
    """Name, content and the run's handle of all that stand in the folder; no handle for those on the whole sweep."""
    for name, content in sweep_pages(source):
        yield name, content, None
    for trial in source.sweep["trial"].values.tolist():
        mark = state.marks.get(trial)
        page = None if mark is None else postmortem(source, trial)
        if mark is not None and page is not None:
            yield "postmortem.html", page, mark.handle


@contextlib.contextmanager
def _held(lock: Path, place: Path) -> Iterator[None]:
    """Nobody else exports the sweep to this place meanwhile. Raises ConfigError if somebody does."""
    try:
        with filelock.FileLock(lock, timeout=0):
            yield
    except filelock.Timeout:
        raise ConfigError(f"--into {place}: another export writes there; allowed: once it has ended") from None


def _read(file: Path) -> Marks:
    try:
        return read_record(file, Marks, MOST_BYTES)
    except Missing:
        return Marks()
    except Unreadable as error:
        raise ConfigError(f"--into {file.parent}: {error}; allowed: another folder, or this one without it") from None


def _write(file: Path, state: Marks) -> None:
    marks = {trial: vars(mark) for trial, mark in state.marks.items()}
    write_whole(file, json.dumps({**vars(state), "marks": marks}).encode())


def write_whole(file: Path, content: bytes) -> None:
    """A reader sees the old file or the new one; a link that stands here is replaced."""
    with replaced(file) as aside:
        aside.write_bytes(content)


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """A path to write to; once the block ends without an error, what is there takes the name of `file`."""
    aside = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        yield aside
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
