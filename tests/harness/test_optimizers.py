"""What every optimizer of the folder has to keep: isolation, pack independence, state, decay and clipped updates."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from harness.model.tensors import Kind
from harness.optim.optimizers import OPTIMIZERS
from harness.optim.optimizers.base import CPU_COLUMNS, CPU_GRAIN
from tests.harness.optimizing import TENSORS, Rig, bits, different, differing, share, tensor_row, trial, without

every = pytest.mark.parametrize("name", OPTIMIZERS)
clipped_or_not = pytest.mark.parametrize("clip_update", [None, 0.1])
MATRICES = ("embedding", "square", "tall")
OPTIONS = {
    "spam": [{"interval": 4, "warmup": 2, "grace": 2, "threshold": 4.0}, {"interval": 3, "reset_count": True}],
    "stable_spam": [{"interval": 4}, {"interval": 3, "reset_count": False}],
    "adafactor": [{"relative_step": True}, {"clip": 0.5, "decay_exponent": 0.5}],
    "lars": [{"trust": 0.1}, {"trust": 1.0}],
    "soap": [{"every": 2}, {"every": 1}],
}
"""Short intervals, so that a test of some steps sees every branch."""


def trials_of(name, count=3, **optim):
    return different(name, count, OPTIONS.get(name), **optim)


# --- isolation and pack independence -----------------------------------------------------------------------------


STILL = (1.0, math.nan, math.inf)  # what the gradients of a trial that stands still are multiplied by
RUINS = [(what, value) for what in ("weights", "gradients", "state", "rate") for value in (math.nan, math.inf)]


def between(name, count, clip_update):
    """A trial, copies of a second one, and a third, in a rig; the last row."""
    first, second, third = trials_of(name, clip_update=clip_update)
    return Rig([first, *[second] * count, third], dtype=torch.float32), count + 1


@cache
def stood_still(name, clip_update):
    """Rows between the first and the last stand still for three steps; all rows before, after, and one step later."""
    rig, last = between(name, len(STILL), clip_update)
    rig.train(3)
    before = every_row(rig)
    for step in (3, 4, 5):
        rig.draw(step)
        for row, factor in enumerate(STILL, 1):
            rig.gradients[row] *= factor
        rig.step(active=[row in (0, last) for row in range(last + 1)])
    after, updates = every_row(rig), rig.optimizer.updates.tolist()
    rig.train(1, start=6)
    return before, after, every_row(rig), updates


@cache
def all_moved(name, clip_update):
    """The same if none stands still."""
    rig, _ = between(name, len(STILL), clip_update)
    rig.train(3)
    for step in (3, 4, 5):
        rig.draw(step)
        rig.step()
    return every_row(rig)


@cache
def ruined(name, clip_update, is_ruined):
    """All rows; those between the first and the last are ruined each in its way, or not."""
    rig, _ = between(name, len(RUINS), clip_update)
    for step in range(6):
        rig.draw(step)
        rates = [t.optim.lr for t in rig.trials]
        for row, (what, value) in enumerate(RUINS if is_ruined and step == 3 else (), 1):  # 4 resets, and forgives it
            if what == "state":
                for values in (rig.optimizer.slot(slot) for slot in slots(rig)):
                    values[row] = value
            elif what == "rate":
                rates[row] = value
            else:
                getattr(rig, what)[row] = value
        rig.step(rates)
    return every_row(rig)


def every_row(rig):
    return [rig.everything(row) for row in range(len(rig.trials))]


def neighbours_differ(left, right):
    return differing(left[0], right[0]) + differing(left[-1], right[-1])


@every
@clipped_or_not
@pytest.mark.parametrize("value", STILL)
def test_a_trial_that_stands_still_keeps_every_bit(name, clip_update, value):
    (before, after, later, updates), row = stood_still(name, clip_update), 1 + STILL.index(value)
    assert differing(before[row], after[row]) == []
    assert updates == [6, 3, 3, 3, 6]
    assert "weights" in differing(before[row], later[row]), "it can go on"
    assert neighbours_differ(after, all_moved(name, clip_update)) == []


@every
@clipped_or_not
@pytest.mark.parametrize("ruin", RUINS, ids=lambda ruin: f"{ruin[0]}-{ruin[1]}")
def test_what_is_not_finite_stays_in_its_trial(name, clip_update, ruin):
    together, clean = (ruined(name, clip_update, is_ruined) for is_ruined in (True, False))
    row = 1 + RUINS.index(ruin)
    assert differing(together[row], clean[row]) != [] and neighbours_differ(together, clean) == []


def slots(rig):
    return [*rig.optimizer.slots, *rig.optimizer.tensor_slots]


ODD = (
    tensor_row("long", (131, 67), Kind.EMBEDDING),  # more elements than a row of a piece has columns
    tensor_row("longer", (300, 173), Kind.HIDDEN, learning_rate=0.5),  # so many that two threads would share a row
    tensor_row("small", (7, 9), Kind.HIDDEN, learning_rate=0.5),
    tensor_row("gain", (13,), Kind.GAIN, decay=0.0),
    tensor_row("scale", (1,), Kind.SCALE, decay=0.0),
)


@every
@pytest.mark.parametrize(("threads", "clip_update"), [(1, None), (2, None), (1, 0.1)])
def test_bits_do_not_depend_on_the_pack(name, threads, clip_update):
    torch.set_num_threads(threads)
    assert ODD[0].size > CPU_COLUMNS and ODD[1].size > CPU_GRAIN
    trials = trials_of(name, 7, clip_update=clip_update)
    together = Rig(trials, ODD, torch.float32)
    together.train(4)
    for members in ([5, 3], [6, 2, 4]):
        apart = Rig([trials[i] for i in members], ODD, torch.float32)
        apart.train(4)
        for row, i in enumerate(members):
            assert differing(apart.everything(row), together.everything(i)) == [], f"{i} in a pack of {len(members)}"


@every
@clipped_or_not
def test_norms(name, clip_update):
    """And that they are taken changes no bit."""
    trials = trials_of(name, clip_update=clip_update)
    rig, unmeasured = Rig(trials, ODD), Rig(trials, ODD)
    for step in range(3):
        before = rig.weights.clone()
        rig.draw(step)
        unmeasured.draw(step)
        norms = rig.step()
        assert unmeasured.step(measure=False) is None
        torch.testing.assert_close(norms.weights, rig.weights.norm(dim=1))
        torch.testing.assert_close(norms.update, (rig.weights - before).norm(dim=1))
        if "moment_2" in rig.optimizer.slots:
            torch.testing.assert_close(norms.second_moment, rig.optimizer.slot("moment_2").norm(dim=1))
        else:
            assert norms.second_moment is None
    for row in range(3):
        assert differing(rig.everything(row), unmeasured.everything(row)) == []


@every
def test_norms_are_finite_where_squares_of_float32_are_not(name):
    """A weight whose highest bit was flipped: its row has a norm, and the others' do not move by a bit."""
    rig, plain = Rig(trials_of(name), ODD, torch.float32), Rig(trials_of(name), ODD, torch.float32)
    for each in (rig, plain):
        each.train(1)
    rig.weights[1, 3] = 7e36
    for each in (rig, plain):
        each.draw(1)
    norms, others = rig.step(), plain.step()
    if name in ("lars", "lamb"):  # by the norms of weights in float32, as published: the step itself is infinite
        assert not rig.weights[1].isfinite().all()
        return
    assert norms.weights[1] == pytest.approx(float(rig.weights[1].double().norm()), rel=1e-6)
    falls_back = name == "schedule_free"  # to its fast iterate, which was not struck
    assert bool(norms.weights[1] > (6e34 if falls_back else 6e36)) and bool(norms.update.isfinite().all())
    for kind in ("weights", "update", "second_moment"):
        if getattr(norms, kind) is not None:
            assert torch.equal(getattr(norms, kind)[[0, 2]], getattr(others, kind)[[0, 2]])


