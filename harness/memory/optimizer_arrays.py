"""What an optimizer keeps beside two moments, which plans count for every one."""

from __future__ import annotations

from functools import lru_cache

from harness.config import Model, Trial
from harness.model.branches import Branches, branches_of
from harness.model.heads import heads_of
from harness.model.precision import FORMATS
from harness.model.scaling import tensor_table
from harness.model.tensors import ModelTensor
from harness.optim.optimizers import OPTIMIZERS


def optimizer_bytes(trial: Trial) -> int:
    """Memory of what one trial's optimizer keeps beside two arrays as long as the weights."""
    state, _ = FORMATS[trial.train.precision]
    heads = heads_of(trial)
    return state.itemsize * _numbers(trial.model, trial.data.vocabulary, branches_of(trial), heads, trial.optim.name)


@lru_cache(maxsize=256)
def _numbers(model: Model, vocabulary: int, branches: Branches, heads: tuple[ModelTensor, ...], optimizer: str) -> int:
    tensors = tensor_table(model, vocabulary, branches=branches, heads=heads)
    whole = max(0, len(OPTIMIZERS[optimizer].slots) - 2) * sum(scaled.size for scaled in tensors)
    return whole + sum(size(scaled) for size in OPTIMIZERS[optimizer].tensor_slots.values() for scaled in tensors)
