"""muP: what the first steps change does not depend on the width, where it grows in the standard parametrisation."""

from __future__ import annotations

import sys

import pytest
import torch

from sweeps.coordinate_check import ACTIVATIONS, main, measure, slopes

STEPS = 3
FLAT = 0.15
"""Over 16 times the width a factor of 1.5 at most. A wrong exponent is off by 1/2 or 1: a factor of 4 or 16."""
GROWS = 0.3
WITHIN = [name for name in ACTIVATIONS if name not in ("embedding", "logits")]


@pytest.fixture(scope="module")
def table():
    """Widths 64 to 1024."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield measure((64, 128, 256, 1024), STEPS, rate=1e-2, seeds=2)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exponents(table):
    """By parametrisation, activation and step."""
    return slopes(table)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mup_is_flat(exponents, activation):
    found = exponents["mup"][activation]
    for step in range(1 if activation == "logits" else 2, STEPS + 1):
        assert abs(found[step]) < FLAT, f"step {step}: {found.to_dict()}"


@pytest.mark.parametrize("activation", [*WITHIN, "logits"])
def test_the_standard_parametrisation_grows(exponents, activation):
    assert exponents["standard"][activation][STEPS] > GROWS


def test_embeddings(table, exponents):
    """They move by the learning rate in both; at initialisation they keep their size in muP alone."""
    assert abs(exponents["standard"]["embedding"][STEPS]) < FLAT
    sizes = slopes(table, of="size")
    assert abs(sizes["mup"]["embedding"][STEPS]) < FLAT < GROWS < -sizes["standard"]["embedding"][STEPS]


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


def run_command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["coordinate_check", *map(str, arguments)])
    main()


@pytest.mark.usefixtures("engine")
def test_the_command_draws_a_figure(tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures" / "check.png"
    run_command(monkeypatch, out, "--steps", 2, "--seeds", 1, "--widths", "32,64")
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert str(out) in printed and all(name in printed for name in ACTIVATIONS.values())


@pytest.mark.parametrize("widths", ["64", "64,64", "64,65", "0,64"])
def test_widths_that_it_refuses(tmp_path, monkeypatch, capsys, widths):
    with pytest.raises(SystemExit) as end:
        run_command(monkeypatch, tmp_path / "check.png", "--widths", widths)
    assert end.value.code == 2
    assert f"{widths}: allowed: two or more multiples of 32" in capsys.readouterr().err
