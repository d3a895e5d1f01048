"""Where norms stand in the residual stream: one row of a table for each published placement.

With f for a branch (attention or feed-forward) and N for the number of blocks, one branch makes of the stream x

    after(skip * x + growth * on_branch(f(before(x))))

in which the three norms are there or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from harness.config import Model, Trial, steps_of


@dataclass(frozen=True)
class Placement:
    """The parts of the equation above that one block has. `grows`: growth is min(1, step / `branch_steps`)."""

    before: bool = False
    on_branch: bool = False
    after: bool = False
    skip: float = 1.0
    grows: bool = False


PRE, POST = Placement(before=True), Placement(after=True)


def _mix(model: Model, block: int) -> Placement:
    """The paper takes floor(mix * N) blocks, which is none in a shallow model; at least one here, unless mix is 0."""
    count = math.floor(model.mix * model.depth + 1e-9)
    return POST if block < max(count, model.mix > 0) else PRE


PLACEMENTS: Mapping[str, Callable[[Model, int], Placement]] = {
    # GPT-2 (Radford et al. 2019); Xiong et al. 2020, arXiv 2002.04745
    "pre": lambda model, block: PRE,
    # Vaswani et al. 2017, arXiv 1706.03762
    "post": lambda model, block: POST,
    # DeepNet, Wang et al. 2022, arXiv 2203.00555, table for a decoder alone; its beta is harness/model/scaling.py's
    "deepnorm": lambda model, block: Placement(after=True, skip=(2 * model.depth) ** 0.25),
    # GLM-130B, Zeng et al. 2022, arXiv 2210.02414, section 2.1
    "deepnorm_glm": lambda model, block: Placement(after=True, skip=(2 * model.depth) ** 0.5),
    # Mix-LN, Li et al. 2024, arXiv 2412.13795
    "mix": _mix,
    # Liu et al. 2023, arXiv 2305.02790: post-LN whose branches have size 0 in step 0
    "branchnorm": lambda model, block: Placement(after=True, grows=True),
    # CogView, Ding et al. 2021, arXiv 2105.13290; Peri-LN, Kim et al. 2025, arXiv 2502.02732
    "sandwich": lambda model, block: Placement(before=True, on_branch=True),
    # OLMo 2, 2025, arXiv 2501.00656, section 3.2; Swin V2, Liu et al. 2021, arXiv 2111.09883
    "branch": lambda model, block: Placement(on_branch=True),
    "none": lambda model, block: Placement(),
}
"""Name -> what the placement gives a block, by its number from 0 on."""


def branch_steps(trial: Trial) -> int:
    """Over how many steps branches grow to their full size, where they do."""
    return steps_of(trial.model.branch_steps, trial.model.branch_share, trial.train.steps, low=1)


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of placements that are not what their name says in a run so short, or a model so shallow."""
    model, steps = trial.model, branch_steps(trial)
    if model.placement == "branchnorm" and steps >= trial.steps:
        why = f"branches still grow at the last of {trial.steps} steps"
        yield "model.branch_steps", f"model.branch_steps={steps}: {why}"
    if model.placement == "mix" and model.mix > 0 and model.mix * model.depth < 1 - 1e-9:
        why = f"of model.depth={model.depth} one block is post-LN, a share of {1 / model.depth:g}"
        needed = f"it takes model.depth >= {math.ceil(1 / model.mix)}"
        yield "model.mix", f"model.mix={model.mix}: {why}; {needed}"


def refused(trial: Trial) -> Iterator[str]:
    """Norms of their own where the placement has one."""
    model = trial.model
    if model.placement in ("sandwich", "branch"):
        for name in (name for name in ("projection_norm", "down_norm") if getattr(model, name)):
            why = f"model.placement={model.placement} has a norm there already"
            yield f"model.{name}=true: {why}; allowed: false, or another placement"


def placement_of(model: Model, block: int) -> Placement:
    """Where norms stand in one block."""
    return PLACEMENTS[model.placement](model, block)


def has_final_norm(model: Model) -> bool:
    """Whether a norm stands before the head: where blocks have norms, and the last leaves the stream without one."""
    last = placement_of(model, model.depth - 1)
    return (last.before or last.on_branch) and not last.after
