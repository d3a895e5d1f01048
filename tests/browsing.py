"""A page in Chromium, as a reader has it: clicked, typed into and looked at. What it asks for is written down.

Playwright's package brings what speaks with a browser; the browser is Debian's, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

SECONDS = 120  # until what is waited for has to be there


def missing(message: str) -> None:
    """A test cannot run without this part."""
    pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        missing(f"no browser: none of {', '.join(names)} is installed (make browser)")
    return str(found)


@dataclass
class Visit:
    """A page, and what happened on it."""

    page: Any
    asked: list[str] = field(default_factory=list)  # addresses
    errors: list[str] = field(default_factory=list)  # of scripts, of the policy, of what could not be loaded

    def until(self, expression: str, wanted: Any = None) -> None:
        """Poll until a JavaScript expression, or a function of `wanted`, holds.

        Playwright's own way has the page evaluate it, which the page's policy forbids.
        """
        last = time.monotonic() + SECONDS
        while not self.page.evaluate(expression, wanted):
            assert time.monotonic() < last, f"{expression}: not within {SECONDS} s"
            self.page.wait_for_timeout(30)

    def check(self, allowed: str) -> None:
        """Nothing went wrong, and nothing was asked for but below this address."""
        assert self.errors == []
        assert [address for address in self.asked if not address.startswith((allowed, "data:", "blob:"))] == []
        assert self.asked, "requests are not seen at all"


@contextlib.contextmanager
def visiting(chromium: str, is_offline: bool = False, **options: Any) -> Iterator[Visit]:
    """An empty page; `is_offline`: with the network off."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        options = {"viewport": {"width": 1280, "height": 800}, **options}
        context = browser.new_context(offline=is_offline, **options)
        context.set_default_timeout(SECONDS * 1000)
        page = context.new_page()
        visit = Visit(page)
        context.on("request", lambda request: visit.asked.append(request.url))
        page.on("pageerror", lambda error: visit.errors.append(str(error)))
        page.on("console", lambda said: visit.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: (visit.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        try:
            yield visit
        finally:
            browser.close()
