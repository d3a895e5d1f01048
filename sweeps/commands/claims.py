"""`stability-harness claims [NAME ...]`: what is claimed of training, and what is right about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sweeps.claims.checks import CHECKS
from sweeps.claims.registered import RegisteredClaim, chosen


def print_claims(names: Sequence[str], tag: str | None, folder: Path | None, console: Console) -> None:
    """Print a line for each claim, or all that is known of those that are named. Raises ConfigError."""
    found = chosen(list(names), tag, folder)
    if names:
        for claim in found:
            _print_one(claim, console)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("name", "verdict", "claim"):
        table.add_column(heading, no_wrap=heading != "claim")
    for claim in found:
        table.add_row(*map(Text, (claim.name, CHECKS[claim.check]().verdict, claim.claim)))
    console.print(table)


def _print_one(claim: RegisteredClaim, console: Console) -> None:
    answer = CHECKS[claim.check]()
    lines = {
        "claim": claim.claim,
        "verdict": f"{answer.verdict}: {answer.words}",
        "source": claim.source,
        "numbers": ", ".join(f"{name} = {value:.6g}" for name, value in answer.numbers.items()),
        "tags": ", ".join(claim.tags),
        "registration": claim.registration,
    }
    console.print(claim.name)
    for name, text in lines.items():
        console.print(f"  {name:<13}{text}", soft_wrap=True)
