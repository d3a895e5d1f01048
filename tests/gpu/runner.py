"""Runs a group of checks, each in a process of its own: one that fails, hangs or breaks the device spoils no other."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from harness.model.determinism import make_deterministic
from tests.gpu.bench import Bench, NotMeasured
from tests.gpu.engine import corpus_of, trial_of
from tests.gpu.marks import CHECKS, LIMIT, Check, Row
from tests.gpu.results import DRY, Results, read

ROOT = Path(__file__).resolve().parents[2]
MODULES = dict.fromkeys((1, 2, 3, 4, 7), "bits") | dict.fromkeys((5, 6, 15), "states")
MODULES |= dict.fromkeys((8, 9, 10, 13), "speed") | dict.fromkeys((11, 12, 14), "large")
MODULES |= dict.fromkeys((16, 17), "doors") | {18: "features"}
SHARED = 2.0  # times as long may a check take that runs beside others
NEEDED = 10.0  # seconds that are left at least for a check to begin


def function_of(check: Check) -> Callable[[Bench], None]:
    return getattr(importlib.import_module(f"tests.gpu.{MODULES[check.number]}"), check.function)


def run_group(options: argparse.Namespace) -> int:
    """Run its checks, and write what there is after each. Status 1 where one failed; in a dry run also where a figure
    is lacking, or one of bits is not what it is on a CPU. Rows of `--only` join those of the same device and torch.
    """
    started = time.monotonic()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    checks = [each for each in CHECKS if each.group == options.task and each.number in (options.only or [each.number])]
    if not options.fresh:
        corpus_of(trial_of())  # for every check
        for check in checks:
            importlib.import_module(f"tests.gpu.{MODULES[check.number]}")
    about, forks = _about(options)
    rows = {check.number: Row(check.number, why="not begun yet") for check in checks}
    results = Results(
        options.task, about, sorted((_others(options, about) | rows).values(), key=lambda row: row.number)
    )
    results.write(out)
    with contextlib.ExitStack() as stack:
        for row in _ended(list(zip(checks, rows.values(), strict=True)), started, options, forks, stack):
            if options.dry:
                _forget(row)
            results.write(out)
            print(f"{row.number:3}  {row.told}  ({row.seconds:.0f} s)", flush=True)
    print((out / f"{options.task}.md").read_text(), flush=True)
    return int(any(row.error for row in rows.values()))


def _ended(
    waiting: list[tuple[Check, Row]],
    started: float,
    options: argparse.Namespace,
    forks: bool,
    stack: contextlib.ExitStack,
) -> Iterator[Row]:
    """The rows of checks as they end: those of bits, which no clock counts in, run side by side."""
    most = options.at_once if options.task == "bits" and not options.dry else 1
    running: list[Running] = []
    while waiting or running:
        if waiting and len(running) < most:
            check, row = waiting.pop(0)
            left = LIMIT - (time.monotonic() - started)
            if left < NEEDED:
                row.why = "the group's nine minutes were over"
                yield row
                continue
            allowed = check.seconds * (1 if most == 1 else SHARED)
            running.append(Running(check, row, min(left, allowed), options, forks))
            stack.callback(running[-1].stop)
            continue
        over = [one for one in running if one.is_over()]
        running = [one for one in running if one not in over]
        yield from (one.row for one in over)
        time.sleep(0.02)


def _others(options: argparse.Namespace, about: Mapping[str, str]) -> dict[int, Row]:
    """What is in the folder already of checks that are left out, if it was measured on the same."""
    if not options.only or not (options.out / f"{options.task}.json").exists():
        return {}
    (old,) = (each for each in read(options.out) if each.group == options.task)
    is_same = all(old.about[name] == about[name] for name in ("device", "torch"))
    return {row.number: row for row in old.rows} if is_same else {}


def _forget(row: Row) -> None:
    """What a dry run has found is no figure; but each has to be there, and bits have to be equal on a CPU too."""
    held = row.check.group == "bits" and row.missed
    if not row.error and (lacking := row.missing or held):
        row.error = f"in a dry run: {row.why or 'not as it should be'}: {', '.join(lacking)}"
    row.figures, row.notes, row.why = {}, [], DRY


class Running:
    """One check in a process of its own, which is killed with all of its own after so many seconds."""

    def __init__(self, check: Check, row: Row, seconds: float, options: argparse.Namespace, forks: bool):
        self.row, self._seconds, self._out = row, seconds, options.out
        self._begun = time.monotonic()
        self._place: Path = options.out / f".{check.number}.json"
        self._log: Path = options.out / f"{check.number}.log"
        for file in (self._place, _end_of(self._place)):
            file.unlink(missing_ok=True)
        self._process = (_forked if forks else _started)(check, self._place, self._log, seconds, options)

    def is_over(self) -> bool:
        """Whether it has ended, or had its time; then the row has all that it has left."""
        status = self._process()
        if status is None and time.monotonic() - self._begun < self._seconds + 1:
            return False
        if status is None:
            self._process.kill()
        self._read(status)
        return True

    def stop(self) -> None:
        """End it if it still runs: whoever waits for it has been interrupted."""
        if self._process.status is None and self._process() is None:
            self._process.kill()

    def _read(self, status: int | None) -> None:
        row = self.row
        row.seconds, row.why = time.monotonic() - self._begun, ""
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(self._place.read_text())
            row.figures, row.notes = told["figures"], told["notes"]
        end: Mapping[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            end = json.loads(_end_of(self._place).read_text())
        row.why, row.error = end.get("why", ""), end.get("error", "")
        if not end:
            row.why = f"stopped after {self._seconds:.0f} s" if status is None else ""
            row.error = "" if status is None else f"its process ended with {status}; see {self._log.name}"
        for file in self._out.glob(f".{row.number}.*"):
            if file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink()
        if not row.error:
            self._log.unlink()


def _end_of(place: Path) -> Path:
    return place.with_suffix(".end")


class Process:
    """A process and all that it starts. Called, it is its exit status, or None while it runs."""

    def __init__(self, number: int):
        self.number, self.status = number, None

    def __call__(self) -> int | None:
        if self.status is None:
            ended, status = os.waitpid(self.number, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):  # it may not have its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.number, signal.SIGKILL)
        os.waitpid(self.number, 0)
        self.status = -signal.SIGKILL


def _forked(check: Check, place: Path, log: Path, seconds: float, options: argparse.Namespace) -> Process:
    sys.stdout.flush()
    sys.stderr.flush()
    if number := os.fork():
        return Process(number)
    status = 1
    try:
        os.setsid()
        with log.open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        status = _measure(check, place, seconds, options.dry)
    finally:
        os._exit(status)


def _started(check: Check, place: Path, log: Path, seconds: float, options: argparse.Namespace) -> Process:
    command = [sys.executable, "-m", "tests.gpu", "one", "--only", str(check.number), "--out", str(place)]
    command += ["--dry"] if options.dry else []
    environment = _environment() | {"TESTS_GPU_SECONDS": str(seconds)}
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
    process.returncode = 0  # it is waited for below, and not by Popen
    return Process(process.pid)


def _environment() -> dict[str, str]:
    """For an interpreter that loads from where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}


