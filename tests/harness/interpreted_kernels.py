"""Triton's programs in its interpreter, on a CPU, against torch's own operations.

Run by test_kernels.py in a process of its own, with TRITON_INTERPRET=1: Triton looks at it when it is imported.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.basics import devices
from harness.kernels import operators, use
from harness.model.parameters import Layout
from harness.optim.clipping import global_norm, scale_tensors, scale_trials, tensor_norms
from harness.testing import engine
from tests.harness.interpreting import alone, interpreted  # noqa: F401
from tests.harness.optimizing import LONG, STACKED, TENSORS, Rig, bits, different, differing


@pytest.fixture(autouse=True)
def of_this_file_alone(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    alone(monkeypatch, "harness.optim.clipping", "harness.optim.optimizers.adamw")


HAS_FMA = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def on_a_cpu(make: Any) -> Any:
    """What `make` returns, by torch's way for CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "CPUS", ("cpu",))
        return make()


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- AdamW ---------------------------------------------------------------------------------------------------------


def trained_rig(rows: Any, count: int, dtype: torch.dtype, measure: bool) -> Rig:
    """Steps in which all rows move, some stand still, whose gradients are not finite, and none has a rate."""
    rig = Rig(different("adamw", count), rows, dtype)
    rig.draw(0)
    rig.step(measure=measure)
    rig.draw(1)
    rig.gradients[count // 2, 3] = math.nan
    rig.layout.view(rig.gradients, rows[-1].name)[0] = math.inf
    rig.step(active=[row == 0 or row % 3 != 1 for row in range(count)], measure=measure)
    rig.draw(2)
    rig.gradients[-1, 2:5] = math.nan
    rig.step([0.0] * count, active=[row != count - 1 for row in range(count)], measure=measure)
    return rig


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "count"), [(TENSORS, 1), (TENSORS[:1], 64), (LONG, 3), (STACKED, 2)])
def test_a_step_has_the_bits_of_torchs_kernel(rows, count, dtype):
    """Of the one for CPUs, which rounds products and sums as one where the CPU can.

    What is left behind the whole vectors of a segment that kernel rounds otherwise: here in the stacked ones alone.
    """
    ours = trained_rig(rows, count, dtype, measure=count < 64)
    theirs = on_a_cpu(lambda: trained_rig(rows, count, dtype, measure=False))
    assert ours.optimizer._has_program and not theirs.optimizer._has_program
    assert torch.equal(ours.optimizer.updates, theirs.optimizer.updates)
    for what, row in [(what, row) for what in ("weights", "moment_1", "moment_2") for row in rows]:
        found, expected = (rig.layout.view(dict(rig.state)[what], row.name) for rig in (ours, theirs))
        if HAS_FMA and rows is not STACKED:
            found, expected = (x.where(~x.isnan(), math.nan) for x in (found, expected))
            assert torch.equal(bits(found), bits(expected)), (what, row.name)
        else:
            tolerance = torch.finfo(dtype).eps * 8
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_a_tensor_without_a_rate_is_left_alone():
    rig = Rig(different("adamw"), LONG, torch.float32)
    before = rig.layout.view(rig.weights, "fixed").clone()
    rig.train(2)
    assert torch.equal(rig.layout.view(rig.weights, "fixed"), before)
    assert not rig.layout.view(rig.optimizer.slot("moment_1"), "fixed").any()