@every
@clipped_or_not
def test_rows_in_pieces_are_as_all_rows_at_once(name, clip_update):
    """As they are on an accelerator, where nobody looks which rows move; there AdamW is no kernel of torch's."""
    trials = trials_of(name, 4, clip_update=clip_update)
    pieces, whole = Rig(trials, ODD, torch.float32), Rig(trials, ODD, torch.float32)
    whole.optimizer._on_cpu = False
    for rig in (pieces, whole):
        rig.train(3)
        rig.train(2, start=3, active=[True, False, True, True])
    assert max(len(piece.rows) for piece in whole.optimizer._cut()) == 4
    if name == "adamw" and clip_update is None:
        for (what, ours), (_, theirs) in zip(whole.state, pieces.state, strict=True):
            assert (ours - theirs).norm() <= 3e-7 * theirs.norm(), what
        return
    assert [differing(pieces.everything(row), whole.everything(row)) for row in range(4)] == [[]] * 4


# --- state -------------------------------------------------------------------------------------------------------


@every
@clipped_or_not
def test_what_stands_between_tensors_stays_zero(name, clip_update):
    rig = Rig(trials_of(name, clip_update=clip_update), ODD, torch.float32)
    for step in range(6):
        rig.draw(step)
        if step == 4:
            rig.layout.view(rig.gradients, "gain")[1] = math.nan
        rig.step()
    between = torch.ones(rig.layout.size, dtype=torch.bool)
    for span in rig.layout.spans:
        between[span.start : span.stop] = False
    assert between.any()
    for slot in rig.optimizer.slots:
        assert (rig.optimizer.slot(slot)[:, between] == 0).all()
    assert (rig.weights[:, between] == 0).all()


