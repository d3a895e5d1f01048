"""The registry of figures: every one is found, in the order of the pages, and stands on its page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from analysis.commands.figure import figure_names
from analysis.figures.registry import Needs, figures

NAMES = {
    Needs.SWEEP: ["loss_against_rate", "largest_stable_rate", "sensitivity_against_width", "faulty_against_golden"],
    Needs.GUARDS: ["guard_signals"],
    Needs.POLICIES: ["quality_over_steps", "gold_against_distance"],
    Needs.SEARCHES: ["search_history", "pareto_front"],
    Needs.COMPARISON: ["mitigation_map"],
    Needs.OUTCOMES: ["vulnerability_map", "outcome_shares", "deviation_curves", "recovery_against_beta2"],
    Needs.INCIDENTS: [
        "detector_tradeoff",
        "loss_lead",
        "module_flips",
        "playbooks_compared",
        "early_warning",
        "spike_hazard",
    ],
}


def test_all_are_found_in_the_order_of_the_pages() -> None:
    assert {needs: [*figures(needs)] for needs in Needs} == NAMES
    assert figure_names() == [name for names in NAMES.values() for name in names]


def test_the_gallery_draws_every_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tutorials" / "scripts" / "08_every_figure.py").read_text()
    drawn = [
        name for call in re.findall(r"^draw\((.*)\)$", text, re.MULTILINE) for name in re.findall(r'"(\w+)"', call)[1:]
    ]
    assert sorted(drawn) == sorted(figure_names())


def test_a_figure_is_named_as_its_file_and_no_two_have_one_place() -> None:
    found = figures(*Needs)
    for name, figure in found.items():
        assert figure.draw.__module__ == f"analysis.figures.{name}"
        assert vars(sys.modules[figure.draw.__module__])[name] is figure
    assert len({(figure.needs, figure.place) for figure in found.values()}) == len(found)
