"""Ranks that are processes do what simulated ones do: real processes that talk through gloo, against simulations.

Each has one thread. Two ranks have the bits of simulated ones, because a + b is b + a. More have them where the
configuration says in which order they are added; otherwise they agree to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import Trial
from harness.objectives.outcome import NON_FINITE
from harness.readings.table import READINGS
from harness.testing import engine
from harness.testing.faults import SHAPE, START
from harness.training.sites import Site
from injectors.value import Value
from sweeps.running.processes import ranks
from tests.harness.processes import CPU, Processes, message_of_differing, message_of_records, serve, trained
from tests.injectors.faults import cases, fault

CASES = cases()


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    with ranks(3, CPU, serve) as group:
        processes = Processes(group)
        yield processes
        processes.end()


@pytest.fixture(scope="module")
def processes(
    request: pytest.FixtureRequest, three: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    """As many as the test asks for."""
    if request.param == 3:
        yield three
    else:
        with three.first(request.param, tmp_path_factory.mktemp("group")) as fewer:
            yield fewer


of_two = pytest.mark.parametrize("processes", [2], indirect=True, ids=["two"])
of_three = pytest.mark.parametrize("processes", [3], indirect=True, ids=["three"])


def assert_same(*runs: engine.Run) -> None:
    """Every bit but those of a NaN, and every record."""
    real, simulated = runs
    differing = [
        engine.same_bits(*({name: torch.where(x.isnan(), torch.nan, x) for name, x in run[i].items()} for run in runs))
        for i in range(len(real.pack.planned))
    ]
    assert differing == [[]] * len(differing)
    assert real.result == simulated.result
    assert real.pack.rows == simulated.pack.rows
    assert engine.same_bits(dict(real.pack.rows_state), dict(simulated.pack.rows_state)) == []


def largest_difference(real: engine.Run, simulated: engine.Run) -> float:
    """Of any signal of any trial, relative to the simulated one."""
    names = [name for name in real.signals if name not in ("tokens_per_second", "step_seconds")]
    pairs = [(real.signals[name], simulated.signals[name]) for name in names]
    assert all(np.array_equal(np.isnan(a), np.isnan(b)) for a, b in pairs)
    return max(float(np.nanmax(np.abs(a - b) / (np.abs(b) + 1e-30), initial=0.0)) for a, b in pairs)


# --- training ----------------------------------------------------------------------------------------------------


@of_two
def test_two_processes_are_two_simulated_ranks(processes):
    """Over 20 steps, in a pack of trials that differ in all that they can; validation batches are shared out."""
    trials = engine.different(4, batch=8, ranks=2, steps=20, validate_tokens=600)
    real, simulated = processes(trained, trials), engine.run(trials)
    assert largest_difference(real, simulated) <= 1e-6
    assert_same(real, simulated)


@of_three
def test_three_processes_are_three_simulated_ranks(processes):
    """To rounding: the all-reduce adds in an order of its own."""
    trials = engine.different(3, batch=6, ranks=3, steps=20, validate_tokens=600)
    real, simulated = processes(trained, trials), engine.run(trials)
    for name in ("loss", "validation_loss", "param_norm"):
        np.testing.assert_allclose(real.signals[name], simulated.signals[name], rtol=1e-6)
    assert largest_difference(real, simulated) <= 1e-4
    for row, planned in enumerate(real.pack.rows):
        torch.testing.assert_close(real.pack.weights[row], simulated.weights[-1][planned], rtol=0, atol=1e-5)


@of_three
@pytest.mark.parametrize("order", ["sequential", "reversed", "pairwise"])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "fp8_e5m2"])
def test_an_order_and_a_format_that_are_asked_for_are_kept(processes, order, format):
    trials = engine.different(2, batch=6, ranks=3, steps=4, reduction=order, accumulation=format)
    real, simulated = processes(trained, trials), engine.run(trials)
    if (order, format) != ("sequential", "fp32"):
        assert_same(real, simulated)


VARIANTS: dict[str, dict[str, Any]] = {
    "qk_clip": {"qk_clip": 0.01, "ranks": 2, "batch": 4},
    "experts": {"block": {"channel_mixer": "moe"}, "moe": {"bias_rate": 0.01}, "ranks": 2, "batch": 4},
    "sigma_reparam": {"sigma_reparam": True, "batch": 4},
    "screened": {"rarity": 4.1, "batch": 4},
    "a batch that grows": {"batch": 8, "batch_start": 2, "batch_steps": 6},
    "half precision": {"precision": "bf16", "batch": 4},
    "fused attention": {"attention": "fused", "batch": 4},
    "dropout": {"dropout": 0.2, "batch": 8, "micro_batches": 2},
    "GPT-2": {"biases": True, "tied_head": True, "positions": "learned", "activation": "gelu_tanh", "batch": 4},
    "a clamp": {"activation": "swiglu", "swiglu_clamp": 0.4, "batch": 4},
    "micro-batches": {"micro_batches": 2, "batch": 8},
    "clipping by rank": {"rank_clip": {"limit": 0.1}, "batch": 4},
    "without clipping": {"clip": None, "batch": 2},
    "every reading": {"signals": {name: 1 + number % 2 for number, name in enumerate(READINGS)}, "batch": 4},
    "readings in reverse": {"signals": dict.fromkeys(READINGS, 1), "batch": 4, "reduction": "reversed"},
}


@of_two
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_variants_of_the_recipe(processes, fields):
    trials = [engine.trial(**{"ranks": 2, "seed": seed, **fields}) for seed in range(3)]
    assert_same(processes(trained, trials), engine.run(trials))


@of_two
def test_without_telemetry_or_detection(processes):
    trials = engine.different(2, batch=4, ranks=2)
    for options in ({"telemetry": False}, {"detection": False}, {"telemetry": False, "detection": False}):
        assert_same(processes(trained, trials, **options), engine.run(trials, **options))


# --- faults ------------------------------------------------------------------------------------------------------


def faulty(golden: Trial, case: str, rank: int, **changes: Any) -> Trial:
    own = fault(case)
    if hasattr(own, "rank"):
        changes["rank"] = rank
    return dataclasses.replace(golden, fault=dataclasses.replace(own, **changes))


@of_two
@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_fault_does_what_it_does_with_simulated_ranks(processes, forks, rank):
    """All in one pack, where those full of NaN freeze; up to two steps of what begins at START."""
    golden = engine.trial(**SHAPE, batch=4, seed=7, steps=START + 2)
    trials = [golden, *(faulty(golden, case, rank) for case in CASES)]
    real, simulated = processes(trained, trials, forks=forks, block=2), engine.run(trials, forks=forks, block=2)
    assert_same(real, simulated)
    assert NON_FINITE in real.result.outcome
    struck = {event.rank for own in real.result.events for event in own}
    assert struck == {0, rank}


@of_two
def test_trials_full_of_nan_leave_the_pack(processes):
    trials = [*engine.different(3, batch=4, ranks=2), engine.trial(batch=4, ranks=2, lr=1e30)]
    nan = Value(start=2, site=Site.GRADIENT, tensor="head", element=0, model="nan", rank=1)
    trials += [dataclasses.replace(trials[0], fault=nan), dataclasses.replace(trials[1], fault=nan)]
    real = processes(trained, trials)
    assert_same(real, engine.run(trials))
    assert real.pack.rows == [0, 1, 2] and real.result.nonfinite_step[4:] == [2, 2]


@of_two
def test_faults_that_last(processes):
    """Permanent ones, and those that come again."""
    lasting = [case for case in CASES if "nan" not in case and "infinity" not in case]
    golden = engine.trial(**SHAPE, batch=4, seed=7)
    trials = [golden, *(faulty(golden, case, 1, duration=None, period=2) for case in lasting)]
    assert_same(processes(trained, trials), engine.run(trials))


@of_two
def test_a_bias_that_balances_experts_is_struck_alike(processes):
    fields = {"block": {"channel_mixer": "moe"}, "activation": "swiglu", "moe": {"bias_rate": 0.1}}
    golden = engine.trial(**SHAPE, **fields, batch=4, seed=7, steps=START + 2)
    noise = Value(start=START, duration=1, site=Site.BUFFER, model="noise", value=1.0, elements=None)
    trials = [golden, dataclasses.replace(golden, fault=noise)]
    real = processes(trained, trials)
    assert_same(real, engine.run(trials))
    assert {event.tensor for event in real.result.events[1]} == {f"blocks.{i}.moe.correction_bias" for i in range(2)}


@of_two
def test_a_flipped_bit_in_one_ranks_gradient_has_the_same_effect(processes):
    """The same event, and the same deviation from the golden twin to 1e-6."""
    flip = Value(start=START, site=Site.GRADIENT, tensor="head", element=3, bit=30, rank=1)
    fields = {"batch": 4, "ranks": 2, "seed": 3, "steps": 20, "clip": 1.0}
    trials = [engine.trial(**fields), engine.trial(**fields, fault=flip)]
    real, simulated = processes(trained, trials), engine.run(trials)
    (event,) = real.result.events[1]
    assert (event.rank, event.step, event.changed) == (1, START, True)
    assert real.result.events == simulated.result.events
    deviations = [run.signals["loss"][1] - run.signals["loss"][0] for run in (real, simulated)]
    np.testing.assert_allclose(*deviations, rtol=0, atol=1e-6)
    assert (deviations[0][: START + 1] == 0).all() and np.abs(deviations[0][START + 1 :]).max() > 1e-4


@of_three
@pytest.mark.parametrize("rank", range(3))
def test_faults_of_any_of_three_ranks(processes, rank):
    """In an order of the sum that is asked for, bit for bit."""
    names = ("value at gradient", "activation_bit", "value at activation_gradient", "stale_gradient", "dropped_rank")
    fields = {**SHAPE, "ranks": 3, "batch": 6, "seed": 7, "reduction": "pairwise"}
    faults = [dataclasses.replace(fault(case), rank=rank) for case in names]
    faults.append(dataclasses.replace(fault("reduction"), order="reversed", format="bf16"))
    trials = [engine.trial(**fields), *(engine.trial(**fields, fault=own) for own in faults)]
    real, simulated = processes(trained, trials), engine.run(trials)
    assert_same(real, simulated)
    assert [sorted({event.rank for event in own}) for own in real.result.events[1:]] == [[rank]] * 5 + [[0]]


@of_two
def test_an_overflow_in_one_rank_costs_the_step_and_half_of_the_scale(processes):
    overflow = Value(start=START, site=Site.GRADIENT, tensor="head", element=0, model="infinity", rank=1)
    fields = {"batch": 4, "ranks": 2, "seed": 3, "precision": "fp16", "loss_scaling": "dynamic", "loss_scale": 64.0}
    trials = [engine.trial(**fields), engine.trial(**fields, fault=overflow)]
    real, simulated = processes(trained, trials), engine.run(trials)
    assert_same(real, simulated)
    scales = real.signals["loss_scale"]
    assert scales[1, START] == 64 and scales[1, START + 1] == 32 and (scales[0] == 64).all()


# --- replicas ----------------------------------------------------------------------------------------------------


@of_three
@pytest.mark.parametrize("rank", [1, 2])
def test_replicas_that_differ_are_found_out_before_anything_is_written(processes, rank):
    message = processes(message_of_differing, engine.different(2, batch=3, ranks=3), rank)
    assert message.startswith(f"ranks 0 and {rank} should have the same state and differ in pack.weights")


@of_two
def test_records_that_differ_are_found_out(processes):
    late = dataclasses.replace(fault("value at update"), start=2)
    golden = engine.trial(**SHAPE, batch=4, seed=7)
    assert "records" in processes(message_of_records, [golden, dataclasses.replace(golden, fault=late)])
