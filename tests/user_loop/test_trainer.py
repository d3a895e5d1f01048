"""The callback for the Trainer of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis import open_sweep, outcomes
from harness import ConfigError, attach
from tests.user_loop.loops import raw_bytes, seeded

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


# --- what goes wrong, and what goes on ------------------------------------------------------------------------------


class Failing(transformers.TrainerCallback):
    """Raises at a step, as any callback or a full disk may."""

    def __init__(self, error: type[BaseException]):
        self.error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == 5:
            raise self.error


class FailingModel(torch.nn.Module):
    """A model whose sixth pass fails."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        self.passes += 1
        if self.passes == 6:
            raise ZeroDivisionError
        return self.model(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_training_leaves_no_trace(error: type[BaseException], untouched: Any, tmp_path: Path) -> None:
    """Neither does one in the model; and the same Trainer trains again."""
    callback = attach.TrainerCallback(fault={"name": "weight_bit", "start": 10, "bit": 27})
    trainer = trainer_of(tmp_path, callback)
    trainer.add_callback(Failing(error))
    with pytest.raises(error):
        trainer.train()
    assert traces(trainer) == 0 and "training_step" not in vars(trainer)
    trainer.remove_callback(Failing)
    trainer.train()
    assert [event.step for event in callback.events] == [10] and traces(trainer) == 0


def test_an_error_in_the_model_leaves_no_trace(tmp_path: Path) -> None:
    callback = attach.TrainerCallback(recover={"ladder": [{"action": "skip"}]}, out=tmp_path / "out")
    trainer = trainer_of(tmp_path, callback)
    trainer.model = trainer.model_wrapped = FailingModel(trainer.model)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert traces(trainer) == 0


def test_the_norm_is_that_which_the_trainer_logs(tmp_path: Path) -> None:
    """Before clipping; the last step of an epoch has fewer passes than the others."""
    callback = attach.TrainerCallback()
    trainer = trainer_of(
        tmp_path, callback, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=4, max_grad_norm=0.5
    )
    trainer.train()
    logged = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert len(logged) == 2 * 19 and max(logged) > 0.5, "300 texts, 4 a pass, 4 passes a step: 18 steps and 3 passes"
    assert np.allclose(callback.signals["grad_norm"], logged, rtol=1e-5)


def test_the_loss_is_that_which_the_trainer_logs(tmp_path: Path) -> None:
    """Not that of the model, which knows of no smoothing of labels."""
    callback = attach.TrainerCallback()
    trainer = trainer_of(tmp_path, callback, label_smoothing_factor=0.5, gradient_accumulation_steps=3)
    trainer.train()
    assert np.allclose(callback.signals["loss"], losses(trainer), atol=1e-3)


def test_a_run_that_goes_on_counts_as_the_trainer_does(untouched: Any, tmp_path: Path) -> None:
    """And says that a fault before its first step never struck."""
    first = trainer_of(tmp_path, save_strategy="steps", save_steps=8)
    first.train()
    ended = weights(first)
    for start, is_struck in ((4, False), (12, True)):
        callback = attach.TrainerCallback(fault={"name": "weight_bit", "start": start, "bit": 27}, detect=None)
        trainer = trainer_of(tmp_path, callback)
        if is_struck:
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
            assert [event.step for event in callback.events] == [start] and callback.outcome == "trained"
            assert weights(trainer) != ended
        else:
            with pytest.warns(UserWarning, match="never struck; it begins at step 4, and the run went on from step 8"):
                trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
            assert callback.outcome == "trained; never struck" and weights(trainer) == ended
        loss = callback.signals["loss"]
        assert len(loss) == STEPS and np.isnan(loss[:8]).all() and np.isfinite(loss[8:]).all()
        with pytest.raises(ConfigError, match="the run went on from a checkpoint at step 8; allowed: a run from its"):
            callback.twin(trainer)


def test_a_trainer_calls_back_at_alarms(tmp_path: Path) -> None:
    told: list[int] = []
    fault = {"name": "weight_bit", "start": 10, "bit": 30, "element": 0, "tensor": "*wte*"}
    callback = attach.TrainerCallback(fault=fault, on_alarm=lambda alarm: told.append(alarm.step))
    trainer_of(tmp_path, callback).train()
    assert told and told[0] in (10, 11)
