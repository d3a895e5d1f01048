"""A step in three acts: what goes into it is fed, it is done, and what it came to is kept.

Only the middle one is done by the device alone: it reads nothing of the host that changes from step to step, so it can
be recorded once and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.incidents.guard_runner import GuardRunner
from harness.optim.after_step import buffers_of
from harness.optim.clipping import global_norm
from harness.policy.rows import PassingRows
from harness.training.blocks import Found
from harness.training.pack import Pack
from harness.training.row_steps import PackStep
from harness.training.signals import Recorder
from harness.training.sites import Site
from harness.training.strikes import Strikes, one


@dataclass(frozen=True)
class Fed:
    """What a step is given beside the state of the pack.

    The rate in force, that of the schedule, and tokens so far [R]; the batch as it trains and the weight of each of its
    sequences (None: all count alike); how many of them were dropped [R], which rows train in this pass [R], and of
    which of them anything of the batch is left [R]. Where experts may be those of older weights: the batch that is
    looked at, and in which rows they are [R].
    """

    rate: Tensor
    scheduled: Tensor
    tokens: Tensor
    batch: Tensor
    weights: Tensor | None
    dropped: Tensor
    here: Tensor
    trains: Tensor
    ahead: Tensor | None = None
    stale: Tensor | None = None


class Passes:
    """The steps of a pack. `telemetry` and `detection` as `harness.loop.loop.train` has them."""

    def __init__(
        self, pack: Pack, recorder: Recorder, answers: GuardRunner, strike: Strikes, telemetry: bool, detection: bool
    ):
        self.pack, self.recorder, self.answers, self.strike = pack, recorder, answers, strike
        self._telemetry = telemetry
        self._nan = torch.full((), torch.nan, dtype=pack.dtype, device=pack.device)
        self._has_norm = bool(pack.clippers) or telemetry or detection or pack.loss_scale.is_dynamic

    def feed(self, pack_step: PackStep) -> Fed:
        """Rate and batch of a step, struck where they are to be."""
        pack, strike = self.pack, self.strike
        rate = pack.learning_rate(pack_step.steps)
        scheduled = rate.clone()
        strike(Site.LEARNING_RATE, pack_step, one("learning_rate", rate))
        batch = pack.batch(pack_step.steps)
        strike(Site.BATCH, pack_step, one("batch", batch))
        here = pack.here(pack_step)
        batch, weights = pack.what_trains(batch, pack_step.steps, pack_step.size, here)
        pack.model.stand_at(pack_step.steps)
        tokens, objective = pack.tokens(pack_step.steps), pack.objective
        of_batch = batch, weights, objective.dropped, here, objective.trains
        return Fed(rate, scheduled, tokens, *of_batch, *pack.routes(pack_step.steps))

    def train(self, pack_step: PackStep, fed: Fed) -> Found:
        """The step itself: every site between the batch and the update is in it."""
        pack, recorder, strike, here = self.pack, self.recorder, self.strike, fed.here
        recorder.begun(pack_step)
        strike(Site.WEIGHT, pack_step, partial(pack.tensors, pack.weights))
        strike(Site.BUFFER, pack_step, partial(buffers_of, pack.model))
        strike(Site.LOSS_SCALE, pack_step, pack.loss_scale.shown)

        pack.know_weights(here)
        if pack.stale_routing and fed.stale is not None:
            pack.stale_routing.begin(pack.objective.forward, fed.batch, fed.ahead, fed.stale, here)
        passing = PassingRows(pack.weights, pack.parts, here)
        batch = pack.objective.roll_out(fed.batch, passing, strike.at(pack_step))
        recorder.begin(pack_step, batch)
        scale, losses = pack.loss_scale.scale.clone(), []
        for rank, part in pack.ranks.parts(batch):
            of_part = None if fed.weights is None else pack.ranks.part(fed.weights, rank)
            losses.append(pack.learn(part, of_part, strike.at_taps(pack_step, rank), rank))
            strike.at_gradient(pack_step, rank)
            for clipper in pack.rank_clippers:
                of_rank = global_norm(pack.gradients) / pack.loss_scale.of_part(scale)
                pack.acts.notice(clipper.part, clipper.clip(pack.gradients, of_rank, here), slice(None))
            pack.ranks.add(pack.gradients)
        pack.ranks.finish(pack.gradients)
        pack.unscale()
        loss = pack.ranks.mean(losses).where(fed.trains, self._nan).detach()
        strike(Site.REDUCED_GRADIENT, pack_step, partial(pack.tensors, pack.gradients))

        norm = global_norm(pack.gradients) if self._has_norm else None
        stepping = self.answers.judge(loss, norm, here, fed.trains)
        if norm is not None:
            pack.clip(norm, stepping)
        strike(Site.CLIPPED_GRADIENT, pack_step, partial(pack.tensors, pack.gradients))
        strike(Site.MOMENT_1, pack_step, partial(pack.slot, "moment_1"))
        strike(Site.MOMENT_2, pack_step, partial(pack.slot, "moment_2"))
        strike(Site.BEFORE_UPDATE, pack_step, pack.state)
        recorder.updates()
        norms = pack.step(fed.rate, stepping, measure=self._telemetry)
        strike(Site.UPDATE, pack_step, pack.state)

        values = {"loss": loss, "learning_rate": fed.rate, "loss_scale": scale}
        values |= {"scheduled_rate": fed.scheduled, "tokens": fed.tokens, "dropped": fed.dropped}
        return recorder.found(values if norm is None else values | {"grad_norm": norm}, norms, here)