@every
@clipped_or_not
def test_a_tensor_whose_rate_is_multiplied_by_zero_is_left_alone(name, clip_update):
    rows = [replace(scaled, learning_rate=0.0) if scaled.name in ("square", "gain") else scaled for scaled in TENSORS]
    rig = Rig(trials_of(name, clip_update=clip_update), rows, torch.float32)
    before = rig.weights.clone()
    for step in range(6):
        rig.draw(step)
        if step == 3:
            rig.layout.view(rig.gradients, "square")[1] = math.nan
        rig.step()
    for scaled in rows:
        found, old = (rig.layout.view(flat, scaled.name) for flat in (rig.weights, before))
        assert torch.equal(bits(found), bits(old)) == (scaled.name in ("square", "gain")), scaled.name


# --- weight decay ------------------------------------------------------------------------------------------------


@every
def test_decay_that_follows_the_schedule_does_not_depend_on_the_rate(name):
    """w <- w - eta_t lambda w, eta_t being the schedule (Loshchilov & Hutter 2019, algorithm 2), with no gradient."""
    own = {"weight_decay": 0.02, "decay_follows": "schedule"}
    trials = [trial(name, seed=5, lr=lr, **own) for lr in (1e-3, 1e-1)]
    rig = Rig(
        [*trials, without(trials[0], decay_follows="rate", weight_decay=20.0), trial(name, seed=5, lr=0.0, **own)]
    )
    start = rig.weights.clone()
    shares = [share(step) for step in range(7)]
    for eta in shares:
        rig.step([t.optim.lr * eta for t in rig.trials])
    for name_ in MATRICES:
        power = 2 if name == "adamc" and name_ != "head" else 1  # whose decay is multiplied by the schedule once more
        expected = math.prod(1 - 0.02 * eta**power for eta in shares)
        old = rig.layout.view(start, name_)[0]
        for row in (0, 1):
            expected = rig.view(name_, 0) / old if name == "schedule_free" else expected  # decay goes into a mean
            torch.testing.assert_close(rig.view(name_, row), old * expected, rtol=1e-12, atol=0)
            assert bool((rig.view(name_, row).abs() < old.abs()).all())
        assert torch.equal(rig.view(name_, 3), old), "a rate of zero has no schedule"
    torch.testing.assert_close(rig.view("embedding", 2), rig.view("embedding", 0), rtol=1e-12, atol=0)
    for name_ in ("gains", "gain", "scale"):
        assert torch.equal(rig.layout.view(rig.weights, name_), rig.layout.view(start, name_)), "vectors do not decay"


@every
def test_decay_is_beside_the_step(name):
    """It takes the same share of the weights, whatever the gradient is and does."""
    plain = trials_of(name, weight_decay=0.0)
    decaying = [without(t, weight_decay=0.5) for t in plain]
    left, right = Rig(plain), Rig(decaying)
    for rig in (left, right):
        rig.draw(0)
        rig.step()
    for r, one in enumerate(plain):
        for scaled in TENSORS:
            start = Rig([one]).view(scaled.name, 0)
            taken = 0.5 * scaled.decay * one.optim.lr * scaled.learning_rate
            torch.testing.assert_close(right.view(scaled.name, r), left.view(scaled.name, r) - taken * start)


# --- updates that are clipped ------------------------------------------------------------------------------------


@every
def test_a_clipped_update_has_no_larger_root_mean_square(name):
    """And is as it was where it is smaller, tensor by tensor, each trial with its own limit (arXiv 1804.04235)."""
    if name == "schedule_free":
        (line,) = OPTIMIZERS[name].refused(trial(name, clip_update=1.0))
        assert line.startswith("optim.clip_update=1.0: ") and line.endswith("null with optim.name=schedule_free")
        return
    plain = trials_of(name, weight_decay=0.0)
    free, start = Rig(plain), Rig(plain)
    moves = 1 if name == "soap" else 0  # the first of its steps only looks
    for step in range(moves + 1):
        free.draw(step)
        free.step()
    sizes = {(scaled.name, r): size(free, start, scaled, r) for scaled in TENSORS for r in range(3)}
    limits = [
        sorted(sizes[scaled.name, r] for scaled in TENSORS)[3] * factor for r, factor in enumerate((1.01, 0.5, 2.0))
    ]
    clipped = Rig([without(one, clip_update=limit) for one, limit in zip(plain, limits, strict=True)])
    for step in range(moves + 1):
        clipped.draw(step)
        clipped.step()
    for (name_, r), unclipped in sizes.items():
        scaled = next(scaled for scaled in TENSORS if scaled.name == name_)
        assert size(clipped, start, scaled, r) == pytest.approx(min(unclipped, limits[r]), rel=1e-6)
        whole, shortened = (rig.view(name_, r) - start.view(name_, r) for rig in (free, clipped))
        torch.testing.assert_close(shortened, whole * min(1.0, limits[r] / unclipped))
    assert any(found > limits[r] for (_, r), found in sizes.items())
    assert any(found < limits[r] for (_, r), found in sizes.items())


def size(rig, start, scaled, r):
    """Root mean square of a tensor's update before the rate."""
    change = rig.view(scaled.name, r) - start.view(scaled.name, r)
    return float(change.square().mean().sqrt()) / (rig.trials[r].optim.lr * scaled.learning_rate)
