"""A playbook that has nothing to answer changes no bit, and waits for no device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.basics import devices
from harness.detectors.table import DETECTORS
from harness.guards.detection import Detection
from harness.guards.finite import FreezeNonFinite
from harness.guards.playbook import PlaybookGuard
from harness.incidents import snapshots
from harness.loop.loop import train
from harness.testing.engine import injector_of, pack_of, run, trial
from harness.training.sites import FaultSchedule
from tests.harness.experts import OF_OTHERS
from tests.harness.ladders import OWN, rung, trained


def test_a_pack_without_alarms_keeps_every_bit() -> None:
    """A playbook that never answers is no more than the memory that it takes."""
    watched = [trained(rung("roll_back"), seed=seed) for seed in range(2)]
    plain = [trial(seed=seed, **OWN) for seed in range(2)]
    ours, theirs = run(watched), run(plain)
    names = set(theirs.signals) - {"tokens_per_second", "step_seconds"}
    assert all(np.array_equal(ours.signals[name], theirs.signals[name], equal_nan=True) for name in names)
    assert torch.equal(ours.pack.weights, theirs.pack.weights)


class NoLook(TorchDispatchMode):
    """Raises where the host would have to wait for a device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), function
        return function(*args, **(kwargs or {}))


def test_judging_and_keeping_a_step_look_at_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CPUS", ())
    looked: list[str] = []
    for cls in (Detection, FreezeNonFinite, PlaybookGuard):
        _watch(monkeypatch, cls, "judge", looked)
    _watch(monkeypatch, snapshots.Snapshots, "take", looked)
    watching = "+".join(name for name in DETECTORS if name not in {*OF_OTHERS, "gain_peers"})
    golden = trained(rung("roll_back"), detect=watching, steps=8)
    pack = pack_of([golden, replace(golden, seed=2)])
    train(pack, FaultSchedule([None] * 2), 4, lambda first, arrays: None)
    assert looked.count("Detection.judge") == looked.count("PlaybookGuard.judge") == looked.count("Snapshots.take") == 8


def _watch(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, looked: list[str]) -> None:
    plain = getattr(cls, name)

    def noted(*arguments: Any) -> Any:
        looked.append(f"{cls.__name__}.{name}")
        with NoLook():
            return plain(*arguments)

    monkeypatch.setattr(cls, name, noted)


def test_the_host_waits_for_no_healthy_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked where there is no alarm, and the device is told of its rows once."""
    golden = trained(rung("roll_back"))
    pack = pack_of([golden, replace(golden, seed=2)])
    calls: list[tuple[str, int]] = []
    for name in ("alarm", "expect"):
        plain = getattr(PlaybookGuard, name)

        def noted(guard: PlaybookGuard, row: int, *arguments: Any, name: str = name, plain: Any = plain) -> Any:
            calls.append((name, row))
            return plain(guard, row, *arguments)

        monkeypatch.setattr(PlaybookGuard, name, noted)
    train(pack, FaultSchedule([injector_of(golden)] * 2), 4, lambda first, arrays: None)
    assert calls == [("expect", 0), ("expect", 1)]
