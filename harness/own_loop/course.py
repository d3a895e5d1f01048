"""The course of somebody's loop: which batch comes next, and what is done when a step of the optimizer is over."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from harness.config import ConfigError, Trial
from harness.guards.base import ASK, FREEZE, GO, GO_AND_ASK
from harness.guards.playbook import refused
from harness.own_loop.batches import END, Batches
from harness.own_loop.legs import RUN, Leg, has_ladder
from harness.own_loop.measures import Measures, Watch
from harness.own_loop.places import Places
from harness.own_loop.presets import Chosen, with_steps
from harness.own_loop.ranks import Ranks
from harness.own_loop.snapshots import Keeper, Snapshot
from harness.own_loop.stepping import Stepping, scaler_among
from harness.own_loop.strikes import Strikes
from harness.own_loop.taps import Taps
from harness.own_loop.treatment import Treatment
from harness.recovery.base import Alarm
from harness.training.remedies import Remedies
from harness.training.sites import Site


@dataclass(frozen=True)
class Asked:
    """What a user has attached, and how; see `harness.own_loop.attach`."""

    model: nn.Module
    optimizers: Sequence[Any]
    extras: Sequence[Any] = ()
    chosen: Sequence[Chosen] = ()
    settings: Trial = field(default_factory=Trial)
    steps: int | None = None
    seed: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


class Plan(Protocol):
    """Which ways through the loop there are."""

    def begin(self, course: Course, loader: Iterable[Any]) -> None:
        """The loop begins, with this loader, and `course.total` is known: go on the first leg."""

    def turn(self, course: Course) -> bool:
        """A leg is over: go on the next one; False: there is none."""

    def stepped(self, course: Course) -> None:
        """A step of the leg at hand is over."""


class Course:
    """Hands out batches and ends steps. A step is over with the pass of the loop in which the optimizer stepped."""

    def __init__(self, asked: Asked, plan: Plan, is_measured: bool = False):
        self.asked, self._plan = asked, plan
        self.places = Places(asked.model, asked.optimizers)
        self.keeper = Keeper(self.places, asked.extras, on_host=True)
        self.scaler, self.ranks, self.batches = scaler_among(asked.extras), Ranks(), Batches()
        self.total = asked.steps  # of the run
        self.step, self.is_over = 0, False
        self.hooks = ExitStack()
        self.as_written: set[int] = set()  # steps that run without compilation, on every leg
        self._ends_with_loader = asked.steps is None
        settings = asked.settings
        self._is_measured = (
            is_measured or bool(asked.chosen) or settings.section("detect").name != "none" or has_ladder(settings)
        )
        self._pass = self._observes = 0
        self._losses: list[Any] = []
        self._judged: tuple[dict[str, bool], dict[str, float], bool] | None = None
        self._answer = GO
        self.leg = self.run_leg = self.new_leg(RUN, 0, asked.chosen)
        self._measures = Measures(self.places)
        self._stepping = Stepping(self.places, self.scaler, self._measures, self.leg.strikes, self.leg.remedies, self)
        self._stepping.measures_now = self._is_measured
        self._taps = Taps(self.places, self.as_written, self.ranks.rank)
        self.hooks.callback(self._taps.close)
        self._stepping.attach(self.hooks)

    # --- legs ----------------------------------------------------------------------------------------------------

    def new_leg(self, kind: str, steps: int, chosen: Sequence[Chosen] = (), is_treated: bool = True) -> Leg:
        """A way through the loop that has not begun, with these faults."""
        asked, remedies, watch = self.asked, Remedies(torch.device("cpu")), Watch(self.asked.settings)
        strikes = Strikes(chosen, self.places, asked.facts, asked.seed, remedies, self.ranks, self.as_written)
        treatment = None
        if is_treated and has_ladder(asked.settings):
            treatment = Treatment(asked.settings, watch, strikes, remedies, self.places, asked.extras)
        return Leg(kind, steps, strikes, remedies, watch, treatment)

    def go(self, leg: Leg, start: Snapshot | None = None) -> None:
        """Go on with a leg, from a snapshot, or from where everything stands."""
        if start is not None:
            self.keeper.put_back(start)
        self.leg, self.step, self._pass = leg, 0 if start is None else start.step, 0
        self._stepping.remedies, self._stepping.strikes = leg.remedies, leg.strikes
        self._stepping.is_muted = leg.is_plain

    # --- passes --------------------------------------------------------------------------------------------------

    def passes(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, and of all legs that follow the run's last step."""
        if self.leg.strikes.facts is None and not self.is_over:
            self.open(_length(loader) if self.total is None else self.total)
            self._plan.begin(self, loader)
        self.batches.begin(loader)
        yield from self.go_on()

    def open(self, total: int) -> None:
        """The run has so many steps. Raises ConfigError for what it cannot have."""
        if not total:
            raise ConfigError("steps=0: nothing to train on; allowed: a loader that is not empty")
        self.total = total
        if reasons := list(refused(with_steps(self.asked.settings, self.total))):
            raise ConfigError(*reasons)
        self.leg.steps = self.total
        if self.leg.treatment and self.leg.treatment.ring:
            self.batches.keeps = 0
        self.leg.strikes.begin(self.total, self.scaler is not None)
        self.go(self.leg)

    def go_on(self) -> Iterator[Any]:
        """The batches of the leg at hand, and of those that follow."""
        while not self.is_over:
            batch = self._next()
            if batch is not END:
                yield batch
                self.end_pass()
                continue
            if self.step < self.leg.steps and not self.leg.stopped and not self._ends_with_loader:
                return  # another loader comes, as in another epoch, or the run ends here
            self.is_over = not self._plan.turn(self)

    def _next(self) -> Any:
        """The batch of the next pass, after the faults that strike before it."""
        leg, step = self.leg, self.step
        if step >= leg.steps or leg.stopped:
            return END
        position = step + leg.remedies.batches(0)
        batch = self.batches.get(position, self._pass)
        if batch is END:
            return END
        if self._pass == 0:
            self.begin_step()
        return batch if leg.is_plain else leg.strikes.batch(position, batch)

    def begin_step(self) -> None:
        """A step of the optimizer begins: keep what it may have to go back to, and let faults strike."""
        leg, step = self.leg, self.step
        self._losses, self._judged, self._answer = [], None, GO
        self._stepping.begin(step)
        if leg.is_plain:
            return
        if leg.treatment:
            leg.treatment.begin(step)
            if leg.treatment.ring and not self.batches.keeps_all:
                self.batches.forget(min(step, leg.treatment.ring.oldest or 0))
        self._taps.begin(leg.strikes, step)
        leg.strikes(Site.WEIGHT, step, lambda: {name: x.data for name, x in self.places.trained.items()})
        if any(leg.strikes.due(Site.LOSS_SCALE, step)):
            leg.strikes(Site.LOSS_SCALE, step, self._stepping.shown_scale)

    def observe(self, loss: Tensor | float) -> None:
        """The loss of the pass at hand."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else float(loss))

    def end_pass(self) -> None:
        """The body of the loop was gone through."""
        self._pass += 1
        if self._stepping.was_asked:
            self._end_step()

    def end_early(self) -> None:
        """The loop was left by `break`: the step at hand counts if the optimizer has stepped in it."""
        is_new = self._stepping.step == self.step and self.leg.series.length <= self.step
        if not self.is_over and self._stepping.was_asked and is_new and self._losses:
            self.end_pass()

    # --- the end of a step ---------------------------------------------------------------------------------------

    def may_step(self) -> bool:
        """Asked by the wrapped optimizer: whether to make the update, as far as is known by now."""
        treatment = self.leg.treatment
        if treatment is None:
            return True
        if len(self._losses) < self._observes or not self._observes:
            treatment.undo.keep()  # the loss comes later
            return True
        self._judge()
        return self._answer not in (ASK, FREEZE)

    def _judge(self) -> None:
        loss = self._mean_loss()
        is_judged = self.scaler is None or self._stepping.has_arrived or not isfinite(loss)
        loss, norm = self.ranks.mean([loss, self._measures.norm()])
        self._judged = self.leg.watch.judge(loss, norm, is_judged)
        if self.leg.treatment:
            self._answer = self.leg.treatment.answer(self.step, self._judged[0], loss, norm, is_judged)

    def _mean_loss(self) -> float:
        if not self._losses:
            raise ConfigError(f"run.observe: was not called in step {self.step}; allowed: once a pass of the loop")
        return float(np.mean([float(loss) for loss in self._losses]))

    def _end_step(self) -> None:
        leg, step = self.leg, self.step
        self._stepping.end()
        self.batches.passes, self._pass = self._pass, 0
        if leg.is_plain:
            self.step += 1
            return
        self._taps.end(leg.strikes, step)
        if self._judged is None and self._is_measured:
            self._judge()
        self._observes = len(self._losses)
        is_taken = self._stepping.is_taken and self._answer not in (ASK, FREEZE)
        if leg.treatment and not is_taken:
            leg.treatment.undo.take_back()
        values = self._measured()
        is_scaled_back = self.scaler is not None and not self._stepping.has_arrived
        is_fine = isfinite(values["loss"]) and (is_scaled_back or isfinite(values.get("grad_norm", 0.0)))
        leg.record(step, values, not is_fine and leg.treatment is None)
        leg.watch.stepped(values, self._stepping.planned)
        leg.strikes.stepped(step)
        if leg.treatment:
            self._answered(leg, values, is_taken)
        else:
            self.step += 1
        self._plan.stepped(self)

    def _measured(self) -> dict[str, float]:
        values = {"loss": self._mean_loss(), "learning_rate": self._stepping.rate}
        if self._is_measured:
            self._measures.after()
            values |= self._measures.told()
        if (scale := self._stepping.scale) is not None:
            values["loss_scale"] = float(scale)
        values = dict(zip(list(values), self.ranks.mean(list(values.values())), strict=True))
        if self._judged:
            alarms, scores, _ = self._judged
            values |= {f"alarm_{name}": float(is_alarm) for name, is_alarm in alarms.items()}
            values |= {f"score_{name}": score for name, score in scores.items()}
        return values

    def _answered(self, leg: Leg, values: Mapping[str, float], is_taken: bool) -> None:
        """Do what the ladder says, and go on where it says."""
        treatment, judged, step, patient = leg.treatment, self._judged, self.step, None
        assert treatment is not None and judged is not None
        alarms, scores, is_late = judged
        if self._answer == FREEZE:
            self._stop(leg)
            return
        raised = {name: scores[name] for name, is_alarm in alarms.items() if is_alarm}
        treatment.is_quiet = is_taken and not raised
        if self._answer in (ASK, GO_AND_ASK):
            norm, usual = values.get("grad_norm", nan), leg.watch.usual
            patient = treatment.settle(Alarm(step, raised, values["loss"], norm, is_taken, is_late, scores, usual))
        elif not raised and leg.watch.names and step != treatment.awaited:
            leg.watch.keep_usual(scores)
        if treatment.has_news:
            patient = treatment.ask_oracle(step)
        self.step = step + 1 if patient is None else patient.goes_on
        if patient is not None and patient.went_back:
            treatment.is_quiet = True
            leg.forget(self.step)
        if patient is not None and patient.is_frozen:
            self._stop(leg)

    def _stop(self, leg: Leg) -> None:
        """The step at hand cannot be taken, and nothing is left to do about it."""
        leg.nonfinite_step = leg.series.length - 1
        leg.stopped = f"step {leg.series.length - 1}: not finite, and the ladder has no rung left for it"
        warnings.warn(f"recover: {leg.stopped}; the run ends with the weights from before that step", stacklevel=5)


def _length(loader: Any) -> int:
    """How many batches a loader has. Raises ConfigError where it does not say."""
    try:
        return len(loader)
    except TypeError:
        why = f"steps=null: a loader of type {type(loader).__name__} does not say how long it is"
        raise ConfigError(f"{why}; allowed: attach(..., steps=N)") from None
