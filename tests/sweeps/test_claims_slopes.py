"""Claims on slopes over width, depth and the like, and on controls that are measured in trials of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import analysis
from analysis.measures.metrics import trial_table
from harness.config import ConfigError
from sweeps.claims import trained
from sweeps.claims.measured import SeedMetric, per_doubling
from sweeps.claims.registered import claims
from sweeps.claims.trained import trials_of
from tests.sweeps.test_claims_by_trials import MINE, ONE, TINY, call, own


def by_width(bounds: dict[int, dict[int, tuple[float, float]]]) -> tuple[SeedMetric, pd.DataFrame]:
    """A metric with these bounds, by width and seed, and rows for it."""
    made = [(width, seed, *ends) for width, of in bounds.items() for seed, ends in of.items()]
    table = pd.DataFrame(made, columns=["width", "seed", "low", "high"])
    return SeedMetric("share", lambda rows: rows.set_index("seed")[["low", "high"]]), table


def test_a_slope_is_least_squares_over_doublings() -> None:
    """Of seeds that have every value; an open end makes the slope's open, but for the middle of the range."""
    metric, table = by_width(
        {
            8: {1: (1.0, 1.0), 2: (1.0, 2.0), 3: (0.0, np.inf), 5: (0.0, 0.0)},
            16: {1: (2.5, 2.5), 2: (1.0, 2.0), 3: (0.0, 0.0), 4: (1.0, 1.0), 5: (-np.inf, np.inf)},
            32: {1: (3.0, 3.0), 2: (3.0, 5.0), 3: (0.0, 0.0), 4: (1.0, 1.0), 5: (4.0, 4.0)},
        }
    )
    found = per_doubling(metric, table, "width")
    expected = np.polyfit([3, 4, 5], [1.0, 2.5, 3.0], 1)[0]
    assert found.loc[1].tolist() == pytest.approx([expected, expected])
    assert found.loc[2].tolist() == pytest.approx([(3 - 2) / 2, (5 - 1) / 2]), "the ends that lie furthest apart"
    assert found.loc[3].tolist() == [-np.inf, 0.0]
    assert found.loc[5].tolist() == [2.0, 2.0], "the middle says nothing, known or not"
    assert 4 not in found.index, "it lacks a width"
    four = by_width({width: {1: (float(width), float(width))} for width in (4, 8, 16, 64)})
    slope = np.polyfit([2, 3, 4, 6], [4.0, 8.0, 16.0, 64.0], 1)[0]
    assert per_doubling(*four, "width").loc[1].tolist() == pytest.approx([slope, slope])


def test_a_claim_on_a_slope_with_a_control_of_its_own(tmp_path: Path, capsys) -> None:
    """Of both arms, seed by seed; the control is measured where the claim says."""
    words = [word for word in TINY if not word.startswith("model.width")]
    changes = {
        "sweep": [*words, "model.width=8,16,32", "optim.lr=1e-4,1e-2", "mitigation=none,qk_norm,post_ln"],
        "cells": ["depth"],
        "slope": "width",
        "metric": "sensitivity",
        "control": {"of": {"mitigation": "post_ln"}, "metric": "sensitivity", "above": 0.0, "because": "it depends"},
    }
    folder, out = own(tmp_path, **changes), tmp_path / "out"
    status, said, err = call(capsys, "run", "mine", f"out={out}", "--config-dir", str(folder), ONE)
    assert status == 0, err
    (verdict,) = trained.verdicts(out, [claims(folder)["mine"]])
    (cell,) = verdict.cells
    table = trial_table(analysis.open_sweep(out))
    each = {}
    for (mitigation, width, seed), rows in table.groupby(["mitigation", "width", "seed"]):
        losses = rows["capped_loss"]
        each[mitigation, width, seed] = losses.mean() - losses.min()
    gains = []
    for seed in range(100, 104):
        gain = [each["qk_norm", width, seed] - each["none", width, seed] for width in (8, 16, 32)]
        gains.append(np.polyfit([3, 4, 5], gain, 1)[0])
    assert cell.judged.mean == pytest.approx(np.mean(gains), abs=1e-9)
    seen = table[table["mitigation"] == "post_ln"].groupby(["seed", "lr"])["capped_loss"].mean().unstack()
    assert cell.control == pytest.approx((seen.mean(axis=1) - seen.min(axis=1)).mean(), abs=1e-9)
    assert "for each doubling of width" in (out / "claims.md").read_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slope": "width"}, "slope: width: is one of the cells"),
        ({"slope": "depth"}, "slope: depth: has fewer than 3 values in of=mitigation=qk_norm"),
        ({"slope": "mitigation"}, "slope: mitigation: is no coordinate of positive numbers"),
        ({"slope": "widht"}, "slope: widht: is no coordinate of positive numbers"),
        (
            {"control": MINE["control"] | {"of": {"mitigation": "post_ln"}}},
            "control.of: mitigation=post_ln: .*allowed: none, qk_norm",
        ),
    ],
)
def test_what_shows_no_slope_or_control_is_refused(tmp_path: Path, changes: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        trials_of(claims(own(tmp_path, **changes))["mine"])


def test_registrations_stay_what_they_were() -> None:
    """Verdicts on the page are of claims as they are registered now; a new key leaves the hashes of others alone."""
    assert claims()["qk_norm_sensitivity"].registration.startswith("fb34270c")
    assert claims()["high_weight_decay_loss"].registration.startswith("eed095a9")
