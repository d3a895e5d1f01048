"""How many tokens of a sequence are prompt, and how many sequences of a rollout a pass trains on."""

from __future__ import annotations

from harness.config import Trial


def prompt_tokens(trial: Trial) -> int:
    """P: the tokens of a prompt; the rest of `model.context` + 1 are those of its completion."""
    given: int | None = trial.section("policy").prompt
    return max(1, trial.model.context // 4) if given is None else given


def trained_sequences(trial: Trial) -> int:
    """Sequences of a rank's micro-batch, with any objective; of a policy, those of one minibatch, without the text."""
    count = trial.section("policy").minibatches if trial.objective.name == "policy" else 1
    return max(1, trial.train.sequences // count)
