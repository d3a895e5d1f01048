"""muP against its authors' package, microsoft/mup: sizes, rates and decays of every tensor, and whole runs."""

from __future__ import annotations

import pytest
import torch
from mup import MuAdamW, MuReadout, MuSGD, set_base_shapes
from torch import nn

from harness.config import Trial
from harness.testing import engine
from tests.plain_gpt import PlainGPT, copy_weights, tensors, train_plain

STEPS, BASE_WIDTH = 20, 8


def theirs(trial: Trial) -> PlainGPT:
    """A plain GPT with their head, which knows how much wider it is than the base model."""

    def of_width(width: int) -> PlainGPT:
        model = trial.model
        shape = (trial.data.vocabulary, width, model.depth, model.head_dim, model.context)
        plain = PlainGPT(*shape, attention_scale=model.head_dim**-0.5)
        plain.head = MuReadout(width, trial.data.vocabulary, bias=False)
        return plain.double()

    wide = of_width(trial.model.width)
    return set_base_shapes(wide, of_width(BASE_WIDTH), delta=of_width(2 * BASE_WIDTH), rescale_params=False)


def groups_of(plain: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay, gains do not."""
    matrices, gains = ([p for p in plain.parameters() if p.dim() == dim] for dim in (2, 1))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]


def trial_of(m: float, **fields) -> Trial:
    size = {"parametrization": "mup", "width": int(m * BASE_WIDTH), "base_width": BASE_WIDTH, "head_dim": 8}
    return engine.trial(**size, precision="fp64", weight_decay=0.1, steps=STEPS, **fields)


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize(("name", "peer"), [("adamw", MuAdamW), ("sgd", MuSGD)])
def test_rates_and_decays_are_theirs(m, name, peer):
    trial = trial_of(m, name=name, lr=0.01)
    pack, plain = engine.pack_of([trial] * 2), theirs(trial)
    optimizer = peer(groups_of(plain, 0.1), lr=0.01)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    named = {"query": "qkv", "key": "qkv", "value": "qkv"}
    own = dict(plain.named_parameters())
    for scaled in pack.layout.tensors:
        *folders, last = scaled.name.replace(".attention.", ".").replace(".feedforward.", ".").split(".")
        weight = own[".".join([*folders, named.get(last, last), "weight"])]
        assert (0.01 * scaled.learning_rate, 0.1 * scaled.decay) == pytest.approx(found[id(weight)]), scaled.name


@pytest.mark.parametrize("m", [1, 4])
def test_a_run_is_theirs(m):
    """With a decay of 0.1, which takes as much off at every width."""
    trial = trial_of(m, mup_epsilon="none", lr=1e-2, clip=1.0, decay="constant", warmup=0)
    trained, fresh, plain = engine.run([trial] * 2), engine.pack_of([trial] * 2), theirs(trial)
    copy_weights(plain, fresh, 0)
    optimizer = MuAdamW(groups_of(plain, 0.1), lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    train_plain(plain, lambda step: fresh.objective.batch(step)[0], STEPS, 1e-2, 1.0, optimizer=optimizer)
    for name, weight in tensors(plain).items():
        found = trained.pack.tensors(trained.pack.weights, 0)[name]
        torch.testing.assert_close(found, weight.detach(), rtol=0, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")
    assert (trained.pack.weights[0] - fresh.weights[0]).abs().max() > 1e-2
