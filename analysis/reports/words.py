"""Text of a store as text of a page: whatever it holds, it is shown, and nothing of it is markup."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from harness.basics.printing import printable

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")


def markdown_text(text: object) -> str:
    """On one line, with a backslash before whatever Markdown might take for markup."""
    return _MARKUP.sub(r"\\\1", printable(str(text)))


def markdown_block(text: str) -> str:
    """A block of code, in a fence that is longer than any in the text; line breaks stay, other controls are escaped."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{_lines(text)}\n{fence}"


def html_lines(text: str) -> Markup:
    """The same for HTML, inside `pre`."""
    return escape(_lines(text))


def _lines(text: str) -> str:
    return "\n".join(printable(line.expandtabs(4)) for line in text.split("\n"))
