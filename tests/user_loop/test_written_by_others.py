"""A training script of the form of nanoGPT's train.py: few of its lines change, and none of its bits."""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np
import pytest
import torch

from tests.user_loop.loops import same

BEFORE = """\
import math
import torch
from torch.nn import functional as F
from tests.plain_gpt import PlainGPT

eval_interval, log_interval, eval_iters = 4, 5, 2
gradient_accumulation_steps, batch_size, block_size = 2, 4, 16
learning_rate, max_iters, warmup_iters, lr_decay_iters, min_lr = 1e-2, 13, 3, 13, 1e-3
grad_clip = 1.0

torch.manual_seed(1337)
data = torch.randint(64, (2000,)).cumsum(0) % 64


def get_batch(split):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


iter_num = 0
best_val_loss = 1e9
model = PlainGPT(64, 16, 1, 8, block_size)
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


def loss_of(x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.tensor([loss_of(*get_batch("val")) for _ in range(eval_iters)])
    model.train()
    return losses.mean()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train")
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        best_val_loss = min(best_val_loss, estimate_loss())
    for micro_step in range(gradient_accumulation_steps):
        loss = loss_of(X, Y) / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
"""

AFTER = (
    BEFORE.replace("import torch\n", "import torch\nfrom harness import attach\n", 1)
    .replace('X, Y = get_batch("train")\nwhile True:\n', 'X, Y = get_batch("train")\nwhile run.next():\n')
    .replace("while run", "run = attach(model, optimizer, [scaler], steps=max_iters + 1, **options)\nwhile run")
    .replace("next():\n", "next():\n    X, Y, iter_num = run.carry(X=X, Y=Y, iter_num=iter_num)\n")
    .replace("    iter_num += 1\n", "    run.observe(loss * gradient_accumulation_steps)\n    iter_num += 1\n")
    .replace("        break\n", "        pass  # run.next() ends the loop\n")
)
STEPS, STRUCK = 14, 7


def script(text: str, **options: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"options": options}
    exec(compile(text, "train.py", "exec"), names)
    return names


def state(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    kept = enumerate(names["optimizer"].state.values())
    moments = {f"{n} {key}": value for n, one in kept for key, value in one.items()}
    return {**names["model"].state_dict(), **moments}


def test_six_lines_change() -> None:
    lines = list(difflib.ndiff(BEFORE.splitlines(), AFTER.splitlines()))
    assert sum(line.startswith("+ ") for line in lines) == 6 and sum(line.startswith("- ") for line in lines) == 2


@pytest.mark.parametrize("options", [{}, {"detect": None}, {"recover": "repair"}, {"twin": True}])
def test_it_trains_the_same_bits(options: dict[str, Any]) -> None:
    before, after = script(BEFORE), script(AFTER, **options)
    assert same(state(before), state(after)) and after["run"].outcome == "trained"
    assert len(after["run"].signals["loss"]) == STEPS
    if "twin" in options:
        assert not after["run"].deviation.any(), "without a fault the twin is the run"


def test_its_twin_is_the_clean_run_and_repair_ends_as_that() -> None:
    clean = script(AFTER)
    fault = {"name": "weight_bit", "start": STRUCK, "tensor": "*up*", "bit": 30}
    run = script(AFTER, fault=fault, twin=True, detect=None)["run"]
    assert run.twin_signals["loss"].tobytes() == clean["run"].signals["loss"].tobytes()
    assert not run.deviation[:STRUCK].any() and not np.array_equal(run.deviation[STRUCK:], np.zeros(STEPS - STRUCK))
    repaired = script(AFTER, fault=fault, recover="repair")
    assert len(repaired["run"].incidents) == 1 and same(state(script(BEFORE)), state(repaired))


@pytest.mark.parametrize(("recover", "refused"), [(None, "no twin"), ("repair", "an error")])
def test_without_carrying_its_batch_it_is_told_so(recover: str | None, refused: str) -> None:
    """What the loop keeps from step to step is named: an argument of the model, and never a verdict on the fault."""
    text = AFTER.replace("    X, Y, iter_num = run.carry(X=X, Y=Y, iter_num=iter_num)\n", "")
    fault = {"name": "weight_bit", "start": STRUCK, "tensor": "*up*", "bit": 30}
    words = r"argument 0 of the model's call 1; allowed: run.carry\(NAME=value\) for a batch"
    if recover is None:
        with pytest.warns(UserWarning, match=rf"twin: there is none, because .*{words}"):
            script(text, fault=fault, twin=True)
    else:
        with pytest.raises(ValueError, match=words):
            script(text, fault=fault, recover=recover)
