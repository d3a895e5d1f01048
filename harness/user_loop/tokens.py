"""A batch of the user's loader as faults of the data see it: token ids, or rows of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.basics.tensor_bytes import byte_view
from harness.config import ConfigError
from harness.user_loop.batches import changed
from harness.user_loop.named_tensors import tensors_in

IGNORED = -100  # a label that no loss counts, as torch has it
Put = Callable[[Tensor], Any]
WANTED = (
    "ids [B, T]; inputs and targets that are the same text moved by one; or a mapping with input_ids, and labels that "
    "are these"
)


def as_tokens(batch: Any, fault: str) -> tuple[Tensor, Put]:
    """The token ids of a batch, [B, T], a copy, and what makes a batch of others of that shape.

    With inputs and targets [B, T] that are one text moved by one, the whole text, [B, T + 1]. A number in front, as of
    `enumerate`, stays as it is. Raises ConfigError, by the name of the `fault`, for a batch in which no tokens are
    known.
    """
    if isinstance(batch, tuple | list) and len(batch) > 1 and _is_count(batch[0]):
        number, *rest = batch
        its_kind: Any = type(batch)
        if len(rest) > 1:
            ids, put = as_tokens(tuple(rest), fault)
            return ids, lambda tokens: its_kind([number, *put(tokens)])
        ids, put = as_tokens(rest[0], fault)
        return ids, lambda tokens: its_kind([number, put(tokens)])
    if _is_ids(batch):
        return batch.clone(), lambda tokens: tokens
    if isinstance(batch, Mapping) and _is_ids(batch.get("input_ids")):
        return batch["input_ids"].clone(), lambda tokens: _with_ids(batch, tokens)
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(map(_is_ids, batch)):
        inputs, targets = batch
        if inputs.shape == targets.shape and torch.equal(inputs[:, 1:], targets[:, :-1]):
            whole = torch.cat([inputs, targets[:, -1:]], 1)
            parts: Any = type(batch)
            return whole, lambda tokens: parts([tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()])
    if not any(True for _ in tensors_in(batch)):
        raise _no_tensor(batch, fault)
    reason = f"strikes token ids, and none are known in a batch of this kind ({_kind(batch)})"
    raise ConfigError(f"fault={fault}: {reason}; allowed: {WANTED}")


def _no_tensor(batch: Any, fault: str) -> ConfigError:
    """The error for a loop that makes its batches by itself, or hands out other things than tensors."""
    reason = f"strikes batches, and that of this loop has no tensor ({_kind(batch)})"
    allowed = "run.steps(batches) with tensors in them, in place of run.steps(N) or run.next()"
    return ConfigError(f"fault={fault}: {reason}; allowed: {allowed}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _kind(batch: Any) -> str:
    """What a batch is, in a few words: `int`, `tuple of Tensor [8, 64] float32, dict`."""
    if isinstance(batch, Tensor):
        return f"Tensor {list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    name = "None" if batch is None else type(batch).__name__
    return f"{name} of {', '.join(map(_kind, batch))}" if isinstance(batch, tuple | list) and len(batch) < 5 else name


def _is_ids(values: Any) -> bool:
    return isinstance(values, Tensor) and values.dim() == 2 and values.dtype in (torch.int64, torch.int32)


def _with_ids(batch: Mapping[str, Any], tokens: Tensor) -> Any:
    """The same batch with other tokens, and the labels that go with them."""
    made: Any = changed(batch, lambda values: values)
    labels, ids = batch.get("labels"), batch["input_ids"]
    if isinstance(labels, Tensor):
        counts = labels != IGNORED
        if labels.shape != ids.shape or not torch.equal(labels[counts], ids[counts]):
            raise ConfigError(f"fault: the labels of a batch are not its input_ids; allowed: {WANTED}")
        made["labels"] = torch.where(counts, tokens.to(labels.dtype), labels)
    made["input_ids"] = tokens
    return made


def as_rows(batch: Any, fault: str) -> tuple[Tensor, Put]:
    """The samples of a batch as rows of bytes, [B, n], a copy, and what makes a batch of others.

    Every tensor with as many rows as the first is in it. Raises ConfigError, by the name of the `fault`, where there is
    none.
    """
    rows = next((len(x) for x in tensors_in(batch) if x.dim()), 0)
    parts = [x for x in tensors_in(batch) if x.dim() and len(x) == rows]
    if not rows:
        raise _no_tensor(batch, fault)
    flat = [byte_view(x).reshape(rows, -1) for x in parts]

    def put(values: Tensor) -> Any:
        cut = iter(values.split([x.shape[1] for x in flat], 1))

        def replaced(old: Tensor) -> Tensor:
            if not old.dim() or len(old) != rows:
                return old
            values: Tensor = next(cut).reshape(-1).clone().view(old.dtype).reshape(old.shape)
            return values

        return changed(batch, replaced)

    return torch.cat(flat, 1), put
