"""What each variant keeps for the backward pass is what the planner counts."""

from __future__ import annotations

import pytest
import torch

from harness.testing import engine
from sweeps.planning.planner import activation_elements
from tests.harness.variants import VARIANTS, with_fields

SHAPE = {"width": 64, "head_dim": 16, "depth": 3, "context": 32, "vocabulary": 100}
KEPT = {
    **{name: fields for name, fields in VARIANTS.items() if not fields.get("sigma_reparam")},  # that keeps matrices
    "soft cap": {"attention_cap": 50.0},
    "clipped softmax": {"soft_clip_high": 1.03},
    "output cap": {"output_cap": 30.0},
    "all norms": {"qk_norm": True, "qkv_norm": True, "projection_norm": True, "up_norm": True, "down_norm": True},
}


def kept_by_a_token(fields):
    return kept_by_a_token_of(engine.pack_of(with_fields(engine.different(2, **SHAPE), fields)))


def kept_by_a_token_of(pack):
    """Values in the storages that autograd holds after a forward pass, without the weights."""
    pack.begin(0)
    batch = pack.objective.batch(0)
    held = {}

    def hold(x):
        storage = x.untyped_storage()
        if storage.data_ptr() != pack.weights.untyped_storage().data_ptr():
            held[storage.data_ptr()] = (storage.nbytes() / 4, x)  # with x, so that its memory is not used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        pack.loss(batch)
    return sum(size for size, _ in held.values()) / batch[:, :, 1:].numel()


def counted(fields):
    return activation_elements(with_fields(engine.different(1, **SHAPE), fields)[0].model, SHAPE["vocabulary"])


@pytest.mark.parametrize("fields", KEPT.values(), ids=KEPT)
def test_a_variant_keeps_as_much_more_as_is_counted(fields):
    """To 5% of the plain model: means and deviations of norms, one a token, are not counted."""
    plain = counted({})
    more, expected = kept_by_a_token(fields) - kept_by_a_token({}), counted(fields) - plain
    assert more == pytest.approx(expected, abs=0.05 * plain)


def test_the_count_is_no_less_than_what_is_kept():
    """What the backward pass makes on its way comes on top, and the plain count has room for it."""
    for fields in KEPT.values():
        assert kept_by_a_token(fields) < counted(fields)
