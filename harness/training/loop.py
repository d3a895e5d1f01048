"""The training loop of a pack, on one screen: every site at which a fault can strike is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.optim.clipping import global_norm
from harness.storage.checkpoint import Checkpoints, Saved
from harness.training.acts import idle_parts
from harness.training.leaving import Leave, hand_over
from harness.training.outcome import judge
from harness.training.pack import Pack
from harness.training.pack_sizes import smallest_pack
from harness.training.resume import restore, state_of
from harness.training.signals import Recorder, Write
from harness.training.sites import Agenda, Event, Site
from harness.training.strikes import Strikes, one

SHRINK_SHARE = 0.25  # the pack drops the rows of trials that are done once they are this share of it


@dataclass
class Result:
    """What a trained pack leaves beside its signals; one entry a planned trial."""

    outcome: list[str]
    nonfinite_step: list[int | None]
    masked_step: list[int | None]
    events: list[list[Event]]
    strikes: list[int]
    changes: list[int]
    dropped: list[list[dict[str, Any]]]
    acts: list[dict[str, int]]  # by part of the recipe, at how many steps it acted
    idle: list[dict[str, str]]  # by part that could not act, why
    digest: list[str]  # of all losses: that of another trial is equal where those are, bit for bit
    ends: dict[str, np.ndarray] = field(
        compare=False
    )  # as `harness.storage.store.ENDS` has them; arrays have no one equality


def train(
    pack: Pack,
    agenda: Agenda,
    block: int,
    write: Write,
    progress: Callable[[int, int], None] = lambda steps, frozen: None,
    telemetry: bool = True,
    detection: bool = True,
    steps: range | None = None,
    checkpoints: Checkpoints | None = None,
    saved: Saved | None = None,
    leave: Leave | None = None,
) -> Result:
    """Train every trial of the pack to its last step (or through `steps`), or until it is not finite.

    It goes on from `saved`, if that is given, and saves `checkpoints`; raises Stopped after one of them if they say so.

    `write(first_step, signals)` gets each block of steps. `progress(steps done, trials frozen)` follows each step; what
    has frozen is known once a block.
    A trial whose loss or gradient is not finite freezes: that step and all later ones change none of its weights.
    With dynamic loss scaling a gradient alone costs it that step and half of its scale (harness/optim/loss_scale.py).
    One whose batch is dropped as a whole misses that step and nothing else (harness/data/screening.py).
    `leave` is given each trial's last weights, when its row goes or at the end (harness/storage/last_weights.py).
    The host waits for the device once a block, and at the step of a strike. Without `telemetry` only the loss, the
    two factors in force and validation are recorded; without `detection` nothing freezes. Neither changes a healthy
    trial.
    """
    recorder, strike = Recorder(pack, block, write, telemetry), Strikes(pack, agenda)
    state = partial(state_of, pack, agenda, recorder)
    if saved:
        restore(saved, pack, agenda, recorder)
        steps = range(saved.step, pack.steps)
    pack.ranks.verify(state)
    for step in steps if steps is not None else range(pack.steps):
        pack.fork(step)
        rate = pack.learning_rate(step)
        strike(Site.LEARNING_RATE, step, one("learning_rate", rate))
        batch = pack.batches(step)
        strike(Site.BATCH, step, one("batch", batch))
        batch, weights = pack.what_trains(batch, step)
        strike(Site.WEIGHT, step, partial(pack.tensors, pack.weights))
        strike(Site.LOSS_SCALE, step, pack.loss_scale.shown)

        pack.begin(step)
        recorder.begin(step)
        scale, losses = pack.loss_scale.scale.clone(), []
        for rank, part in pack.ranks.parts(batch):
            own = None if weights is None else pack.ranks.part(weights, rank)
            losses.append(pack.learn(part, own, strike.at_taps(step, rank), rank))
            strike.at_gradient(step, rank)
            pack.ranks.add(pack.gradients)
        pack.ranks.finish(pack.gradients)
        pack.loss_scale.unscale(pack.gradients)
        loss = pack.ranks.mean(losses).where(pack.screening.trains, torch.nan)
        strike(Site.REDUCED_GRADIENT, step, partial(pack.tensors, pack.gradients))

        is_judged = detection or pack.loss_scale.is_dynamic
        norm = global_norm(pack.gradients) if pack.clippers or telemetry or is_judged else None
        measured, stepping = pack.active.clone(), pack.active & pack.screening.trains
        if is_judged and norm is not None:
            stepping = _judge(pack, loss, norm, detection)
        if norm is not None:
            pack.clip(norm, stepping)
        strike(Site.CLIPPED_GRADIENT, step, partial(pack.tensors, pack.gradients))
        strike(Site.MOMENT_1, step, partial(pack.slot, "moment_1"))
        strike(Site.MOMENT_2, step, partial(pack.slot, "moment_2"))
        strike(Site.BEFORE_UPDATE, step, pack.state)
        norms = pack.step(rate, stepping, measure=telemetry)
        strike(Site.UPDATE, step, pack.state)

        recorder.record(step, loss, norm, rate, scale, norms, measured)
        if pack.device.type == "cpu" or recorder.is_due(step):
            pack.find_masked(step, agenda.last, loss)
        if recorder.is_due(step):
            pack.ranks.verify(state)
            recorder.flush()
            _shrink(pack, recorder.nonfinite, leave)
            if not bool(pack.active.any()):
                break
        progress(step + 1, len(recorder.nonfinite))
        if checkpoints and step + 1 < pack.steps and pack.ranks.agreed(checkpoints.is_due(step + 1)):
            pack.ranks.verify(state)
            checkpoints.save(step + 1, *state())
    result = _result(pack, agenda, recorder)
    if leave:
        hand_over(pack, range(len(pack)), recorder.nonfinite, leave)
    return result


def _judge(pack: Pack, loss: Tensor, norm: Tensor, detection: bool) -> Tensor:
    """Freeze the trials that cannot go on, and adapt the loss scales. Returns the trials whose weights change, [R]."""
    scaling, finite, trains = pack.loss_scale, pack.can_step(norm), pack.screening.trains
    can_go_on = scaling.adapt(finite, pack.active & trains)
    if detection:
        pack.active = pack.active & (torch.isfinite(loss) & can_go_on | ~trains)
    stepping = pack.active & trains
    return stepping & (finite | ~scaling.dynamic) if scaling.is_dynamic else stepping


def _result(pack: Pack, agenda: Agenda, recorder: Recorder) -> Result:
    recorder.close()
    numbers = range(len(pack.planned))
    nonfinite = [recorder.nonfinite_step(number) for number in numbers]
    outcome = [judge(loss, step) for loss, step in zip(recorder.losses(), nonfinite, strict=True)]
    masked = [pack.twins.masked.get(number) for number in numbers]
    dropped = pack.twins.records(pack.screening.records)
    acts, idle = pack.acts.found(pack.twins, pack.steps - 1), [idle_parts(trial) for trial in pack.planned]
    ends = recorder.ends()
    digest = digests(recorder.losses(), *ends.values())
    strikes, changes = agenda.strikes, agenda.changes
    return Result(outcome, nonfinite, masked, agenda.events, strikes, changes, dropped, acts, idle, digest, ends)


def digests(*values: np.ndarray) -> list[str]:
    """For each trial, a hash of the bits of its values [R, n] in all arrays."""
    return [
        hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()[:16] for rows in zip(*values, strict=True)
    ]


def _shrink(pack: Pack, nonfinite: Mapping[int, int], leave: Leave | None) -> None:
    """Drop the rows of frozen and masked trials when they are many, but keep the smallest pack that rounds alike."""
    active = pack.active.tolist()
    done = [row for row, on in enumerate(active) if not on or pack.rows[row] in pack.twins.masked]
    if len(done) < SHRINK_SHARE * len(active):
        return
    kept = sorted(set(range(len(active))) - set(done))
    kept += done[: max(0, smallest_pack(pack.device) - len(kept))]
    if len(kept) < len(active):
        if leave:
            hand_over(pack, sorted(set(range(len(active))) - set(kept)), nonfinite, leave)
        pack.keep(sorted(kept))
