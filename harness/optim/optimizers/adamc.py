"""AdamC: AdamW whose weight decay falls with the square of the rate, but for the head."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from harness.config import Trial
from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Multipliers, Numbers, Piece, Step


class AdamC(Adam):
    """Defazio 2025 (arXiv 2506.02285), algorithm 1: of matrices that norms follow, decay is multiplied by rate / peak.

    Norms make the size of such a matrix settle where decay and steps balance, and the size of its gradient goes the
    other way: with AdamW it grows as the rate falls to its end. All matrices are taken for such but the head, which
    no norm follows, as in the paper; where the embedding is the head, the embedding.
    """

    per_tensor = True

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        yield from super().idle(trial)
        if trial.optim.weight_decay == 0:
            yield "optim.name", "optim.name=adamc: is AdamW where nothing decays, with optim.weight_decay=0"

    def numbers(self, h: Numbers) -> Numbers:
        share = h["rate"] / self._peak.clamp(min=1e-300)  # a peak of 0 has rates of 0
        kept = {
            _kept(multipliers): 1 - taken * h["rate"] * multipliers[0] * share
            for multipliers, taken in self._decays.items()
        }
        return {**super().numbers(h), **kept}

    def pace(self, piece: Piece, step: Step) -> tuple[Tensor, Tensor]:
        pace, kept = step.paces[piece.multipliers]
        return pace, kept if piece.is_head else step.numbers[_kept(piece.multipliers)]


def _kept(multipliers: Multipliers) -> str:
    return f"kept {multipliers}"
