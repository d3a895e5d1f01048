"""The memory that a pack takes on an accelerator, counted without one, against what torch's own allocator says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from harness.basics import devices
from harness.config import Trial, sections
from harness.kernels import use
from harness.memory import footprint as module
from harness.memory.allocations import GRAIN, INSIDE, REST, Allocations
from harness.memory.footprint import HELD, LEARN, META, VALIDATE, WORKSPACES, count, footprint, rehearsal
from harness.model import attention
from harness.testing import engine
from sweeps.planning import planner
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import activation_bytes, pack_bytes, state_bytes, trials_that_fit
from tests.harness.features import FEATURES, Fields

CPU = torch.device("cpu")
MOE = {"experts": 4, "top": 2, "bias_rate": 0.01}
EXPERTS: Fields = {"block": {"channel_mixer": "moe"}, "activation": "swiglu", "moe": MOE}
SHAPES: dict[str, Fields] = {  # tens of MiB each, so that what the host keeps for itself is below a percent
    "width 64": {"width": 64, "context": 128, "batch": 8},
    "width 128, four blocks": {"width": 128, "context": 64, "batch": 8, "depth": 4},
    "width 256": {"width": 256, "context": 32, "batch": 4},
    "width 512": {"width": 512, "context": 16, "batch": 2, "depth": 1},
    "large vocabulary": {"context": 64, "batch": 2, "vocabulary": 20_000, "width": 32},
    "ranks": {"width": 256, "context": 16, "batch": 4, "ranks": 4},
    "ranks in pairs": {"width": 256, "context": 16, "batch": 4, "ranks": 4, "reduction": "pairwise"},
    "micro-batches": {"width": 128, "context": 128, "batch": 8, "micro_batches": 4},
    "checkpointing": {"width": 128, "context": 128, "batch": 4, "depth": 4, "checkpointing": True},
    "fused attention": {"width": 64, "context": 300, "batch": 4},
    "fused attention, checkpointing": {"width": 64, "context": 300, "batch": 4, "depth": 4, "checkpointing": True},
    "fused attention in bf16": {"width": 64, "context": 300, "batch": 4, "precision": "bf16"},
    "bf16": {"width": 128, "context": 64, "batch": 8, "precision": "bf16"},
    "fp64": {"width": 128, "context": 64, "batch": 4, "precision": "fp64"},
    "adafactor": {"width": 256, "context": 16, "batch": 2, "name": "adafactor"},
    "sgd": {"width": 256, "context": 16, "batch": 2, "name": "sgd"},
    "spam": {"width": 256, "context": 16, "batch": 2, "name": "spam"},
    "clippers": {"width": 256, "context": 16, "batch": 2, "clip_value": 0.1, "clip_tensor": 0.3, "zclip": {}},
    "experts": {"width": 128, "context": 64, "batch": 4, **EXPERTS},
    "experts by older weights": {"width": 128, "context": 64, "batch": 4, **EXPERTS, "moe": {**MOE, "lag": 2}},
    "readings": {"width": 256, "context": 16, "batch": 2, "signals": {"layer_updates": 1, "moment_size": 1}},
}


OFTEN_ENOUGH = {"ranks in pairs", "width 512", "fused attention, checkpointing", "fp64", "clippers"}
"""Shapes whose parts others have, too, and whose real step, which takes seconds, is left out."""


def shaped(**fields: Any) -> Trial:
    return engine.trial(**{"head_dim": 16, **fields})


def going_back(on: str, **fields: Any) -> Trial:
    """One that goes back to snapshots, three of which are kept."""
    ladder = '[{"detector": "loss_ratio", "action": "roll_back"}]'
    playbook = sections()["playbook"](name="own", ladder=ladder)
    return shaped(
        **fields,
        **{"detect": {"name": "loss_ratio"}, "playbook": playbook, "playbook.snapshot": {"kept": 3, "on": on}},
    )


@pytest.fixture
def accelerator_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data on the CPU take the ways of an accelerator, and so does what is counted, without programs of Triton."""
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(use, "is_installed", lambda: False)


