"""Text of a store as text of a page: whatever it holds, it is shown, and nothing of it is markup."""

from __future__ import annotations

import re

import numpy as np
from markupsafe import Markup, escape

from harness.basics.printing import printable

UNKNOWN, INFINITE = "not known", "not finite"  # in place of a number
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


# --- numbers -------------------------------------------------------------------------------------------------------


def nat(value: float) -> str:
    """A loss, in nat."""
    return _no_number(value) or (f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}")


def signed(value: float) -> str:
    """A difference of two losses, in nat."""
    return _no_number(value) or (f"{value:+.3f}" if abs(value) < 1e4 else f"{value:+.3g}")


def in_nat(number: str, unit: str = "nat") -> str:
    """A number in words with its unit, and what is said of no number without one."""
    return number if number in (UNKNOWN, INFINITE) else f"{number} {unit}".strip()


def rounded(value: float | str | None) -> str:
    """Any number; also a logged one, which is text if it is not finite."""
    if isinstance(value, str):
        return INFINITE
    return _no_number(value) or f"{value:.4g}"


def _no_number(value: float | None) -> str:
    """What is said of what is no number; "" for one."""
    if value is None or np.isnan(value):
        return UNKNOWN
    return INFINITE if np.isinf(value) else ""
