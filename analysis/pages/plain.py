"""What a page is given: JSON that every browser reads, in which no text can end a script or begin a tag."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.basics.printing import printable

MOST_LETTERS = 2000  # of a text on a page


def json_text(value: Any) -> str:
    """`value`, of plain values with finite numbers, as JSON without `<`, `>` and `&`. Raises ValueError for others."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def shown(text: str) -> str:
    """A text of a store on one line, with escapes for what is not to be seen as itself; a very long one is cut."""
    line = printable(text)
    return line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS]} (and {len(line) - MOST_LETTERS} more letters)"


def plain(value: Any) -> Any:
    """`value` with texts as they are shown, and numbers that are not finite as the words NaN, Infinity, -Infinity."""
    if isinstance(value, Mapping):
        return {shown(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else word(value)
    return value if value is None or isinstance(value, bool | int) else shown(str(value))


def word(value: float) -> str:
    """For a number that is not finite, as JavaScript names it."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def numbers(values: np.ndarray) -> list[float | str | None]:
    """Those of a column: null where nothing is known, which is NaN, and words for infinities."""
    return [None if v != v else v if math.isfinite(v) else word(v) for v in values.tolist()]
