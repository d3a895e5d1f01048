"""Tables and progress in a terminal, by rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness.basics.printing import in_encoding, printable


class Terminal(Console):
    """Rich's console for text that is nothing but text: neither markup nor emoji, and each string is one line."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's, with each string on one line."""
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's: what moves the cursor comes from rich alone, and text has nothing of the kind in it."""
        for segment in super().render(renderable, options):
            lines = (in_encoding(printable(line), self.encoding) for line in segment.text.split("\n"))
            yield segment if segment.control else Segment("\n".join(lines), segment.style)
