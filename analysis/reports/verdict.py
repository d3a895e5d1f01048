"""An incident in one or two sentences: what happened, what came of it, and why, as far as the evidence goes."""

from __future__ import annotations

from math import isfinite

from analysis.measures.anomalies import TrialSignals
from analysis.measures.causes import UNKNOWN, Finding
from analysis.measures.incidents import Incident
from analysis.reports.words import in_nat, nat
from harness.basics.printing import count

JUMP = 0.1  # nat/token above what was before, from which on a loss shows an incident
ENDED = {
    1: "the run came back",
    2: "a part of the damage stayed",
    3: "the run was lost",
}


def verdict(incident: Incident, finding: Finding, unit: str = "nat/token") -> str:
    """The sentences on top of a post-mortem; `unit` is that of the loss."""
    answered = ", ".join(dict.fromkeys(act.action for act in incident.acts))
    answer = f"; the playbook answered ({answered})" if answered else ""
    cost = f" It cost {count(incident.steps, 'step')}." if incident.steps else ""
    first = f"At step {incident.first} {_seen(incident, unit)}{answer}, and {ENDED[incident.outcome]}.{cost}"
    known = f"The evidence says: {finding.cause}." if finding.cause != UNKNOWN else "The evidence does not tell why."
    return f"{first} {known}"


def shows(incident: Incident) -> bool:
    """Whether the loss showed it at some step, also at one that was undone."""
    return not incident.loss_peak - incident.loss_before < JUMP  # a loss that is not finite does


def no_symptom(run: TrialSignals, incident: Incident) -> str:
    """Why there is no symptom, though the loss has risen."""
    is_kept = incident.peak_step < run.steps and run["loss"][incident.peak_step] == incident.loss_peak
    if incident.acts and not is_kept:
        return "The loss of a step that was undone shows the incident; no symptom is left in the steps that were kept."
    return "The rise of the loss is too small, for how much it varies, to be a symptom of docs/detection.md."


def _seen(incident: Incident, unit: str) -> str:
    if not isfinite(incident.loss_peak):
        return "the loss was not finite any more"
    if shows(incident):
        at = "" if incident.peak_step == incident.first else f" by step {incident.peak_step}"
        since = f" from {nat(incident.loss_before)}" if isfinite(incident.loss_before) else ""
        return f"the loss rose{since} to {in_nat(nat(incident.loss_peak), unit)}{at}"
    seen = incident.signs[0] if incident.signs else "a detector's alarm"
    return f"the loss showed nothing, but there was a sign of it ({seen})"
