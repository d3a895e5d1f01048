"""A healthy step of an accelerator waits for nothing, bakes nothing in, and has no operation that is not repeatable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.config import Trial
from harness.kernels import use
from harness.loop.loop import train
from harness.readings.table import READINGS
from harness.recovery.table import ACTIONS
from harness.testing import engine
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from tests.harness import ladders
from tests.harness.features import FEATURES
from tests.harness.tracing import META, FromHost, Operation, Trace, Traced, pieces_of, steps_of
from tests.sweeps import test_mitigations

STEPS = (1, 2)  # neither is validated after, nor has what is read at every tenth step
LATER = (6, 7)  # where batches have grown

# Operations that give the same bits in every run on CUDA, and need no sort for it, by torch's documentation of
# `use_deterministic_algorithms`: element-wise ones, views and copies, gathers, products, sorts, and forward and
# backward passes that torch does not list there. Sums of floats are ours: torch cuts them by how many there are.
# `_index_put_impl_` is the backward pass of the embedding, which sorts, so that ids add up in their tokens' order.
OPERATIONS = """
    _conj _index_put_impl_ _log_softmax _safe_softmax _softmax _softmax_backward_data _to_copy _unsafe_view abs add
    add_ alias all amax amin any arange argmax argmin baddbmm bitwise_and bitwise_and_ bitwise_not bitwise_or
    bitwise_or_ bitwise_xor bitwise_xor_ bmm cat clamp clamp_ clamp_min clone copy_ cos detach diagonal div div_
    embedding empty eq exp exp_ eye expand fill_ floor_divide fmax full full_like gather ge gelu gelu_backward gt
    gt_ index index_select isinf isnan le linalg_vector_norm log logical_and logical_and_ logical_or_ lt
    masked_fill_ max maximum minimum mul mul_ native_layer_norm native_layer_norm_backward ne neg neg_ new_empty
    new_zeros ones ones_like permute pow pow_ promote_types reciprocal reciprocal_ relu remainder round rsqrt_ rsub
    scalar_tensor searchsorted select select_backward sigmoid sign slice_backward silu silu_backward slice sort
    split split_with_sizes sqrt sqrt_ squeeze stack sub sub_ sum tanh threshold_backward topk transpose tril unbind
    unfold unsqueeze view view_as_complex view_as_real where zeros zeros_like __rshift__ adamw powers add_up
    add_columns scale log_likelihood likelihood_backward split_heads join_heads turn_heads normed normed_backward
    add_blocks attended attended_backward scores scores_backward mixed_by mixed_by_backward
