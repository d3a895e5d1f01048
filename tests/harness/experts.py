"""A mixture of experts as tests make one: its trials, and its branch by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.config import Trial
from harness.model.branches import branches_of
from harness.testing import engine
from harness.training.pack import Pack

NAME, WIDTH, HIDDEN, EXPERTS, TOP = "blocks.0.moe", 16, 12, 8, 2
SHAPE: dict[str, Any] = {
    "depth": 1,
    "width": WIDTH,
    "context": 8,
    "batch": 2,
    "precision": "fp64",
    "activation": "swiglu",
}
SHAPE |= {"block": {"channel_mixer": "moe"}}
OF_EXPERTS = {
    "expert_output",
    "expert_share",
    "router_logits",
    "routing_flips",
}  # detectors that want a model with experts
OF_OTHERS = {*OF_EXPERTS, "policy_entropy", "policy_kl", "policy_mismatch", "policy_reward"}  # or a policy
SIZES = {"experts": EXPERTS, "top": TOP, "hidden": HIDDEN, "balance": 0.0}


def mixed(moe: dict[str, Any] | None = None, **fields: Any) -> Trial:
    return engine.trial(**{**SHAPE, **fields, "moe": {**SIZES, **(moe or {})}})


def branch_of(trial: Trial) -> tuple[Pack, Callable[[Tensor], Tensor]]:
    """A pack of two rows with rough weights, and its branch as a function of [R, N, D]."""
    pack = engine.pack_of([trial, trial])
    with torch.no_grad():
        for values in (pack.weights, dict(pack.rows_state).get("router_bias", torch.empty(0))):
            values.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    (branch,) = (one for one in branches_of(trial) if one.kind == "moe")
    tools = pack.model.tools()
    return pack, lambda x: branch(tools, NAME, x, trial.model.context)
