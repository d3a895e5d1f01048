"""Validation: the loss of held-out windows by segment, before the first step, in between and after the last."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from harness.data.batches import Batches
from harness.testing import engine
from harness.training.pack import Pack
from injectors.value import Value

STEPS = 6
FIELDS = {"steps": STEPS, "validate_every": 2, "validate_tokens": 2000, "validate_between": 300}


def alone(pack: Pack, tokens: int) -> np.ndarray:
    """[R, S]: each window by itself."""
    starts, losses = pack.objective.held_out(tokens), []
    with torch.no_grad(), pack.model.taps.muted():
        for window in pack.objective.batches.validation(starts.flatten()):
            parts = [pack.loss(window.expand(rows.stop - rows.start, 1, -1), rows=rows) for rows in pack.parts]
            losses.append(torch.cat(parts).double())
    return torch.stack(losses, 1).unflatten(1, starts.shape).mean(-1).numpy()


@pytest.mark.parametrize("tokens", [1, 100, 300, 2000, 10**9])
@pytest.mark.parametrize("at_once", [None, 1, 7, 10**6])
def test_segments_have_the_mean_loss_of_their_windows(tokens: int, at_once: int | None) -> None:
    """Whatever passes through the model together; the last piece may be smaller than the others."""
    pack = engine.pack_of(engine.different(3))
    pack._windows_at_once = at_once or pack._windows_at_once
    pack.begin(0)
    found = pack.validation_losses(tokens)
    assert found.dtype == torch.float64 and found.shape[1] <= 64
    np.testing.assert_allclose(found.numpy(), alone(pack, tokens), rtol=1e-6)


def test_z_loss_is_not_in_it() -> None:
    trials = engine.different(2)
    with_z = [dataclasses.replace(t, train=dataclasses.replace(t.train, z_loss=0.5)) for t in trials]
    one, other = (engine.pack_of(each).validation_losses(100) for each in (trials, with_z))
    assert torch.equal(one, other)


def test_each_validation_has_its_own_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    held_out = Batches.held_out
    monkeypatch.setattr(Batches, "held_out", lambda self, tokens: asked.append(tokens) or held_out(self, tokens))
    run = engine.run(engine.different(2, **FIELDS))
    assert asked == [300, 300, 300, 2000]
    assert np.isfinite(run.signals["validation_loss"]).all(0).tolist() == [False, True] * 3


def test_what_is_recorded_is_the_mean_and_its_standard_error() -> None:
    run = engine.run(engine.different(3, **FIELDS))
    final = run.result.ends["final_segment_loss"]
    assert final.shape == (3, 64) and np.isfinite(final).all()
    np.testing.assert_allclose(run.signals["validation_loss"][:, -1], final.mean(1), rtol=1e-12)
    expected = final.std(1, ddof=1) / 8
    np.testing.assert_allclose(run.signals["validation_loss_error"][:, -1], expected, rtol=1e-12)
    run.pack.begin(STEPS)
    np.testing.assert_array_equal(run.pack.validation_losses(2000).numpy(), final)


def test_the_loss_before_the_first_step_is_that_of_the_initial_weights() -> None:
    trials = engine.different(3, **FIELDS)
    pack = engine.pack_of(trials)
    pack.begin(0)
    initial = engine.run(trials).result.ends["initial_segment_loss"]
    segments = -(-300 // trials[0].model.context)
    assert np.isfinite(initial).sum(1).tolist() == [segments] * 3, "one window a segment: fewer than 64"
    np.testing.assert_array_equal(initial[:, :segments], pack.validation_losses(300).numpy())
    assert np.isnan(initial[:, segments:]).all()


def test_a_short_text_is_validated_on_as_a_whole() -> None:
    run = engine.run(engine.different(2, **{**FIELDS, "length": 4000}))
    assert np.isfinite(run.result.ends["final_segment_loss"]).sum(1).tolist() == [(400 - 1) // 8] * 2


def test_one_window_has_no_error() -> None:
    run = engine.run(engine.different(2, **{**FIELDS, "validate_tokens": 1}))
    assert np.isfinite(run.signals["validation_loss"][:, -1]).all()
    assert np.isnan(run.signals["validation_loss_error"][:, -1]).all()


def test_a_trial_that_was_lost_has_an_initial_loss_alone() -> None:
    first, second = engine.different(2, **FIELDS)
    lost = dataclasses.replace(first, optim=dataclasses.replace(first.optim, lr=1e30, clip=None))
    ends = engine.run([lost, second]).result.ends
    assert np.isnan(ends["final_segment_loss"][0]).all() and np.isfinite(ends["final_segment_loss"][1]).all()
    assert np.isfinite(ends["initial_segment_loss"][:, 0]).all()


def test_forks_and_masked_trials_have_the_losses_of_their_twins() -> None:
    golden = engine.trial(**FIELDS)

    def fault(value: float) -> Value:
        values = {"kind": "value", "name": "value", "site": "weight", "tensor": "head", "start": 3}
        return Value(**values, model="scale", value=value).resolved()

    trials = [golden, *(dataclasses.replace(golden, fault=fault(value)) for value in (1e3, 1.0))]
    ends = engine.run(trials, forks=True).result.ends
    initial, final = ends["initial_segment_loss"], ends["final_segment_loss"]
    assert np.array_equal(initial[1], initial[0], equal_nan=True) and np.array_equal(initial[2], initial[0], True)
    assert np.array_equal(final[2], final[0]) and not np.array_equal(final[1], final[0])
    whole = engine.run(trials).result.ends
    assert np.array_equal(whole["final_segment_loss"], final)
