"""Gradient norms, and clipping by them, at the ends of float32's range."""

from __future__ import annotations

import math

import pytest
import torch

from harness.clipping import CPU_COLUMNS, clip_by_global_norm, global_norm


def test_norm_and_clipping_of_extreme_gradients():
    gradients = torch.tensor(
        [[3e38] * 100, [1e-30] * 100, [0.0] * 100, [math.inf] + [0.0] * 99, [3.0, 4.0] + [0.0] * 98]
    )
    norm = global_norm(gradients)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(
        norm[[0, 1, 2, 4]], torch.tensor([3e39, 1e-29, 0.0, 5.0], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert norm[3] == math.inf
    clipped = gradients.clone()
    clip_by_global_norm(clipped, norm, torch.tensor([1.0, 1.0, 1.0, 1.0, 2.5], dtype=torch.float64))
    torch.testing.assert_close(clipped[0], torch.full((100,), 0.1))
    assert torch.equal(clipped[1:3], gradients[1:3])
    torch.testing.assert_close(clipped[4, :2], torch.tensor([1.5, 2.0]))


@pytest.mark.parametrize(("value", "expected"), [(1e25, 1e25), (math.inf, math.inf), (1e-30, 1e-30)])
def test_a_trial_whose_norm_is_taken_again_changes_no_other(value, expected):
    """Over several pieces of a CPU's sum; the large value stands in the last but one."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(3, 3 * CPU_COLUMNS + 5, generator=generator)
    alone = global_norm(gradients)
    gradients[1] = 0
    gradients[1, 2 * CPU_COLUMNS + 7] = value
    norm = global_norm(gradients)
    assert torch.equal(norm[[0, 2]], alone[[0, 2]])
    assert norm[1].item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(norm[[0, 2]], gradients[[0, 2]].double().norm(dim=1), rtol=1e-6, atol=0)
