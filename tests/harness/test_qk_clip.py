"""QK-Clip: by its defining property, against a plain GPT whose weights are scaled by hand, and as a part of a pack."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness.testing import engine
from harness.testing.changes import Change
from harness.training.sites import Site
from tests.plain_gpt import plain_of, tensors

SHAPE = {"width": 32, "head_dim": 8, "context": 16, "batch": 4, "warmup": 0}
STEPS = 50
TOLERANCE = 1e-9  # as for a plain GPT without it


def largest_logits(pack, step=0):
    """[R, layers, heads] of one batch, by a reader of our own."""
    found = {}

    def read(name, scores):
        layer, parts = int(name.split(".")[1]), scores.amax((1, 3, 4))
        found[layer] = torch.maximum(found[layer], parts) if layer in found else parts

    detach = pack.model.taps.attach("*.attention.scores", read)
    pack.learn(pack.objective.batch(step))
    detach()
    return torch.stack([found[layer] for layer in sorted(found)], dim=1).detach()


def step(pack, stepping=None):
    """The optimizer's step, at a rate of zero, with what follows it."""
    everywhere = torch.ones(len(pack), dtype=torch.bool)
    pack.gradients.fill_(0)
    pack.step(torch.zeros(len(pack), dtype=pack.dtype), everywhere if stepping is None else stepping, measure=False)


def trials(limits, **fields):
    return [engine.trial(seed=r, qk_clip=limit, **{**SHAPE, **fields}) for r, limit in enumerate(limits)]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("attention", ["explicit", "fused"])
def test_the_same_batch_again_gives_the_threshold(attention, positions):
    """For the heads of the first layer that exceeded theirs; all other weights keep their bits."""
    many = trials([2.0, 3.0, 4.0, 1e3], attention=attention, positions=positions)
    pack = engine.pack_of(many)
    limit = torch.tensor([trial.model.qk_clip for trial in many])[:, None, None]
    before, weights = largest_logits(pack), pack.weights.clone()
    step(pack)
    after = largest_logits(pack)
    over = before > limit
    assert over[:3, 0].any() and not over[:3, 0].all() and not over[3].any()
    expected = torch.where(over, limit, before)[:, 0]
    torch.testing.assert_close(after[:, 0], expected, rtol=1e-6, atol=0)
    assert torch.equal(after[:, 0][~over[:, 0]], before[:, 0][~over[:, 0]])
    for scaled in pack.layout.tensors:
        new, old = (pack.layout.view(flat, scaled.name) for flat in (pack.weights, weights))
        if not scaled.name.endswith(("attention.query", "attention.key")):
            assert torch.equal(new, old), scaled.name
            continue
        layer = int(scaled.name.split(".")[1])
        heads = (new != old).unflatten(1, (4, 8)).flatten(2).any(2)
        assert torch.equal(heads, over[:, layer]), scaled.name
        factor = torch.where(over, limit / before, 1.0)[:, layer].sqrt().repeat_interleave(8, 1)[:, :, None]
        torch.testing.assert_close(new, old * factor, rtol=1e-6, atol=0)


def test_the_largest_of_all_parts_and_ranks_counts():
    """A pack whose rows pass in parts, and ranks that are a forward pass each, give what one pass does."""
    one = engine.pack_of(trials([0.5, 0.7]))
    many = engine.pack_of(trials([0.5, 0.7]) * 9)
    ranks = engine.pack_of(trials([0.5, 0.7], ranks=4))
    assert len(many.parts) > 1
    one.learn(one.objective.batch(0))
    many.learn(many.objective.batch(0))
    for _, part in ranks.ranks.parts(ranks.objective.batch(0)):
        ranks.learn(part)
    before = one.weights.clone()
    for pack in (one, many, ranks):
        step(pack)
    assert not torch.equal(one.weights, before)
    for row in range(18):
        torch.testing.assert_close(many.weights[row], one.weights[row % 2], rtol=1e-6, atol=0)
    torch.testing.assert_close(ranks.weights, one.weights, rtol=1e-6, atol=0)


