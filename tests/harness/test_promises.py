"""The promises of docs/architecture.md that the engine itself keeps, in bits: nothing here has a tolerance but one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config import Trial
from harness.model.parameters import ALIGNMENT, Layout
from harness.model.scaling import tensor_table
from harness.objectives.outcome import NON_FINITE
from harness.testing import engine
from harness.testing.changes import Change, fill_first
from harness.training.sites import Site
from injectors.value import Value


@cache
def plain_run(trials: tuple[Trial, ...]) -> engine.Run:
    """What these trials leave, looked at by many tests and changed by none."""
    return engine.run(trials)


def ruin(tensors: Mapping[str, Tensor]) -> None:
    for x in tensors.values():
        x.fill_(0)


# --- 1: control equals nothing --------------------------------------------------------------------------------------


OF_OTHERS = (Site.BEFORE_UPDATE, Site.LOSS_SCALE, Site.SAMPLER_WEIGHT, Site.REWARD, Site.ADVANTAGE, Site.BUFFER)
# Those of policies: tests/injectors/test_rewards.py; buffers: tests/injectors/test_buffers.py.
SITES = [site for site in Site if site not in OF_OTHERS]


@cache
def with_injectors() -> engine.Run:
    """For each site two trials whose injector is never due, and one like the first in which it is."""
    first, second = engine.different(2)
    injectors: dict[int, Change] = {}
    for site in SITES:
        for steps in (range(0), range(first.train.steps, 10**4), range(3, 4)):
            injectors[len(injectors)] = Change(site, steps, ruin)
    return engine.run([first, second, first] * len(SITES), injectors)


@pytest.mark.parametrize("site", SITES)
def test_an_injector_that_is_never_due_changes_no_bit(site):
    plain, run, own = plain_run(tuple(engine.different(2))), with_injectors(), 3 * SITES.index(site)
    assert [engine.same_bits(plain[i], run[own + i]) for i in range(2)] == [[], []]
    assert run.result.events[own : own + 2] == [[], []]
    assert engine.same_bits(plain[0], run[own + 2]), "the same injector does change something once it is due"


@pytest.mark.parametrize("attention", ["explicit", "fused"])
def test_taps_change_no_bit_unless_they_return_something(attention):
    trials = engine.different(3, attention=attention, qk_norm=True)
    plain = engine.run(trials)

    def attach_and_detach(pack):
        detach = pack.model.taps.attach("*", lambda name, x: x * 0)
        detach()

    read = []
    prepared = {
        "detached": attach_and_detach,
        "reading": lambda pack: pack.model.taps.attach("*", lambda name, x: read.append(x.detach().sum())),
        "returning what it got": lambda pack: pack.model.taps.attach("*", lambda name, x: x),
    }
    for how, prepare in prepared.items():
        tapped = engine.run(trials, prepare=prepare)
        assert [engine.same_bits(plain[i], tapped[i]) for i in range(3)] == [[], [], []], how
    assert read
    changed = engine.run(trials, prepare=lambda pack: pack.model.taps.attach("*.down", lambda name, x: x * 0))
    assert engine.same_bits(plain[0], changed[0])


@pytest.mark.parametrize("attention", ["explicit", "fused"])
def test_measuring_changes_no_bit(attention):
    """Telemetry, the search for non-finite values, and how often results leave the device."""
    trials = [engine.trial(seed=r, attention=attention, clip=0.5 if r else None) for r in range(3)]
    full = engine.run(trials)
    ways = [
        {"telemetry": False},
        {"telemetry": False, "detection": False},
        {"detection": False},
        {"block": 3},
        {"block": 1000},
    ]
    for way in ways:
        other = engine.run(trials, **way)
        for i in range(3):
            kept = [name for name in full[i] if not np.isnan(other.signals.get(name, np.zeros(1))).all()]
            assert {"loss", "validation_loss", "learning_rate", "weights"} <= set(kept)
            assert ("activation_rms" in kept) == way.get("telemetry", True)
            left, right = ({name: run[i][name] for name in kept} for run in (full, other))
            assert engine.same_bits(left, right) == [], way


# --- 3: isolation ---------------------------------------------------------------------------------------------------

VICTIM = 2


def fill(value):
    return lambda pack: pack.weights[VICTIM].fill_(value)


def one_weight(value):
    return lambda pack: pack.tensors(pack.weights, VICTIM)["blocks.0.feedforward.up"][3, 5].fill_(value)


def change(site, value):
    return {VICTIM: Change(site, range(3, 4), lambda tensors: next(iter(tensors.values())).fill_(value))}


POISONS = {
    "learning rate": {"victim": {"lr": 1e30, "warmup": 0}},
    "bit of the embedding": {"victim": {"fault": Value(start=3, tensor="embedding", element=0, bit=30)}},
    "bit of a hidden weight": {"victim": {"fault": Value(start=3, tensor="blocks.1.feedforward.up", bit=30)}},
    "weights infinite": {"prepare": fill(math.inf)},
    "weights NaN": {"prepare": fill(math.nan)},
    "weights huge": {"prepare": fill(3e38)},
    "one weight infinite": {"prepare": one_weight(math.inf)},
    "one weight NaN": {"prepare": one_weight(math.nan)},
    "gradient NaN": {"injectors": change(Site.REDUCED_GRADIENT, math.nan)},
    "moment infinite": {"injectors": change(Site.MOMENT_1, math.inf)},
    "rate NaN": {"injectors": change(Site.LEARNING_RATE, math.nan)},
}
SHAPES = {"explicit": {}, "fused, clipped": {"attention": "fused", "clip": 0.5}}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_trial_full_of_nan_changes_no_bit_of_its_neighbours(poison, shape):
    shape = {"steps": 6, **shape}  # two after the last strike
    healthy = [engine.trial(seed=r, **shape) for r in range(5)]  # one in five frozen: the pack does not shrink
    trials = list(healthy)
    trials[VICTIM] = engine.trial(seed=VICTIM, **shape, **poison.get("victim", {}))
    run = engine.run(trials, poison.get("injectors"), poison.get("prepare", lambda pack: None))
    assert run.result.outcome[VICTIM] == NON_FINITE and len(run.pack) == 5
    reference = plain_run(tuple(healthy))
    for i in {0, 1, 3, 4}:
        assert engine.same_bits(run[i], reference[i]) == []
        assert run.result.outcome[i] == reference.result.outcome[i] != NON_FINITE
    froze = run.result.nonfinite_step[VICTIM]
    frozen = [engine.bits(weights[VICTIM]) for weights in run.weights[froze:]]
    assert len(frozen) > 1 and all(torch.equal(weights, frozen[0]) for weights in frozen)
    if froze:
        by_this_step = (frozen[0] != engine.bits(run.weights[froze - 1][VICTIM])).sum()
        assert by_this_step == sum(event.step == froze for event in run.result.events[VICTIM] if event.bit is not None)
    steps = trials[0].train.steps
    assert run.pack.optimizer.updates.tolist() == [froze if i == VICTIM else steps for i in range(5)]
    for name in ("loss", "grad_norm", "learning_rate", "activation_rms"):
        assert np.isnan(run.signals[name][VICTIM, froze + 1 :]).all()


def test_weights_of_a_trial_that_starts_infinite_stay_as_they_were():
    run = engine.run([engine.trial(seed=r) for r in range(5)], prepare=fill(math.inf))
    assert run.result.nonfinite_step[VICTIM] == 0
    assert torch.isinf(run.weights[-1][VICTIM]).all()


# --- 4: pack independence -------------------------------------------------------------------------------------------

UNEVEN = {"width": 30, "head_dim": 10, "feedforward": 101, "context": 65, "batch": 3, "vocabulary": 257, "depth": 1}
INDEPENDENT = {
    "width 16": {"width": 16, "head_dim": 8},
    "width 32, deep": {"width": 32, "head_dim": 16, "depth": 4},
    "width 48": {"width": 48, "head_dim": 16, "context": 32},
    "width 64": {"width": 64, "head_dim": 16, "context": 64, "depth": 1, "vocabulary": 256},
    "width 96": {"width": 96, "head_dim": 32, "context": 33, "depth": 1},
    "odd context": {"context": 33, "batch": 3},
    "qk_norm": {"width": 64, "head_dim": 32, "qk_norm": True, "context": 33, "depth": 1},
    "fused": {"attention": "fused", "width": 48, "head_dim": 16, "context": 33},
    "muP": {"parametrization": "mup", "width": 128, "head_dim": 16, "depth": 1, "vocabulary": 256},
    # Sizes at which a thread's share of a whole pack ends inside a row of features: these need the trial-wise
    # rotary positions and SiLU of the harness.
    "rotary, odd share": {"width": 48, "head_dim": 16, "context": 85, "batch": 5, "depth": 1, "attention": "fused"},
    "swiglu, odd share": {"activation": "swiglu", "width": 24, "head_dim": 8, "batch": 5, "context": 65, "depth": 1},
    # Trials that take no whole cache lines: these need the trial-wise products of the harness.
    "nothing even": {**UNEVEN, "activation": "swiglu", "qk_norm": True},
    "nothing even, fused": {**UNEVEN, "attention": "fused"},
    "nothing even, sigma": {**UNEVEN, "sigma_reparam": True},
    "one token": {"context": 1, "batch": 1, "depth": 1},
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", INDEPENDENT.values(), ids=INDEPENDENT)
def test_a_trial_does_not_depend_on_its_pack(shape, threads):
    torch.set_num_threads(threads)
    trials = engine.different(7, **{"steps": 2, "validate_every": 2, **shape})
    together = engine.run(trials)
    for members in ([5, 3], [6, 2, 4]):
        apart = engine.run([trials[i] for i in members])
        for row, i in enumerate(members):
            assert engine.same_bits(apart[row], together[i]) == [], f"trial {i} in a pack of {len(members)}"


@pytest.mark.parametrize("shape", [{}, {"width": 32, "context": 16}, {"width": 64, "head_dim": 16, "context": 64}])
def test_one_and_two_threads_give_the_same_bits(shape):
    """Where rows of attention scores fill whole vectors; torch's softmax sums other rows in another order."""
    trials = engine.different(3, **shape, steps=4)
    one = engine.run(trials)
    torch.set_num_threads(2)
    two = engine.run(trials)
    assert [engine.same_bits(one[i], two[i]) for i in range(3)] == [[], [], []]