def allocated(function: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has given out at a time while the function ran, inside kernels too."""
    gc.collect()  # what goes meanwhile must not be what others have left
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in events]).max())


def measured(trial: Trial, rows: int, part: int) -> int:
    """The same of a real step; initial weights of a seed, which the host keeps, are there before."""
    count(trial, 2, 2, CPU)
    attention._rotation.cache_clear()  # those lie on the device
    attention._causal_mask.cache_clear()
    return allocated(lambda: count(trial, rows, part, CPU))


# --- what is counted is what is taken ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in OFTEN_ENOUGH])
def test_the_count_is_what_a_real_step_takes(shape: str, accelerator_ways: None) -> None:
    """A pack of two parts. The promise is 15%, and the measure is torch's own."""
    trial = rehearsal(shaped(**SHAPES[shape]))
    assert max(count(trial, 4, 2, META).values()) == pytest.approx(measured(trial, 4, 2), rel=0.02)


@pytest.mark.parametrize("shape", ["width 128, four blocks", "sgd"])
def test_four_arrays_of_state_and_what_passes_forward_are_not_the_peak(shape: str, accelerator_ways: None) -> None:
    """The rule that a CPU is planned by, which was that of every device: beyond 15%, where the count is right."""
    trial = shaped(**SHAPES[shape])
    rows, taken = 4, measured(rehearsal(trial), 4, 4)
    rule = rows * state_bytes(trial) + activation_bytes(trial, rows, "cuda")
    assert not 0.85 * taken < rule < 1.15 * taken
    without_replay = replace(footprint(trial), pools=0).bytes(rows) - WORKSPACES
    assert 0.97 * taken < without_replay < 1.03 * taken
    with_replay = pack_bytes(PackPlan((trial,) * rows, frozenset()), "cuda") - WORKSPACES
    assert with_replay > 1.2 * without_replay, "what steps take that are not replayed, and those that are"


@pytest.mark.parametrize("feature", sorted({*list(FEATURES)[::4], "plain", "detectors", "readings: all"}))
def test_everything_that_a_trial_may_have_can_be_counted(feature: str, accelerator_ways: None) -> None:
    """Phase by phase, as the same step on real tensors is."""
    trial = rehearsal(engine.different(1, **{"width": 32, **FEATURES[feature]})[0])
    expected, found = count(trial, 2, 2, CPU), count(trial, 2, 2, META)
    assert found.keys() == expected.keys() == {HELD, LEARN, VALIDATE, REST}
    for name, bytes_ in found.items():
        assert bytes_ == pytest.approx(expected[name], rel=0.03, abs=2**18), name


def test_snapshots_on_the_device_are_counted_and_those_in_main_memory_are_not() -> None:
    none, here, there = (
        footprint(trial).held.row
        for trial in (shaped(width=128), going_back("device", width=128), going_back("host", width=128))
    )
    weights = planner.weight_bytes(shaped(width=128))
    assert here - none == pytest.approx(3 * 3 * weights, rel=0.02)  # of weights and two moments each
    assert there - none < 0.01 * weights


def test_sizes_that_grow_are_counted_as_they_end() -> None:
    grown, growing = shaped(width=64, batch=4), shaped(width=64, batch=4, batch_start=1, sequence_start=2)
    assert footprint(growing).bytes(8) == pytest.approx(footprint(grown).bytes(8), rel=1e-3)


def test_a_few_micro_batches_tell_of_many() -> None:
    """But for the tokens of the batch, which are next to nothing."""
    trial = shaped(width=64, context=64, batch=32, micro_batches=16)
    rehearsed = rehearsal(trial)
    assert (rehearsed.train.micro_batches, rehearsed.train.sequences) == (3, trial.train.sequences)
    whole = replace(rehearsed, train=replace(rehearsed.train, batch=32, micro_batches=16))
    expected, found = (count(one, 8, 8, META) for one in (whole, rehearsed))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.03)


def test_rates_of_all_steps_are_counted() -> None:
    short, long = (footprint(shaped(steps=steps)) for steps in (8, 1_000_008))
    of_slots, of_tokens = 8 * 4_000_000, 8_000_000
    assert long.bytes(5) - short.bytes(5) == pytest.approx(of_slots + of_tokens, rel=1e-3)


# --- and from small packs to large ones --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["width 64", "width 256", "ranks in pairs", "micro-batches", "spam"])
@pytest.mark.parametrize(("rows", "part"), [(16, 16), (64, 64), (64, 32), (192, 64)])
def test_small_packs_tell_of_large_ones(shape: str, rows: int, part: int) -> None:
    trial = shaped(**SHAPES[shape])
    expected, found = count(rehearsal(trial), rows, part, META), footprint(trial)
    assert found.held.at(rows, part) == pytest.approx(expected.pop(HELD), rel=0.02)
    for name, peak in found.peaks.items():
        assert peak.at(rows, part) == pytest.approx(expected[name], rel=0.02), name


@pytest.mark.parametrize("fields", [{}, {"checkpointing": True}, {"placement": "mix"}, {"name": "adafactor"}])
def test_shallow_models_tell_of_deep_ones(fields: Fields) -> None:
    trial = shaped(width=64, depth=9, **fields)
    expected, found = count(rehearsal(trial), 8, 8, META), footprint(trial)
    assert found.held.at(8, 8) == pytest.approx(expected.pop(HELD), rel=0.01)
    for name, peak in found.peaks.items():
        assert peak.at(8, 8) == pytest.approx(expected[name], rel=0.01), name


