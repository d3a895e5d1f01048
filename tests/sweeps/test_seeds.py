"""Trials that differ in their seed alone share what is composed and checked, and are as if each came alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness.config import ConfigError
from sweeps.compose.arguments import expand
from sweeps.compose.grid import Composer
from tests.sweeps import command


def test_seeds_that_share_what_is_composed_are_trials_as_if_each_came_alone() -> None:
    """The checks and the fields of thousands of seeds are those of the first; in whatever order they are asked for."""
    axes = ["model.width=32,64", "mitigation=none,qk_norm", "fault=none,weight_bit,rare_tokens", "seed=7,0,3"]
    jobs = expand({}, axes, command.loader())
    together, each = Composer(command.loader(), "grid"), Composer(command.loader(), "grid")
    shuffled = random.Random(1).sample(jobs, len(jobs))
    found = {tuple(job): together.trial([*job[::-1]]) for job in shuffled}
    for job in jobs:
        alone = each._composed(job)
        assert found[tuple(job)] == alone and found[tuple(job)].id == alone.id and alone.seed in (7, 0, 3)
    twice = [*jobs[0], "seed=5"]
    assert together.trial(twice) == each._composed(twice)
    for wrong in ("seed=-1", "seed=1.5", "seed=x"):
        with pytest.raises(ConfigError, match=f"^{wrong}: "):
            together.trial([*jobs[0][:-1], wrong])


def test_what_is_wrong_with_a_trial_is_said_of_each_seed(empty: Path) -> None:
    (line,) = command.refused(empty / "out", "fault=weight_bit", "fault.start=900", "seed=range(50)")
    assert line.startswith("error: fault.start=900: ")