def test_a_pack_of_one_agrees_to_rounding():
    """A batch of one takes other kernels. In 8 steps of Adam rounding errors of 1e-7 grow at most a hundredfold."""
    for trial in engine.different(3, width=32, head_dim=16, context=16):
        alone, in_a_pack = engine.run([trial]), engine.run([trial, trial])
        for name in ("loss", "grad_norm", "param_norm"):
            np.testing.assert_allclose(alone.signals[name][0], in_a_pack.signals[name][0], rtol=1e-5)


@pytest.mark.parametrize("width", [6, 10, 16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_matrix_that_is_read_starts_on_a_cache_line(width, activation):
    """And stacked ones follow each other without a gap, at any size."""
    model = engine.trial(width=width, head_dim=width, feedforward=7, activation=activation).model
    layout = Layout(tuple(tensor_table(model, 61)))
    flat = torch.arange(layout.size).expand(2, -1)
    assert layout.size % ALIGNMENT == 0
    end = 0
    for scaled in layout.tensors:
        start = layout.offsets[scaled.name]
        assert start == end if scaled.stacked else start % ALIGNMENT == 0 and 0 <= start - end < ALIGNMENT
        end = start + scaled.size
    names = ["query", "key", "value"]
    stack = layout.view(flat, "blocks.1.attention.query", "blocks.1.attention.value")
    parts = [layout.view(flat, f"blocks.1.attention.{name}") for name in names]
    assert torch.equal(stack, torch.cat(parts, 1)) and stack.shape == (2, 3 * width, width)


# --- 5: shrinking ---------------------------------------------------------------------------------------------------


def blow_up(trial):
    return dataclasses.replace(trial, optim=dataclasses.replace(trial.optim, lr=1e30))


@pytest.mark.parametrize(
    ("size", "victims", "left"),
    [(8, [5], 8), (8, [0, 5], 6), (8, [0, 1, 2, 3, 4], 3), (3, [0, 1], 2), (2, [1], 2), (7, [0, 2, 4, 5, 6], 2)],
)
@pytest.mark.parametrize("block", [1, 3])
def test_a_pack_that_shrinks_leaves_the_others_as_they_were(size, victims, left, block):
    healthy = engine.different(size, steps=12)
    survivors = [i for i in range(size) if i not in victims]
    fault = Value(start=10, tensor="blocks.0.feedforward.up", bit=20)
    healthy[survivors[-1]] = dataclasses.replace(healthy[survivors[-1]], fault=fault)
    trials = [blow_up(trial) if i in victims else trial for i, trial in enumerate(healthy)]
    run, reference = engine.run(trials, block=block), plain_run(tuple(healthy))
    assert len(run.pack) == left and len(reference.pack) == size
    assert [name for name, outcome in enumerate(run.result.outcome) if outcome == NON_FINITE] == victims
    for i in survivors:
        assert engine.same_bits(run[i], reference[i]) == []
    assert run.result.events[survivors[-1]] == reference.result.events[survivors[-1]] != []
    for i in victims:
        froze = run.result.nonfinite_step[i]
        for name, values in run.signals.items():
            measured = np.isfinite(values[i]) | (np.arange(12) <= froze if values.ndim == 2 else True)
            assert name == "validation_loss" or not np.isfinite(values[i, froze + 1 :]).any(), name
            assert name != "learning_rate" or measured[: froze + 1].all()
        assert np.isfinite(run.signals["learning_rate"][i, : froze + 1]).all()


def test_a_pack_keeps_as_many_trials_as_there_are_threads():
    """A CPU's batched products split single matrices once there are fewer of them than threads."""
    trials = [engine.trial(seed=r, lr=1e30 if r else 1e-3, warmup=0, steps=4) for r in range(8)]
    for threads, left in ((1, 2), (2, 2), (4, 4)):
        torch.set_num_threads(threads)
        assert len(engine.run(trials).pack) == left


def test_a_pack_that_is_frozen_altogether_ends_early():
    trials = [engine.trial(seed=r, lr=1e30, warmup=0, steps=50) for r in range(3)]
    run = engine.run(trials)
    assert run.result.outcome == [NON_FINITE] * 3
    assert run.signals["loss"].shape[1] == max(run.result.nonfinite_step) + 1 < 50


# --- 6: what is not finite ------------------------------------------------------------------------------------------


NOT_FINITE = (math.nan, math.inf, -math.inf)
FILLED = {  # site -> what is filled there, and how many steps later the trial is not finite
    Site.WEIGHT: ("head", 0),
    Site.REDUCED_GRADIENT: ("head", 0),
    Site.LEARNING_RATE: ("learning_rate", 1),  # the weights are ruined by this step and read by the next
    Site.CLIPPED_GRADIENT: ("head", 1),
}
FILLS = list(itertools.product(FILLED, NOT_FINITE))


@cache
def filled(block: int) -> engine.Run:
    """A pack with a trial for each site and value, struck in step 4, and as many healthy ones as keep its size."""
    trials = [engine.trial(seed=r) for r in range(4 * len(FILLS) + 1)]
    fills = {i: Change(site, range(4, 5), fill_first(FILLED[site][0], value)) for i, (site, value) in enumerate(FILLS)}
    return engine.run(trials, fills, block=block)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("site", FILLED)
def test_the_step_at_which_a_trial_was_not_finite(site, value, block):
    run, victim, step = filled(block), FILLS.index((site, value)), 4 + FILLED[site][1]
    assert len(run.pack) == len(run.pack.planned)
    assert run.result.nonfinite_step[victim] == step and run.result.outcome[victim] == NON_FINITE
    finite = np.isfinite(run.signals["loss"]) & np.isfinite(run.signals["grad_norm"])
    assert finite[victim].tolist() == [i < step for i in range(8)]


@pytest.mark.parametrize("block", [1, 3, 8])
def test_no_other_trial_of_the_pack_was_not_finite(block):
    run, healthy = filled(block), slice(len(FILLS), None)
    assert set(run.result.nonfinite_step[healthy]) == {None} and NON_FINITE not in run.result.outcome[healthy]
    assert np.isfinite(run.signals["loss"][healthy]).all() and np.isfinite(run.signals["grad_norm"][healthy]).all()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_large_gradient_is_not_an_infinite_one(clip):
    """Squares of 1e25 overflow float32, so the norm must not be taken in it."""
    trials = [engine.trial(seed=r, clip=clip) for r in range(3)]
    run = engine.run(trials, {1: Change(Site.REDUCED_GRADIENT, range(3, 4), lambda t: t["head"].fill_(1e25))})
    assert run.result.nonfinite_step == [None] * 3 and NON_FINITE not in run.result.outcome
    assert run.signals["grad_norm"][1, 3] == pytest.approx(1e25 * math.sqrt(64 * 16), rel=1e-6)
    assert np.isfinite(run.signals["loss"]).all() and torch.isfinite(run.weights[-1][1]).all()
