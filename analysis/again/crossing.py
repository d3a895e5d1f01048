"""The cross test: batches at which one run spiked, fed to another: is it the data, or the state of the run?

PaLM restarted from another checkpoint and read the batches of a spike there: it did not spike (Chowdhery et al. 2022,
arXiv 2204.02311, section 5.1), so those batches were not bad as such.

The other run is trained again up to the step, fault included: runs follow from their configuration alone, bit for bit
on the same machine but for rounding where it was trained beside others. Then it takes loss and gradient of each batch,
and no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from analysis.again.batches import CPU, BatchReader
from harness.config import ConfigError, Trial
from harness.detectors.windows import MAD_TO_STD
from harness.loop.loop import train
from harness.model.determinism import make_deterministic, settings_kept
from harness.optim.clipping import global_norm
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from injectors import InjectableFault

OWN = 20  # batches of the other run that it would read next, or its last ones: what is usual for it there
SPIKES_SIGMA, SPIKES_LOSS, SPIKES_NORM = 6.0, 0.25, 2.0  # deviations; nat/token or times the gradient norm, at least
BLOCK = 32
STATE, DATA = "state", "data"


@dataclass(frozen=True)
class Crossed:
    """Losses and gradient norms of the other run on the offending batches, and on its own, with the verdict."""

    step: int  # at which the other run stood
    steps: tuple[int, ...]  # those of the offending batches
    losses: np.ndarray
    norms: np.ndarray
    own_losses: np.ndarray
    own_norms: np.ndarray
    verdict: str

    @property
    def words(self) -> str:
        """What it means."""
        if self.verdict == DATA:
            return "data: it spikes there too, so the batches are bad as such."
        return "state: it does not spike there, so what was wrong was the state of the run, or what was done to it."


@settings_kept()
def crossed(reading: BatchReader, steps: Sequence[int], other: BatchReader, at: int) -> Crossed:
    """Feed the batches of `steps` that one trial has read to another, trained up to step `at` of its own.

    Near its end the other's own batches are its last `OWN`.

    Raises ConfigError for a trial with other sizes or another text, for one that has become non-finite before, and for
    one that cannot be trained again.
    """
    for name, here, there in (
        ("model.context", reading.trial.model.context, other.trial.model.context),
        ("the text's fingerprint", reading.corpus.fingerprint, other.corpus.fingerprint),
    ):
        if here != there:
            raise ConfigError(
                f"OTHER={other.trial.id}: {name} is {there}, and TRIAL's {here}; allowed: one with the same"
            )
    if other.trial.model.start is not None:
        why = "begins with weights of a file, which is not opened unasked"
        raise ConfigError(f"OTHER={other.trial.id}: {why}; allowed: one that begins with its own")
    at = min(at, other.trial.steps)
    offending = [reading.batch(step) for step in steps]
    pack = _trained(other.trial, other, at)
    clean = other.clean
    first = max(0, min(at, other.trial.steps - OWN))  # the last ones, if the run ends sooner
    own = [_judged(pack, clean.batch(step), at) for step in range(first, min(first + OWN, other.trial.steps))]
    theirs = [_judged(pack, batch, at) for batch in offending]
    own_losses, own_norms = np.array(own).T
    losses, norms = np.array(theirs).T
    is_data = _spikes(losses, own_losses, SPIKES_LOSS) or _spikes(np.log(norms), np.log(own_norms), np.log(SPIKES_NORM))
    return Crossed(at, tuple(steps), losses, norms, own_losses, own_norms, DATA if is_data else STATE)


def _spikes(values: np.ndarray, usual: np.ndarray, least: float) -> bool:
    """Whether any of `values` is far above the usual."""
    middle = np.median(usual)
    deviation = MAD_TO_STD * np.median(np.abs(usual - middle))
    return bool((~(values - middle <= max(SPIKES_SIGMA * deviation, least))).any())


def _trained(trial: Trial, reading: BatchReader, until: int) -> Pack:
    """The trial as it stands before step `until`. Raises ConfigError."""
    make_deterministic(CPU)
    try:
        armed = trial.fault.arm(reading.facts) if isinstance(trial.fault, InjectableFault) else None
        pack = Pack([trial], reading.corpus, CPU)
        ended = (
            train(pack, FaultSchedule([armed]), BLOCK, lambda first_step, signals: None, until=until) if until else None
        )
    except (ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        reason = f"cannot be trained again ({type(error).__name__}: {str(error)!r:.80})"
        raise ConfigError(f"OTHER={trial.id}: {reason}; allowed: a trial of this version's") from None
    if ended and (broken := ended.nonfinite_step[0]) is not None:
        raise ConfigError(
            f"OTHER={trial.id}: was not finite any more at step {broken}, before {until}; allowed: another"
        )
    return pack


def _judged(pack: Pack, tokens: np.ndarray, step: int) -> tuple[float, float]:
    """Loss and gradient norm of one batch, with the weights as they are."""
    batch = torch.as_tensor(tokens)[None]
    pack.begin(min(step, pack.steps - 1))
    with pack.model.taps.muted():
        loss = pack.learn(batch)
    pack.loss_scale.unscale(pack.gradients)
    return float(loss[0]), float(global_norm(pack.gradients)[0])
