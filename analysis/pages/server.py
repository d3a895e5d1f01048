"""Serves the page that watches a sweep, on this machine alone: a few fixed answers, and never a file by its name.

Every question names this server in its Host header, or is refused: a page from elsewhere whose name was made to lead
here (DNS rebinding) does not. There are no cookies, no other origin is let in, and nothing can be changed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from analysis.pages.document import NOTHING_ELSE, PLOTLY, SCRIPTS, STYLE, asset, served
from analysis.pages.follower import Follower
from analysis.pages.plain import json_text, shown
from harness.basics.printing import label
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost
from harness.storage.stored import read_root

LOOPBACK = "127.0.0.1"
MOST_LETTERS = 4000  # of an address
POLICY = f"default-src 'none'; script-src 'self'; connect-src 'self'; frame-ancestors 'none'; {NOTHING_ELSE}"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TEXT, JSON = "text/plain; charset=utf-8", "application/json"
Answer = tuple[HTTPStatus, str, bytes]


class Routes:
    """What there is to ask for, by path."""

    def __init__(self, out: Path, follower: Follower):
        """Raises ConfigError if `out` holds no results."""
        title = f"{label(str(read_root(out)['study']))}: watched"
        files = {"/": ("text/html; charset=utf-8", served({"is_live": True, "title": title}))}
        files |= {f"/{name}": ("text/javascript; charset=utf-8", asset(name)) for name in (PLOTLY, *SCRIPTS)}
        files[f"/{STYLE}"] = ("text/css; charset=utf-8", asset(STYLE))
        self._fixed = {path: (HTTPStatus.OK, kind, text.encode()) for path, (kind, text) in files.items()}
        self._asked: Mapping[str, Callable[[Mapping[str, str]], Any]] = {
            "/data/news": lambda given: follower.news(_integer(given.get("version", ""))),
            "/data/curves": lambda given: follower.curves(given.get("signal", ""), given.get("trials", "").split(",")),
            "/data/trial": lambda given: follower.trial(given.get("id", "")),
        }

    def answer(self, target: str) -> Answer:
        """Of a path with its query."""
        if len(target) > MOST_LETTERS:
            return _refused(HTTPStatus.REQUEST_URI_TOO_LONG)
        with contextlib.suppress(ValueError):  # no address at all
            address = urlsplit(target)
            if address.path in self._fixed:
                return self._fixed[address.path]
            if address.path in self._asked:
                given = {name: values[-1] for name, values in parse_qs(address.query).items()}
                return _told(lambda: self._asked[address.path](given))
        return _refused(HTTPStatus.NOT_FOUND)


def _integer(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _told(ask: Callable[[], Any]) -> Answer:
    """JSON; what is wrong with a store is an answer too."""
    try:
        return HTTPStatus.OK, JSON, json_text(ask()).encode()
    except (ConfigError, FolderLost, OSError) as error:
        reason = shown(str(error))
    except Exception as error:  # of a store that no sweep has written: the page says so, and the server goes on
        reason = shown(f"{type(error).__name__}: {error}")
    return HTTPStatus.INTERNAL_SERVER_ERROR, JSON, json_text({"error": reason}).encode()


def _refused(status: HTTPStatus) -> Answer:
    return status, TEXT, f"{status.value} {status.phrase}\n".encode()


class Server(ThreadingHTTPServer):
    """Bound to the loopback address alone."""

    daemon_threads = True

    def __init__(self, port: int, pages: Routes):
        super().__init__((LOOPBACK, port), Handler)
        self.pages = pages
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed meanwhile is no error."""


class Handler(BaseHTTPRequestHandler):
    """One question."""

    server: Server
    server_version, sys_version = "stability-harness", ""
    timeout = 10  # seconds for a question to come in

    def _answer(self) -> Answer:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            return _refused(HTTPStatus.MISDIRECTED_REQUEST)
        if self.command != "GET":
            return _refused(HTTPStatus.METHOD_NOT_ALLOWED)
        return self.server.pages.answer(self.path)

    def do_GET(self) -> None:
        status, kind, body = self._answer()
        self.send_response(status)
        more = {"Allow": "GET"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        for name, value in {**HEADERS, **more, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = do_GET

    def log_message(self, format: str, *values: Any) -> None:
        """Nobody reads a line a second."""


@contextlib.contextmanager
def serving(out: Path, port: int = 0) -> Iterator[Server]:
    """A server of the page on the results in `out`, at this port or a free one, that follows them in a thread.

    Raises ConfigError if `out` holds no results, or the port cannot be had.
    """
    follower = Follower(out)
    pages = Routes(out, follower)
    try:
        server = Server(port, pages)
    except OSError as error:
        reason = f"cannot be had ({error.strerror})"
        raise ConfigError(f"--port={port}: {reason}; allowed: another, or none for a free one") from None
    thread = threading.Thread(target=follower.run, name="follower", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        follower.end()
        server.server_close()
        thread.join(timeout=10)
