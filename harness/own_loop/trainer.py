"""The same for the Trainer of `transformers`, as a callback."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import Trainer
from transformers import TrainerCallback as Base

from harness.config import ConfigError
from harness.guards.playbook import actions_of
from harness.own_loop.course import Course
from harness.own_loop.hooks import wrap
from harness.own_loop.keeping import Keeping
from harness.own_loop.legs import RUN, TWIN, Leg
from harness.own_loop.results import Results
from harness.own_loop.snapshots import Snapshot
from harness.own_loop.steps import Asked
from harness.own_loop.warn import warn
from harness.own_loop.witness import Comparison
from harness.recovery.table import ACTIONS

GUARDED = ("training_step", "get_batch_samples", "compute_loss", "evaluate", "_maybe_log_save_evaluate", "log")
"""What a Trainer calls of itself while it trains."""


def _trainer_above() -> Any:
    """The Trainer that has called this callback; None where it is called in another way."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    return None


class TrainerCallback(Results, Base):
    """Faults, detectors, a ladder of answers and a golden twin for a `transformers.Trainer`.

        callback = attach.TrainerCallback(fault="weight_bit")
        trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[callback])
        trainer.train()
        callback.twin(trainer)  # trains the golden twin, and leaves the model as the run did
        print(callback.deviation)

    The arguments are those of `attach`. The loss is that of the model's output. A Trainer does not go back, so neither
    do playbooks: they may skip steps, lower the rate and reset moments. Raises ConfigError as `attach` does.
    """

    def __init__(self, asked: Asked, keeping: Keeping | None):
        for name in dict.fromkeys(actions_of(asked.settings)):
            if ACTIONS[name].goes_back or name == "skip_batches":
                stays = [action for action in ("carry_on", "skip", "lower_rate", "reset_moments") if action in ACTIONS]
                why = "goes back or reads on, and the loop of a Trainer does not"
                raise ConfigError(f"recover.ladder: action {name}: {why}; allowed: {', '.join(stays)}")
        self._asked, self._keeping = asked, keeping
        self._kind = RUN
        self._first: Snapshot | None = None
        self._hooks = ExitStack()
        self._leg: Leg | None = None
        self._twin: Leg | None = None
        self.differing: str | None = None

    # --- what the Trainer calls ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Attach to its model and optimizer."""
        self._hooks.close()
        extras = [objects["lr_scheduler"]] if objects.get("lr_scheduler") is not None else []
        asked = Asked(
            objects["model"],
            [objects["optimizer"]],
            [*extras, *self._asked.extras],
            self._asked.chosen if self._kind == RUN else (),
            self._asked.settings,
            int(state.max_steps),
            self._asked.seed,
            self._asked.facts,
            self._asked.on_alarm,
        )
        course = self._course = Course(asked, self, is_measured=True)
        self._hooks.enter_context(course.hooks)
        course.open(int(state.max_steps))
        course.step = course.first_step = int(state.global_step)  # not 0 where it goes on from a checkpoint
        course.expect_replays()
        self._release_at_errors()
        leg = course.run_leg
        if self._kind == RUN:
            self._leg, self._first = leg, course.take_snapshot()
            leg.witness.keeps_weights = True
            if self._keeping:
                self._keeping.begin(course, False)
        else:
            assert self._first is not None and self._leg is not None
            leg.kind = TWIN
            self._leg.strikes.see_ranks()
            leg.comparison = Comparison(self._leg, self._leg.strikes, raises=False)
            course.as_written |= self._as_written
            course.go(leg, self._first)
            self._twin = leg
        model = course.places.model
        self._hooks.callback(model.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        self._hooks.callback(model.register_forward_hook(self._after, with_kwargs=True).remove)

    def _release_at_errors(self) -> None:
        """An error does not come to `on_train_end`: it is seen where the Trainer calls what may raise."""
        trainer = _trainer_above()
        for owner, name in ((trainer, one) for one in GUARDED):
            if owner is not None and hasattr(owner, name):
                wrap(owner, name, self._guarded, self._hooks)
        if trainer is not None:
            wrap(trainer.callback_handler, "call_event", self._guarded, self._hooks)

    def _guarded(self, real: Any, *args: Any, **more: Any) -> Any:
        try:
            return real(*args, **more)
        except BaseException:
            self._hooks.close()
            if self._keeping and self._kind == RUN:
                self._keeping.stop()
            raise

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """A step of the optimizer begins."""
        self._parts: list[Any] = []
        self._is_sum = False
        self._course.begin_step()

    def _before(self, model: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The batch is handed to the model."""
        if not model.training:
            return None
        return inputs, dict(self._course.leg.strikes.batch(self._course.step, named))

    def _after(self, model: nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        """The model has given its loss: a part of the step's where the Trainer says how many items there are."""
        if model.training:
            loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", None)
            if loss is None:
                raise ConfigError(
                    "attach.TrainerCallback: the model gives no loss; allowed: with labels in its batches"
                )
            self._is_sum = named.get("num_items_in_batch") is not None
            self._parts.append(loss.detach())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The loss is known."""
        self._course.observe(sum(self._parts) / (1 if self._is_sum else max(1, len(self._parts))))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> Any:
        """A step is over; a twin that is none ends here."""
        course = self._course
        course.end_pass()
        if course.leg.stopped or course.step >= course.leg.steps:
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Nothing of its objects is changed any more."""
        if self._kind == RUN:
            self._end_short(self._course, lacks_twin=False)
            events = self._gather()
            if self._keeping:
                self._keeping.finish(None, events)
        self._as_written = set(self._course.as_written)
        self._hooks.close()

    # --- the twin ------------------------------------------------------------------------------------------------

    def twin(self, trainer: Any) -> None:
        """Train the golden twin from the same beginning with the same Trainer, by its `train`; after the run.

        Raises ConfigError for a run that has gone on from a checkpoint, whose first steps nobody has seen.

        Up to the first strike it has to be the run, bit for bit; if it is not, a warning names the first step and what
        differs there, and there is no twin.
        """
        if self._first is None or self._twin is not None:
            raise ConfigError("callback.twin: needs a run, and no twin; allowed: once, after trainer.train()")
        if begun := self._course.first_step:
            why = f"the run went on from a checkpoint at step {begun}"
            raise ConfigError(f"callback.twin: {why}; allowed: a run from its first step")
        final, self._kind = self._course.take_snapshot(), TWIN
        try:
            trainer.train()
        finally:
            self._hooks.close()
            self._course.keeper.put_back(final)
            self._kind = RUN
        if self._keeping and self._twin is not None:
            self._keeping.finish(self._twin, self.events)

    # --- as the plan of a course ---------------------------------------------------------------------------------

    def begin(self, course: Course, loader: Iterable[Any]) -> None:
        """There is no loader."""

    def turn(self, course: Course) -> bool:
        return False

    def refuse(self, course: Course, reason: str) -> None:
        """The twin is none: nothing is said by it."""
        self.differing, self._twin = reason, None
        course.leg.stopped = "differs"
        warn(f"twin: there is none, because {reason}")

    def lengthened(self, course: Course) -> None:
        """Not under a Trainer, which says how many steps there are."""

    def begun(self, course: Course) -> None:
        """Nothing is done here."""

    def stepped(self, course: Course) -> None:
        if self._keeping and self._kind == RUN:
            self._keeping.stepped(course.leg)
