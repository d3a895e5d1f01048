"""The same for the Trainer of `transformers`, as a callback."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Trainer
from transformers import TrainerCallback as Base

from harness.config import ConfigError
from harness.user_loop.callback import OwnTrainer
from harness.user_loop.hooks import wrap

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


class TrainerCallback(OwnTrainer, Base):
    """Faults, detectors, a ladder of answers and a golden twin for a `transformers.Trainer`.

        callback = attach.TrainerCallback(fault="weight_bit")
        trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[callback])
        trainer.train()
        callback.twin(trainer)  # trains the golden twin, and leaves the model as the run did
        print(callback.deviation)

    The arguments are those of `attach`. The loss is that of the model's output. A Trainer does not go back, so neither
    do playbooks: they may skip steps, lower the rate and reset moments. Raises ConfigError as `attach` does.
    """

    # --- what the Trainer calls ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Attach to its model and optimizer."""
        extras = [objects["lr_scheduler"]] if objects.get("lr_scheduler") is not None else []
        done = int(state.global_step)  # not 0 where it goes on from a checkpoint
        self._open(objects["model"], [objects["optimizer"]], extras, int(state.max_steps), done)
        self._release_at_errors()
        model = self._driver.places.model
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
            self._fail()
            raise

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """A step of the optimizer begins."""
        self._parts: list[Any] = []
        self._is_sum = False
        self._driver.begin_step()

    def _before(self, model: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The batch is handed to the model."""
        if not model.training:
            return None
        return inputs, dict(self._driver.replay.strikes.batch(self._driver.step, named))

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
        self._driver.observe(sum(self._parts) / (1 if self._is_sum else max(1, len(self._parts))))

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
        self._train_twin(trainer.train)
