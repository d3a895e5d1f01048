"""Whether weights and moments stayed as they were while nothing may write to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.model.formats import raw_words
from harness.optim.optimizers.base import Optimizer
from harness.readings.base import ReadingContext, ReadingSignal, StepReading

COLUMNS = 256  # that have a sum each: of two changed bits that would cancel in one sum few stand in one column
SLOTS = ("moment_1", "moment_2")


class AtRest(StepReading):
    """1 where an array is not, right before the update, what it was when the step began, and 0 where it is.

    Between the two a step reads weights and moments, and writes to neither: so a 1 is memory that has lost what it was
    given, or a program that writes where it must not. Sums of the raw words are compared, as in checks of matrices by
    their sums (Huang and Abraham 1984, doi 10.1109/TC.1984.1676475). A wrong gradient is not seen, nor an update that
    is computed wrongly. Of an array that the optimizer does not keep the signal is 0.
    """

    cadence = 0
    help = "whether weights and moments change between the beginning of a step and its update"
    signals = {
        "weights_changed": ReadingSignal((), "1", "whether weights have changed before the update"),
        "moment_1_changed": ReadingSignal((), "1", "whether first moments have changed before the update"),
        "moment_2_changed": ReadingSignal((), "1", "whether second moments have changed before the update"),
    }

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        self._sums: dict[str, Tensor] = {}
        self._changed: dict[str, Tensor] = {}

    def begun(self, optimizer: Optimizer) -> None:
        self._sums = {name: checksums(flat_RxP) for name, flat_RxP in _arrays(optimizer).items()}

    def updates(self, optimizer: Optimizer) -> None:
        now = {name: checksums(flat_RxP) for name, flat_RxP in _arrays(optimizer).items()}
        self._changed = {name: (now[name] != before).any(1).double() for name, before in self._sums.items()}
        self._sums = {}

    def read(self, before_RxP: Tensor | None, optimizer: Optimizer) -> Mapping[str, Tensor]:
        changed, self._changed = self._changed, {}
        unknown = torch.zeros(len(optimizer.weights), dtype=torch.float64, device=self.known.device)
        return {f"{name}_changed": changed.get(name, unknown) for name in ("weights", *SLOTS)}


def _arrays(optimizer: Optimizer) -> dict[str, Tensor]:
    """[R, P] each."""
    return {"weights": optimizer.weights} | {name: optimizer.slot(name) for name in SLOTS if name in optimizer.slots}


def checksums(flat_RxP: Tensor) -> Tensor:
    """Sums of the raw words of each row, modulo 2^64, by column: int64 [R, columns].

    A change of one bit alters one of them, whatever the number format, also where values are NaN.
    """
    words = raw_words(flat_RxP)
    if words.shape[1] * words.element_size() % 8 == 0:
        words = words.view(torch.int64)  # two or four numbers at a time
    whole = words.shape[1] // COLUMNS * COLUMNS
    sums = words[:, :whole].unflatten(1, (-1, COLUMNS)).sum(1)
    return torch.cat([sums, words[:, whole:].to(torch.int64)], 1)
