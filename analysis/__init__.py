"""From stored results to figures and a report. Reads datasets alone, and knows nothing of how they were made."""

from analysis.mitigations import compare
from analysis.open_sweep import fault_events, open_sweep
from analysis.outcomes import outcomes
from analysis.statistics import rates

__all__ = ["compare", "fault_events", "open_sweep", "outcomes", "rates"]
