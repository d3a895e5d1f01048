"""Random streams: those of Python, numpy and torch, and generators of the user's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Streams = dict[str, Any]


def streams() -> Streams:
    """The states of the random streams of Python, numpy and torch."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": on_devices,
    }


def set_streams(kept: Streams) -> None:
    """Go on from these states."""
    random.setstate(kept["python"])
    np.random.set_state(kept["numpy"])
    torch.set_rng_state(kept["torch"])
    if kept["cuda"]:
        torch.cuda.set_rng_state_all(kept["cuda"])


def same_streams(one: Streams, other: Streams) -> bool:
    """Whether nothing was drawn in between."""
    return (
        torch.equal(one["torch"], other["torch"])
        and one["python"] == other["python"]
        and all(np.array_equal(*pair) for pair in zip(one["numpy"], other["numpy"], strict=True))
        and len(one["cuda"]) == len(other["cuda"])
        and all(torch.equal(*pair) for pair in zip(one["cuda"], other["cuda"], strict=True))
    )


@dataclass(frozen=True)
class GeneratorState:
    """A random generator with `state_dict` and `load_state_dict`."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]


def generator_state(generator: Any) -> GeneratorState | None:
    """A generator of torch, Python or numpy in that form; None for anything else."""
    if isinstance(generator, torch.Generator):
        return GeneratorState(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return GeneratorState(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return GeneratorState(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(generator, np.random.RandomState):
        return GeneratorState(generator.get_state, generator.set_state)
    return None
