"""A change of rate, an epoch's end, a state that is loaded or a layer that is unfrozen is no incident."""

from __future__ import annotations

import pytest
import torch

from harness import attach
from harness.objectives.outcome import TRAINED
from tests.user_loop.folders import Regression
from tests.user_loop.healthy import EPOCH, HEALTHY, STEPS, alarms_of, bare
from tests.user_loop.loops import same

SEEDS = range(20, 22)  # nothing was tuned on them
CHANGES = {  # steps at which something changes that is no fault; else at each epoch
    "residual": (STEPS // 2, 3 * STEPS // 4),
    "restored": (100, 170),
    "unfrozen": (60, 120),
    "adapters": (20,),
    "graph": (),
    "variational": (),
    "recurrent": (),
}
AFTER = 4  # steps in which such a change could be seen
QUIET = ["SGD, rate to a tenth", "residual", "variational", "restored"]


def test_changes_of_a_healthy_run_raise_no_alarm() -> None:
    """Chance leaves one in 500 steps, here as anywhere in these loops of small batches; there were 60 in 1,000."""
    seen, looked, ended = [], 0, {}
    for name, make in HEALTHY.items():
        for seed in SEEDS:
            script = make(seed)
            with attach(script.model, script.optimizers, script.extra) as run:
                script.go(run)
            ended[name, seed] = run.outcome.split(";")[0]
            changes = CHANGES.get(name, range(EPOCH, STEPS, EPOCH))
            near = {step for change in changes for step in range(change, change + AFTER)}
            seen += [(name, seed, step) for step in sorted(set(alarms_of(run)) & near)]
            looked += len(near)
    assert looked > 270 and len(seen) <= looked // 100, seen
    assert set(ended.values()) == {TRAINED}, ended


def test_a_model_that_is_trained_already_ends_as_trained() -> None:
    """A regression that begins where it would end: 150 steps of noise, of which eight in ten runs were divergent."""
    ended = []
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        model, true = torch.nn.Linear(5, 1), torch.randn(1, 5, generator=draw)
        model.load_state_dict({"weight": true.clone(), "bias": torch.zeros(1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with attach(model, optimizer, steps=150, detect=None) as run:
            for x in run.steps(torch.randn(150, 16, 5, generator=draw)):
                loss = (model(x) - x @ true.T - 0.5 * torch.randn(16, 1, generator=draw)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.observe(loss)
        ended.append(run.outcome)
    assert ended == [TRAINED] * 20


@pytest.mark.parametrize("name", QUIET)
def test_repair_leaves_a_healthy_run_alone(name: str) -> None:
    untouched = bare(HEALTHY[name], SEEDS[0])
    script = HEALTHY[name](SEEDS[0])
    with attach(script.model, script.optimizers, script.extra, recover="repair") as run:
        script.go(run)
    assert run.incidents == [] and same(script.state(), untouched.state())


def test_weights_that_grow_fast_from_the_start_are_no_alarm() -> None:
    """By a tenth of their norm in a step: the first change is the scale of what its trend may be off by."""
    loop = Regression()
    with attach(loop.model, loop.optimizer, steps=12, recover="repair") as run:
        for batch in run.steps(loop.loader(12)):
            run.observe(loop.body(batch))
    norms = run.signals["param_norm"]
    assert norms[1] > 1.1 * norms[0] and run.incidents == [] and list(alarms_of(run)) == []


@pytest.mark.parametrize("name", [name for name in QUIET if name != "restored"])  # which would undo it
def test_a_fault_at_such_a_change_is_found(name: str) -> None:
    """Though the trend of the weights' norm is lost where the rate is new."""
    change = next(iter(CHANGES.get(name, [EPOCH])), EPOCH)
    script = HEALTHY[name](SEEDS[0])
    named = [key for key, weight in script.model.named_parameters() if weight.dim() > 1]
    fault = {"name": "weight_bit", "start": change, "bit": 30, "tensor": named[0], "element": 0}
    with attach(script.model, script.optimizers, script.extra, fault=fault) as run:
        script.go(run)
    (event,) = run.events
    if abs(float(event.before)) < 2:  # above it the flipped bit makes a number small
        assert change <= min(alarms_of(run)) <= change + 1
