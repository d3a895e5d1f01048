"""Routing by older weights for a while."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, Trial, number
from harness.recovery.base import Action, Detail, Row


@dataclass(frozen=True)
class Options:
    """`playbook.anticipate.*`."""

    steps: int | None = number(PER_TRIAL, 50, "for so many steps tokens go by older weights; null: for good", low=1)


class Anticipate(Action):
    """Tokens go to the experts that weights of `moe.lag` steps before choose, for some steps or for good.

    After `roll_back` in the same rung, as published, from the snapshot on.
    """

    takes = True
    changes_course = True
    source = "DeepSeek-V4's report, section 4.2.3; lag, trigger and duration are not published"

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        if trial.section("block").channel_mixer != "moe":
            yield "playbook: anticipate: there are no experts; allowed: block.channel_mixer=moe moe.lag=N"
        elif trial.section("moe").lag == 0:
            yield "playbook: anticipate: moe.lag=0: no older weights choose; allowed: moe.lag=1 to 64"
        elif trial.section("moe").stale_when == "always":
            yield "playbook: anticipate: moe.stale_when=always: they choose already; allowed: moe.stale_when=asked"

    def do(self, row: Row, options: Any) -> Detail:
        row.route_stale(options.steps)
        return {"steps": options.steps}
