"""Standard output that takes no more: a closed pipe ends a command quietly, and a full disk is named in a line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO, cast

from harness.basics.printing import complain

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The exit status that a shell gives to a program whose reader has gone, as in `| head -1`."""
NO_ROOM = 2


class OutputLost(SystemExit):
    """Standard output takes no more; `code` is the exit status.

    No OSError and no Exception: otherwise argparse and logging ignore it, and code that writes files takes it for
    trouble with those.
    """


class _Checked:
    """A text stream that raises OutputLost once it cannot be written, and at every later attempt."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._status = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._writing():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._writing():
            self._stream.flush()

    def release(self) -> None:
        """Raise no more: logging keeps the stream, and flushes it when Python exits."""
        self._status = 0

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if self._status:
            raise OutputLost(self._status)
        try:
            yield
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> NoReturn:
        is_closed_pipe = isinstance(error, BrokenPipeError)
        self._status = CLOSED_PIPE if is_closed_pipe else NO_ROOM
        if not is_closed_pipe:
            complain(
                f"error: standard output: {error.strerror or error}; allowed: a file or a pipe that can be written"
            )
        # Python flushes once more when it exits: what is left goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        raise OutputLost(self._status) from None


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Within, a standard output that takes no more raises OutputLost; what is buffered is written at the end."""
    before = sys.stdout
    # Python has none where it starts with a closed one, as after `>&-`.
    with contextlib.nullcontext(before) if before else open(os.devnull, "w") as stream:
        checked = _Checked(stream)
        sys.stdout = cast(TextIO, checked)
        try:
            try:
                yield
            finally:
                checked.flush()
        finally:
            sys.stdout = before
            checked.release()
