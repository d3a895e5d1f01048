"""The step is not taken."""

from __future__ import annotations

from typing import Any

from harness.recovery.base import Action, Detail, Row


class Skip(Action):
    """Weights and moments stay bit for bit what they are, whatever is in the gradient, and the next batch comes."""

    source = "OLMo-core, optim/skip_step_optimizer.py; Levanter, MaxText, torchft"

    def do(self, row: Row, options: Any) -> Detail:
        return {}
