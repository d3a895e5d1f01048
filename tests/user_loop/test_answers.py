"""Playbooks in the user's loop: what is undone is undone bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness import attach
from harness.user_loop.loop_state import LoopState
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.snapshots import Keeper, difference
from tests.user_loop.loops import LOOPS, STEPS, Loop, attached, plain, same, train

STRUCK = 25
BROKEN = {"name": "weight_bit", "start": STRUCK, "bit": 30}
SKIP = {"ladder": [{"detector": "finite", "action": "skip", "limit": None, "cool_down": 1}]}
BACK: dict[str, Any] = {
    "ladder": [{"detector": "any", "action": "roll_back", "limit": 5, "cool_down": 5}],
    "snapshot": {"every": 4, "kept": 3},
}
TOLD = ["after", "before"]  # when the loss is told: after the optimizer's step, or before it


def observing_early(loop: Loop) -> Loop:
    """The loop of `plain`, whose body tells the loss before the optimizer steps."""

    def body(batch: Any) -> Tensor:
        ids, targets = batch
        loss = nn.functional.cross_entropy(loop.model(ids).flatten(0, 1), targets.flatten())
        loop.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.kept["run"].observe(loss)
        loop.optimizer.step()
        loop.extra[0].step()
        return loss

    loop.body = body
    return loop


# --- back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize(("detector", "most"), [("grad_norm_skip", 2), ("combined", 4)])
def test_an_alarm_that_is_right_changes_no_bit(detector: str, most: int, told: str) -> None:
    """The step comes out alike on both devices, and was taken; that costs two, or four where it is of the last one."""
    untouched = plain()
    train(untouched)
    loop = plain() if told == "after" else observing_early(plain())
    run = attach(
        loop.model,
        loop.optimizer,
        loop.extra,
        detect={"name": detector, detector: {"limit": 1e-6}},
        recover="repair",
        steps=STEPS,
    )
    loop.kept["run"] = run
    with run:
        for batch in run.steps(loop.loader()):
            loss = loop.body(batch)
            if told == "after":
                run.observe(loss)
    incident = run.incidents[0]
    verdicts = {act["detail"]["verdict"] for act in incident["acts"] if "verdict" in act["detail"]}
    assert verdicts == {"correct"} and same(loop.state(), untouched.state())
    assert incident["alarms"] == 20 and 2 * 20 <= incident["steps_lost"] <= most * 20  # then its rung is used up


@pytest.mark.parametrize("recover", ["repair", "rerun", BACK], ids=["repair", "rerun", "roll_back"])
@pytest.mark.parametrize("name", LOOPS)
def test_after_a_rollback_a_run_ends_as_if_nothing_had_been(name: str, recover: Any) -> None:
    """Weights, moments, buffers, the schedule, the scaler and random streams; the fault is transient."""
    untouched = LOOPS[name]()
    train(untouched)
    loop = LOOPS[name]()
    fault = {**BROKEN, "tensor": "*weight"}
    if name == "convolutions":  # normalisation would hide that
        fault = {"name": "bit_flip", "site": "weight", "tensor": "5.weight", "model": "nan", "start": STRUCK}
    detect = "spiky_loss+finite" if recover is not BACK else "finite"
    seen, run = attached(loop, fault=fault, detect=detect, recover=recover, steps=STEPS)
    assert [event.changed for event in run.events] == [True]
    assert run.incidents and run.incidents[0]["step"] in range(STRUCK, STRUCK + 4)
    assert same(loop.state(), untouched.state())
    assert loop.extra == [] or repr(loop.extra[0].state_dict()) == repr(untouched.extra[0].state_dict())
    assert len(run.signals["loss"]) == STEPS and np.isfinite(run.signals["loss"]).all()
    passes = len(seen) - sum(1 for _ in untouched.loader())
    assert passes >= 1, "some steps were run twice"


def test_a_permanent_fault_is_escaped_on_another_device() -> None:
    untouched, loop = plain(), plain()
    train(untouched)
    loop = plain()
    fault = {"name": "stuck_bit", "start": STRUCK, "tensor": "embedding.weight", "model": "stuck_at_1", "bit": 30}
    _, run = attached(loop, fault=fault, recover="repair")
    acts = run.incidents[0]["acts"]
    assert acts[-1]["detail"]["verdict"] == "persistent" and len(run.events) >= 2
    assert same(loop.state(), untouched.state())


# --- skipped -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", TOLD)
def test_a_skipped_step_leaves_weights_and_moments_alone(told: str) -> None:
    """As in a loop that leaves out the optimizer's step by itself, and goes on with its schedule."""
    loop, by_hand = plain(), plain()
    by_hand = plain()
    for step, batch in enumerate(by_hand.loader()):
        if step == STRUCK:
            taken = by_hand.optimizer.step
            by_hand.optimizer.step = lambda: setattr(by_hand.optimizer, "_opt_called", True)
            by_hand.body(batch)
            by_hand.optimizer.step = taken
        else:
            by_hand.body(batch)
    loop = plain()
    fault = {"name": "nan_gradient", "start": STRUCK}
    if told == "before":
        loop = observing_early(loop)
        with attach(loop.model, loop.optimizer, loop.extra, fault=fault, detect="finite", recover=SKIP) as run:
            loop.kept["run"] = run
            for batch in run.steps(loop.loader()):
                loop.body(batch)
    else:
        _, run = attached(loop, fault=fault, detect="finite", recover=SKIP)
    assert [act["action"] for incident in run.incidents for act in incident["acts"]] == ["skip"]
    assert same(loop.state(), by_hand.state())
    assert run.signals["update_rms"][STRUCK] == 0 < run.signals["update_rms"][STRUCK + 1]


