"""Where norms stand in the residual stream: one row of a table for each published placement.

With f for a branch (attention or feed-forward) and N for the number of blocks, one branch makes of the stream x

    after(skip * x + growth * on_branch(f(before(x))))

in which the three norms are there or not. Which of them are may differ from block to block, and between the branches
of one: `place` is 0 for the first of them, attention, and 1 for the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from harness.config import Model, Trial, steps_of
from harness.model.layers import DYNAMIC_TANH


@dataclass(frozen=True)
class Placement:
    """The parts of the equation above that one block has. `grows`: growth is min(1, step / `branch_steps`)."""

    before: bool = False
    on_branch: bool = False
    after: bool = False
    skip: float = 1.0
    grows: bool = False


PRE, POST = Placement(before=True), Placement(after=True)


def _mix(model: Model, block: int, place: int) -> Placement:
    """The paper takes floor(mix * N) blocks, which is none in a shallow model; at least one here, unless mix is 0."""
    count = math.floor(model.mix * model.depth + 1e-9)
    return POST if block < max(count, model.mix > 0) else PRE


def _hybrid(model: Model, block: int, place: int) -> Placement:
    """The norm behind attention is that in front of the feed-forward part, and what goes on beside it passes too."""
    return POST if place == 0 else Placement()


PLACEMENTS: Mapping[str, Callable[[Model, int, int], Placement]] = {
    # GPT-2 (Radford et al. 2019); Xiong et al. 2020, arXiv 2002.04745
    "pre": lambda model, block, place: PRE,
    # Vaswani et al. 2017, arXiv 1706.03762
    "post": lambda model, block, place: POST,
    # DeepNet, Wang et al. 2022, arXiv 2203.00555, table for a decoder alone; its beta is harness/model/scaling.py's
    "deepnorm": lambda model, block, place: Placement(after=True, skip=(2 * model.depth) ** 0.25),
    # GLM-130B, Zeng et al. 2022, arXiv 2210.02414, section 2.1
    "deepnorm_glm": lambda model, block, place: Placement(after=True, skip=(2 * model.depth) ** 0.5),
    # Mix-LN, Li et al. 2024, arXiv 2412.13795
    "mix": _mix,
    # Liu et al. 2023, arXiv 2305.02790: post-LN whose branches have size 0 in step 0
    "branchnorm": lambda model, block, place: Placement(after=True, grows=True),
    # CogView, Ding et al. 2021, arXiv 2105.13290; Peri-LN, Kim et al. 2025, arXiv 2502.02732
    "sandwich": lambda model, block, place: Placement(before=True, on_branch=True),
    # OLMo 2, 2025, arXiv 2501.00656, section 3.2; Swin V2, Liu et al. 2021, arXiv 2111.09883
    "branch": lambda model, block, place: Placement(on_branch=True),
    # HybridNorm and HybridNorm*, Zhuo et al. 2025, arXiv 2503.04598, as their code has them; with norms on each head's
    # queries, keys and values
    "hybrid": _hybrid,
    "hybrid_star": lambda model, block, place: PRE if block == 0 else _hybrid(model, block, place),
    "none": lambda model, block, place: Placement(),
}
"""Name -> what the placement gives a branch, by the number of its block, from 0 on, and its place there."""


ONLY_WITH = {
    "mix": ("placement", "mix"),
    **dict.fromkeys(("branch_steps", "branch_share"), ("placement", "branchnorm")),
    "dyt_alpha": ("norm", DYNAMIC_TANH),
}
"""Fields of the model, and the value of another field without which nothing reads them."""


def branch_steps(trial: Trial) -> int:
    """Over how many steps branches grow to their full size, where they do."""
    return steps_of(trial.model.branch_steps, trial.model.branch_share, trial.train.steps, low=1)


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of placements that are not what their name says in a run so short, or a model so shallow."""
    model, steps = trial.model, branch_steps(trial)
    for name, (field, wanted) in ONLY_WITH.items():
        if getattr(model, name) != getattr(Model(), name) and (value := getattr(model, field)) != wanted:
            yield f"model.{name}", f"model.{name}={getattr(model, name)}: has no part in model.{field}={value}"
    if model.placement == "branchnorm" and steps >= trial.steps:
        why = f"branches still grow at the last of {trial.steps} steps"
        yield "model.branch_steps", f"model.branch_steps={steps}: {why}"
    if model.placement == "mix" and model.mix > 0 and model.mix * model.depth < 1 - 1e-9:
        why = f"of model.depth={model.depth} one block is post-LN, a share of {1 / model.depth:g}"
        needed = f"it takes model.depth >= {math.ceil(1 / model.mix)}"
        yield "model.mix", f"model.mix={model.mix}: {why}; {needed}"
    if model.depth_scaled_norms and any(_in_front(model)) and not any(_in_front(model)[1:]):
        why = "only the first block has norms in front of its branches, and they are multiplied by 1"
        yield "model.depth_scaled_norms", f"model.depth_scaled_norms=true: {why}"


def _in_front(model: Model) -> list[bool]:
    """Whether a norm stands in front of a branch, for each block."""
    are_there = model.attention_norm, model.feedforward_norm
    return [
        any(placement_of(model, block, place).before and is_there for place, is_there in enumerate(are_there))
        for block in range(model.depth)
    ]


def refused(trial: Trial) -> Iterator[str]:
    """Norms of their own where the placement has one."""
    model = trial.model
    if model.placement in ("sandwich", "branch"):
        for name in (name for name in ("projection_norm", "down_norm") if getattr(model, name)):
            why = f"model.placement={model.placement} has a norm there already"
            yield f"model.{name}=true: {why}; allowed: false, or another placement"
    if model.depth_scaled_norms and not any(_in_front(model)):
        why = f"model.placement={model.placement} has no norm in front of a branch"
        yield f"model.depth_scaled_norms=true: {why}; allowed: false, or model.placement=pre, sandwich, mix"


def placement_of(model: Model, block: int, place: int) -> Placement:
    """Where norms stand at one branch of a block."""
    return PLACEMENTS[model.placement](model, block, place)


def has_final_norm(model: Model) -> bool:
    """Whether a norm stands before the head: where blocks have norms, and the last leaves the stream without one."""
    first, last = (placement_of(model, model.depth - 1, place) for place in (0, 1))
    has_norms = any(at.before or at.on_branch or at.after for at in (first, last))
    return has_norms and not last.after
