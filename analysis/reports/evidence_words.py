"""The evidence of an incident in words: what was measured at its onset, in which units, and what a sound step has."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.measures.evidence import LATER, Evidence
from analysis.measures.incidents import SIGNS
from analysis.reports.words import rounded

HEADING = ["at the onset", "value", "unit", "sound"]
ODD = SIGNS | {"grad_norm": "gradient norm", "attention_logit_max": "attention logits"}
BLAMED = {
    "re-execution": "without it the step is finite",
    "state": "it was not finite before the step",
    "setting": "a setting alone explains it",
    "outlier": "by far its largest value",
}


def odd_line(evidence: Evidence, otherwise: str) -> str:
    """Which signals are odd at the onset, or `otherwise`."""
    names = [ODD.get(name, name.replace("_", " ")) for name in evidence.odd]
    return f"Odd at the onset, step {evidence.begin}: {', '.join(names) or otherwise}."


def measured_rows(evidence: Evidence) -> list[list[Any]]:
    """A row for each number that is known: what, value, unit, and what a sound step has; see `HEADING`."""
    e = evidence
    norm = e.norm_ratio if e.is_norm_finite else np.inf
    rows: list[tuple[str, float, str, str]] = [
        ("learning rate", e.rate_ratio, "times that of the schedule", "1"),
        (
            "rise of the loss",
            e.loss_rise if e.is_loss_finite else np.inf,
            f"{e.loss_unit} over its median".strip(),
            "about 0",
        ),
        ("gradient norm before clipping", norm, "times its median of the steps before", "about 1"),
        ("update, rms over the rate", e.update_ratio, "times its median of the steps before", "about 1"),
        (
            f"what is left of the update's jump {LATER} steps later",
            e.update_kept,
            "share of what a first moment would keep",
            "1; far less is no gradient's doing",
        ),
        ("change of the weights' norm", e.weight_check, "norms of the update", "at most 1"),
        (
            "norm of the second moment" if e.moment_check >= 0 else "least the second moment's norm may be",
            abs(e.moment_check),
            "times the most that its last value and this gradient allow"
            if e.moment_check >= 0
            else "times what it is, by its last value",
            "at most 1",
        ),
        ("largest activation of a block", e.activation_ratio, "times its median of the steps before", "about 1"),
    ]
    return [[what, rounded(value), unit, sound] for what, value, unit, sound in rows if not np.isnan(value)]


def provenance_line(evidence: Evidence) -> str:
    """Where the first value that was not finite came from, in a sentence or two; "" where that is not known."""
    told = evidence.provenance
    if not told.get("direction"):
        return ""
    place = f"{told.get('site', 'unknown').replace('_', ' ')} {told.get('tensor', '')}".strip() + _index(told, "index")
    layer = f", layer {_whole(told['layer'])}" if "layer" in told else ""
    head = f", head {_whole(told['head'])}" if "head" in told else ""
    operation = f" in {told['operation']}" if "operation" in told else ""
    format_ = f" ({told['format']})" if "format" in told else ""
    value = f"{told['value']}, " if "value" in told else ""
    line = (
        f"Run again, step {_whole(told.get('step', '?'))} has its first value that is not finite on the way "
        f"{told['direction']}, at {place}{layer}{head}: {value}by {told.get('cause', 'unknown')}{operation}{format_}."
    )
    if blamed := told.get("blamed"):
        site = told.get("blamed_site", "").replace("_", " ")
        why = BLAMED.get(told.get("evidence", ""), "")
        line += f" To blame is the {site} {blamed}{_index(told, 'blamed_index')}{f': {why}' if why else ''}."
    return line


def _index(told: Any, name: str) -> str:
    return f" {told[name]}" if name in told else ""


def _whole(text: str) -> str:
    """A number that a coordinate with gaps has made a float."""
    return text.removesuffix(".0")