@pytest.mark.parametrize("rows", [LONG, STACKED])
def test_what_stands_between_tensors_stays_zero(rows):
    """Even where it has no epsilon to be divided by."""
    rig = Rig(different("adamw", eps=0.0), rows, torch.float32)
    rig.train(3)
    rig.gradients[1] = math.nan
    rig.gradients[:, rig.layout.padding] = 0.0
    rig.step()
    padding = rig.layout.padding
    assert len(padding) and not any(x[:, padding].any() for x in (rig.weights, rig.optimizer.slot("moment_2")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_after_a_step(dtype):
    """In float64, against numpy; the same whether or not a row moved, and no bit depends on whether they are taken."""
    rig, silent = (Rig(different("adamw", 4), LONG, dtype) for _ in range(2))
    padding = rig.layout.padding
    for each in (rig, silent):
        for array in (each.weights, each.optimizer.slot("moment_1"), each.optimizer.slot("moment_2")):
            array[:, padding] = 7.0  # counts for nobody
    for step in range(2):
        before = rig.weights.clone()
        for each in (rig, silent):
            each.draw(step)
        norms = rig.step(active=[True, False, True, True])
        assert silent.step(active=[True, False, True, True], measure=False) is None
    learned = torch.ones(rig.layout.size, dtype=torch.bool).index_fill_(0, padding, False)
    learned[rig.layout.spans[2].start : rig.layout.spans[2].stop] = False
    change = rig.weights - before
    arrays = (rig.weights, rig.optimizer.slot("moment_2"), change)
    for found, array in zip((norms.weights, norms.second_moment, norms.update), arrays, strict=True):
        assert found.dtype == torch.float64
        expected = np.linalg.norm(array[:, learned].double().numpy(), axis=1)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14)
    assert norms.update[1] == 0 and (norms.weights > 0).all()
    for row in range(4):
        assert differing(rig.everything(row), silent.everything(row)) == []


def test_bits_depend_neither_on_the_pack_nor_on_the_row():
    trials = different("adamw", 5)
    together = Rig(trials, LONG, torch.float32)
    together.train(2)
    all_norms = together.step()
    for places in ([3], [4, 1, 2]):
        few = Rig([trials[place] for place in places], LONG, torch.float32)
        few.train(2)
        norms = few.step()
        for row, place in enumerate(places):
            assert differing(few.everything(row), together.everything(place)) == []
            for name in ("weights", "second_moment", "update"):
                assert getattr(norms, name)[row] == getattr(all_norms, name)[place]


def test_rows_beside_what_is_not_finite_keep_their_bits():
    def run(ruin: float) -> Rig:
        rig = Rig(different("adamw", 3), LONG, torch.float32)
        rig.train(1)
        for array in (rig.weights, rig.gradients, rig.optimizer.slot("moment_2")):
            array[1, 7] = ruin
        rig.step(rates=[1e-3, ruin, 1e-3])
        return rig

    sound = run(0.5)
    for ruin in (math.nan, math.inf):
        ruined = run(ruin)
        assert differing(ruined.everything(1), sound.everything(1)) != []
        assert all(differing(ruined.everything(row), sound.everything(row)) == [] for row in (0, 2))


# --- norms and clipping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [LONG, STACKED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_gradients(rows, dtype):
    layout = Layout(rows)
    gradients = numbers(5, layout.size, dtype=dtype).index_fill_(1, layout.padding, 0.0)
    gradients[1] *= 1e30
    gradients[2] *= 1e-30
    layout.view(gradients, rows[-1].name)[3] = math.inf
    layout.view(gradients, rows[0].name)[4] = math.nan
    exact = gradients.double().clone().numpy()
    norms = global_norm(gradients)
    gradients[:, layout.padding] = 7.0  # of no tensor
    found = tensor_norms(gradients, layout)
    assert found.dtype == norms.dtype == torch.float64
    np.testing.assert_allclose(norms.numpy(), np.linalg.norm(exact, axis=1), rtol=1e-14)
    for number, span in enumerate(layout.spans):
        expected = np.linalg.norm(exact[:, span.start : span.stop], axis=1)
        np.testing.assert_allclose(found[:, number].numpy(), expected, rtol=1e-14)
    for places in ([2], [1, 0]):
        few = gradients[places]
        assert torch.equal(tensor_norms(few, layout), found[places])
        assert torch.equal(global_norm(few.index_fill_(1, layout.padding, 0.0)), norms[places])


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2500])
def test_many_blocks_add_up(count):
    partial = numbers(2, count, dtype=torch.float64).abs()
    firsts = torch.tensor([0, count // 3, count], dtype=torch.int32)
    found = torch.ops.stability_harness.add_up(partial, firsts).numpy()
    expected = [[part.sum() for part in np.split(row, [count // 3])] for row in partial.numpy()]
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("rows", [LONG, STACKED])
@pytest.mark.parametrize("factor", [0.5, 0.0, math.nan, 1.0])
def test_scaling(rows, factor):
    """By the bits of torch's products; a factor of one leaves what is there, and gaps stay zero."""
    layout = Layout(rows)
    padding = layout.padding
    gradients = numbers(3, layout.size).index_fill_(1, padding, 0.0)
    gradients[0, 1] = math.nan
    by_row, by_tensor = gradients.clone(), gradients.clone()
    factors = torch.tensor([1.0, factor, 0.3], dtype=torch.float64)
    scale_trials(by_row, factors, layout)
    for_tensors = factors[:, None] * torch.arange(1, len(rows) + 1)
    scale_tensors(by_tensor, for_tensors, layout)
    assert torch.equal(bits(by_row[0]), bits(gradients[0]))
    for number, (row, span) in enumerate(zip(rows, layout.spans, strict=True)):
        here = slice(span.start, span.stop)
        for found, by in ((by_row, factors), (by_tensor, for_tensors[:, number])):
            expected = gradients[:, here] * by.float()[:, None]
            assert torch.equal(found[:, here].nan_to_num(7.0), expected.nan_to_num(7.0)), row.name
    assert not by_row[:, padding].any() and not by_tensor[:, padding].any()


def test_arrays_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        global_norm(numbers(8, 4).T)


# --- a whole pack ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_pack_learns_with_them_as_without(monkeypatch, precision):
    """Clipped by row and by tensor; the rest of the pack takes an accelerator's ways in both."""
    trials = engine.different(2, precision=precision, steps=2, clip=(0.1, 0.2), clip_tensor=(0.5, 0.4))
    launched, launch = [], operators.launch

    def noted(name: str, *arguments: Any, **constants: Any) -> None:
        launched.append(name)
        launch(name, *arguments, **constants)

    monkeypatch.setattr(operators, "launch", noted)
    ours = engine.run(trials)
    assert set(launched) == {"adamw", "powers", "add_up", "scale"} and launched.count("adamw") == 2
    launched.clear()
    monkeypatch.setattr(use, "is_installed", lambda: False)
    theirs = engine.run(trials)
    assert not launched
    tolerance = {"fp32": 2e-5, "fp64": 1e-12}[precision]
    for name in ("loss", "grad_norm", "param_norm", "second_moment_norm", "update_rms"):
        np.testing.assert_allclose(ours.signals[name], theirs.signals[name], rtol=tolerance, err_msg=name)
    torch.testing.assert_close(ours.pack.weights, theirs.pack.weights, rtol=tolerance, atol=tolerance)
