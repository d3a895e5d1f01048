"""The training loop of a pack, on one screen: every site at which a fault can strike is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from harness.clipping import clip_by_global_norm, global_norm
from harness.outcome import judge
from harness.pack import Pack
from harness.signals import Recorder, Write
from harness.sites import Agenda, Event, Site

SHRINK_SHARE = 0.25  # the pack drops its frozen trials once they are this share of it
SMALLEST_PACK = 2  # a batch of one takes other kernels, so a trial's bits would change in mid-run


@dataclass
class Result:
    """What a trained pack leaves beside its signals; one entry a planned trial."""

    outcome: list[str] = field(default_factory=list)
    nonfinite_step: list[int | None] = field(default_factory=list)
    events: list[list[Event]] = field(default_factory=list)


def train(
    pack: Pack,
    agenda: Agenda,
    block: int,
    write: Write,
    progress: Callable[[int, int], None] = lambda steps, frozen: None,
    telemetry: bool = True,
    detection: bool = True,
) -> Result:
    """Train every trial of the pack to its last step, or until it is not finite.

    `write(first_step, signals)` gets each block of steps, `progress(steps done, trials frozen)` follows it.
    A trial whose loss or gradient is not finite freezes: that step and all later ones change none of its weights.
    The host waits for the device once a block, and at the step of a strike. Without `telemetry` only the loss, the
    learning rate and validation are recorded; without `detection` nothing freezes. Neither changes a healthy trial.
    """
    recorder = Recorder(pack, block, write, telemetry)

    def strike(site: Site, step: int, tensors: Callable[[int], Mapping[str, Tensor]]) -> None:
        for planned in agenda.due(site, step):
            row = pack.row_of(planned)
            if row is not None:
                agenda.strike(planned, tensors(row), step)

    for step in range(pack.steps):
        rate = pack.learning_rates[step].clone()
        strike(Site.LEARNING_RATE, step, partial(_one, "learning_rate", rate))
        batch = pack.batches(step)
        strike(Site.BATCH, step, partial(_one, "batch", batch))
        strike(Site.WEIGHT, step, partial(pack.tensors, pack.weights))

        recorder.begin(step)
        loss = pack.loss(batch)
        loss.sum().backward()
        strike(Site.REDUCED_GRADIENT, step, partial(pack.tensors, pack.gradients))

        norm = global_norm(pack.gradients) if pack.clips or telemetry or detection else None
        measured = pack.active
        if detection and norm is not None:
            pack.active = measured & torch.isfinite(loss) & torch.isfinite(norm)
        if pack.clips and norm is not None:
            clip_by_global_norm(pack.gradients, norm, pack.clip)
        strike(Site.CLIPPED_GRADIENT, step, partial(pack.tensors, pack.gradients))
        strike(Site.MOMENT_1, step, partial(pack.tensors, pack.optimizer.moment_1))
        strike(Site.MOMENT_2, step, partial(pack.tensors, pack.optimizer.moment_2))
        norms = pack.optimizer.step(rate, pack.active, measure=telemetry)

        recorder.record(step, loss, norm, rate, norms, measured)
        if recorder.flush_if_due(step):
            progress(step + 1, len(recorder.nonfinite))
            _shrink(pack)
            if not bool(pack.active.any()):
                break

    recorder.close()
    steps = [recorder.nonfinite.get(trial) for trial in range(len(pack.planned))]
    outcome = [judge(loss, step) for loss, step in zip(recorder.losses(), steps, strict=True)]
    return Result(outcome, steps, agenda.events)


def _one(name: str, values: Tensor, row: int) -> Mapping[str, Tensor]:
    return {name: values[row]}


def _shrink(pack: Pack) -> None:
    """Drop the frozen trials when they are many, but keep the smallest pack whose bits are those of a larger one."""
    active = pack.active.tolist()
    frozen = [row for row, on in enumerate(active) if not on]
    if len(frozen) < SHRINK_SHARE * len(active):
        return
    kept = [row for row, on in enumerate(active) if on]
    # With fewer trials than threads a CPU splits single matrices, and then rounds them differently.
    smallest = max(SMALLEST_PACK, torch.get_num_threads()) if pack.device.type == "cpu" else SMALLEST_PACK
    kept += frozen[: max(0, smallest - len(kept))]
    if len(kept) < len(active):
        pack.keep(sorted(kept))
