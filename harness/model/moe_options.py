"""The section `moe` of a recipe; the branch that reads it is harness/model/branches/moe.py."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import PER_TRIAL, STRUCTURAL, choice, number
from harness.config.limits import MOST_STEPS

MOST = 256  # experts


@dataclass(frozen=True)
class Options:
    """The section `moe` of the recipe."""

    experts: int = number(STRUCTURAL, 4, "experts that the router chooses among", low=1, high=MOST)
    top: int = number(STRUCTURAL, 2, "experts that each token goes to", low=1, high=MOST)
    dense_first: int = number(STRUCTURAL, 0, "blocks, the first ones, that have the dense part instead", low=0)
    shared: int = number(STRUCTURAL, 0, "experts beside them that every token goes to", low=0, high=MOST)
    hidden: int | None = number(
        STRUCTURAL,
        None,
        "hidden size of an expert; null: so that those of one token have as much as the dense part",
        low=1,
        high=2**20,
    )
    routing: str = choice(
        STRUCTURAL,
        "live",
        "by what experts are chosen: the current weights, those of step frozen_from, or a hash of the token",
        "live",
        "frozen",
        "hash",
    )
    frozen_from: int = number(
        PER_TRIAL, 0, "with moe.routing=frozen: the step from which on its weights choose", low=0, high=MOST_STEPS
    )
    lag: int = number(
        STRUCTURAL, 0, "steps before, of whose weights the choice is; 0: the current ones", low=0, high=64
    )
    stale: str = choice(
        STRUCTURAL, "choice", "what is old with a lag: the choice, or its weights too", "choice", "weights"
    )
    stale_when: str = choice(
        PER_TRIAL, "always", "at which steps a lag counts: all, or those for which a playbook asks", "always", "asked"
    )
    gate: str = choice(STRUCTURAL, "softmax", "scores of router logits", table="harness.model.routing:GATES")
    weights: str = choice(
        STRUCTURAL,
        "renormalised",
        "weights of the chosen experts: their scores over the sum of these, or as they are",
        "renormalised",
        "plain",
    )
    scale: float = number(PER_TRIAL, 1.0, "factor on the weights", above=0)
    groups: int = number(STRUCTURAL, 1, "groups of experts, of which the best are looked at", low=1, high=MOST)
    groups_kept: int = number(STRUCTURAL, 1, "groups that are looked at", low=1, high=MOST)
    capacity: float | None = number(
        STRUCTURAL,
        None,
        "room in each expert as a multiple of even loads, beyond which it drops tokens, the last ones; null: none does",
        above=0,
    )
    jitter: float = number(
        PER_TRIAL, 0.0, "what a router reads is multiplied by 1 - jitter to 1 + jitter in training", low=0, below=1
    )
    router_precision: str = choice(
        STRUCTURAL, "fp32", "format of the router's product: that of the weights, or of products", "fp32", "products"
    )
    gate_alpha: float = number(
        STRUCTURAL, 1.0, "a of g sigmoid(a g), the non-linearity of a gate; gpt-oss: 1.702", above=0
    )
    up_offset: float = number(STRUCTURAL, 0.0, "what is added to the linear part of a gated expert; gpt-oss: 1")
    balance: float = number(PER_TRIAL, 0.01, "weight of the balance loss over the batch", low=0)
    balance_sequence: float = number(PER_TRIAL, 0.0, "weight of the balance loss within each sequence", low=0)
    bias_rate: float = number(
        PER_TRIAL, 0.0, "by how much a bias on scores moves after a step, towards even loads; 0: there is none", low=0
    )
    router_z: float = number(PER_TRIAL, 0.0, "weight of the mean squared log-sum-exp of router logits", low=0)
