"""Our own GPT in a loop of plain torch: attached, it is struck as in a sweep, and what follows is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import ConfigError, attach
from harness.faults.facts import facts_of
from harness.optim.schedules import rates_of
from harness.testing import engine
from harness.user_loop.presets import chosen_faults
from tests.plain_gpt import Rotary
from tests.user_loop.loops import attached, plain

STEPS = 12
FAULTS: list[dict[str, Any]] = [
    {"name": "weight_bit", "start": 0},
    {"name": "weight_bit", "start": 5, "bit": 27},
    {"name": "gradient_bit", "start": 5, "bit": 28},
    {"name": "moment_bit", "start": 5},
    {"name": "update_bit", "start": 5, "bit": 27},
    {"name": "learning_rate_jump", "start": 5},
]


class Branch(nn.Module):
    """Something that has weights."""


class OurGPT(nn.Module):
    """The harness's GPT in plain torch, with its names, in its order, and the weights of a row of a pack."""

    def __init__(self, trial: Any, weights: dict[str, Tensor]):
        super().__init__()
        self.head_dim, self.depth = trial.model.head_dim, trial.model.depth
        self.rotary = Rotary(trial.model.context, self.head_dim)
        self.blocks = nn.ModuleList(Branch() for _ in range(self.depth))
        self.order = list(weights)
        for name, weight in weights.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                owner = owner[int(part)] if isinstance(owner, nn.ModuleList) else _child(owner, part)
            owner.register_parameter(last, nn.Parameter(weight.clone()))

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        named = dict(super().named_parameters(*args, **options))
        return iter([(name, named[name]) for name in self.order])

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            a, f = block.attention, block.feedforward
            y = _norm(x, block.attention_norm)
            q, k, v = (
                F.linear(y, w).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (a.query, a.key, a.value)
            )
            mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(-2), a.projection)
            x = x + F.linear(F.gelu(F.linear(_norm(x, block.feedforward_norm), f.up)), f.down)
        return F.linear(_norm(x, self.final_norm), self.head)


def _child(owner: nn.Module, name: str) -> nn.Module:
    if not hasattr(owner, name):
        owner.add_module(name, Branch())
    return getattr(owner, name)


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.layer_norm(x, gain.shape, gain, eps=1e-6)


def both(fault: dict[str, Any]) -> tuple[Any, np.ndarray, Any]:
    """The events of the sweep's engine and its deviation, and the attached run."""
    options: dict[str, Any] = {"steps": STEPS, "clip": 1.0, "precision": "fp64", "warmup": 3, "seed": 11}
    golden = engine.trial(**options)
    (chosen,) = chosen_faults(fault)
    struck = engine.trial(**options, fault=chosen.fault)
    pack = engine.pack_of([golden])
    trained = engine.run([golden, struck])
    model = OurGPT(golden, pack.tensors(pack.weights, 0)).double()
    assert list(dict(model.named_parameters())) == list(facts_of(golden).tensors)
    optim, rates = golden.optim, rates_of(golden)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() == 2) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, optim.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: float(rates[min(step, STEPS - 1)]) / optim.lr)
    batches = [pack.objective.batch(step)[0] for step in range(STEPS)]
    with attach(model, adamw, [schedule], fault=fault, twin=True, seed=golden.seeds["fault"]) as run:
        for tokens in run.steps(batches):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            adamw.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            schedule.step()
            run.observe(loss)
    losses = trained.signals["loss"].astype(np.float64)
    assert np.allclose(run.twin_signals["loss"], losses[0], rtol=0, atol=1e-6)
    return trained.result.events[1], losses[1] - losses[0], run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
def test_a_fault_does_what_it_does_in_a_sweep(fault: dict[str, Any]) -> None:
    recorded, deviation, run = both(fault)
    assert len(run.events) == len(recorded) > 0
    for ours, theirs in zip(run.events, recorded, strict=True):
        assert (ours.site, ours.tensor, ours.index, ours.bit, ours.step, ours.mask) == (
            theirs.site,
            theirs.tensor,
            theirs.index,
            theirs.bit,
            theirs.step,
            theirs.mask,
        )
        assert float(ours.before) == pytest.approx(float(theirs.before), rel=1e-7)
        assert float(ours.after) == pytest.approx(float(theirs.after), rel=1e-7)
        if fault["start"] == 0:
            assert ours == theirs, "the very record"
    begin = fault["start"]
    assert not run.deviation[:begin].any() and not deviation[:begin].any()
    finite = np.isfinite(deviation)
    assert np.array_equal(finite, np.isfinite(run.deviation))
    # Losses are stored in float32, and an error of an ulp of a huge loss is huge.
    scale = np.maximum(1.0, np.abs(deviation[finite]))
    assert np.max(np.abs(run.deviation[finite] - deviation[finite]) / scale, initial=0) < 2e-6


# --- records -----------------------------------------------------------------------------------------------------


def test_a_record_of_ones_own_run_is_injected_again(tmp_path: Path) -> None:
    fault = {"name": "weight_bit", "start": 20}
    _, run = attached(plain(), fault=fault, twin=True, out=tmp_path / "a")
    from analysis import open_sweep

    trial = str(open_sweep(tmp_path / "a")["trial"].values[1])
    again = {"name": "replay", "record": f"{tmp_path / 'a'}:{trial}"}
    _, other = attached(plain(), fault=again)
    assert other.events == run.events and other.signals["loss"].tobytes() == run.signals["loss"].tobytes()

    loop = plain()
    with torch.no_grad():
        loop.model.norm.bias += 1
    with pytest.raises(Exception, match=r"weight .* at step 20: before .*, recorded"):
        attached(loop, fault=again)
    small = nn.Linear(3, 3)
    with (
        pytest.raises(ConfigError, match="own.tensors=.*: but fault.record is from a trial with"),
        attach(small, torch.optim.SGD(small.parameters()), fault=again, steps=30) as run,
    ):
        next(run.steps([torch.zeros(1, 3)] * 30))


def test_a_fault_from_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"defaults": ["value"], "about": {"text": "ours"}, "start": 7, "bit": 3}))
    _, run = attached(plain(), fault=file)
    assert [(event.step, event.bit) for event in run.events] == [(7, 3)]
    _, other = attached(plain(), fault=[{"name": str(file), "start": 9}])
    assert [(event.step, event.bit) for event in other.events] == [(9, 3)]
    file.write_text("[1, 2")
    with pytest.raises(ConfigError, match="mine.yaml: is not YAML"):
        attached(plain(), fault=file)
