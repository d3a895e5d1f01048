"""The promises that hold whatever a trial has: an optimizer, a clipper, a branch, an objective, a reading, a size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import Fault, Trial
from harness.faults.fault import fault_types
from harness.model.branches import branches_of
from harness.model.outline import model_tensors
from harness.objectives.outcome import NON_FINITE
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.testing import engine
from harness.testing.changes import Change, fill_first
from harness.testing.promises import Promises
from harness.training.pack import Pack
from harness.training.sites import Site

GOLDEN, BLOCK, SAVED = 5, 3, 5
# A thread's share of a pack ends inside a row of features, and of heads.
ODD = {"width": 24, "head_dim": 8, "context": 17, "batch": 3, "feedforward": 41, "vocabulary": 61}
ODD |= {"steps": 2, "validate_every": 2}
ODD_FUSED = {**ODD, "context": 33}  # with 17 torch's kernel rounds otherwise in a second thread
SMALL = {"width": 16, "head_dim": 8, "context": 8, "vocabulary": 64, "steps": 7}
UP = "blocks.0.feedforward.up"
STRIKES: list[dict[str, Any]] = [  # of the golden trials 0, 1, ..
    {"kind": "value", "start": 3, "tensor": UP, "element": 0, "bit": 23},
    # It leaves all that remembers gradients another.
    {
        **{"kind": "value", "start": 5, "value": 100.0, "tensor": "embedding", "model": "scale"},
        **{"site": "reduced_gradient", "elements": None},
    },
    {"kind": "random_tokens", "start": 2, "duration": 2},
    # To fp32: it does nothing, and the trial is its twin again.
    {"kind": "value", "start": 4, "tensor": "embedding", "model": "round"},
]
SCALED, IDLE = GOLDEN + 1, GOLDEN + 3
RUINS = [
    Change(Site.WEIGHT, range(4, 5), fill_first(UP, math.nan)),
    Change(Site.WEIGHT, range(3, 4), lambda tensors: [x.fill_(3e38) for x in tensors.values()]),
    Change(Site.REDUCED_GRADIENT, range(4, 5), fill_first("embedding", math.nan)),
    Change(Site.REDUCED_GRADIENT, range(5, 6), fill_first(UP, -math.inf)),
    Change(Site.REDUCED_GRADIENT, range(4, 5), lambda tensors: [x.mul_(1e6) for x in tensors.values()]),
]


def check_setting(bears_ruin: bool = False, absorbs_scale: bool = False, **fields: Any) -> None:
    """Hold a setting of trials to every promise of this page, in packs of small trials on the CPU; some seconds.

    Args:
        bears_ruin: Whether it is made to bear gradients and weights that are not finite, as a guard is that goes back.
        absorbs_scale: Whether a gradient that is scaled leaves the same step, as of an optimizer that sees signs alone.
        **fields: Of the trial, by short names as `engine.trial` takes them: `name="my_optimizer"`, `clip=0.5`, and
            sections by theirs: `agc={"ratio": 0.1}`. A tuple holds a value for each trial, in turn.

    Raises:
        AssertionError: It breaks a promise; the text names it.
        ConfigError: There are no such trials.
    """
    SettingPromises(fields, spared=len(RUINS) if bears_ruin else 0, absorbs_scale=absorbs_scale).check_all()


class SettingPromises(Promises):
    """The promises, each a method. The trials are trained once in each way; nothing here has a tolerance."""

    def __init__(self, fields: Mapping[str, Any], spared: int = 0, absorbs_scale: bool = False):
        """`spared`: so many of the last ruins ruin nothing, because the setting is made to bear them."""
        super().__init__(str(dict(fields)))
        self._fields, self._spared, self._absorbs_scale = dict(fields), spared, absorbs_scale

    def it_acts(self) -> None:
        """Each part of the recipe that can be idle is not, in one trial at least; else the rest would say little."""
        acts = self.full.result.acts[:GOLDEN]
        parts = {part for counts in acts for part in counts}
        assert parts and all(any(counts.get(part) for counts in acts) for part in parts)

    def it_does_not_depend_on_the_pack(self) -> None:
        """Neither on its size nor on the place, with two threads; forks and ruined trials show it with one."""
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            trials = self.trials(**(ODD_FUSED if self._fields.get("attention") == "fused" else ODD))
            together = engine.run(trials, prepare=roughen)
            for members in ([3, 2], [4, 1, 0]):  # two threads share the middle one of an odd pack
                apart = engine.run([trials[number] for number in members], prepare=roughen)
                engine.assert_same_trials(apart, together, dict(enumerate(members)))
        finally:
            torch.set_num_threads(threads)

    def it_forks_as_a_whole_run_and_goes_on_from_a_checkpoint(self) -> None:
        """The checkpoint has a fork behind it and one before it, and a trial that was its twin again.

        And its blocks are computed again on the way back, which changes no bit, whatever is measured.
        """
        with TemporaryDirectory() as name:
            folder, whole = Path(name), self.full
            checkpoints = SavedOnce(ResultsPath.at(folder))
            trials = [replace(trial, train=replace(trial.train, checkpointing=True)) for trial in self.family]
            forked = engine.assert_fork_equals_full_run(
                trials, whole, prepare=roughen, block=BLOCK, checkpoints=checkpoints
            )
            assert forked.pack.twins.begins[GOLDEN:] == [fault["start"] for fault in STRIKES]
            assert all(forked.result.changes[GOLDEN:-1])
            masked = [4 if number == IDLE else None for number in range(len(trials))]
            found = forked.result.masked_step
            if self._absorbs_scale:
                masked[SCALED] = found[SCALED]
            assert found == masked
            for row, number in enumerate(forked.pack.rows):
                if number in whole.pack.rows:
                    states = [
                        {name: values[at] for name, values in run.pack.rows_state}
                        for run, at in ((forked, row), (whole, whole.pack.rows.index(number)))
                    ]
                    assert engine.same_bits(*states) == [], f"trial {number}"
            resumed = engine.resumed(trials, folder, [], BLOCK, forks=True)
            engine.assert_same_end(resumed, forked, SAVED // BLOCK * BLOCK)

    def it_lets_ruined_trials_change_no_bit_of_the_others(self, telemetry: bool = True, detection: bool = True) -> None:
        """Behind each golden trial stands one that is ruined in its way.

        Without detection nobody finds out, and all stay to the end. Where nothing is measured, blocks are recomputed.
        """
        trials, golden = self.family, self.trials()
        beside = [each for pair in zip(golden, reversed(golden), strict=True) for each in pair] + trials[GOLDEN:]
        beside = [replace(each, train=replace(each.train, checkpointing=not telemetry)) for each in beside]
        ruins = [Change(each.site, each.steps, self._elsewhere(each.change)) for each in RUINS]
        strikes = {2 * number + 1: ruin for number, ruin in enumerate(ruins)}
        ruined = engine.run(beside, strikes, roughen, BLOCK, telemetry=telemetry, detection=detection)
        places = {n: 2 * n if n < GOLDEN else GOLDEN + n for n in range(len(trials))}
        engine.assert_same_trials(self.full, ruined, places, None if telemetry else ["loss", "weights"])
        if self._spared == len(RUINS):
            return
        for number in range(4 - self._spared):  # the fifth is clipped, or has the signs that it had
            losses = ruined.signals["loss"][2 * number + 1], self.full.signals["loss"][GOLDEN - 1 - number]
            assert not np.array_equal(*losses, equal_nan=True), f"ruin {number} has ruined nothing"
        assert ruined.result.nonfinite_step[1] == (4 if detection else None)
        assert not detection or ruined.result.outcome[1] == ruined.result.outcome[3] == NON_FINITE
        blamed = ruined.result.provenance[1]
        assert not detection or (blamed is not None and blamed["blamed"] == self._up)

    # --- what is trained ----------------------------------------------------------------------------------------

    def trials(self, **shape: Any) -> list[Trial]:
        """Five golden trials that differ in every per-trial field."""
        return engine.different(GOLDEN, **{"warmup": 1, **SMALL, **shape, **self._fields})

    @cached_property
    def _up(self) -> str:
        """A matrix that stands where `UP` does, in a block without that one."""
        trial = self.trials()[0]
        names = [tensor.name for tensor in model_tensors(trial.model, trial.data.vocabulary, branches_of(trial))]
        return UP if UP in names else next(name for name in names if name.startswith("blocks.0.") and ".up" in name)

    def _elsewhere(self, change: Callable[[Mapping[str, Tensor]], object]) -> Callable[[Mapping[str, Tensor]], object]:
        """The change, to which that matrix has the usual one's name."""
        if self._up == UP:
            return change
        return lambda tensors: change({UP if name == self._up else name: x for name, x in tensors.items()})

    @cached_property
    def family(self) -> list[Trial]:
        """Five golden trials, and four of them with a fault."""
        golden = self.trials()
        struck = zip(golden, _faults(self._up), strict=False)
        return [*golden, *(replace(trial, fault=fault) for trial, fault in struck)]

    @cached_property
    def full(self) -> engine.Run:
        """Every trial in a row of its own."""
        return engine.run(self.family, block=BLOCK, prepare=roughen)


@cache
def _faults(up: str) -> list[Fault]:
    types: Mapping[str, Any] = fault_types()
    strikes = ({**fields, "tensor": up} if fields.get("tensor") == UP else fields for fields in STRIKES)
    return [types[fields["kind"]](**{"name": fields["kind"], **fields}) for fields in strikes]


@dataclass
class SavedOnce(Checkpoints):
    """The state before one step alone."""

    def is_due(self, step: int) -> bool:
        return step == SAVED


def roughen(pack: Pack) -> None:
    """Add noise to every tensor, so that none is at a special value; it depends on seed and tensor alone."""
    for r, number in enumerate(pack.rows):
        for name, weight in pack.tensors(pack.weights, r).items():
            weight += _noise(pack.planned[number].seeds["init"], name, weight.shape).to(weight)


@cache
def _noise(seed: int, name: str, shape: torch.Size) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
