"""A study of several grids, which vary different things: what a figure draws, and how lines and sentences name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis import open_sweep
from analysis.figures.loss_against_rate import loss_against_rate
from analysis.figures.registry import Results
from analysis.reports.findings import sensitivity_lines
from tests.analysis import synthetic


def several_grids(out: Path) -> None:
    """One over rates, one over depth at one rate, and one that also varies an option of no other."""
    grids = [{"lr": lr, "seed": seed} for lr in (1e-3, 1e-2) for seed in (0, 1)]
    grids += [{"lr": 1e-2, "depth": depth, "beta1": 0.5} for depth in (1, 3, 4)]
    grids += [{"lr": lr, "beta2": beta2} for lr in (1e-3, 1e-2) for beta2 in (0.9, 0.99, 0.5)]
    by_depth: dict[int, list[Any]] = {}
    for words in grids:
        by_depth.setdefault(words.get("depth", 2), []).append(synthetic.make_trial(**words))
    for trials in by_depth.values():
        synthetic.write_pack(out, trials)


def test_of_several_grids_lines_of_several_rates_are_drawn_and_named_by_what_differs(tmp_path: Path) -> None:
    several_grids(tmp_path)
    drawing = loss_against_rate(Results(open_sweep(tmp_path)))
    assert synthetic.legend_words(drawing.figure) == [f"mitigation: none, beta2 = {x}" for x in (0.5, 0.9, 0.95, 0.99)]
    assert drawing.caption.endswith(" Not shown: 3 combinations at a single rate.")


def test_of_several_grids_a_report_names_the_ends_by_what_differs(tmp_path: Path) -> None:
    several_grids(tmp_path)
    sensitivity = Results(open_sweep(tmp_path)).sensitivity
    (line,) = sensitivity_lines(sensitivity)
    assert line.startswith("LR sensitivity of 4 combinations: lowest at width 32, beta2 0.") and "depth" not in line
    sensitivity.loc[sensitivity["sensitivity"].last_valid_index(), "rates"] = 3
    several = "LR sensitivity of 4 combinations: their learning rates differ, so they cannot be compared."
    assert sensitivity_lines(sensitivity) == [several]
