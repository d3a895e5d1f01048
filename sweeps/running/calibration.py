"""How many rows of a pack pass through the model together on an accelerator: measured once, and kept for this user.

A few steps are trained with each of the sizes that `harness.training.pack_sizes.tried` gives, when the first pack of a
structure is trained on a kind of device with a version of torch. No plan reads what was measured, so a plan is the same
on a machine without that device. On a CPU, where sizes must not depend on a clock, there is the rule alone.

    <cache>/rows_at_once.json      trial-steps a second by rows at once, of each device, torch and structure
    <cache>/rows_at_once.lock      who measures; the others wait
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.basics.cache_folder import CACHE_VARIABLE, cache_folder
from harness.basics.devices import on_cpu
from harness.config import NO_FAULT, ConfigError, Trial
from harness.data.corpus import Corpus
from harness.loop.graphs import recordings
from harness.loop.loop import train
from harness.memory.footprint import footprint
from harness.storage.records import Missing, Unreadable, read_record
from harness.storage.results_folder import FolderLost, ResultsPath
from harness.storage.stored import read_pack
from harness.training.pack import Pack
from harness.training.pack_sizes import largest_part, tried
from harness.training.sites import FaultSchedule
from sweeps.compose.settings import LARGEST_PACK
from sweeps.planning.planner import counted
from sweeps.running.locks import Turn

AT_ONCE = "rows_at_once"  # in the environment of a pack that began on an accelerator
FILE, LOCK = "rows_at_once.json", "rows_at_once.lock"
MOST_BYTES = 2**24
WARM, TIMED = 8, 20  # steps: before the clock, in which graphs and caches are made, and by it
NEAR = 0.97  # sizes whose speeds differ by less are as fast, and then the smallest takes the least memory
SLOWER = 0.9  # of the best one's speed: larger ones than such a size are not tried
SHARE_OF_FREE = 0.9  # of the memory that nobody has taken yet

Measure = Callable[[Trial, int, torch.device, Corpus], float]


@dataclass(frozen=True)
class Measured:
    """Trial-steps a second by rows at once, of packs of one structure on one kind of device."""

    device: str
    torch: str
    structure: str
    speeds: Mapping[str, float]

    def __post_init__(self) -> None:
        for rows, speed in self.speeds.items():
            if not (rows.isascii() and rows.isdecimal() and 1 <= int(rows) <= LARGEST_PACK and 0 < speed < math.inf):
                raise ValueError(f"speeds[{rows[:20]}] is {speed}, not a speed of so many rows")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.device, self.torch, self.structure


@dataclass(frozen=True)
class SpeedFile:
    """What the file holds."""

    measured: tuple[Measured, ...] = ()


def kept_rows(pack: ResultsPath) -> int | None:
    """With how many rows at once a pack began that is in the store: it goes on with them, wherever that is.

    None: it has not begun, or began where nothing is measured.
    """
    begun = read_pack(pack)
    rows = begun.attributes["environment"].get(AT_ONCE) if begun is not None else None
    return rows if type(rows) is int and 1 <= rows <= LARGEST_PACK else None


def fastest_rows(
    trials: Sequence[Trial],
    device: torch.device,
    corpus: Corpus,
    measure: Measure | None = None,
    folder: Path | None = None,
) -> int | None:
    """About how many rows of a pack of these trials are to pass through the model together; None: by the rule.

    What is kept in `folder` (the user's cache) counts; where nothing is, it is measured and kept. By the rule it is on
    a CPU, for too few trials to cut, and, with a warning, where their memory cannot be counted, or where the file is
    damaged or cannot be written.
    """
    first, short = trials[0], shortened(trials[0])
    sizes = tried(first.model, first.train.sequences, device)
    if on_cpu(device) or len(trials) <= sizes[0] or counted(first, device.type) is None:
        return None
    folder, memory = cache_folder() if folder is None else folder, free_bytes(device)
    key = name_of(device), str(torch.__version__), structure_of(short)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Turn(ResultsPath.at(folder) / LOCK):
            speeds = _read(folder).get(key)
            if speeds is None:
                speeds = _speeds(short, sizes, device, corpus, memory, measure or trial_steps_a_second)
                if speeds:  # some size had room
                    _write(folder, Measured(*key, {str(size): speed for size, speed in speeds.items()}))
    except Unreadable as error:
        warnings.warn(f"{error}; rows at once are those of the rule", RuntimeWarning, stacklevel=2)
        return None
    except (OSError, ConfigError, FolderLost) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        message = f"{folder}: cannot write the cache ({reason}); rows at once are those of the rule"
        warnings.warn(f"{message}. {CACHE_VARIABLE} names another folder", RuntimeWarning, stacklevel=2)
        return None
    return _best({size: speed for size, speed in speeds.items() if _fits(first, len(trials), size, memory)})


def _best(speeds: Mapping[int, float]) -> int | None:
    """The smallest size that is as fast as the fastest; None of none."""
    most = max(speeds.values(), default=0.0)
    return min((size for size, speed in speeds.items() if speed >= NEAR * most), default=None)


def _fits(trial: Trial, rows: int, part: int, memory: float) -> bool:
    return footprint(trial).bytes(rows, largest_part(rows, part)) <= memory


def _speeds(
    trial: Trial, sizes: Iterable[int], device: torch.device, corpus: Corpus, memory: float, measure: Measure
) -> dict[int, float]:
    """Of packs of each of these sizes, as far as they fit and larger ones are not slower."""
    speeds: dict[int, float] = {}
    for size in sizes:
        if footprint(trial).bytes(size, size) > memory:
            break
        try:
            speeds[size] = measure(trial, size, device, corpus)
        except torch.OutOfMemoryError:
            break
        if speeds[size] < SLOWER * max(speeds.values()):
            break
    return speeds


def trial_steps_a_second(trial: Trial, rows: int, device: torch.device, corpus: Corpus) -> float:
    """Of a pack of so many copies of a trial, all of which pass together."""
    pack, marks = Pack([trial] * rows, corpus, device, at_once=rows), []

    def mark(steps: int, frozen: int) -> None:
        if steps in (WARM, WARM + TIMED):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            marks.append(time.perf_counter())

    fault_schedule, stop = FaultSchedule([None] * rows), WARM + TIMED
    options: dict[str, Any] = {"until": stop, "provenance": False, "record": recordings(device)}
    train(pack, fault_schedule, stop + 1, lambda first_step, signals: None, mark, **options)
    del pack
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows * TIMED / (marks[1] - marks[0])


def shortened(trial: Trial) -> Trial:
    """The trial as it is measured: a few steps of whole batches, and next to no validation."""
    train = replace(trial.train, steps=WARM + TIMED + 1, validate_every=10**6, validate_tokens=1, validate_between=1)
    schedule = replace(trial.schedule, sequence_start=None, batch_start=None)
    return replace(trial, train=train, schedule=schedule, model=replace(trial.model, start=None), fault=NO_FAULT)


def structure_of(trial: Trial) -> str:
    """A name for what trials of one pack have in common."""
    return hashlib.sha256(repr(trial.structure).encode()).hexdigest()[:32]


def name_of(device: torch.device) -> str:
    """The kind of device, such as `NVIDIA H100 80GB HBM3`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def free_bytes(device: torch.device) -> float:
    """What a pack may take of the device's memory as it is now; infinite where that is not known."""
    return SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


# --- the file ----------------------------------------------------------------------------------------------------


def _read(folder: Path) -> dict[tuple[str, str, str], dict[int, float]]:
    """Speeds by device, torch and structure. Raises Unreadable."""
    try:
        kept = read_record(folder / FILE, SpeedFile, MOST_BYTES)
    except Missing:
        return {}
    return {entry.key: {int(rows): speed for rows, speed in entry.speeds.items()} for entry in kept.measured}


def _write(folder: Path, new: Measured) -> None:
    """Add an entry. The file is there as a whole, or as it was; under the lock."""
    others = [
        Measured(*key, {str(rows): speed for rows, speed in speeds.items()}) for key, speeds in _read(folder).items()
    ]
    kept = SpeedFile((*(entry for entry in others if entry.key != new.key), new))
    (ResultsPath.at(folder) / FILE).write(json.dumps(dataclasses.asdict(kept)).encode())
