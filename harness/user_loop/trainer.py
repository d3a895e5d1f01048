"""The same for the Trainer of `transformers`, as a callback."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers import TrainerCallback as Base

from harness.config import ConfigError
from harness.user_loop.callback import OwnTrainer
from harness.user_loop.hooks import wrap
from harness.user_loop.replays import RUN

GUARDED = ("get_batch_samples", "compute_loss", "evaluate", "_maybe_log_save_evaluate", "log")
"""What a Trainer calls of itself while it trains, in addition to `training_step`."""
PLAIN = (int, float, str, type(None))  # of which attributes of a Trainer its twin begins with the run's


def _trainer_above() -> Trainer:
    """The Trainer that has called this callback. Raises ConfigError where it is called in another way."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise ConfigError("attach.TrainerCallback: no Trainer has called it; allowed: Trainer(..., callbacks=[callback])")


def _plain(trainer: Trainer) -> dict[str, Any]:
    """What a Trainer counts by itself. TRL's counts its passes, which say when it samples."""
    return {name: value for name, value in vars(trainer).items() if isinstance(value, PLAIN)}


class TrainerCallback(OwnTrainer, Base):
    """Faults, detectors, a ladder of answers and a golden twin for a `transformers.Trainer`.

        callback = attach.TrainerCallback(fault="weight_bit")
        trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[callback])
        trainer.train()
        callback.twin(trainer)  # trains the golden twin, and leaves the model as the run did
        print(callback.deviation)

    The arguments are those of `attach`. The loss is that of the Trainer, as it logs it, so subclasses with a loss of
    their own are followed, TRL's among them. A Trainer does not go back, so neither do playbooks: they may skip steps,
    lower the rate and reset moments. Raises ConfigError as `attach` does.
    """

    # --- what the Trainer calls ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Attach to its model and optimizer."""
        extras = [objects["lr_scheduler"]] if objects.get("lr_scheduler") is not None else []
        done = int(state.global_step)  # not 0 where it goes on from a checkpoint
        trainer = _trainer_above()
        if self._kind == RUN:
            self._counted = _plain(trainer)
        else:
            vars(trainer).update(self._counted)
        self._open(objects["model"], [objects["optimizer"]], extras, int(state.max_steps), done)
        self._follow(trainer)
        model = self._driver.places.model
        self._hooks.callback(model.register_forward_pre_hook(self._before, with_kwargs=True).remove)

    def _follow(self, trainer: Trainer) -> None:
        """Its losses, and errors, which do not come to `on_train_end`: they are seen where it calls what may raise."""
        wrap(trainer, "training_step", self._passed, self._hooks)
        for name in GUARDED:
            if hasattr(trainer, name):
                wrap(trainer, name, self._guarded, self._hooks)
        wrap(trainer.callback_handler, "call_event", self._guarded, self._hooks)

    def _passed(self, real: Any, *args: Any, **more: Any) -> Any:
        """A pass was made: its part of the step's loss is known."""
        loss = self._guarded(real, *args, **more)
        self._parts.append(loss.detach())
        return loss

    def _guarded(self, real: Any, *args: Any, **more: Any) -> Any:
        try:
            return real(*args, **more)
        except BaseException:
            self._fail()
            raise

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """A step of the optimizer begins."""
        self._parts: list[Any] = []
        self._driver.begin_step()

    def _before(self, model: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The batch is handed to the model; calls without gradients, by which some Trainers sample, are none of it."""
        if not model.training or not torch.is_grad_enabled():
            return None
        return inputs, dict(self._driver.replay.strikes.batch(self._driver.step, named))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The loss is known."""
        self._driver.observe(sum(self._parts))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> Any:
        """A step is over; a twin that is none ends here."""
        driver = self._driver
        driver.end_pass()
        if driver.replay.stopped or driver.step >= driver.replay.steps:
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Nothing of its objects is changed any more."""
        self._close()

    # --- the twin ------------------------------------------------------------------------------------------------

    def twin(self, trainer: Any) -> None:
        """Train the golden twin from the same beginning with the same Trainer, by its `train`; after the run.

        Raises ConfigError for a run that has gone on from a checkpoint, whose first steps nobody has seen.

        Up to the first strike it has to be the run, bit for bit; if it is not, a warning names the first step and what
        differs there, and there is no twin.
        """
        ended = _plain(trainer)
        self._train_twin(trainer.train)
        vars(trainer).update(ended)
