"""The same for the Trainer of `lightning`, as a callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from harness.config import ConfigError
from harness.user_loop.callback import OwnTrainer
from harness.user_loop.hooks import wrap


class LightningCallback(OwnTrainer, Callback):
    """Faults, detectors, a ladder of answers and a golden twin for a `lightning.pytorch.Trainer`.

        callback = attach.LightningCallback(fault="weight_bit")
        Trainer(max_epochs=3, callbacks=[callback]).fit(module, loader)
        callback.twin(lambda: Trainer(max_epochs=3, callbacks=[callback]).fit(module, loader))
        print(callback.deviation)

    The arguments are those of `attach`. The loss is what `training_step` gives. The loop is Lightning's and does not go
    back, so neither do playbooks: they may skip steps, lower the rate and reset moments. Raises ConfigError as `attach`
    does, and for manual optimization and strategies that shard a model.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the module and its optimizers."""
        if not pl_module.automatic_optimization:
            why = "calls its optimizers by itself, where this callback does not see its steps"
            raise ConfigError(f"automatic_optimization=False: {why}; allowed: True, or attach in a loop of your own")
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            kind = type(trainer.strategy).__name__
            raise ConfigError(f"strategy={kind}: of a sharded model a process has a part alone; allowed: auto, or ddp")
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        steps = trainer.estimated_stepping_batches
        if not isinstance(steps, int):
            raise ConfigError(f"max_steps={steps}: Lightning does not know how long it trains; allowed: max_steps=N")
        extras = [*schedulers, *([] if scaler is None else [scaler])]
        self._open(pl_module, trainer.optimizers, extras, steps, int(trainer.global_step))
        wrap(pl_module, "training_step", self._training_step, self._hooks)

    def _training_step(self, real: Callable[..., Any], batch: Any, *args: Any, **more: Any) -> Any:
        """The batch is handed to the module, which gives its loss."""
        driver = self._driver
        told = real(driver.replay.strikes.batch(driver.step, batch), *args, **more)
        loss = told["loss"] if isinstance(told, dict) else told
        if not isinstance(loss, Tensor):
            raise ConfigError("attach.LightningCallback: training_step gives no loss; allowed: a tensor, or its `loss`")
        driver.observe(loss)
        return told

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A pass begins, and with it perhaps a step."""
        self._driver.begin_pass()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A pass is over; a twin that is none ends here."""
        driver = self._driver
        driver.end_pass()
        if driver.replay.stopped:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Nothing of its objects is changed any more."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same after an error."""
        self._fail()

    def twin(self, train: Callable[[], Any]) -> None:
        """Train the golden twin from the same beginning, by a new Trainer with this callback; after the run.

        Up to the first strike it has to be the run, bit for bit; if it is not, a warning names the first step and what
        differs there, and there is no twin. Raises ConfigError for a run that has gone on from a checkpoint.
        """
        self._train_twin(train)
