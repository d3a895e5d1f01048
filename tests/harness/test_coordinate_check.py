"""muP: what the first steps change does not depend on the width, where it grows in the standard parametrisation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sweeps.coordinate_check import ACTIVATIONS, measure, slopes

STEPS = 3
FLAT = 0.15
"""Over 16 times the width a factor of 1.5 at most. A wrong exponent is off by 1/2 or 1: a factor of 4 or 16."""
GROWS = 0.3
WITHIN = [name for name in ACTIVATIONS if name not in ("embedding", "logits")]


@pytest.fixture(scope="module")
def exponents():
    """By parametrisation, activation and step, over widths 64 to 1024."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield slopes(measure((64, 128, 256, 1024), STEPS, rate=1e-2, seeds=2))
    torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mup_is_flat(exponents, activation):
    found = exponents["mup"][activation]
    for step in range(1 if activation == "logits" else 2, STEPS + 1):
        assert abs(found[step]) < FLAT, f"step {step}: {found.to_dict()}"


@pytest.mark.parametrize("activation", [*WITHIN, "logits"])
def test_the_standard_parametrisation_grows(exponents, activation):
    assert exponents["standard"][activation][STEPS] > GROWS


def test_embeddings_move_by_the_learning_rate_in_both(exponents):
    assert abs(exponents["standard"]["embedding"][STEPS]) < FLAT


def test_only_the_head_moves_in_the_first_step_of_mup(exponents):
    assert {name for name in ACTIVATIONS if 1 in exponents["mup"].get(name, ())} == {"logits"}


def test_both_agree_at_the_base_width_but_for_the_head(engine):
    """So a learning rate that was tuned at the base width in one is tuned for the other."""
    standard, mup = (engine.pack_of([engine.trial(parametrization=p, base_width=16)] * 2) for p in ("standard", "mup"))
    for name, row in standard.layout.by_name.items():
        same = torch.equal(standard.tensors(standard.weights, 0)[name], mup.tensors(mup.weights, 0)[name])
        assert same == (name != "head")
        assert row.learning_rate == mup.layout.by_name[name].learning_rate == 1
    assert not mup.tensors(mup.weights, 0)["head"].any()


def test_the_command_draws_a_figure(tmp_path: Path):
    out = tmp_path / "figures" / "check.png"
    command = [sys.executable, "-m", "sweeps.coordinate_check", str(out), "--steps", "2", "--seeds", "1"]
    done = subprocess.run([*command, "--widths", "32,64"], capture_output=True, text=True, check=True)
    assert out.read_bytes().startswith(b"\x89PNG") and "residual stream" in done.stdout
    refused = subprocess.run([*command, "--widths", "64,65"], capture_output=True, text=True)
    assert refused.returncode == 2 and "64,65: allowed: two or more multiples of 32" in refused.stderr
