"""From stored results to figures and a report. Reads datasets alone, and knows nothing of how they were made."""

from analysis import current_folder

if current_folder.is_run_by_name():
    current_folder.leave()  # before anything else is imported

from analysis.measures.mitigations import compare
from analysis.measures.outcomes import outcomes
from analysis.measures.statistics import rates
from analysis.reading.open_sweep import fault_events, open_sweep, part_acts
from analysis.reading.weights import load_weights, to_gpt2

__all__ = [
    "compare",
    "fault_events",
    "load_weights",
    "open_sweep",
    "outcomes",
    "part_acts",
    "rates",
    "to_gpt2",
]
