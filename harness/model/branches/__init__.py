"""Kinds of branches: one file each. A new one is a new file here; nothing else needs to know it."""

from __future__ import annotations

from collections.abc import Iterator

from harness.basics import plugins
from harness.config import Trial, sections, shown
from harness.model.branches.base import Branch, Branches

__all__ = ["BRANCHES", "Branch", "Branches", "branches_of", "refused"]

BRANCHES: dict[str, type[Branch]] = plugins.subclasses("branches", Branch)
"""Every kind of branch, by the name of its module."""


def branches_of(trial: Trial) -> Branches:
    """The branches of each block of the trial's model, in the order in which they act."""
    kinds = vars(trial.section("block")).values()
    return tuple(
        BRANCHES[kind](kind, trial.model, trial.section(kind) if kind in sections() else None) for kind in kinds
    )


def refused(trial: Trial) -> Iterator[str]:
    """What the branches of a trial cannot be, and values that only a branch reads which is not there."""
    places = vars(trial.section("block"))
    for place, kind in list(places.items())[1:]:
        if kind == places["token_mixer"]:
            yield f"block.{place}={kind}: stands in block.token_mixer already; allowed: another kind"
    kinds = {branch.at(block).kind for branch in branches_of(trial) for block in range(trial.model.depth)}
    for kind in (kind for kind in BRANCHES if kind not in kinds):
        where = " and ".join(f"block.{place}={kind}" for place, kind in places.items())
        others = {name for other in kinds for name in BRANCHES[other].fields}
        own = [name for name in BRANCHES[kind].fields if name not in others]
        read = {"model": own, **({kind: vars(trial.section(kind))} if kind in sections() else {})}
        for section, names in read.items():
            values = trial.section(section)
            for name in names:
                value, default = getattr(values, name), getattr(type(values)(), name)
                if value != default:
                    key, there = f"{section}.{name}={shown(value)}", f"{shown(default)}, or a block with {kind}"
                    yield f"{key}: reaches nothing, as {kind} is not in a block of {where}; allowed: {there}"
    for branch in branches_of(trial):
        yield from branch.refused(trial)
