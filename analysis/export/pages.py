"""Pages beside a store, as they are handed to a tracker: whatever stands in them, no browser runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from analysis.export.runs import Source
from analysis.pages.trial_page import POSTMORTEMS

PAGES = ("report.html", "campaign.html")
# Before everything else that the page has, so that it holds for all of it; the encoding too, in which it is read.
SEAL = (
    b'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    b"img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'\">\n"
)


def sweep_pages(source: Source) -> Iterator[tuple[str, bytes]]:
    """Name and content of the reports that stand in the folder."""
    for name in PAGES:
        if (content := source.page(name)) is not None:
            yield name, SEAL + content


def postmortem(source: Source, trial: str) -> bytes | None:
    """The page on a trial; None if there is none."""
    content = source.page(POSTMORTEMS, f"{trial}.html")
    return None if content is None else SEAL + content


def digest(content: bytes) -> str:
    """By which a page is told from an older one."""
    return hashlib.sha256(content).hexdigest()
