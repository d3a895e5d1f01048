"""Loss scaling of each micro-batch by itself, against that of the whole batch."""

from __future__ import annotations

import pytest

from harness.config import ConfigError
from harness.testing import engine
from harness.training.config_checks import check_trial
from tests.harness.test_loss_scale import scales, unscaled

PARTS = {"batch": 8, "ranks": 2, "micro_batches": 2, "steps": 4, "loss_scaling": "static", "loss_scale": 2.0**17}


def test_per_micro_batch_the_sums_are_of_unscaled_gradients():
    """In float32 that is the same bit for bit, since the scale is a power of two."""
    whole, parts = (engine.run([engine.trial(loss_scale_per=per, **PARTS)] * 2) for per in ("batch", "micro_batch"))
    assert engine.same_bits(unscaled(whole, 0), unscaled(parts, 0)) == []
    assert scales(whole) == scales(parts) == [2.0**17] * 4


def test_per_micro_batch_a_narrow_running_sum_loses_small_gradients():
    """Over ranks it is in fp16, which begins at 6e-8: scaled gradients lie within, unscaled ones below."""

    def gradients(per, **options):
        pack = engine.pack_of([engine.trial(**PARTS | {"accumulation": "fp16", "loss_scale_per": per} | options)] * 2)
        pack.tensors(pack.weights, 0)["head"].sign_().mul_(2.0**-27)
        for _, part in pack.ranks.parts(pack.objective.batch(0)):
            pack.learn(part)
            pack.ranks.add(pack.gradients)
        pack.ranks.finish(pack.gradients)
        pack.loss_scale.unscale(pack.gradients)
        return pack.tensors(pack.gradients, 0)

    exact, kept, lost = gradients("batch", accumulation="fp32"), gradients("batch"), gradients("micro_batch")
    for name in (name for name in exact if name.endswith((".value", ".up", ".down"))):
        assert exact[name].any() and (kept[name] - exact[name]).norm() < 0.03 * exact[name].norm(), name
        assert not lost[name].any(), name


def test_a_clip_by_rank_sees_the_same_gradients_either_way():
    clip = {"rank_clip": {"limit": 0.1}}
    whole, parts = (
        engine.run([engine.trial(loss_scale_per=per, **PARTS, **clip)] * 2) for per in ("batch", "micro_batch")
    )
    assert engine.same_bits(unscaled(whole, 0), unscaled(parts, 0)) == []
    assert whole.result.acts[0]["rank_clip.limit"] == 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loss_scaling": "none"}, "there is no scale; allowed: batch, or another train.loss_scaling"),
        ({"ranks": 1, "micro_batches": 1}, "the batch has one part; allowed: batch, or more train.ranks or "),
    ],
)
def test_per_micro_batch_there_has_to_be_a_scale_and_more_than_one_part(options, why):
    with pytest.raises(ConfigError, match=f"train.loss_scale_per=micro_batch: {why}"):
        check_trial(engine.trial(loss_scale_per="micro_batch", **PARTS | options))
