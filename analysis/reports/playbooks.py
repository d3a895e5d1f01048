"""What playbooks save and cost, in words and columns of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from analysis.measures.playbooks import NOTHING, by_fault, is_oracle, playbooks
from analysis.measures.verdicts import CORRECT, verdict_table, verdicts
from analysis.reading.open_sweep import open_sweep
from analysis.reading.selection import with_company
from analysis.reports.printed import table_lines
from harness.basics.printing import count
from harness.config import ConfigError

SHARES = ("kept", "kept_low", "kept_high", "ended")


def told_playbooks(out: Path, per_hour: float | None = None, wheres: Sequence[str] = ()) -> list[str]:
    """The table of playbooks, and what the one that keeps most keeps of each fault. Raises ConfigError."""
    if per_hour is not None and not 0 <= per_hour < float("inf"):
        raise ConfigError(f"--per-hour={per_hour}: out of range; allowed: a number from 0 on")
    sweep = with_company(open_sweep(out), wheres)
    try:
        table = playbooks(sweep, per_hour)
    except ValueError as error:
        raise ConfigError(f"out={out}: {error}; allowed: a sweep of playbook={NOTHING} and others") from None
    shown = table.assign(**{name: 100 * table[name] for name in SHARES})
    others = table[(table["playbook"] != NOTHING) & ~table["playbook"].map(is_oracle)].dropna(subset="kept")
    lines = table_lines(shown)
    lines += [
        "Shares in percent, with 95% Wilson intervals; steps of an answered incident, false ones a thousand steps."
    ]
    if len(others):
        best = str(others.loc[others["kept"].idxmax(), "playbook"])
        lines += ["", f"{best}, of the incidents that are lost without an answer, by fault:"]
        lines += table_lines(by_fault(sweep, best))
    found = verdicts(out)
    found = found[found["trial"].isin(sweep["trial"].values)]
    if len(found):
        lines += ["", *_of_verdicts(found), *table_lines(verdict_table(found))]
    return lines


def _of_verdicts(found: pd.DataFrame) -> Iterator[str]:
    is_right = found["truth"] == found["verdict"]
    yield f"Steps that were run again: {is_right.sum()} of {len(found)} verdicts are right; truths down."
    is_late = ~found["in_reach"]
    if is_late.any():
        yield (
            f"At {count(int(is_late.sum()), 'alarm')} the fault had struck none of these steps;"
            f" {is_right[is_late].sum()} of them were called {CORRECT}. If all of them count as wrong:"
            f" {is_right[~is_late].sum()} of {len(found)}."
        )
