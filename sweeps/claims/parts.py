"""All claims in parts that take some minutes each, so that a table of all of them is trained piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config import Trial
from sweeps.claims.registered import RegisteredClaim
from sweeps.claims.trained import Recipes, trials_of
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import pack_seconds

MINUTES = 30  # of a part, unless one claim takes longer
CORES = 2  # for which parts are cut: on every machine they are the same ones


@dataclass(frozen=True)
class PartOfClaims:
    """Claims of one subject, their first tag. `minutes` are about those of two cores, for their first look."""

    subject: str
    claims: Sequence[RegisteredClaim]
    trials: int
    minutes: float


def parts(claims: Sequence[RegisteredClaim]) -> list[PartOfClaims]:
    """Claims by subject and name, as many to a part as fit its time; a trial that several of them need counts once."""
    recipes: Recipes = {}
    found: list[PartOfClaims] = []
    there: dict[str, Trial] = {}
    for claim in sorted(claims, key=lambda one: (one.tags[0], one.name)):
        own = {each.id: each for trial in trials_of(claim, 1, recipes) for each in (trial, trial.golden)}
        together = there | own
        last = found[-1] if found else None
        if last is not None and last.subject == claim.tags[0] and (minutes := _minutes(together)) <= MINUTES:
            found[-1] = PartOfClaims(last.subject, [*last.claims, claim], len(together), minutes)
            there = together
        else:
            found.append(PartOfClaims(claim.tags[0], [claim], len(own), _minutes(own)))
            there = own
    return found


def _minutes(trials: dict[str, Trial]) -> float:
    seconds = sum(pack_seconds(PackPlan((trial,), frozenset()), "cpu") for trial in trials.values())
    return seconds / CORES / 60
