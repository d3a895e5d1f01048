"""Every variant of the model against plain PyTorch in float64: values, all gradients, and training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.model.scaling import UNCUT_INITS
from harness.testing import engine
from harness.testing.settings import roughen
from tests.harness.variants import VARIANTS, with_fields
from tests.plain_parts import PlainModel, leading_vectors, loss_of

STEPS = 3
RATES = (1e-2, 3e-3, 3e-2)
DECAY = 0.1
NOT_DECAYED = ("_norm", "_bias", "layer_scale", "_scale", ".multiplier", "_shift")  # vectors, and numbers alone
NOT_DECAYED += ("_alpha", ".sink", "mixer_gate", "mixer_offset", ".sphere_step", "_factor")


def speed_of(name, model):
    """By what nGPT's code multiplies what it learns: the start of a factor over that of the number learned."""
    if name.endswith(".sphere_step"):
        return 0.05 * model.width**0.5
    return model.width**0.5 if name.endswith((".qk_factor", "logit_factor")) else 1.0


def trials_of(variant):
    common = {"steps": STEPS, "precision": "fp64", "warmup": 0, "decay": "constant", "weight_decay": DECAY, "batch": 3}
    return with_fields([engine.trial(seed=r, lr=rate, **common) for r, rate in enumerate(RATES)], VARIANTS[variant])


def plain_model(pack, initial, r):
    """A row of the pack as a plain model. `initial` are the weights with which its vectors start."""
    model = pack.planned[r].model
    weights = {name: w.clone().requires_grad_() for name, w in pack.tensors(pack.weights, r).items()}
    start = pack.tensors(initial, r)
    matrices = [name for name in weights if f"{name}_scale" in weights] if model.sigma_reparam else []
    vectors = leading_vectors({name: start[name] for name in matrices}, matrices)
    return PlainModel(model, weights, vectors, pack.planned[r].seeds["data"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_those_of_a_plain_model(variant):
    trials = trials_of(variant)
    pack = engine.pack_of(trials)
    initial = pack.weights.clone()
    roughen(pack)
    pack.gradients.fill_(float("nan"))  # they are written, not accumulated
    pack.begin(2)
    batch = pack.objective.batch(0)
    losses = pack.learn(batch)
    for r in range(len(RATES)):
        plain = plain_model(pack, initial, r)
        plain.begin(2)
        loss = loss_of(plain, batch[r])
        loss.backward()
        torch.testing.assert_close(losses[r], loss.detach(), rtol=1e-12, atol=0)
        for name, gradient in pack.tensors(pack.gradients, r).items():
            expected = plain.weights[name].grad
            # What is added to all keys alike is added to all scores of a query, unless their positions turn it.
            is_seen = not name.endswith("key_bias") or trials[r].model.positions == "rotary"
            is_seen |= trials[r].model.qk_norm
            assert (expected.abs().max() > 1e-7) == is_seen, f"{name} has hardly a gradient: this says little about it"
            torch.testing.assert_close(
                gradient, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"gradient of {n}: {m}"
            )


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_equals_that_of_a_plain_model(variant):
    trials = trials_of(variant)
    fresh = engine.pack_of(trials)
    initial = fresh.weights.clone()
    roughen(fresh)
    trained = engine.run(trials, prepare=roughen)
    for r, trial in enumerate(trials):
        plain = plain_model(fresh, initial, r)
        optim, groups = trial.optim, []
        for name, w in plain.weights.items():
            speed = speed_of(name, trial.model)
            pace = {"lr": optim.lr * speed, "eps": optim.eps / speed}
            groups.append({"params": [w], "weight_decay": DECAY * (not name.endswith(NOT_DECAYED)), **pace})
        optimizer = torch.optim.AdamW(groups, optim.lr, (optim.beta1, optim.beta2))
        for step in range(STEPS):
            plain.begin(step)
            loss = loss_of(plain, fresh.objective.batch(step)[r])
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.weights.values(), float("inf"))
            found = trained.signals["loss"][r, step], trained.signals["grad_norm"][r, step]
            assert found == pytest.approx((loss.item(), norm.item()), rel=1e-10)
            optimizer.step()
            plain.normalise()
        for name, weight in trained.pack.tensors(trained.pack.weights, r).items():
            expected = plain.weights[name].detach()
            # Adam divides a gradient by its own size, and so its rounding errors too.
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        assert (trained.pack.weights[r] - fresh.weights[r]).abs().max() > 1e-3, "it hardly trained"


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_weights_do_not_depend_on_the_variant(variant):
    """A tensor that two models share starts with the same noise, cut or not, whatever else they have."""
    common = {"steps": STEPS, "precision": "fp64"}
    init = "normal" if VARIANTS[variant].get("init") in UNCUT_INITS else "standard"
    plain = engine.pack_of(with_fields([engine.trial(seed=r, **common) for r in range(2)], {"init": init}))
    pack = engine.pack_of(with_fields([engine.trial(seed=r, **common) for r in range(2)], VARIANTS[variant]))
    shared = pack.layout.by_name.keys() & plain.layout.by_name.keys()
    assert {"embedding", "blocks.0.attention.query", "blocks.1.feedforward.down"} <= shared
    is_turned = VARIANTS[variant].get("hypersphere", False)  # there noise says the direction alone
    for name in shared:
        ours, theirs = (p.layout.view(p.weights, name) / (p.layout.by_name[name].std or 1.0) for p in (pack, plain))
        if is_turned and theirs.dim() == 3:
            across = -2 if name.endswith((".projection", ".down")) else -1
            ours, theirs = (nn.functional.normalize(x, dim=across) for x in (ours, theirs))
        if pack.layout.by_name[name].std:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
