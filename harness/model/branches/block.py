"""Which kinds of branches stand in a block: the section `block` of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import STRUCTURAL, choice

KINDS = "harness.model.branches:BRANCHES"


@dataclass(frozen=True)
class Options:
    """A block's branches, in the order in which they act; all blocks are alike."""

    token_mixer: str = choice(STRUCTURAL, "attention", "branch through which tokens see earlier ones", table=KINDS)
    channel_mixer: str = choice(STRUCTURAL, "feedforward", "branch behind it, for each token alone", table=KINDS)
