"""The callback for the Trainer of `lightning`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis import open_sweep, outcomes
from harness import ConfigError, attach
from tests.user_loop.loops import Loop, raw_bytes, seeded
from tests.user_loop.scripts import data
from tests.user_loop.test_attach import traces

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*(num_workers|srun|treespec).*")
PASSES, EPOCHS = 15, 2
STEPS = 2 * 5  # three passes a step, of 15 an epoch


class Module(lightning.LightningModule):
    """A net with dropout; its scheduler steps between two epochs."""

    def __init__(self, fails_at: int = -1, by_hand: bool = False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.Tanh(), nn.Linear(12, 3))
        self.norms: list[float] = []
        self.fails_at, self.automatic_optimization = fails_at, not by_hand

    def training_step(self, batch: Any, number: int) -> Tensor:
        if number == self.fails_at:
            raise ZeroDivisionError
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        self.norms.append(torch.stack(norms).norm().item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    usual = {"max_epochs": EPOCHS, "accelerator": "cpu", "accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    return lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**quiet, **usual, **options})


def loader(passes: int = PASSES) -> Any:
    return torch.utils.data.DataLoader(data(passes), batch_size=None, shuffle=True)


def trained(folder: Path, callback: Any = None, passes: int = PASSES, **options: Any) -> tuple[Module, Any]:
    seeded()
    module = Module()
    trainer = trainer_of(folder, *([] if callback is None else [callback]), **options)
    trainer.fit(module, loader(passes))
    return module, trainer


def weights(module: nn.Module) -> list[bytes]:
    return [raw_bytes(weight) for weight in module.parameters()]


def left(module: Any, trainer: Any) -> list[str]:
    found = traces(Loop(module, trainer.optimizers, [], list, lambda batch: batch))
    return found + ["training_step"] * ("training_step" in vars(module))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 1}])
def test_disarmed_it_changes_no_bit(options: dict[str, Any], tmp_path: Path) -> None:
    untouched, _ = trained(tmp_path, **options)
    callback = attach.LightningCallback()
    module, trainer = trained(tmp_path, callback, **options)
    assert weights(module) == weights(untouched) and left(module, trainer) == []
    assert callback.outcome == "trained" and not callback.events
    assert np.allclose(callback.signals["grad_norm"], module.norms, rtol=1e-5)


def test_the_norm_of_a_short_window_is_that_before_clipping(tmp_path: Path) -> None:
    callback = attach.LightningCallback()
    module, _ = trained(tmp_path, callback, passes=PASSES + 2)
    assert len(module.norms) == 2 * 6
    assert np.allclose(callback.signals["grad_norm"], module.norms, rtol=1e-5)


@pytest.mark.parametrize(
    "fault",
    [
        {"name": "weight_bit", "bit": 27},
        {"name": "activation_bit", "tensor": "net.0"},
        {"name": "gradient_bit", "bit": 27},
        {"name": "moment_bit"},
        {"name": "learning_rate_jump"},
    ],
    ids=lambda fault: fault["name"],
)
def test_the_twin_is_the_run_up_to_the_strike(fault: dict[str, Any], tmp_path: Path) -> None:
    callback = attach.LightningCallback(fault={"start": 4, **fault}, out=tmp_path / "out")
    module, _ = trained(tmp_path, callback)
    ended = weights(module)
    callback.twin(lambda: trainer_of(tmp_path, callback).fit(module, loader()))
    assert callback.differing is None and weights(module) == ended
    assert callback.events[0].step == 4 and callback.events[0].changed
    assert len(callback.deviation) == STEPS and not callback.deviation[:4].any() and callback.deviation[4:].any()
    clean = attach.LightningCallback(detect=None)
    trained(tmp_path, clean)
    assert callback.twin_signals["loss"].tobytes() == clean.signals["loss"].tobytes()
    sweep = outcomes(open_sweep(tmp_path / "out"))
    assert sorted(sweep["fault"].values) == sorted(["none", fault["name"]])


def test_a_step_is_skipped_and_an_alarm_is_called_back(tmp_path: Path) -> None:
    told: list[int] = []
    callback = attach.LightningCallback(
        fault={"name": "nan_gradient", "start": 4},
        detect="finite",
        recover={"ladder": [{"action": "skip"}]},
        on_alarm=lambda alarm: told.append(alarm.step),
    )
    module, _ = trained(tmp_path, callback)
    assert told == [4] and [incident["step"] for incident in callback.incidents] == [4]
    assert all(bool(weight.isfinite().all()) for weight in module.parameters())


def test_an_error_leaves_no_trace(tmp_path: Path) -> None:
    callback = attach.LightningCallback(fault={"name": "weight_bit", "start": 4})
    seeded()
    module, trainer = Module(fails_at=4), trainer_of(tmp_path, callback)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader())
    assert left(module, trainer) == []


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="action re_execute: goes back or reads on, .* allowed: carry_on, skip"):
        attach.LightningCallback(recover="repair")
    module, trainer = (
        Module(by_hand=True),
        trainer_of(tmp_path, attach.LightningCallback(), gradient_clip_val=None, accumulate_grad_batches=1),
    )
    with pytest.raises(
        ConfigError, match="automatic_optimization=False: calls its optimizers by itself, .* allowed: T"
    ):
        trainer.fit(module, loader())
    trainer = trainer_of(tmp_path, attach.LightningCallback(), max_epochs=-1)
    with pytest.raises(ConfigError, match="max_steps=inf: Lightning does not know how long it trains; allowed: max_"):
        trainer.fit(Module(), loader())
    assert left(module, trainer) == []
