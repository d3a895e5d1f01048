"""SOAP against a kept package, from bases that are the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytorch_optimizer
import torch
from torch import Tensor

from tests.harness.optimizing import STEPS, TENSORS, Rig, betas, different, drawn, share, starts, taken
from tests.harness.test_optimizers_others import Groups


def test_soap() -> None:
    """Which eigenvectors belong to an eigenvalue of zero is rounding: of the first bases there theirs are taken.

    The next ones are made when gradients have filled all directions. Theirs are made in float32, ours in the format of
    the weights.
    """
    rig, every = Rig(different("soap", options=[{}, {"every": 12}, {"every": 25}])), [10, 12, 25]
    weights, theirs = [], []
    for trial, interval in zip(rig.trials, every, strict=True):
        weights.append([torch.nn.Parameter(starts(trial)[scaled.name]) for scaled in TENSORS])
        flat = {"gains": (18,)}  # of several heads, which are vectors to us
        for weight, scaled in zip(weights[-1], TENSORS, strict=True):
            weight.data = weight.data.reshape(flat.get(scaled.name, scaled.shape))
        groups: Groups = [
            {"params": [weight], "eps": trial.optim.eps * scaled.epsilon}
            for weight, scaled in zip(weights[-1], TENSORS, strict=True)
        ]
        given = {"betas": betas(trial), "weight_decay": 0.0, "precondition_frequency": interval}
        theirs.append(pytorch_optimizer.SOAP(groups, **given))
    for step in range(STEPS):
        rig.train(1, step)
        for row, (trial, optimizer) in enumerate(zip(rig.trials, theirs, strict=True)):
            rate = trial.optim.lr * share(step)
            for group, weight, scaled in zip(optimizer.param_groups, weights[row], TENSORS, strict=True):
                group["lr"] = rate * scaled.learning_rate
                weight.grad = drawn(scaled, trial.seed, step).reshape(weight.shape)
                weight.data.mul_(1 - taken(trial, scaled, rate))  # before the step, which reads no weights
            optimizer.step()
            if step == 0:
                _take_bases(rig, row, optimizer, weights[row])
    for row, trial in enumerate(rig.trials):
        for weight, scaled in zip(weights[row], TENSORS, strict=True):
            found = rig.view(scaled.name, row)
            torch.testing.assert_close(found, weight.detach().reshape(scaled.shape), rtol=1e-6, atol=1e-6)
            assert (found - starts(trial)[scaled.name]).abs().max() > 1e-2 * trial.optim.lr


def _take_bases(rig: Rig, row: int, theirs: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
    """Ours equal theirs but where the eigenvalue is zero, and theirs are ours from here on."""
    for number, (weight, scaled) in enumerate(zip(weights, TENSORS, strict=True)):
        for side, basis in zip(("left", "right"), theirs.state[weight]["Q"], strict=False):
            if len(basis):
                columns = rig.optimizer._columns[f"{side}_basis"][number]
                ours = rig.optimizer.slot(f"{side}_basis")[row, columns].view(basis.shape)
                rank = min(scaled.shape)
                alike = (ours * basis).sum(0)[:rank].abs()  # a sign is free
                torch.testing.assert_close(alike, torch.ones_like(alike), rtol=1e-6, atol=1e-6)
                ours.copy_(basis)
