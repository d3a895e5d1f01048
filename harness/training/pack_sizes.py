"""How many rows, and windows of held-out text, pass through the model together."""

from __future__ import annotations

import torch

from harness.basics.devices import on_cpu
from harness.config import Model

SMALLEST_PACK = 2  # a batch of one takes other kernels, so a trial's bits would change in mid-run


def smallest_pack(device: torch.device) -> int:
    """The fewest rows whose bits are those of a larger pack.

    With fewer trials than threads a CPU splits single matrices, and then rounds them differently.
    """
    return max(SMALLEST_PACK, torch.get_num_threads()) if on_cpu(device) else SMALLEST_PACK


def rows_at_once(model: Model, sequences: int, device: torch.device) -> int:
    """Rows that pass through the model together.

    They are enough that the fixed cost of an operation is shared, few enough that activations stay in the cache.
    `sequences` are those of each trial that pass at once.

    From tests/benchmarks/pack_size.py, see docs/benchmarks.md.
    """
    most, features = (8, 2**18) if on_cpu(device) else (64, 2**25)
    return max(2, min(most, features // (sequences * model.context * model.width)))


def largest_part(rows: int, at_once: int) -> int:
    """The most slots that a part of so many rows has on an accelerator: a power of two, up to `at_once`.

    One for a row that is alone, as it is from its first step to its last.
    """
    return 1 if rows == 1 else 1 << (max(SMALLEST_PACK, min(at_once, 2 * rows - 1)).bit_length() - 1)


def part_size(rows: int, at_once: int) -> int:
    """Slots of each part of so many rows on an accelerator: of that size, or half of it where fewer are idle then."""
    most = largest_part(rows, at_once)
    return min((most, max(min(most, SMALLEST_PACK), most // 2)), key=lambda size: (-rows % size, -size))


def cut(rows: int, at_once: int, device: torch.device) -> list[slice]:
    """Slots that pass through the model one part after the other: of about the size that is fastest, none too small.

    On an accelerator parts are of one size, a power of two, with idle slots behind. A CPU has none of those.
    """
    if on_cpu(device):
        least = smallest_pack(device)
        count = max(1, min(round(rows / max(at_once, least)), rows // least))
        ends = [rows * i // count for i in range(count + 1)]
    else:
        size = part_size(rows, at_once)
        ends = list(range(0, -(-rows // size) * size + 1, size))
    return [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def tried(model: Model, sequences: int, device: torch.device) -> list[int]:
    """Sizes from which a measurement chooses on an accelerator, rising: from a quarter of the rule's to four times it.

    On a CPU, where nothing is measured, the rule's alone.
    """
    rule = rows_at_once(model, sequences, device)
    return [rule] if on_cpu(device) else sorted({max(2, rule * times // 4) for times in (1, 2, 4, 8, 16)})


def windows_at_once(model: Model, vocabulary: int, device: torch.device) -> int:
    """Held-out windows that pass through the model together, for each row, so that the fixed cost is shared.

    On a CPU a third faster than four windows at a time, at widths 32 and 64 with context 32; for CUDA it is a guess.
    """
    return (2**18 if on_cpu(device) else 2**19) // (model.context * max(model.width, vocabulary))
