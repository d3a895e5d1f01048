"""The callback for the Trainer of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis import open_sweep, outcomes
from harness import ConfigError, attach
from tests.own_loop.loops import raw_bytes, seeded

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STEPS = 24


class Texts(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.ids = torch.tensor(list(Path(__file__).read_bytes() + Path(torch.__file__).read_bytes()[:20_000]))

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[16 * index : 16 * index + 16]
        return {"input_ids": ids, "labels": ids}


def trainer_of(folder: Path, callback: Any = None, **options: Any) -> Any:
    """A small GPT-2 with dropout, whose gradients are those of two passes."""
    seeded()
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids))
    arguments = {"max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    arguments |= {"learning_rate": 3e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
    made = transformers.TrainingArguments(str(folder), disable_tqdm=True, **{**arguments, **options})
    callbacks = [] if callback is None else [callback]
    return transformers.Trainer(model, made, train_dataset=Texts(), callbacks=callbacks)


def weights(trainer: Any) -> list[bytes]:
    return [raw_bytes(weight) for weight in trainer.model.parameters()]


def traces(trainer: Any) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    hooks = sum(len(getattr(module, kind)) for module in trainer.model.modules() for kind in kinds)
    hooks += sum(len(weight._post_accumulate_grad_hooks or ()) for weight in trainer.model.parameters())
    return hooks + (type(vars(trainer.optimizer.optimizer).get("step")).__name__ == "method")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = trainer_of(tmp_path_factory.mktemp("untouched"))
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_disarmed_it_changes_no_bit(untouched: Any, tmp_path: Path) -> None:
    callback = attach.TrainerCallback()
    trainer = trainer_of(tmp_path, callback)
    trainer.train()
    assert weights(trainer) == weights(untouched) and losses(trainer) == losses(untouched)
    assert np.allclose(callback.signals["loss"], losses(trainer), atol=1e-4) and traces(trainer) == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"name": "weight_bit", "bit": 27},
        {"name": "activation_bit", "tensor": "transformer.h.1.mlp*"},
        {"name": "gradient_bit", "bit": 27},
        {"name": "moment_bit"},
        {"name": "learning_rate_jump"},
        {"name": "rare_tokens"},
    ],
    ids=lambda fault: fault["name"],
)
def test_the_twin_is_the_run_up_to_the_strike(fault: dict[str, Any], untouched: Any, tmp_path: Path) -> None:
    callback = attach.TrainerCallback(fault={"start": 10, **fault}, out=tmp_path / "out")
    trainer = trainer_of(tmp_path / "trainer", callback)
    trainer.train()
    ended = weights(trainer)
    callback.twin(trainer)
    assert callback.differing is None and weights(trainer) == ended and traces(trainer) == 0
    assert callback.events[0].step == 10 and callback.events[0].changed
    assert len(callback.deviation) == STEPS and not callback.deviation[:10].any() and callback.deviation[10:].any()
    assert np.allclose(callback.twin_signals["loss"], losses(untouched), atol=1e-4)
    sweep = outcomes(open_sweep(tmp_path / "out"))
    assert sorted(sweep["fault"].values) == sorted(["none", fault["name"]])
    with pytest.raises(ConfigError, match="callback.twin: needs a run, and no twin"):
        callback.twin(trainer)


def test_a_step_is_skipped(tmp_path: Path) -> None:
    callback = attach.TrainerCallback(
        fault={"name": "nan_gradient", "start": 10}, detect="finite", recover={"ladder": [{"action": "skip"}]}
    )
    trainer = trainer_of(tmp_path, callback)
    trainer.train()
    assert [incident["step"] for incident in callback.incidents] == [10] and callback.outcome == "trained"
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())
    assert np.isfinite(losses(trainer)[11:]).all()


def test_what_a_trainer_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="action re_execute: goes back or reads on, .* allowed: carry"):
        attach.TrainerCallback(recover="repair")
    with pytest.raises(ConfigError, match="fault=weight_bitt: unknown"):
        attach.TrainerCallback(fault="weight_bitt")


def test_a_training_that_does_not_repeat_itself_is_told_so(tmp_path: Path) -> None:
    class Noisy(transformers.TrainerCallback):
        draw = torch.Generator().manual_seed(0)

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            with torch.no_grad():
                model.transformer.h[0].ln_1.bias += 0.01 * torch.randn(16, generator=self.draw)

    callback = attach.TrainerCallback(fault={"name": "weight_bit", "start": 10})
    trainer = trainer_of(tmp_path, callback)
    trainer.add_callback(Noisy())
    trainer.train()
    with pytest.warns(UserWarning, match="the loop does not repeat itself: .* in step 0 in transformer.wte.weight"):
        callback.twin(trainer)
    with pytest.raises(ConfigError, match="deviation: there is no golden twin"):
        _ = callback.deviation
