"""The callback under TRL's GRPOTrainer, by the parts of examples/attach/grpo.py."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import open_sweep
from harness import attach
from tests.user_loop.loops import raw_bytes

for package in ("transformers", "accelerate", "datasets", "trl"):
    pytest.importorskip(package)
STEPS = 14
START = 7
FAULTS: list[dict[str, Any]] = [
    {"name": "weight_bit"},
    {"name": "gradient_bit"},
    {"name": "activation_bit", "tensor": "transformer.h.0.attn", "bit": 29},
    {"name": "fp16_underflow"},
    {"name": "moment_bit"},
    {"name": "learning_rate_jump"},
    {"name": "rare_tokens"},
]
LOOPS: dict[str, dict[str, Any]] = {
    "dropout": {"disable_dropout": False},
    "two passes": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16},
    "samples of before": {"num_iterations": 2, "steps_per_generation": 4, "per_device_train_batch_size": 16},
    "recomputed": {"gradient_checkpointing": True},
}


def example() -> Any:
    spec = util.spec_from_file_location("grpo", Path(__file__).parents[2] / "examples" / "attach" / "grpo.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


grpo = example()


def trainer_of(folder: Path, callback: Any = None, **options: Any) -> Any:
    return grpo.trainer_of(str(folder), [] if callback is None else [callback], max_steps=STEPS, **options)


def weights(trainer: Any) -> list[bytes]:
    return [raw_bytes(weight) for weight in trainer.model.parameters()]


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = trainer_of(tmp_path_factory.mktemp("untouched"))
    trainer.train()
    return trainer


def test_disarmed_it_changes_no_bit(untouched: Any, tmp_path: Path) -> None:
    """And its loss is TRL's, not that of the model, which has none of rewards."""
    callback = attach.TrainerCallback()
    trainer = trainer_of(tmp_path, callback)
    trainer.train()
    assert weights(trainer) == weights(untouched) and grpo.rewards(trainer).tolist() == grpo.rewards(untouched).tolist()
    assert np.allclose(callback.signals["loss"], logged(trainer, "loss"), rtol=1e-3, atol=1e-6)
    assert np.allclose(callback.signals["grad_norm"], logged(trainer, "grad_norm"), rtol=1e-3)
    assert not callback.signals["alarm_combined"].any() and "training_step" not in vars(trainer)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_the_twin_is_the_run_up_to_the_strike(fault: dict[str, Any], untouched: Any, tmp_path: Path) -> None:
    callback = attach.TrainerCallback(fault={"start": START, **fault})
    trainer = trainer_of(tmp_path, callback)
    trainer.train()
    ended = weights(trainer)
    own = grpo.rewards(trainer)
    callback.twin(trainer)
    assert callback.differing is None and not callback.deviation[:START].any()
    assert callback.events[0].step == START and callback.events[0].changed
    assert ended != weights(untouched) and weights(trainer) == ended
    assert own[:START].tolist() == grpo.rewards(untouched)[:START].tolist()
    assert grpo.rewards(trainer).tolist() == grpo.rewards(untouched).tolist()


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_other_forms(name: str, tmp_path: Path) -> None:
    clean = trainer_of(tmp_path, **LOOPS[name])
    clean.train()
    callback = attach.TrainerCallback(fault={"name": "weight_bit", "start": START})
    trainer = trainer_of(tmp_path, callback, **LOOPS[name])
    trainer.train()
    callback.twin(trainer)
    assert [event.step for event in callback.events] == [START]
    assert callback.differing is None and not callback.deviation[:START].any() and callback.deviation[START:].any()
    assert logged(trainer, "loss") == logged(clean, "loss")


def test_weights_that_are_not_finite_end_the_run_and_not_its_twin(untouched: Any, tmp_path: Path) -> None:
    """TRL samples from them in the next step, which is an error of torch."""
    callback = attach.TrainerCallback(fault={"name": "nan_gradient", "start": START}, out=tmp_path / "out")
    trainer = trainer_of(tmp_path / "trainer", callback)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        trainer.train()
    assert callback.outcome == "non-finite" and len(callback.signals["loss"]) == START + 1
    callback.twin(trainer)
    assert callback.differing is None and grpo.rewards(trainer).tolist() == grpo.rewards(untouched).tolist()
    sweep = open_sweep(tmp_path / "out")
    ends = dict(zip(sweep["fault"].values, sweep["outcome"].values, strict=True))
    assert ends == {"none": "trained", "nan_gradient": "non-finite"}


def test_a_step_is_skipped(tmp_path: Path) -> None:
    skip = {"ladder": [{"action": "skip"}]}
    callback = attach.TrainerCallback(fault={"name": "nan_gradient", "start": START}, detect="finite", recover=skip)
    trainer = trainer_of(tmp_path, callback)
    trainer.train()
    assert [incident["step"] for incident in callback.incidents] == [START]
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_reference_that_follows_is_an_extra(is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = trainer_of(tmp_path).model.config
    made = "trl.trainer.grpo_trainer.create_model_from_path"  # which reads a folder
    monkeypatch.setattr(made, lambda *_, **__: grpo.GPT2LMHeadModel(config))
    trainer = trainer_of(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=3)
    extra = [trainer.ref_model] if is_kept else []
    callback = attach.TrainerCallback(fault={"name": "weight_bit", "start": START}, extra=extra)
    trainer.add_callback(callback)
    trainer.train()
    if not is_kept:
        with pytest.warns(UserWarning, match="the loop does not repeat itself: .* in step 0 .*for other objects"):
            callback.twin(trainer)
        return
    callback.twin(trainer)
    assert callback.differing is None and not callback.deviation[:START].any()
