"""What trials have learned: their last weights, where a sweep had `keep=weights`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from harness.config import ConfigError, Trial, sections
from harness.model.gpt2 import gpt2_of
from harness.storage.last_weights import read_weights

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def load_weights(out: Path | str, trial: Any) -> dict[str, Tensor]:
    """The last weights of a trial of the sweep in `out`.

    Args:
        out: A results folder of a sweep with `keep=weights`.
        trial: Its id, as the coordinate `trial` of `open_sweep` has it.

    Returns:
        By name, `blocks.0.attention.query` [out, in] and so on; float32, and float64 with train.precision=fp64. A trial
        that became non-finite has the weights with which it stood still.

    Raises:
        ConfigError: `out` has none of that trial, or damaged ones. It is a ValueError.
    """
    return read_weights(Path(out), str(getattr(trial, "values", trial)))[1]


def to_gpt2(out: Path | str, trial: Any) -> GPT2LMHeadModel:
    """The trained trial as a GPT-2 of `transformers`, which computes the same logits.

    Use it for generation, or save it with `save_pretrained` for other tools of evaluation.

    Args:
        out: A results folder of a sweep with `keep=weights`.
        trial: Its id, as the coordinate `trial` of `open_sweep` has it.

    Returns:
        A `GPT2LMHeadModel` in evaluation mode.

    Raises:
        ConfigError: As `load_weights`, and for a structure that is no GPT-2 (rotary positions, a gate, QK-norm ...), by
            key.
        ImportError: `transformers` is not installed (`pip install stability-harness[transformers]`).
    """
    name = str(getattr(trial, "values", trial))
    config, tensors = read_weights(Path(out), name)
    try:
        parts = {part: cls(**config[part]) for part, cls in sections().items() if part in config}
        return gpt2_of(Trial.of(parts), tensors)
    except (ConfigError, ImportError):
        raise
    except Exception as error:  # whatever transformers makes of numbers that are none
        reason = f"are not those of its configuration ({type(error).__name__}: {str(error)!r:.100})"
        raise ConfigError(f"out={out}: the weights of trial {name} {reason}; allowed: as a sweep writes them") from None
