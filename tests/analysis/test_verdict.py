"""The sentences on top of a post-mortem, and what its figure draws of steps that were undone."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from analysis.figures.incident import _undone
from analysis.measures.causes import UNKNOWN, Finding
from analysis.measures.incidents import Incident
from analysis.reading.incident_log import Act
from analysis.reports.verdict import shows, verdict

FOUND = Finding("corrupted weight", "a reason")


def incident(peak: float, outcome: int, acts: tuple[Act, ...] = (), peak_step: int = 80, steps: int = 1) -> Incident:
    about = {"trial": "t", "first": 80, "last": 99, "symptoms": (), "alarms": (), "is_logged": bool(acts)}
    losses = {"loss_before": 2.5, "loss_peak": peak, "peak_step": peak_step, "loss_after": 2.5, "after_step": 119}
    rest = {"left": 0.0, "grad_norm_peak": 1.0, "tokens": 0.0, "seconds": 1.0, "money": 0.0, "size": 1.0}
    signs = ("jump of the update",)
    return Incident(**about, **losses, **rest, signs=signs, acts=acts, outcome=outcome, steps=steps)


RERUN = Act(step=80, action="re_execute", loss=5.5, grad_norm=0.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            incident(5.5, 3, steps=40),
            "At step 80 the loss rose from 2.500 to 5.500 nat/token, and the run was lost. It cost 40 steps.",
        ),
        (
            incident(5.5, 1, (RERUN, RERUN)),
            "At step 80 the loss rose from 2.500 to 5.500 nat/token; the playbook answered (re_execute), and the run "
            "came back. It cost 1 step.",
        ),
        (
            incident(3.0, 2, peak_step=85, steps=0),
            "At step 80 the loss rose from 2.500 to 3.000 nat/token by step 85, and a part of the damage stayed.",
        ),
        (incident(inf, 3), "At step 80 the loss was not finite any more, and the run was lost. It cost 1 step."),
        (
            incident(2.52, 1),
            "At step 80 the loss showed nothing, but there was a sign of it (jump of the update), and the run came "
            "back. It cost 1 step.",
        ),
    ],
)
def test_an_incident_in_two_sentences(given: Incident, said: str) -> None:
    assert verdict(given, FOUND) == f"{said} The evidence says: corrupted weight."


def test_a_cause_that_is_not_known_is_no_word_of_the_evidence() -> None:
    assert verdict(incident(5.5, 1), Finding(UNKNOWN, "a reason")).endswith(" The evidence does not tell why.")


def test_whether_the_loss_shows_it() -> None:
    assert shows(incident(5.5, 1)) and shows(incident(inf, 3)) and shows(incident(nan, 3))
    assert not shows(incident(2.55, 1)) and not shows(incident(2.4, 1))


def test_what_was_undone_is_drawn_as_it_was_seen() -> None:
    kept = np.full(120, 2.5)
    others = [
        Act(step=90, action="skip", loss=2.5),
        Act(step=95, action="skip", loss="inf"),
        Act(step=96, action="skip"),
    ]
    acts = (RERUN, *others)
    assert list(_undone(incident(5.5, 1, acts), "loss", kept)) == [(80, 5.5)]
    assert list(_undone(incident(5.5, 1, acts), "grad_norm", kept)) == [(80, 0.0)]
    assert list(_undone(incident(5.5, 1, acts), "update_rms", kept)) == [], "nothing of it was logged"
    late = (Act(step=130, action="roll_back", loss=7.0),)
    assert list(_undone(incident(5.5, 1, late), "loss", kept)) == [(130, 7.0)], "beyond the end of what is stored"
