"""nGPT: what has norm 1, and the sizes of what its authors learn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import ConfigError, Trial
from harness.model.hypersphere import unit
from harness.testing import engine
from harness.training.config_checks import check_trial
from harness.training.pack import Pack

WIDTH, HEADS, DEPTH, STEPS = 16, 2, 2, 12
SHAPE: dict[str, Any] = {"width": WIDTH, "head_dim": WIDTH // HEADS, "depth": DEPTH, "context": 8, "batch": 2}
SHAPE |= {"precision": "fp64", "activation": "swiglu", "placement": "none", "hypersphere": True}
SHAPE |= {"weight_decay": 0.0, "warmup": 0, "steps": STEPS, "clip": None}


def trials(**fields: Any) -> list[Trial]:
    return [engine.trial(**{**SHAPE, "seed": seed, "lr": lr, **fields}) for seed, lr in enumerate((1e-2, 3e-2))]


def test_a_factor_learns_as_the_number_that_their_code_learns() -> None:
    """They learn p and multiply it by k: AdamW on p is AdamW on k p with k times the rate and a kth of epsilon.

    test_model_parts.py has loss, gradients and training of all tensors, against equations written out.
    """
    (trial, _), begun = trials(eps=1e-3), []
    layout = engine.pack_of([trial]).layout
    alpha, factor = (layout.by_name[name] for name in ("blocks.0.attention.sphere_step", "logit_factor"))
    for scaled, k in ((alpha, 0.05 * math.sqrt(WIDTH)), (factor, math.sqrt(WIDTH))):
        assert (scaled.learning_rate, scaled.epsilon, scaled.decay) == (pytest.approx(k), pytest.approx(1 / k), 0)
        assert scaled.mean == pytest.approx(k / math.sqrt(WIDTH)), "p starts at 1 / sqrt(width)"
        begun.append(scaled.mean / k)
        p = torch.tensor([scaled.mean / k], dtype=torch.float64, requires_grad=True)
        s = torch.tensor([scaled.mean], dtype=torch.float64, requires_grad=True)
        theirs = torch.optim.Adam([p], lr=0.01, eps=1e-3)
        ours = torch.optim.Adam([s], lr=0.01 * scaled.learning_rate, eps=1e-3 * scaled.epsilon)
        for target in (0.3, 0.7, 0.2):
            for optimizer, value in ((theirs, p * k), (ours, s)):
                optimizer.zero_grad()
                (value - target).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(s, p * k, rtol=1e-12, atol=0)
    assert begun == pytest.approx([1 / math.sqrt(WIDTH)] * 2)


def test_vectors_along_the_width_have_norm_one() -> None:
    """At the start, after every step, and in the stream; a row that stands still is left as it is."""
    sizes: list[Tensor] = []

    def prepare(pack: Pack) -> None:
        pack.model.taps.attach("blocks.*.residual", lambda name, x: sizes.append(x.norm(dim=-1)))

    pack = engine.run(trials(), prepare=prepare).pack
    for size in sizes:
        torch.testing.assert_close(size, torch.ones_like(size))
    for name, x in pack.tensors(pack.weights, 1).items():
        if x.dim() == 2 and not name.endswith("factor"):
            size = x.norm(dim=0 if name.endswith((".projection", ".down")) else 1)
            torch.testing.assert_close(size, torch.ones_like(size), msg=name)
    before = pack.weights.mul_(2).clone()
    pack.after_steps[0].act(torch.tensor([True, False]), pack.ranks)
    assert torch.equal(pack.weights[1], before[1]) and not torch.equal(pack.weights[0], before[0])


def test_the_gradient_of_a_unit_vector() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit, (x,))


def test_it_trains_where_plain_blocks_do() -> None:
    """At ten times the usual rate, without warm-up: what the authors say of it, as far as a small model goes."""
    fields = {"precision": "fp32", "steps": 60, "lr": 3e-2}
    losses = engine.run(trials(**fields)).signals["loss"]
    assert (losses[:, -10:].mean(1) < losses[:, 0] - 0.5).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"placement": "pre"}, "model.placement=pre: model.hypersphere=true has norms of its own"),
        ({"qk_norm": True}, "model.qk_norm=true: model.hypersphere=true has norms of its own"),
        ({"biases": True}, "model.biases=true: "),
        ({"init": "zero_residual"}, "model.init=zero_residual: zeros have no direction"),
        ({"parametrization": "mup"}, "model.parametrization=mup: "),
        ({"block": {"channel_mixer": "moe"}}, "block.channel_mixer=moe: is not known on the hypersphere"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_place_on_it(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trial(engine.trial(**{**SHAPE, **fields}))
    assert any(reason.startswith(said) for reason in caught.value.reasons)
