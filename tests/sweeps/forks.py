"""`python -m sweeps` forked from a process that has loaded torch and our modules, which takes longer than small sweeps.

Our modules are loaded once from each path that a test asks for, and nothing of them is called before the fork. A
command leads a session of its own, hears the signals that it is sent, and ends as the interpreter ends it. The server
that forks its workers is the one of `multiprocessing`, in a process that has loaded all this, too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

LIBRARIES = (
    "antlr4, hydra, omegaconf, optuna, pebble, rich.progress, scipy.stats, tokenizers, torch, xarray, yaml, zarr"
)
OURS = "sweeps.commands.sweep, sweeps.compose.grid, sweeps.running.launch, sweeps.search.rounds, injectors.replay"
MOST = 1 << 20  # bytes of a command line
MANY = 100  # no process here has so many files open


class Forked:
    """A command that runs: what the tests need of a subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], cwd: Path, path: Sequence[Path], variables: Mapping[str, str]):
        asked = {"arguments": arguments, "cwd": str(cwd), "path": list(map(str, path))}
        asked["variables"] = {**variables, "PYTHONPATH": os.pathsep.join(map(str, path))}
        ends = [os.pipe() for _ in ("out", "err", "status")]
        self.args, self.returncode = arguments, None
        with _asking:
            socket.send_fds(_server(), [json.dumps(asked).encode()], [theirs for _, theirs in ends])
            self.pid = int(_server().recv(MOST))
        for _, theirs in ends:
            os.close(theirs)
        *printed, self._status = (os.fdopen(own, "rb") for own, _ in ends)
        self._texts = ["", ""]
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in enumerate(printed)]
        for reader in self._readers:
            reader.start()

    def _read(self, number: int, printed: IO[bytes]) -> None:
        with printed:
            for piece in iter(printed.readline, b""):
                self._texts[number] += piece.decode()

    @property
    def said(self) -> str:
        """What it has written to standard error so far."""
        return self._texts[1]

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            with self._status:
                self.returncode = os.waitstatus_to_exitcode(int(self._status.read()))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Until all processes have ended that could print."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self._texts[0], self._texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_asking = threading.Lock()


@functools.cache
def _server() -> socket.socket:
    """What forks commands, for as long as this process lives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, __file__], stdin=theirs, start_new_session=True)
    theirs.close()

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


# --- in the process that forks -----------------------------------------------------------------------------------


def _serve(client: socket.socket) -> dict:
    """Have a process for each path that has our modules from there, and hand it what is asked for.

    Returns in those that are to be commands.
    """
    loaded: dict[str, socket.socket] = {}
    while True:
        asked, ends, *_ = socket.recv_fds(client, MOST, 3)
        if not asked:
            for process in loaded.values():
                process.close()
            _end()
        path = json.loads(asked)["path"]
        if (key := os.pathsep.join(path)) not in loaded:
            loaded[key], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if not os.fork():
                for inherited in (*ends, *(process.detach() for process in loaded.values())):
                    os.close(inherited)
                sys.path[:0] = path
                with contextlib.suppress(Exception):  # what fails here fails in the command, which says so
                    _load(OURS)
                return _fork(theirs, client)
            theirs.close()
        socket.send_fds(loaded[key], [asked], ends)
        for end in ends:
            os.close(end)


def _fork(asking: socket.socket, client: socket.socket) -> dict:
    """Fork a command for each that is asked for, and tell the client its number. Returns in those."""
    while True:
        asked, ends, *_ = socket.recv_fds(asking, MOST, 3)
        if not asked:
            _end()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not os.fork():
            command = os.fork()
            if not command:
                os.setsid()
                client.send(str(os.getpid()).encode())
                asking.close()
                client.detach()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for end, number in zip(ends, (1, 2), strict=False):
                    os.dup2(end, number)
                for end in ends:
                    os.close(end)
                return json.loads(asked)
            _tell(command, ends)
        for end in ends:
            os.close(end)


def _end() -> NoReturn:
    """Once all that was forked has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass
    os._exit(0)


def _load(modules: str) -> None:
    for module in modules.split(", "):
        importlib.import_module(module)
    gc.freeze()  # what all share is left alone


def _stand_by() -> None:
    """Have a child that becomes this process' fork server once that is to start, and ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a fork server does
        code, received, *_ = socket.recv_fds(theirs, MOST, 2)
        if not code:
            os._exit(0)
        above = [fcntl.fcntl(end, fcntl.F_DUPFD, MANY) for end in received]
        theirs.close()
        asked = json.loads(code)
        for end, number in zip(above, asked["ends"], strict=True):
            os.dup2(end, number)
            os.close(end)
        exec(asked["code"], {"__name__": "__main__"})
        os._exit(0)
    theirs.close()
    real, waiting = multiprocessing.util.spawnv_passfds, [child]

    def spawn(path: bytes, words: Sequence[str], ends: Sequence[int]) -> int:
        if not words[-1].startswith("from multiprocessing.forkserver import main") or not waiting:
            return real(path, words, ends)
        socket.send_fds(ours, [json.dumps({"code": words[-1], "ends": list(ends)}).encode()], ends)
        ours.close()
        return waiting.pop()

    multiprocessing.util.spawnv_passfds = spawn


def _tell(command: int, ends: Sequence[int]) -> NoReturn:
    """Be the parent of a command, which has pipes of its own, until it has ended."""
    *printed, status = ends
    for end in printed:
        os.close(end)
    os.write(status, str(os.waitpid(command, 0)[1]).encode())
    os._exit(0)


if __name__ == "__main__":
    del sys.path[0]
    faulthandler.enable()
    _load(LIBRARIES)
    asked = _serve(socket.socket(fileno=0))
    os.chdir(asked["cwd"])
    os.environ.update(asked["variables"])
    sys.path.insert(0, asked["cwd"])
    _stand_by()
    sys.argv[1:] = asked["arguments"]
    importlib.import_module("sweeps.running.local").available_cores = lambda: 1  # as in `call`
    runpy.run_module("sweeps", run_name="__main__", alter_sys=True)
