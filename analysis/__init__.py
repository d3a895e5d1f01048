"""From stored results to figures and a report. Reads datasets alone, and knows nothing of how they were made.

Each name is loaded when it is first used: opening a sweep loads no plotting library.
"""

from __future__ import annotations

from analysis import current_folder

if current_folder.is_run_by_name():
    current_folder.leave()  # before anything else is imported

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.measures.confusion import confusion
    from analysis.measures.detectors import alarms
    from analysis.measures.incidents import incidents
    from analysis.measures.leaderboard import scored
    from analysis.measures.mitigations import compare
    from analysis.measures.outcomes import outcomes
    from analysis.measures.provenance import named, provenance
    from analysis.measures.statistics import rates
    from analysis.measures.symptoms import symptoms
    from analysis.measures.tidy import grid, table
    from analysis.reading.levels import numbers
    from analysis.reading.open_sweep import fault_events, open_sweep
    from analysis.reading.part_acts import part_acts
    from analysis.reading.weights import load_weights, to_gpt2
    from analysis.reports.postmortem import write_postmortem

_HOMES = {
    "measures.confusion": ("confusion",),
    "measures.detectors": ("alarms",),
    "measures.incidents": ("incidents",),
    "measures.leaderboard": ("scored",),
    "measures.mitigations": ("compare",),
    "measures.outcomes": ("outcomes",),
    "measures.provenance": ("named", "provenance"),
    "measures.statistics": ("rates",),
    "measures.symptoms": ("symptoms",),
    "measures.tidy": ("grid", "table"),
    "reading.levels": ("numbers",),
    "reading.open_sweep": ("fault_events", "open_sweep"),
    "reading.part_acts": ("part_acts",),
    "reading.weights": ("load_weights", "to_gpt2"),
    "reports.postmortem": ("write_postmortem",),
}
__all__ = [
    "alarms",
    "compare",
    "confusion",
    "fault_events",
    "grid",
    "incidents",
    "load_weights",
    "named",
    "numbers",
    "open_sweep",
    "outcomes",
    "part_acts",
    "provenance",
    "rates",
    "scored",
    "symptoms",
    "table",
    "to_gpt2",
    "write_postmortem",
]  # literal: type checkers read it


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"analysis.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
