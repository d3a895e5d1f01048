"""The HTML document of both pages: everything in one file, or what a server hands out part by part."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis.pages.plain import json_text

BROWSER = Path(__file__).parent / "browser"
PLOTLY = "plotly.js"
SCRIPTS = ("parts.js", "trial.js", "overview.js", "live.js", "app.js")  # in the order in which they are run
STYLE = "page.css"
# plotly.js sets the styles of what it draws, and makes pictures of it; it is run without eval.
NOTHING_ELSE = "style-src 'self' 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"


@cache
def asset(name: str) -> str:
    """A file that the page is made of, by its name."""
    return get_plotlyjs() if name == PLOTLY else (BROWSER / name).read_text(encoding="utf-8")


def one_file(data: dict[str, Any]) -> str:
    """A page that needs nothing beside it, on the plain values `data`. Raises ValueError for what JSON has no word for.

    Its policy lets the scripts run that it has here, told by their digests, and no other, and asks for nothing.
    """
    scripts = [asset(name) for name in (PLOTLY, *SCRIPTS)]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {allowed}; {NOTHING_ELSE}"
    return _rendered(data, policy=policy, scripts=[Markup(script) for script in scripts], style=Markup(asset(STYLE)))


def served(data: dict[str, Any]) -> str:
    """The document of a page whose scripts and data a server hands out."""
    return _rendered(data, policy="", scripts=[f"/{name}" for name in (PLOTLY, *SCRIPTS)], style="")


def _rendered(data: dict[str, Any], **parts: Any) -> str:
    loader = jinja2.FileSystemLoader(BROWSER)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html.j2")
    return page.render(is_live=data["is_live"], title=data["title"], data=Markup(json_text(data)), **parts)