def test_only_trials_that_step_and_only_finite_logits():
    """And what was read for one step is forgotten at the next."""
    pack = engine.pack_of(trials([0.1] * 4))
    pack.tensors(pack.weights, 1)["blocks.0.attention.query"].fill_(math.nan)
    pack.tensors(pack.weights, 2)["blocks.0.attention.query"][3].fill_(math.inf)
    pack.learn(pack.objective.batch(0))
    before = pack.weights.clone()
    step(pack, torch.tensor([False, True, True, True]))
    changed = [(engine.bits(pack.weights[r]) != engine.bits(before[r])).any().item() for r in range(4)]
    assert changed == [False, False, True, True]
    other_heads = pack.tensors(pack.weights, 2)["blocks.0.attention.query"][8:]
    assert not torch.equal(other_heads, pack.tensors(before, 2)["blocks.0.attention.query"][8:])
    pack.weights.copy_(before)
    step(pack)
    assert torch.equal(engine.bits(pack.weights), engine.bits(before)), "nothing was read since"


def test_validation_is_not_read():
    pack = engine.pack_of(trials([0.1] * 2))
    before = pack.weights.clone()
    pack.validation_losses(64)
    step(pack)
    assert torch.equal(pack.weights, before)


def keep_output(seen, module, inputs, output):
    seen.append(output.detach())


def plain_run(trial, pack, row):
    """A plain GPT with torch's AdamW, heads scaled after each step: its weights, and how often that was done."""
    model, tau = trial.model, trial.model.qk_clip
    plain, adamw = plain_of(trial, pack, row)
    heads, scaled = model.width // model.head_dim, 0
    mask = torch.ones(model.context, model.context, dtype=torch.bool).tril()
    for number in range(trial.steps):
        tokens, seen = pack.objective.batch(number)[row], []
        keep = partial(keep_output, seen)
        hooks = [block.attention_norm.register_forward_hook(keep) for block in plain.blocks]
        loss = F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        for hook in hooks:
            hook.remove()
        factors = []
        for block, x in zip(plain.blocks, seen, strict=True):
            q, k, _ = block.qkv(x).detach().unflatten(-1, (3, heads, -1)).unbind(2)
            q, k = (plain.rotary(part.transpose(1, 2)) for part in (q, k))
            logits = (q @ k.mT / math.sqrt(model.head_dim)).masked_fill(~mask, -math.inf)
            factors.append([min(1.0, tau / max(logit, 1e-9)) for logit in logits.amax((0, 2, 3)).tolist()])
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        with torch.no_grad():
            for block, gammas in zip(plain.blocks, factors, strict=True):
                for head, gamma in enumerate(gammas):
                    for part in range(2):
                        start = part * model.width + head * model.head_dim
                        block.qkv.weight[start : start + model.head_dim] *= math.sqrt(gamma)
                    scaled += gamma < 1
    return {name: weight.detach() for name, weight in tensors(plain).items()}, scaled


def test_a_trial_equals_a_plain_gpt_that_is_scaled_by_hand():
    own = {"steps": STEPS, "precision": "fp64", "decay": "constant", "lr": 1e-2, "batch": 2, "width": 16}
    many = trials([0.8, 2.0], **own)
    fresh, run = engine.pack_of(many), engine.run(many)
    for r, trial in enumerate(many):
        expected, scaled = plain_run(trial, fresh, r)
        assert STEPS / 10 < scaled < STEPS * 4
        found = run.pack.tensors(run.pack.weights, r)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
    free = engine.run(trials([1e6] * 2, **own))
    logits = [run.signals["attention_logit_max"][:, 1:].max(1) for run in (run, free)]
    assert (logits[0] < logits[1]).all(), "it holds logits back"


# --- as a part of a pack ----------------------------------------------------------------------------------------------


def test_an_injector_sees_weights_after_it():
    """The site `update` comes after all that the step does, so that a strike there stands."""
    seen = {}

    def look(tensors):
        seen.update({name: x.clone() for name, x in tensors.items() if ":" not in name})

    many = trials([0.3] * 2, steps=5)
    run = engine.run(many, {0: Change(Site.UPDATE, range(4, 5), look)})
    found = run.pack.tensors(run.pack.weights, 0)
    assert all(torch.equal(seen[name], found[name]) for name in found)
    free = engine.run(trials([1e30] * 2, steps=5))
    assert not np.array_equal(run.signals["loss"], free.signals["loss"])
