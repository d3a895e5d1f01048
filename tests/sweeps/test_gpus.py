"""Which GPUs a worker on this machine sees. No GPU is needed to say so."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sweeps.running.local import LocalExecutor, gpus_of, visible_gpus, worker_pool


@pytest.mark.parametrize(
    ("processes", "gpus", "expected"),
    [
        (1, "0", ["0", "0", "0", "0"]),
        (1, "0 1", ["0", "1", "0", "1"]),
        (1, "2 5 7", ["2", "5", "7", "2"]),
        (2, "0 1 2 3", ["0,1", "2,3", "0,1", "2,3"]),
        (2, "0 1 2", ["0,1", "2,0", "1,2", "0,1"]),
        (4, "0 1", ["0,1", "0,1", "0,1", "0,1"]),
    ],
)
def test_workers_take_gpus_in_turn(processes: int, gpus: str, expected: list[str]) -> None:
    assert [",".join(gpus_of(worker, processes, gpus.split())) for worker in range(4)] == expected


def test_the_gpus_of_this_process_are_shared_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5ab")
    assert visible_gpus() == ["3", "GPU-5ab"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert visible_gpus() == []


@pytest.mark.parametrize(("workers", "processes", "on_one"), [(1, 1, 1), (2, 1, 1), (3, 1, 2), (4, 1, 2), (2, 2, 2)])
def test_workers_on_one_gpu_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, workers: int, processes: int, on_one: int
) -> None:
    class Properties:
        total_memory = 100

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    assert LocalExecutor(workers, processes).memory("cuda") == 80 / on_one


def what_it_sees(folder: Path, workers: int) -> str | None:
    """In a worker: its GPUs, once each of the workers is here."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < workers:
        time.sleep(0.01)
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("gpus", "expected"), [(["4", "6"], ["4", "4", "6"]), (["0"], ["0", "0", "0"]), ([], [None, None, None])]
)
def test_each_worker_sees_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], expected: list[str | None]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with worker_pool(3, 1, 1, gpus, SimpleNamespace(value=0)) as pool:
        seen = [pool.schedule(what_it_sees, args=(tmp_path, 3)) for _ in range(3)]
        assert sorted((future.result() for future in seen), key=str) == expected
