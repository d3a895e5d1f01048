"""A sampler that is the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.config import Trial
from harness.recovery.base import Action, Detail, Row, not_a_policy


class MatchSampler(Action):
    """The sampler has the trainer's format, temperature and weights, without noise, from the next rollout on.

    What a mismatch has cost so far stays. On a real system it costs the speed for which the sampler was another one.
    """

    takes = True
    changes_course = True
    source = "Qi et al. 2025, arXiv 2510.26788, who have one format on both sides from the start"

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        yield from not_a_policy(trial, "match_sampler")
        if trial.objective.name == "policy" and not trial.section("policy").sampler_apart:
            yield "playbook: match_sampler: policy.sampler_apart=false: it is the trainer already; allowed: true"
        if trial.objective.name == "policy" and trial.section("policy").routing_replay:
            yield "playbook: match_sampler: policy.routing_replay=true replays those of a sampler apart; allowed: false"

    def do(self, row: Row, options: Any) -> Detail:
        row.amend({"policy.sampler_apart": False})
        return {}