def run_one(options: argparse.Namespace) -> int:
    """One check in this process, as `_started` asks for it."""
    (check,) = [each for each in CHECKS if each.number in options.only]
    return _measure(check, options.out, float(os.environ.get("TESTS_GPU_SECONDS", LIMIT)), options.dry)


def _measure(check: Check, place: Path, seconds: float, is_dry: bool) -> int:
    """Run a check here; how it ended stands beside its figures, the trace of an error in the log."""
    end = {}
    try:
        device = torch.device("cpu" if is_dry else "cuda")
        bench = Bench(device, is_dry, place, time.monotonic() + seconds)
        torch.set_num_threads(1 if is_dry else max(1, (os.cpu_count() or 1) // 4))
        make_deterministic(device)
        function_of(check)(bench)
    except NotMeasured as reason:
        end = {"why": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        end = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    sys.stderr.flush()
    _end_of(place).write_text(json.dumps(end or {"why": ""}))
    return 0


# --- where ------------------------------------------------------------------------------------------------------------


def _about(options: argparse.Namespace) -> tuple[dict[str, str], bool]:
    """When, on what and with what; and whether checks may be forked from this process, which is faster.

    This process itself must never touch the device, or a fork could not.
    """
    about = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version()}
    if options.dry:
        return about | {"device": f"a {DRY} on a CPU"}, not options.fresh
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            torch.ones(1, device="cuda").sum().item()
            os.write(writer, json.dumps(_device()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    os.waitpid(child, 0)
    if told:
        return about | {"device": json.loads(told)}, not options.fresh
    command = [sys.executable, "-c", "from tests.gpu.runner import _device; print(_device())"]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no device"])[-1]
        raise SystemExit(f"error: no GPU that torch can use: {reason}; --dry runs every check on a CPU")
    return about | {"device": done.stdout.strip()}, False


def _device() -> str:
    """Name, memory and count of the GPUs."""
    count, memory = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
    several = f"{count} x " if count > 1 else ""
    return f"{several}{torch.cuda.get_device_name(0)}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
