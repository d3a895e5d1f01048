"""From stored results to figures and a report. Reads datasets alone, and knows nothing of how they were made."""

from analysis import current_folder

if current_folder.is_run_by_name():
    current_folder.leave()  # before anything else is imported

from analysis.measures.confusion import confusion
from analysis.measures.detectors import alarms
from analysis.measures.incidents import incidents
from analysis.measures.leaderboard import scored
from analysis.measures.mitigations import compare
from analysis.measures.outcomes import outcomes
from analysis.measures.provenance import named, provenance
from analysis.measures.statistics import rates
from analysis.measures.symptoms import symptoms
from analysis.reading.levels import numbers
from analysis.reading.open_sweep import fault_events, open_sweep, part_acts
from analysis.reading.weights import load_weights, to_gpt2
from analysis.reports.postmortem import write_postmortem

__all__ = [
    "alarms",
    "compare",
    "confusion",
    "fault_events",
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
    "to_gpt2",
    "write_postmortem",
]
