"""Which runs of a sweep are of conditions on which constants of detectors were chosen, and which judge them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import xarray as xr
from omegaconf import OmegaConf

from harness.storage.stored import PackInfo

TUNE, TEST, MIXED = "tune", "test", "mixed"
SAID = {
    TEST: "test conditions, which share no recipe, width, batch or text with any on which constants were chosen",
    TUNE: "conditions on which constants were chosen",
    MIXED: "conditions that share a recipe, width, batch or text with those on which constants were chosen",
}


@cache
def _registered() -> tuple[dict[str, list[Any]], str]:
    """What conditions.yaml has, and the first digits of its SHA-256."""
    text = resources.files("analysis.measures").joinpath("conditions.yaml").read_text()
    known: Any = OmegaConf.to_container(OmegaConf.create(text))
    return known, hashlib.sha256(text.encode()).hexdigest()[:8]


def registration() -> str:
    """The first eight digits of the SHA-256 of the file in which conditions are cut."""
    return _registered()[1]


def kind_of(trial: Mapping[str, Any]) -> str:
    """`TUNE`: recipe, width, batch and text are all registered; `TEST`: none of them is; `MIXED`: some are.

    `trial` is a configuration as stores have it. A loop of the user's own shares nothing that is known: `TEST`.
    """
    model, train, data = (trial.get(name, {}) for name in ("model", "train", "data"))
    own = {
        "recipe": trial.get("recipe"),
        "width": model.get("width"),
        "batch": [train.get("batch"), model.get("context")],
        "text": [data.get("source"), data.get("tokenizer")],
    }
    shared = [own[name] in known for name, known in _registered()[0].items()]
    return TUNE if all(shared) else MIXED if any(shared) else TEST


def kinds(sweep: xr.Dataset, packs: Sequence[PackInfo]) -> np.ndarray:
    """`kind_of` each trial of a sweep, [trial]; `packs` are those of its store (`analysis.reading.open_with_packs`)."""
    described = {
        name: kind_of(trial)
        for pack in packs
        for name, trial in zip(pack.attributes["ids"], pack.attributes["trials"], strict=True)
    }
    return np.array([described[str(name)] for name in sweep["trial"].values])