"""
ALLOWED = frozenset(OPERATIONS.split())
SUMS = {"sum", "linalg_vector_norm"}  # of whole numbers and truth values; and the norm that is the largest element


def sums_of_floats(operations: Sequence[Operation]) -> list[Operation]:
    """Those whose order torch would choose by how many results there are, and so by the size of a pack."""
    of_floats = (one for one in operations if one.name.split(".")[1] in SUMS and one.tensors[0][1].is_floating_point)
    return [one for one in of_floats if "inf" not in one.others]


def healthy(trials: list[Trial]) -> list[Traced]:
    """Two steps in which nothing is due that is not due at every step."""
    lasting = [replace(trial, train=replace(trial.train, steps=40, validate_every=40)) for trial in trials]
    sizes = lasting[0].curriculum
    grows = len({*sizes.sequences.tolist()}) + len({*sizes.lengths.tolist()}) > 2
    return steps_of(lasting, LATER if grows else STEPS)


def check(trials: list[Trial]) -> None:
    first, second = healthy(trials)
    assert first.trained == second.trained, "a step is the same whatever its number"
    names = {operation.name.split(".")[1] for operation in [*first.all, *second.all]}
    assert names <= ALLOWED, sorted(names - ALLOWED)
    assert not sums_of_floats([*first.all, *second.all])


@pytest.mark.parametrize("name", [name for name in FEATURES if not name.startswith("readings: ")])
def test_whatever_is_on(name: str) -> None:
    fields = FEATURES[name]
    waits = [reading for reading, cls in READINGS.items() if cls.waits]
    signals = {**fields.get("signals", {}), **dict.fromkeys(waits, 0)}
    check(engine.different(3, **{**fields, "signals": signals}))


@pytest.mark.parametrize("mitigation", sorted(test_mitigations.MITIGATIONS))
def test_every_mitigation(mitigation: str) -> None:
    check(test_mitigations.different(mitigation, 3))


@pytest.mark.parametrize("name", [name for name in FEATURES if not name.startswith("readings: ")][::2])
def test_pieces_of_validation(name: str) -> None:
    """They do the same, and no more than a step may."""
    first, second = pieces_of(engine.different(3, **FEATURES[name]))
    assert first and first == second
    assert {operation.name.split(".")[1] for operation in first} <= ALLOWED
    assert not sums_of_floats(first)


def test_what_a_piece_of_validation_bakes_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, numbers = Pack.window_losses, iter(range(100))
    monkeypatch.setattr(Pack, "window_losses", lambda *arguments: plain(*arguments) + next(numbers))
    first, second = pieces_of(engine.different(2))
    assert first != second
    monkeypatch.setattr(Pack, "window_losses", lambda *arguments: plain(*arguments) * float(plain(*arguments).sum()))
    with pytest.raises((FromHost, NotImplementedError, RuntimeError)):
        pieces_of(engine.different(2))


@pytest.mark.parametrize("reading", [name for name, cls in READINGS.items() if not cls.waits])
def test_every_reading(reading: str) -> None:
    check(engine.different(3, batch=4, ranks=2, signals=dict.fromkeys(READINGS, 0) | {reading: 1}))


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_that_has_nothing_to_answer(action: str) -> None:
    """The host looks at no step, and takes a snapshot when one is due."""
    detector, detect = ("oracle", "finite") if action == "undo" else ("any", "finite+skip_step+update_norm")
    golden = ladders.trained(ladders.rung(action, detector), detect=detect)
    check([golden, replace(golden, seed=7)])


def test_as_many_operations_whatever_the_number_of_rows() -> None:
    """While they pass through the model together."""
    counts = {rows: len(healthy([engine.trial(seed=seed) for seed in range(rows)])[0].all) for rows in (2, 3, 8, 64)}
    assert len(set(counts.values())) == 1, counts


@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (2, 2), (3, 4), (33, 64), (65, 96), (129, 160)])
def test_slots(rows: int, slots: int) -> None:
    """Parts of one size, whatever the number of rows; only a trial that is alone is so all the time."""
    pack = Pack([engine.trial(seed=seed) for seed in range(rows)], engine.corpus_of(engine.trial()), META)
    assert pack.weights.shape[0] == pack.slots.count == slots and len(pack) == rows
    assert len({part.stop - part.start for part in pack.parts}) == 1


REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "linalg_vector_norm", "nansum", "_softmax", "_log_softmax", "native_layer_norm")
)
FEW = 128  # elements: what sums fewer has nothing to be cut into


def unaligned(traced: Traced, slots: int) -> list[str]:
    """Reductions that read rows of a pack which do not all start alike: at multiples of 16 bytes, which is what a
    thread of CUDA reads at once.
    """
    found = []
    for operation in traced.all:
        for shape, dtype, strides in operation.tensors:
            is_large = len(shape) > 1 and shape[0] == slots and math.prod(shape[1:]) >= FEW
            if operation.name.split(".")[1] in REDUCTIONS and is_large and strides[0] * dtype.itemsize % 16:
                found.append(f"{operation.name} of {shape}")
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("context", [64, 65, 512])
def test_every_row_of_a_reduction_starts_alike(context: int, precision: str) -> None:
    fields = {"width": 64, "head_dim": 16, "context": context, "batch": 8, "precision": precision, "clip": 1.0}
    traced = healthy([engine.trial(seed=seed, **fields) for seed in range(3)])[0]
    assert unaligned(traced, 4) == []


def test_a_row_that_starts_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "is_installed", lambda: False)  # so that the softmax is torch's
    traced = healthy([engine.trial(seed=seed, batch=1, context=17, head_dim=16) for seed in range(3)])[0]
    assert any("softmax" in name for name in unaligned(traced, 4))


# --- that such things are found out ---------------------------------------------------------------------------------


def spoiled(spoil: Any) -> None:
    """A step in which something is done to the loss."""

    def prepare(pack: Pack) -> None:
        plain = pack.can_step
        pack.can_step = lambda norm: plain(spoil(norm))  # type: ignore[method-assign]

    steps_of(engine.different(2), [3], prepare)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x * float(x[0]),
        lambda x: x if bool((x > 0).all()) else x,
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
        lambda x: x + torch.ones(2),
        lambda x: x + torch.tensor(1.0),
        lambda x: x * len(x.nonzero()),
    ],
    ids=["item", "bool", "mask", "list", "other device", "number of another device", "nonzero"],
)
def test_a_look_at_the_device_and_a_value_of_the_host_are_found(spoil: Any) -> None:
    with pytest.raises((FromHost, NotImplementedError, RuntimeError)):
        spoiled(spoil)
    spoiled(lambda x: x + 1)


def test_what_a_step_bakes_in_is_found() -> None:
    numbers = iter(range(100))

    def prepare(pack: Pack) -> None:
        plain = pack.can_step
        pack.can_step = lambda norm: plain(norm + next(numbers))  # type: ignore[method-assign]

    first, second = steps_of(engine.different(2), [3, 4], prepare)
    assert first.trained != second.trained


def test_what_is_sent_must_not_be_waited_for() -> None:
    with Trace(may_send=True):
        torch.ones(2).to("meta", non_blocking=True)
        with pytest.raises(FromHost):
            torch.ones(2).to("meta")


# --- addresses ----------------------------------------------------------------------------------------------------


def addresses(pack: Pack) -> dict[str, int]:
    arrays = {**dict(pack.rows_state), "gradients": pack.gradients}
    return {name: values.data_ptr() for name, values in arrays.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "spam", "adafactor"])
def test_what_lasts_stays_where_it_is(optimizer: str) -> None:
    trials = [engine.trial(name=optimizer, seed=seed, steps=12, clip=1.0) for seed in range(3)]
    pack, seen = engine.pack_of(trials), []

    def progress(steps: int, frozen: int) -> None:
        seen.append(addresses(pack))

    train(pack, FaultSchedule([None] * 3), 4, lambda first, signals: None, progress)
    assert len(seen) == 12 and all(each == seen[0] for each in seen)
