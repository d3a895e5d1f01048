"""`make docs`: the site is built without a warning, its tutorials run, links lead somewhere, the search finds."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("sphinx_gallery", reason="needs the docs group: pip install --group docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it."""
    html = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    done = subprocess.run([*words, str(ROOT / "docs"), str(html)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return html


def test_every_tutorial_was_run_and_shows_a_figure(site: Path) -> None:
    scripts = sorted((ROOT / "docs" / "tutorials" / "scripts").glob("[0-9]*.py"))
    assert len(scripts) >= 7
    for script in scripts:
        page = (site / "tutorials" / f"{script.stem}.html").read_text()
        assert "sphx-glr-script-out" in page, "what it prints"
        assert "sphx-glr-single-img" in page or "sphx-glr-multi-img" in page, "what it draws"


def test_links_between_pages_lead_somewhere(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html") if "_static" not in page.parts}
    broken = []
    for page, text in pages.items():
        for link in re.findall(r'href="([^"#]+)(?:#[^"]*)?"', text):
            if not re.match(r"[a-z]+:", link):
                target = (page.parent / urllib.parse.unquote(link.partition("?")[0])).resolve()
                if not target.exists():
                    broken.append((str(page.relative_to(site)), link))
    assert len(pages) > 50 and not broken


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    text = (site / "index.html").read_text()
    sources = re.findall(r'<(?:script|img)[^>]*src="([^"]+)"|<link[^>]*href="([^"]+)"[^>]*stylesheet', text)
    assert sources and not [one for pair in sources for one in pair if one.startswith(("http", "//"))]


@pytest.mark.parametrize("words", ["loss spike", "muP", "resume", "flipped bits", "largest stable learning rate"])
def test_the_search_finds(site: Path, words: str, chromium: str, tmp_path: Path) -> None:
    address = f"{(site / 'search.html').as_uri()}?{urllib.parse.urlencode({'q': words})}"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"found (?:one page|\d+ pages?) matching", shown), "no page"


def test_the_reference_has_every_command_and_key(site: Path) -> None:
    from sweeps.commands.console import commands
    from sweeps.compose.overrides import trial_fields
    from sweeps.compose.settings import keys

    told = (site / "reference" / "commands.html").read_text()
    assert all(f'id="{name}"' in told for name in commands() if name != "sweep")
    told = (site / "reference" / "keys.html").read_text()
    lacking = [key for key in (*trial_fields(), *keys()) if f">{key}<" not in told and "." in key]
    assert not lacking
