"""Tables as text: as they are, or folded to the width of a terminal that is narrower."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from typing import Literal

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

LARGEST_WHOLE = 1e6  # beyond it a power of ten is easier to read
GAP, LEAST = 2, 12  # letters between columns, and that a column of words has at least


def table_lines(table: pd.DataFrame, digits: int = 3, index: bool = False) -> list[str]:
    """The lines of a table, fractions to so many digits, whole numbers in full and `-` for what is not known.

    Where standard output is a terminal that is narrower, words are folded within their columns, if that is enough.
    """

    def number(value: float) -> str:
        return f"{value:.0f}" if value.is_integer() and abs(value) < LARGEST_WHOLE else f"{value:.{digits}g}"

    lines: list[str] = table.to_string(index=index, float_format=number, na_rep="-").split("\n")
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(len, lines)) <= width:
        return lines
    if index:
        table = table.reset_index()
    folded, needed = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False), 0
    for name in table.columns:
        cells = [str(name), *(_cell(value, number) for value in table[name])]
        is_number = pd.api.types.is_numeric_dtype(table[name])
        is_whole = is_number or not any(" " in cell for cell in cells)
        needed += GAP + (max(map(len, cells)) if is_whole else LEAST)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        folded.add_column(Text(str(name)), justify=justify, no_wrap=is_whole)
    if needed > width:
        return lines
    for row in table.itertuples(index=False):
        folded.add_row(*(Text(_cell(value, number)) for value in row))
    text = io.StringIO()
    Console(file=text, width=width, no_color=True).print(folded)
    return [line.rstrip() for line in text.getvalue().rstrip("\n").split("\n")]


def _cell(value: object, number: Callable[[float], str]) -> str:
    if isinstance(value, float):
        return "-" if value != value else number(value)
    return "-" if value is None else str(value)
