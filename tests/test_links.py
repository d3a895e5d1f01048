"""Links of every page: local ones lead to a file of git and a heading, outside ones have a form that can be right.

Whether an outside address answers is not asked here: `make linkcheck` does, on a machine with a network.
"""

from __future__ import annotations

import re
import subprocess
import urllib.parse
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)])
GENERATED = {
    ROOT / "docs" / "reference" / f"{name}.md" for name in ("commands", "keys", "dataset", "figures", "errors")
}
GENERATED |= {ROOT / "docs" / "tutorials" / "index.rst"}  # when the site is built
PAGES = [page for page in PAGES if page not in GENERATED]
TEXTS = [*PAGES, *(ROOT / "sweeps" / "conf").rglob("*.yaml")]
TEXTS += [file for room in ("harness", "injectors", "sweeps", "analysis") for file in (ROOT / room).rglob("*.py")]
ADDRESS = re.compile(r"https?://[^\s)>\"'`\]]*")
LOOPBACK = "127.0.0.1"  # of `watch`, in an example


@cache
def in_git() -> set[Path]:
    """Every file that a checkout has, or that can be added, and the folders of these; without git what is there."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    names = listed.stdout.split("\0") if not listed.returncode else [str(file) for file in ROOT.rglob("*")]
    files = {ROOT / name for name in names if name}
    return {place for file in files for place in (file, *file.parents)}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Of its headings, as hosts of code and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,6} (.+)$", text, flags=re.MULTILINE)
    plain = [
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings
    ]
    return set(plain)


def links(page: Path) -> list[str]:
    """Targets of Markdown's links and pictures outside of blocks of code."""
    text = re.sub(r"^```(?!{).*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(\s*<?([^)\s>]+)>?\s*\)", text)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_local_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / urllib.parse.unquote(path)).resolve() if path else page
        assert target in in_git(), f"{link}: not in a checkout, or generated with the site"
        if anchor:
            assert anchor in anchors(target), link


def test_what_is_generated_is_in_no_checkout() -> None:
    assert len(GENERATED) == 6 and not GENERATED & in_git() and PAGES[0] in in_git()


def test_outside_links_have_a_form_that_can_be_right() -> None:
    """https, a host with a domain, nothing of the sentence at their end; and one form of each address."""
    forms = defaultdict(set)
    for file in TEXTS:
        for address in ADDRESS.findall(file.read_text()):
            parts = urllib.parse.urlsplit(address)
            if parts.hostname is None or parts.hostname == LOOPBACK or "{" in address:
                continue  # a pattern, or this machine
            assert parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.hostname), (
                named(file),
                address,
            )
            assert address[-1] not in ".,;:", (named(file), address)
            forms[re.sub(r"^www\.", "", parts.netloc), parts.path.rstrip("/"), parts.query].add(address)
    assert forms and not [sorted(same) for same in forms.values() if len(same) > 1]


def test_a_paper_has_one_number_and_one_year() -> None:
    """Of numbers of arXiv: a month that there is, four or five digits, and the same year wherever it is cited."""
    cited = defaultdict(set)
    for file in TEXTS:
        text = re.sub(r"\s+(?:#\s+)?", " ", file.read_text())
        for number in re.findall(r"\barXiv[ :]+(\d[\d.]*\d)", text):
            assert re.fullmatch(r"\d\d(0[1-9]|1[0-2])\.\d{4,5}", number), (named(file), number)
        for year, number in re.findall(r"\b((?:19|20)\d\d),? \(?arXiv[ :]+(\d{4}\.\d{4,5})", text):
            cited[number].add(int(year))
    assert len(cited) > 80
    assert not {number: years for number, years in cited.items() if len(years) > 1}
    early = {number: years for number, years in cited.items() if min(years) < 2000 + int(number[:2])}
    assert not early, "a paper is not older than its number"