# --- in a plan ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["width 64", "width 512", "ranks"])
@pytest.mark.parametrize("gib", [0.5, 2, 80])
def test_as_many_trials_as_fit(shape: str, gib: float) -> None:
    trial = shaped(**SHAPES[shape])
    fitting = trials_that_fit(trial, gib * 2**30, "cuda")
    assert pack_bytes(PackPlan((trial,) * fitting, frozenset()), "cuda") <= gib * 2**30
    assert pack_bytes(PackPlan((trial,) * (2 * fitting + 64), frozenset()), "cuda") > gib * 2**30


def test_a_structure_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many trials of it there are, and only for devices that are none of the CPU's."""
    counted: list[int] = []

    def counting(trial: Trial, rows: int, part: int, device: torch.device) -> dict[str, int]:
        counted.append(rows)
        return count(trial, rows, part, device)

    monkeypatch.setattr(module, "count", counting)
    monkeypatch.setattr(module, "_FOUND", {})
    monkeypatch.setattr(module, "_COUNTED", {})
    trials = [shaped(width=40, lr=lr, seed=seed, clip=1.0) for lr in (1e-3, 1e-2) for seed in range(50)]
    packs = [PackPlan((trial, trial), frozenset()) for trial in trials]
    assert len({pack_bytes(pack, "cpu") for pack in packs}) == 1 and not counted
    assert len({pack_bytes(pack, "cuda") for pack in packs}) == 1
    assert counted == [2, 4, 4]


def test_per_trial_parts_that_take_memory_are_told_apart() -> None:
    plain = shaped(width=64, vocabulary=4096)
    assert footprint(replace(plain, train=replace(plain.train, z_loss=0.1))).peaks != footprint(plain).peaks


def test_what_cannot_be_counted_is_planned_by_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> dict[str, int]:
        raise NotImplementedError("no such operation\nwithout numbers")

    monkeypatch.setattr(module, "count", refuses)
    monkeypatch.setattr(module, "_FOUND", {})
    monkeypatch.setattr(module, "_COUNTED", {})
    pack = PackPlan((shaped(width=48),) * 4, frozenset())
    with pytest.warns(RuntimeWarning, match="cuda is a rough estimate: NotImplementedError: no such operation without"):
        by_rule = pack_bytes(pack, "cuda")
    assert by_rule > 4 * state_bytes(pack.trials[0])


# --- how it is counted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [META, CPU])
def test_storages_count_while_somebody_has_them(device: torch.device) -> None:
    with Allocations(device) as watch:
        x = torch.empty(1000, 256, device=device)
        view = x[10:20].view(-1)
        assert watch.alive == 1000 * 256 * 4
        del x
        assert watch.alive == 1000 * 256 * 4, "the view has it"
        small = view.sum()
        assert watch.alive == 1000 * 256 * 4 + GRAIN
        del view
        assert watch.alive == GRAIN and watch.peaks == {REST: 1000 * 256 * 4 + GRAIN}
        with watch.phase("other"):
            y = small + torch.empty(128, device=device)
            del y
        assert watch.peaks["other"] == 3 * GRAIN and watch.alive == GRAIN


def test_arguments_that_are_equal_but_of_other_types_are_other_calls() -> None:
    with Allocations(META):
        x = torch.empty(4, dtype=torch.int64, device=META)
        assert (x + 1).dtype == torch.int64 and (x + 1.0).dtype == torch.float32 and (x + 1).dtype == torch.int64
        for _ in range(2):
            assert x.sum(0, True).shape == (1,) and x.sum(0, False).shape == ()


def test_the_host_reads_zeros() -> None:
    with Allocations(META):
        x = torch.ones(2, 3, device=META)
        assert x.sum().item() == 0 and not x.any() and x.tolist() == [[0.0] * 3] * 2 and x.nonzero().shape == (0, 2)
        assert np.array_equal(x.cpu().numpy(), np.zeros((2, 3)))


def test_norms_in_another_type_copy_what_they_read() -> None:
    """Inside of the kernel, where no operation shows it."""
    x = torch.randn(4, 100_000)
    inside = INSIDE[torch.ops.aten.linalg_vector_norm.default]
    for dtype in (None, torch.float64):
        taken = allocated(lambda dtype=dtype: torch.linalg.vector_norm(x, dim=1, dtype=dtype))
        assert taken == pytest.approx(inside(x, 2, [1], dtype=dtype), abs=64)


def test_counting_leaves_nothing_behind() -> None:
    """Neither another attention nor another state of torch's generator; and no memory but tables of columns."""
    usual, state = F.scaled_dot_product_attention, torch.get_rng_state()
    trial = rehearsal(shaped(width=2048, context=300, depth=4, dropout=0.1))
    assert allocated(lambda: count(trial, 4, 4, META)) < 2**23
    assert F.scaled_dot_product_attention is usual and torch.equal(torch.get_rng_state(), state)
