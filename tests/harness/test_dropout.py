"""Dropout: masks that are random enough, and a function of seed, step, place and sequence alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from harness.model.dropout import dropped, random_words, stream
from harness.testing import engine
from tests.harness.test_micro_batches import gradients
from tests.harness.variants import with_fields

SHAPE = (3, 400, 50)  # trials, tokens of four sequences, features
SHARES = torch.tensor([0.1, 0.0, 0.75])


def kept(step: int = 0, place: str = "embedding", seeds=(0, 1, 2), sequences=range(4)) -> torch.Tensor:
    """Which elements are kept of `SHAPE`, [trials, sequences, elements of each]."""
    shape = (SHAPE[0], 100 * len(sequences), SHAPE[2])
    found = dropped(torch.ones(shape), SHARES, torch.tensor([stream(seed, step, place) for seed in seeds]), sequences)
    return (found != 0).view(3, len(sequences), -1)


def test_numbers_are_those_of_splitmix64() -> None:
    """The first numbers of its authors' code, from the state 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = random_words(torch.tensor([0, 1234567]), range(4))[1]
    assert [number % 2**64 for number in found.tolist()] == expected
    assert torch.equal(random_words(torch.tensor([7]), range(2, 4)), random_words(torch.tensor([7]), range(4))[:, 2:])


def test_a_share_is_dropped_and_the_rest_grows() -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    found = dropped(x, SHARES, torch.tensor([stream(0, 0, "a")] * 3), range(4))
    assert torch.equal(found[1], x[1])
    for trial, share in ((0, 0.1), (2, 0.75)):
        is_kept, n = found[trial] != 0, x[trial].numel()
        assert is_kept.double().mean().item() == pytest.approx(1 - share, abs=5 * math.sqrt(share * (1 - share) / n))
        torch.testing.assert_close(found[trial][is_kept], (x[trial] / (1 - share))[is_kept], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 2, 7, 7)])
def test_odd_numbers_of_elements(shape: tuple[int, ...]) -> None:
    found = dropped(torch.ones(shape), SHARES, torch.tensor([1, 2, 3]), range(4))
    assert found.shape == shape and (found[1] == 1).all()


def test_masks_of_anything_else_are_others() -> None:
    """As unlike as two independent ones: of 5,000 elements a sequence, by the correlation of what is kept."""
    base = kept()[2].double()
    others = [kept(step=1), kept(place="blocks.0.attention"), kept(seeds=(2, 1, 0)), kept(sequences=range(4, 8))]
    pairs = [(base, other[2].double()) for other in others]
    pairs += [(base[:-1], base[1:]), (base[:, :-1], base[:, 1:]), (base[:, ::2], base[:, 1::2])]
    for left, right in pairs:
        correlation = np.corrcoef(left.flatten(), right.flatten())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(left.numel())


def test_a_sequence_has_its_mask_whatever_stands_beside_it() -> None:
    assert torch.equal(kept(sequences=range(1, 3)), kept()[:, 1:3])


def test_ranks_and_micro_batches_drop_what_the_whole_batch_drops() -> None:
    whole = gradients(dropout=0.3)
    for fields in ({"ranks": 2}, {"micro_batches": 4}, {"ranks": 2, "micro_batches": 2}):
        torch.testing.assert_close(gradients(dropout=0.3, **fields), whole, rtol=1e-10, atol=1e-13)


def test_none_is_dropped_from_held_out_text() -> None:
    plain, with_dropout = (engine.pack_of(with_fields([engine.trial()] * 2, {"dropout": d})) for d in (None, 0.5))
    for pack in (plain, with_dropout):
        pack.begin(0)
    torch.testing.assert_close(plain.validation_losses(64), with_dropout.validation_losses(64))


def test_masks_follow_the_seed_of_the_data() -> None:
    """So that a trial with other initial weights, or another fault, has the same noise."""
    trials = with_fields(engine.different(2), {"dropout": 0.3})
    own = [dataclasses.replace(t, seed=t.seed + 5, data=dataclasses.replace(t.data, seed=t.seed)) for t in trials]
    own = [dataclasses.replace(t, model=dataclasses.replace(t.model, seed=t.seed - 5)) for t in own]
    left, right = engine.run(trials), engine.run(own)
    assert [engine.same_bits(left[r], right[r]) for r in range(2)] == [[], []]