def test_a_skipped_step_leaves_no_statistics_behind() -> None:
    """A NaN in the running mean of a batch normalisation would stay for ever."""
    loop = LOOPS["convolutions"]()
    fault = {"name": "activation_bit", "tensor": "0", "model": "nan", "start": STRUCK}
    _, run = attached(loop, fault=fault, detect="finite", recover=SKIP)
    assert np.isnan(run.signals["loss"]).sum() == 1
    assert all(bool(x.isfinite().all()) for x in loop.state().values())


def test_a_rate_is_lowered_for_a_while_and_the_schedule_is_not_touched() -> None:
    ladder = {
        "ladder": [{"detector": "finite", "action": "lower_rate+skip", "limit": 1, "cool_down": 5}],
        "lower_rate": {"factor": 0.25, "steps": 4},
    }
    loop = plain()
    _, run = attached(loop, fault={"name": "nan_gradient", "start": STRUCK}, detect="finite", recover=ladder)
    untouched = plain()
    _, other = attached(untouched)
    ratio = run.signals["learning_rate"] / other.signals["learning_rate"]
    assert np.allclose(ratio[STRUCK + 1 : STRUCK + 5], 0.25) and np.allclose(np.delete(ratio, range(26, 30)), 1)
    assert loop.optimizer.param_groups[0]["lr"] == untouched.optimizer.param_groups[0]["lr"]


def test_moments_begin_anew() -> None:
    ladder = {"ladder": [{"detector": "finite", "action": "reset_moments", "limit": 1, "cool_down": 5}]}
    _, run = attached(plain(), fault={"name": "nan_gradient", "start": STRUCK}, detect="finite", recover=ladder)
    norm = run.signals["second_moment_norm"]
    assert norm[STRUCK + 1] < 0.2 * norm[STRUCK - 1]
    rate = run.signals["learning_rate"][STRUCK + 1]
    assert 0.9 * rate < run.signals["update_rms"][STRUCK + 1] < 1.05 * rate, "as Adam's first step"


def test_batches_are_read_over() -> None:
    ladder = {
        "ladder": [{"detector": "finite", "action": "roll_back+skip_batches", "limit": 1, "cool_down": 5}],
        "roll_back": {"back": 2},
        "skip_batches": {"count": 5},
        "snapshot": {"every": 1, "kept": 4},
    }
    loop, seen = plain(), []
    fault = {"name": "nan_gradient", "start": STRUCK}
    words = "the loader ended after 45 of 50 steps, because answers have passed over 5 batches"
    options = {"fault": fault, "detect": "finite", "recover": ladder}
    with pytest.warns(UserWarning, match=words), attach(loop.model, loop.optimizer, loop.extra, **options) as run:
        for batch in run.steps(loop.loader()):
            seen.append((run.step, batch[0].clone()))
            run.observe(loop.body(batch))
    untouched = plain()
    planned = [batch[0] for batch in untouched.loader() if untouched.body(batch) is not None]
    place = [next(i for i, other in enumerate(planned) if torch.equal(ids, other)) for _, ids in seen]
    assert place == [*range(STRUCK + 1), *range(STRUCK - 2 + 5, STEPS)]
    assert [step for step, _ in seen[STRUCK + 1 :]] == [*range(STRUCK - 2, STEPS - 5)], "the loader has no more"


def test_a_ladder_without_a_rung_left_ends_the_run_with_what_was_sound() -> None:
    ladder = {"ladder": [{"detector": "finite", "action": "skip", "limit": 2, "cool_down": 50}]}
    loop = plain()
    fault = {"name": "nan_gradient", "start": STRUCK, "duration": None}
    with pytest.warns(UserWarning, match="step 27: not finite, and the ladder has no rung left"):
        seen, run = attached(loop, fault=fault, detect="finite", recover=ladder)
    assert len(seen) == 28 and run.outcome == "non-finite"
    assert all(bool(x.isfinite().all()) for x in loop.state().values())


def test_the_oracle_undoes_a_fault() -> None:
    untouched = plain()
    train(untouched)
    loop = plain()
    _, run = attached(loop, fault={**BROKEN, "bit": 24}, detect=None, recover="oracle")
    assert same(loop.state(), untouched.state()) and len(run.events) == 1


def test_the_twin_of_a_repaired_run_is_the_run() -> None:
    _, run = attached(plain(), fault=BROKEN, recover="repair", twin=True)
    assert run.incidents and not run.deviation.any() and len(run.deviation) == STEPS


# --- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_snapshot_has_all_that_a_step_changes(name: str, on_host: bool) -> None:
    """The next steps are the same bit for bit, also from before the optimizer's first step."""
    for taken in (0, 8):
        loop = LOOPS[name]()
        batches = list(loop.loader())
        for batch in batches[:taken]:
            loop.body(batch)
        keeper = Keeper(NamedTensors(loop.model, loop.optimizers), loop.extra, LoopState(), on_host)
        passes, kept = dict(loop.kept), keeper.take(taken)
        ends = []
        for _ in range(2):
            losses = [loop.body(batch).item() for batch in batches[taken : taken + 6]]
            ends.append((losses, keeper.take(taken + 6)))
            keeper.put_back(kept)
            loop.kept.update(passes)
        assert ends[0][0] == ends[1][0] and difference(ends[0][1], ends[1][1]) is None
        assert difference(kept, keeper.take(taken)) is None
        assert difference(kept, ends[0][1]) is not None
