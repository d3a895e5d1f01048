"""Names by which sweeps and their analysis know the same thing."""

from __future__ import annotations

LAST_BIT = "last_bit"  # the fault whose trials measure the clean envelope
MAX_STABLE_RATE, WORST_FAULT, PARETO = SEARCHES = ("max_stable_lr", "worst_fault", "pareto")  # kinds of searches
