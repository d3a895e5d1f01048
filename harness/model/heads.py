"""What a trial's objective adds to the tensors of its model, behind all others."""

from __future__ import annotations

from harness.config import Trial
from harness.model.tensors import Kind, ModelTensor

VALUE_HEAD = "value_head"


def heads_of(trial: Trial) -> tuple[ModelTensor, ...]:
    """The value head of a policy with a critic (harness/policy/critic.py), or nothing."""
    has_critic = trial.objective.name == "policy" and trial.section("policy").critic
    return (ModelTensor(VALUE_HEAD, (1, trial.model.width), Kind.VALUE_HEAD),) if has_critic else ()
