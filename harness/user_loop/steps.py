"""One step of the user's loop: what is kept before it, what it measures, and what is done when it is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.config import ConfigError, Trial
from harness.detectors.loop_signals import BEGAN, JUDGED, RATE
from harness.guards.base import ASK, FREEZE, GO, GO_AND_ASK
from harness.recovery.base import Alarm
from harness.training.interventions import Interventions
from harness.training.sites import Site
from harness.user_loop.batches import BatchBuffer
from harness.user_loop.hooks import Hook
from harness.user_loop.inputs import Inputs, NotRepeated, not_repeated
from harness.user_loop.loop_state import LoopState
from harness.user_loop.measures import MEASURED_AT_END, Measures, SeenStep, Watch, said
from harness.user_loop.named_tensors import NamedTensors, inner_optimizer
from harness.user_loop.presets import ChosenFault, looks_at_rest
from harness.user_loop.ranks import Ranks
from harness.user_loop.recovery_session import RecoverySession
from harness.user_loop.replays import RUN, LoopReplay, has_ladder
from harness.user_loop.snapshots import Keeper, Snapshot
from harness.user_loop.stepping import Stepping, scaler_among
from harness.user_loop.strikes import LoopStrikes
from harness.user_loop.taps import ModuleTaps
from harness.user_loop.warn import warn

ATTACHED: WeakKeyDictionary[Optimizer, ExitStack] = WeakKeyDictionary()
"""The hooks of each optimizer that is attached now."""


def detach(optimizer: Any) -> bool:
    """Whether an optimizer was attached; nothing of its run changes it, or its model, any more."""
    hooks = ATTACHED.get(inner_optimizer(optimizer))
    if hooks is not None:
        hooks.close()
    return hooks is not None


@dataclass(frozen=True)
class AttachConfig:
    """What a user has attached, and how; see `harness.user_loop.attach`."""

    model: nn.Module
    optimizers: Sequence[Any]
    extras: Sequence[Any] = ()
    chosen: Sequence[ChosenFault] = ()
    settings: Trial = field(default_factory=Trial)
    steps: int | None = None
    seed: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    on_alarm: Callable[[Alarm], Any] | None = None


class Steps:
    """A step is one of the optimizer: it is over with the pass of the loop in which an optimizer stepped.

    What it acquires of the user's objects is released by `hooks`, also where the beginning fails half-way.
    """

    def __init__(self, asked: AttachConfig, is_measured: bool = False):
        self.asked = asked
        self.places, self.loop = NamedTensors(asked.model, asked.optimizers), LoopState()
        self.keeper = Keeper(self.places, asked.extras, self.loop, on_host=True)
        self.scaler, self.ranks, self.batches = scaler_among(asked.extras), Ranks(), BatchBuffer()
        self.inputs = Inputs(self.places.outer)
        self.total = asked.steps  # of the run
        self.step, self.is_over = 0, False
        self.first_step = 0  # of this process, where a run goes on
        self.as_written: set[int] = set()  # steps that run without compilation, on every replay
        settings = asked.settings
        self._is_measured = (
            is_measured or bool(asked.chosen) or settings.section("detect").name != "none" or has_ladder(settings)
        )
        self._pass = self._observes = 0
        self._losses: list[Any] = []
        self._judged: tuple[dict[str, bool], dict[str, float], bool] | None = None
        self._shown: tuple[float, float, bool] | None = None  # loss, gradient norm, whether detectors judge it
        self._answer = GO
        self._is_judged = True
        self._is_again = False  # the run has gone back to the step at hand
        self._carried = True  # snapshots have the gradients
        self._ends_finite = False  # the norms that were measured as the last step ended, and it was not undone
        self.replay = self.run_replay = self.new_replay(RUN, 0, asked.chosen)
        self._measures = Measures(self.places, looks_at_rest(asked.settings))
        with ExitStack() as hooks:
            self._claim(hooks)
            hooks.callback(self.inputs.close)
            self._stepping = Stepping(
                self.places, self.scaler, self._measures, self.replay.strikes, self.replay.interventions, self
            )
            self._stepping.measures_now = self._is_measured
            self._taps = ModuleTaps(self.places, self.as_written, self.ranks.rank)
            hooks.callback(self._taps.close)
            self._stepping.attach(hooks)
            self._follow_restored(hooks)
            self.hooks = hooks.pop_all()
            for optimizer in self.places.optimizers:
                ATTACHED[optimizer] = self.hooks
        if self.replay.session and self.replay.session.ring:
            self.expect_replays()

    def _claim(self, hooks: ExitStack) -> None:
        """Each optimizer is attached once at a time."""
        for optimizer in self.places.optimizers:
            if optimizer in ATTACHED:
                why = "is attached already, to a run that has not ended"
                allowed = "run.close() of that run first, or attach.detach(optimizer)"
                raise ConfigError(f"optimizer={type(optimizer).__name__}: {why}; allowed: {allowed}")
        for optimizer in self.places.optimizers:
            hooks.callback(ATTACHED.pop, optimizer, None)

    def _follow_restored(self, hooks: ExitStack) -> None:
        """A state that the loop loads is a new beginning for detectors."""

        def restored(*_: Any) -> None:
            self._is_restored = True
            self._measures.begun()

        self._is_restored = self._began_anew = False
        for owner in (self.places.model, *self.places.optimizers):
            if hasattr(owner, "register_load_state_dict_post_hook"):
                hooks.callback(owner.register_load_state_dict_post_hook(Hook(restored)).remove)

    def expect_replays(self) -> None:
        """Steps may be run again: what enters the model and what the loop carries is followed from here on."""
        self.loop.keeps = self._stepping.follows_gradients = True
        self.inputs.follow()

    def new_replay(
        self, kind: str, steps: int, chosen: Sequence[ChosenFault] = (), is_treated: bool = True
    ) -> LoopReplay:
        """A way through the loop that has not begun, with these faults."""
        asked, interventions, watch = self.asked, Interventions(torch.device("cpu")), Watch(self.asked.settings)
        strikes = LoopStrikes(chosen, self.places, asked.facts, asked.seed, interventions, self.ranks, self.as_written)
        session = None
        if is_treated and has_ladder(asked.settings):
            session = RecoverySession(
                asked.settings, watch, strikes, interventions, self.places, asked.extras, self.loop
            )
        return LoopReplay(kind, steps, strikes, interventions, watch, session)

    def take_snapshot(self) -> Snapshot:
        """All there is before the step at hand."""
        return self.keeper.take(self.step, with_gradients=self._stepping.carries_gradients is not False)

    def take_first_snapshot(self) -> Snapshot:
        """All there is before the first loader is opened."""
        return replace(self.take_snapshot(), is_before_loader=True)

    # --- a step begins -------------------------------------------------------------------------------------------

    def begin_step(self, goes_straight_on: bool = False) -> None:
        """A step of the optimizer begins: keep what it may have to go back to, and let faults strike.

        `goes_straight_on`: none of the loop's own code ran since the step before.
        """
        replay, step = self.replay, self.step
        self._losses, self._judged, self._shown, self._answer = [], None, None, GO
        self.places.refresh()
        if replay.sees_trained(step, tuple(self.places.trained)):
            self._is_restored = True  # norms of other weights than before
        self._begun(replay, step)
        self._stepping.begin(step)
        carries = self._stepping.carries_gradients is not False
        if replay.session:
            if replay.session.ring and carries and not self._carried:
                replay.session.ring.clear()  # its snapshots lack the gradients to which steps add
            replay.session.begin(step, carries, goes_straight_on and self._ends_finite)
            if replay.session.ring and not self.batches.keeps_all:
                self.batches.forget(min(step, replay.session.ring.oldest or 0))
        self._carried = carries
        self._expect_inputs(replay, step)
        self._taps.begin(replay.strikes, step)
        self._measures.begun()
        replay.strikes(Site.WEIGHT, step, lambda: {name: x.data for name, x in self.places.owned.items()})
        if any(replay.strikes.due(Site.BUFFER, step)):
            replay.strikes(Site.BUFFER, step, lambda: {name: x.data for name, x in self.places.struck_buffers.items()})
            if replay.session:
                replay.session.undo.see_buffers()
        if any(replay.strikes.due(Site.LOSS_SCALE, step)):
            replay.strikes(Site.LOSS_SCALE, step, self._stepping.shown_scale)

    def _begun(self, replay: LoopReplay, step: int) -> None:
        """What else is done before a step of a replay, which has its first batch."""

    def _expect_inputs(self, replay: LoopReplay, step: int) -> None:
        """What has to enter the model in a step that was run before."""
        position = step + replay.interventions.batches(0)
        if self._is_again:
            self.inputs.begin(replay.records.calls.get(position), only_first=True, raises=True)
        elif replay.comparison is not None:
            self.inputs.begin(*replay.comparison.calls(step, position), raises=replay.comparison.raises)
        else:
            self.inputs.begin(None, only_first=False, raises=False)

    def observe(self, loss: Tensor | float) -> None:
        """The loss of the pass at hand."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else float(loss))

    # --- the end of a step ---------------------------------------------------------------------------------------

    def may_step(self) -> bool:
        """Asked by the wrapped optimizer: whether to make the update, as far as is known by now."""
        session = self.replay.session
        if session is None:
            return True
        if len(self._losses) < self._observes or not self._observes:
            session.undo.keep()  # the loss comes later
            return True
        self._judge(is_judged=True)
        return self._answer not in (ASK, FREEZE)

    def _judge(self, is_judged: bool) -> None:
        """Not `is_judged`: the scaler has kept the optimizer from stepping, because gradients have overflowed."""
        loss = self._mean_loss()
        is_judged = is_judged or not isfinite(loss)
        self._is_judged = is_judged
        loss, norm = self.ranks.mean([loss, self._measures.norm()])
        self._began_anew, self._is_restored = self._is_restored, False
        self._shown = loss, norm, is_judged
        if self.asked.on_alarm is None and self.replay.session is None:
            return  # nobody waits for it
        if self._began_anew:
            self.replay.watch.restart()
        self._judged = self.replay.watch.judge(loss, norm, self.step, is_judged)
        if self.replay.session:
            self._answer = self.replay.session.answer(self.step, self._judged[0], loss, norm, is_judged)

    def _mean_loss(self) -> float:
        if not self._losses:
            raise ConfigError(f"run.observe: was not called in step {self.step}; allowed: once a pass of the loop")
        return sum(map(float, self._losses)) / len(self._losses)

    def _end_step(self) -> None:
        """An optimizer stepped, and the pass is over."""
        replay, step = self.replay, self.step
        self._stepping.end()
        self.batches.passes, self._pass = self._pass, 0
        self._taps.end(replay.strikes, step)
        self.inputs.rest()
        if self._judged is None and self._is_measured:
            self._judge(is_judged=self.scaler is None or self._stepping.has_arrived)
        self._observes = len(self._losses)
        is_taken = self._stepping.is_taken and self._answer not in (ASK, FREEZE)
        if replay.session and not is_taken:
            replay.session.undo.take_back()
        self._see_repeated(replay, step)
        values = self._measured()
        is_scaled_back = self.scaler is not None and not self._stepping.has_arrived
        is_fine = isfinite(values["loss"]) and (is_scaled_back or isfinite(values.get("grad_norm", 0.0)))
        replay.record(step, values, not is_fine and replay.session is None)
        if self._judged is None and self._shown is not None:
            replay.watch.judge_later(SeenStep(step, *self._shown, self._began_anew, values))
        else:
            replay.watch.stepped(values)
        replay.strikes.stepped(step)
        self._began_anew = self._is_again = False
        self.loop.stepped()
        self._tell(replay, values, is_taken)
        if replay.session:
            is_left_alone = self._answer == GO and self.asked.on_alarm is None
            self._ends_finite = is_left_alone and all(isfinite(values.get(name, nan)) for name in MEASURED_AT_END)
            self._answered(replay, values, is_taken)
            self._ends_finite &= self.step == step + 1
        else:
            self.step += 1
        self._stepped(replay, step)

    def _stepped(self, replay: LoopReplay, step: int) -> None:
        """What else is done once a step of a replay is over."""

    def _see_repeated(self, replay: LoopReplay, step: int) -> None:
        """Keep what was seen of this step; one that the run has gone back to has to have the rate of the first time."""
        position, rates = step + replay.interventions.batches(0), self._stepping.rates
        if self._is_again and (before := replay.records.rates.get(step)) is not None and before != rates:
            number = next((n for n, pair in enumerate(zip(before, rates, strict=False)) if pair[0] != pair[1]), 0)
            raise NotRepeated(not_repeated(f"the learning rate of parameter group {number}", step))
        if self.loop.keeps:
            replay.records.saw(step, position, self.inputs.calls, rates)
        if replay.records.keeps_weights and replay.strikes.first_change is None:
            replay.records.keep_weights(step, self.places)

    def _tell(self, replay: LoopReplay, values: Mapping[str, float], is_taken: bool) -> None:
        """Call back at an alarm of the run itself."""
        if self.asked.on_alarm is None or replay.kind != RUN or self._judged is None:
            return
        alarms, scores, is_late = self._judged
        raised = {name: scores[name] for name, is_alarm in alarms.items() if is_alarm}
        if raised:
            norm = values.get("grad_norm", nan)
            self.asked.on_alarm(Alarm(self.step, raised, values["loss"], norm, is_taken, is_late, scores))

    def _measured(self) -> dict[str, float]:
        values = {"loss": self._mean_loss(), "learning_rate": self._stepping.rate}
        if self._is_measured:
            self._measures.after()
            values |= self._measures.told()
            values |= {RATE: self._stepping.planned, BEGAN: float(self._began_anew), JUDGED: float(self._is_judged)}
        if (scale := self._stepping.scale) is not None:
            values["loss_scale"] = float(scale)
        values = dict(zip(list(values), self.ranks.mean(list(values.values())), strict=True))
        if self._judged:
            values |= said(*self._judged[:2])
        return values

    def _answered(self, replay: LoopReplay, values: Mapping[str, float], is_taken: bool) -> None:
        """Do what the ladder says, and go on where it says."""
        session, judged, step, row = replay.session, self._judged, self.step, None
        assert session is not None and judged is not None
        alarms, scores, is_late = judged
        raised = {name: scores[name] for name, is_alarm in alarms.items() if is_alarm}
        session.is_quiet = is_taken and (not raised or session.passes)
        if self._answer in (ASK, GO_AND_ASK):
            norm, usual = values.get("grad_norm", nan), replay.watch.usual
            row = session.settle(Alarm(step, raised, values["loss"], norm, is_taken, is_late, scores, usual))
        elif not raised and replay.watch.names and step != session.awaited:
            replay.watch.keep_usual(scores)
        if session.has_news:
            row = session.ask_oracle(step)
        if self._answer == FREEZE and (row is None or not row.went_back):
            self._stop(replay)
            return
        self.step = step + 1 if row is None else row.goes_on
        if self.step <= step:
            self._is_again = True
        if row is not None and (row.went_back or row.is_calm):
            session.is_quiet = True
        if row is not None and row.went_back:
            replay.forget(self.step)
        if row is not None and row.is_frozen:
            self._stop(replay)

    def _stop(self, replay: LoopReplay) -> None:
        """The step at hand cannot be taken, and nothing is left to do about it."""
        replay.nonfinite_step = replay.series.length - 1
        replay.stopped = f"step {replay.series.length - 1}: not finite, and the ladder has no rung left for it"
        warn(f"recover: {replay.stopped}; the run ends with the weights from before that step")
