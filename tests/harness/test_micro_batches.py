"""Micro-batches: the gradient of the whole batch, from parts that pass one after the other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from harness.config import ConfigError
from harness.testing import engine
from harness.training.config_checks import check_trial
from injectors.value import Value
from sweeps.planning.planner import activation_bytes, state_bytes

STEPS = 6


def gradients(**fields) -> torch.Tensor:
    pack = engine.pack_of([engine.trial(seed=r, batch=8, precision="fp64", **fields) for r in range(3)])
    batch, weights = pack.what_trains(pack.objective.batch(0), 0)
    pack.begin(0)
    for rank, part in pack.ranks.parts(batch):
        pack.learn(part, None if weights is None else pack.ranks.part(weights, rank), rank=rank)
        pack.ranks.add(pack.gradients)
    pack.ranks.finish(pack.gradients)
    return pack.gradients.clone()


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(
    "fields", [{}, {"z_loss": 1e-2}, {"rarity": 4.2}, {"checkpointing": True}, {"activation": "swiglu"}], ids=str
)
def test_the_gradient_is_that_of_the_whole_batch(count: int, fields: dict) -> None:
    whole, parts = gradients(**fields), gradients(micro_batches=count, **fields)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-13)
    assert not torch.equal(parts, whole), "the sums are taken in another order"


def test_of_each_ranks_share() -> None:
    both, ranks = gradients(ranks=2, micro_batches=2), gradients(ranks=2)
    torch.testing.assert_close(both, ranks, rtol=1e-10, atol=1e-13)


def test_a_run_is_that_of_whole_batches_to_rounding() -> None:
    runs = [engine.run(engine.different(3, batch=4, micro_batches=n, precision="fp64", steps=STEPS)) for n in (1, 4)]
    for name in ("loss", "grad_norm", "param_norm", "validation_loss", "attention_logit_max"):
        np.testing.assert_allclose(runs[1].signals[name], runs[0].signals[name], rtol=1e-7, err_msg=name)


def test_gradients_of_a_narrow_format_are_added_in_float32() -> None:
    """Of fp16 products: a sum in their format would lose what is here kept."""
    pack = engine.pack_of([engine.trial(seed=r, batch=8, micro_batches=8, precision="fp16") for r in range(2)])
    pack.begin(0)
    pieces = []
    learn = pack._learn
    pack._learn = lambda *of: (learn(*of), pieces.append(pack.gradients.clone()))[0]
    pack.learn(pack.objective.batch(0))
    assert len(pieces) == 8 and pack.gradients.dtype == torch.float32
    total = pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    assert torch.equal(pack.gradients, total / 8)


def test_the_loss_scale_is_that_of_the_whole_batch() -> None:
    """An overflow in one micro-batch costs the step, once, and half of the scale."""
    fields = {"batch": 4, "micro_batches": 4, "precision": "fp16", "loss_scaling": "dynamic", "steps": STEPS}
    run = engine.run([engine.trial(seed=r, loss_scale=2.0**24, **fields) for r in range(2)])
    scale = run.signals["loss_scale"]
    assert (np.diff(np.log2(scale)) >= -1).all() and (scale[:, -1] < scale[:, 0]).all()
    assert np.isfinite(run.signals["loss"]).all()


def test_batches_grow_by_whole_micro_batches() -> None:
    run = engine.run(engine.different(2, batch=8, micro_batches=4, batch_start=4, batch_steps=4))
    assert set(np.diff(run.signals["tokens"][0], prepend=0) / run.pack.planned[0].model.context) == {4, 8}


def test_a_fault_at_an_activation_strikes_the_first_micro_batch_alone() -> None:
    """Its elements are those of one micro-batch, and it has one record a strike."""
    fault = Value(kind="value", name="value", site="activation", tensor="embedding", start=2, model="nan")
    golden = engine.trial(batch=4, micro_batches=2)
    run = engine.run([golden, dataclasses.replace(golden, fault=fault.resolved())])
    (event,) = run.result.events[1]
    tokens = 2 * golden.model.context
    assert event.index[0] < tokens and run.result.strikes == [0, 1]
    assert run.result.nonfinite_step == [None, 2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": 8, "micro_batches": 3}, "train.micro_batches=3: does not divide train.batch=8"),
        (
            {"batch": 8, "ranks": 4, "micro_batches": 4},
            "train.micro_batches=4: does not divide a rank's share of train.batch=8",
        ),
    ],
)
def test_what_does_not_divide_the_batch_is_refused(fields: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}; allowed: a divisor of it$"):
        check_trial(engine.trial(**fields))


def test_memory_of_a_large_vocabulary_falls_with_the_micro_batch() -> None:
    """A batch of 64 at GPT-2's vocabulary: its logits are the largest part of what passes at once."""
    fields = {"batch": 64, "context": 256, "width": 64, "source": "tokens", "path": "x", "vocabulary": 50257}
    whole, small = (engine.trial(micro_batches=n, **fields) for n in (1, 16))
    assert activation_bytes(small, 2, "cuda") < activation_bytes(whole, 2, "cuda") / 15
    assert state_bytes(small) == state_bytes(whole) * 5 / 4, "the running sum"
