"""Batches as they train while sequences or batches grow: what a loader hands out is whole, and is cut here."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from harness.config import Trial
from harness.config.curriculum import Curriculum


def loaded(sizes: Curriculum, batch_RxBxT1: Tensor, step: int) -> Tensor:
    """The sequences of the loader's batch that train at this step, still whole: [R, b, T+1]."""
    return batch_RxBxT1[:, : int(sizes.sequences[step])]


def cut(sizes: Curriculum, batch_RxBxT1: Tensor, step: int) -> Tensor:
    """Sequences [R, b, T+1] as they train at this step: [R, b x pieces, t+1], each t inputs and their targets."""
    length = int(sizes.lengths[step])
    if length == sizes.context:
        return batch_RxBxT1
    if sizes.pieces[step] == 1:
        return batch_RxBxT1[:, :, : length + 1]
    # A piece begins with the token that the one before it ended with, as targets are inputs moved by one.
    return batch_RxBxT1.unfold(2, length + 1, length).flatten(1, 2)


def share_out(sizes: Curriculum, values_RxB: Tensor, step: int) -> Tensor:
    """A number for each sequence [R, b], given to each of its pieces: [R, b x pieces]."""
    pieces = int(sizes.pieces[step])
    return values_RxB if pieces == 1 else values_RxB.repeat_interleave(pieces, dim=1)


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of sequences or batches that do not grow, or not to their end."""
    growth, sizes = trial.schedule, trial.curriculum
    for name, start, whole in (
        ("sequence", growth.sequence_start, trial.model.context),
        ("batch", growth.batch_start, trial.train.batch),
    ):
        steps = getattr(growth, f"{name}_steps")
        if start is not None and start >= whole:
            yield f"schedule.{name}_start", f"schedule.{name}_start={start}: is the full size, so that nothing grows"
        elif start is not None and steps >= sizes.steps:
            yield f"schedule.{name}_steps", f"schedule.{name}_steps={steps}: grows through all {sizes.steps} steps"


def refused(trial: Trial) -> Iterator[str]:
    """Sequences or batches that begin beyond their full size."""
    growth, context, batch = trial.schedule, trial.model.context, trial.train.batch
    for name, start, whole, why in (
        ("sequence", growth.sequence_start, context, f"longer than model.context={context}"),
        ("batch", growth.batch_start, batch, f"more than train.batch={batch}"),
    ):
        if (start or 0) > whole:
            yield f"schedule.{name}_start={start}: {why}; allowed: 1 to {whole} or null"
