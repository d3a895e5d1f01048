"""The norms: name -> function of activations [R, ..., D], the gains of D features, and epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from harness.config import Model
from harness.model.layers import Leaf, layer_norm, rms_norm

NORMS: Mapping[str, Callable[[Tensor, Leaf, float], Tensor]] = {
    "layer": layer_norm,  # Ba et al. 2016, arXiv 1607.06450
    "rms": rms_norm,  # Zhang & Sennrich 2019, arXiv 1910.07467
}


def kept_by_norms(model: Model, fed: int) -> int:
    """Values that norms leave for the backward pass: two, or with RMSNorm one, for each that they are fed."""
    return (2 if model.norm == "layer" else 1) * fed
