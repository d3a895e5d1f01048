"""Commands as a user types them, each in a process of its own, and what may never come of one.

python -m tests.fuzz.commands      the process that forks them; it has loaded everything already
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
COMPUTING, WAITING = 10, 30  # seconds: of computation, and until it ends, on a machine that does other things too
MEMORY = 2**33  # bytes that a command may take; so small models need a hundredth of it
MOST_ERRORS = 21  # as many as a command prints, one for each thing that is wrong
STARTS = ("error: ", "warning: ", "note: ")
LONGEST_LINE = 30_000  # characters


@dataclass(frozen=True)
class Ended:
    """How a command ended. `hung` is what its threads were doing when it was ended for taking too long."""

    words: tuple[str, ...]
    status: int
    out: str
    err: str
    is_hung: bool
    seconds: float


class Failure(AssertionError):
    """What a command did and may not do."""


def run(words: Sequence[str], cwd: Path, path: str = "/nowhere") -> Ended:
    """A command in the folder `cwd`. `words` are what stands after `stability-harness`; `path` finds programs.

    There is one word more than commands: `open OUT` reads all values, as a notebook does.
    """
    with tempfile.TemporaryDirectory() as place:
        asked = {"words": [os.fsencode(word).hex() for word in words], "cwd": str(cwd), "path": path, "place": place}
        begun = time.monotonic()
        server = _server()
        assert server.stdin and server.stdout
        server.stdin.write(f"{json.dumps(asked)}\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        texts = [(Path(place) / name).read_bytes().decode(errors="replace") for name in ("out", "err")]
    return Ended(tuple(words), answer["status"], *texts, answer["is_hung"], time.monotonic() - begun)


def check(ended: Ended, most_errors: int = MOST_ERRORS) -> Ended:
    """Raises Failure for what no command may do, whatever it is given."""
    lines = ended.err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    # A trace that a pack has left is shown as text, and its first line is no sign of one of ours.
    wrong = {
        "it hung": ended.is_hung,
        f"it ended with status {ended.status}": ended.status not in (0, 1, 2),
        "a traceback": "Traceback (most recent call last)" in ended.err + ended.out,
        "a line that is neither an error nor a warning": not all(line.startswith(STARTS) for line in lines),
        f"{len(errors)} lines of error": len(errors) > most_errors,
        "an error, but status 0": bool(errors) and ended.status == 0,
        "status 2 without a word": ended.status == 2 and not errors,
        "an error that says nothing": any(len(line) < len("error: ") + 8 for line in errors),
        "a line without end": any(len(line) > LONGEST_LINE for line in lines),
        "control characters": not all(line.isprintable() for line in lines),
    }
    if found := [what for what, is_so in wrong.items() if is_so]:
        said = ended.err if len(ended.err) < 6000 else f"{ended.err[:2000]}\n...\n{ended.err[-4000:]}"
        raise Failure(f"{', '.join(found)}:\n  {list(ended.words)!r:.3000}\n{said}")
    return ended


def seen(folder: Path, *without: Path) -> dict[str, tuple[Any, ...]]:
    """What is in a folder and when it was changed, so that a rewrite shows too; but for some folders in it."""
    found: dict[str, tuple[Any, ...]] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(place) / name not in without]
        for name in (*folders, *files):
            path = Path(place) / name
            about = path.lstat()
            if path not in without:
                size = about.st_size if name in files else 0
                changed = about.st_mtime_ns if name in files else 0
                found[str(path.relative_to(folder))] = (about.st_mode, size, changed, about.st_ino)
    return found


def check_same(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]], words: Sequence[str]) -> None:
    """Raises Failure if anything was touched."""
    if touched := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
        raise Failure(f"it touched {', '.join(touched[:5])}:\n  {list(words)!r:.3000}")


@functools.cache
def _server() -> subprocess.Popen[str]:
    home = tempfile.mkdtemp(prefix="home-")  # libraries keep caches there
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "MPLBACKEND": "agg", "HOME": home}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "tests.fuzz.commands"]
    return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | variables, start_new_session=True, **pipes)


# --- in the process that forks -----------------------------------------------------------------------------------


def _load() -> None:
    """All that a command would load."""
    import matplotlib.pyplot  # noqa: F401
    import torch
    import zarr  # noqa: F401

    import analysis.__main__  # noqa: F401
    import sweeps.commands.completion  # noqa: F401
    from sweeps.running import local, progress

    torch.set_num_threads(1)
    local.available_cores = lambda: 1  # type: ignore[assignment]
    progress.FIRST_SECONDS = math.inf  # no lines of progress, which a busy machine may show
    gc.freeze()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        if not (child := os.fork()):
            _be(asked)
        status, is_hung = _ended(child)
        answers.write(f"{json.dumps({'status': status, 'is_hung': is_hung})}\n")
        answers.flush()


def _be(asked: dict[str, Any]) -> None:
    """The command, in a session of its own. Never returns."""
    status = 70
    try:
        os.setsid()
        for number, name in enumerate(("/dev/null", f"{asked['place']}/out", f"{asked['place']}/err")):
            flags = os.O_RDONLY if not number else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(name, flags, 0o600), number)
        os.chdir(asked["cwd"])
        os.environ.update(PATH=asked["path"], HOME=asked["cwd"])
        faulthandler.enable()
        faulthandler.register(signal.SIGXCPU, chain=True)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (COMPUTING + _used(), resource.RLIM_INFINITY))
        sys.stdin = os.fdopen(0, closefd=False)
        status = _status([os.fsdecode(bytes.fromhex(word)) for word in asked["words"]])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 70
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(Exception):
        import multiprocessing.util

        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _used() -> int:
    """Seconds of computation that this process has had already."""
    return math.ceil(time.process_time())


def _status(words: list[str]) -> int:
    from harness.basics.printing import say, warn_in_one_line
    from harness.config import ConfigError
    from harness.storage.results_folder import FolderLost
    from sweeps.commands import console as command

    if words[:1] != ["open"]:
        return command.run(words)
    from analysis.reading.open_sweep import open_sweep

    warn_in_one_line()
    try:
        open_sweep(words[1]).load()
        return 0
    except (ConfigError, FolderLost) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2


def _ended(child: int) -> tuple[int, bool]:
    """Its exit status, and whether it had to be ended."""
    last = time.monotonic() + WAITING
    pause = 0.001
    while time.monotonic() < last:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill(child)  # what it has left behind
            found = os.waitstatus_to_exitcode(status)
            return found, found == -signal.SIGXCPU
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    os.kill(child, signal.SIGABRT)  # says what it is doing
    time.sleep(0.5)
    _kill(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), True


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _load()
    _serve()
