"""What writing a pack costs: our writer, one array a signal, against zarr-python's, one array a signal or one a shape.

    python -m tests.benchmarks.store [--rounds 20]

A pack of eight trials, its metadata and four blocks of 50 steps of every signal. Ours also keeps a checksum of each
chunk and seals the metadata; zarr-python's has the checksum in its chunks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec

from harness.config import Trial
from harness.storage.store import SIGNALS, PackStore, open_store
from tests.sweeps import command

TRIALS, STEPS, BLOCK, LAYERS = 8, 200, 50, 4
SHAPES = {"step": (TRIALS, STEPS), "layer": (TRIALS, STEPS, LAYERS)}


def shape_of(name: str) -> str:
    """Which of `SHAPES` a signal has."""
    return "layer" if "layer" in SIGNALS[name].dims else "step"


@cache
def trials() -> list[Trial]:
    """Those of the pack."""
    return command.tiny_trials(f"seed=range({TRIALS})", f"train.steps={STEPS}", f"model.depth={LAYERS}")


def ours(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    """As a sweep writes them."""
    store = open_store(folder, "grid")
    pack = PackStore.create(store, "0" * 16, trials(), STEPS, LAYERS, {"kind": "", "fingerprint": ""}, {}, BLOCK)
    for first in range(0, STEPS, BLOCK):
        pack.write(first, {name: array[:, first : first + BLOCK] for name, array in values.items()})


def zarrs(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    """The same arrays by zarr-python."""
    group = zarr.open_group(folder / "store.zarr", mode="w").create_group("pack")
    arrays = {name: made(group, name, SHAPES[shape_of(name)], (TRIALS, BLOCK, LAYERS)) for name in values}
    for first in range(0, STEPS, BLOCK):
        for name, array in values.items():
            arrays[name][:, first : first + BLOCK] = array[:, first : first + BLOCK]


def zarrs_by_shape(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    """All signals of a shape in one array, whose first axis is the signal."""
    group = zarr.open_group(folder / "store.zarr", mode="w").create_group("pack")
    for shape, sizes in SHAPES.items():
        names = [name for name in values if shape_of(name) == shape]
        array = made(group, shape, (len(names), *sizes), (len(names), TRIALS, BLOCK, LAYERS))
        for first in range(0, STEPS, BLOCK):
            array[:, :, first : first + BLOCK] = np.stack([values[name][:, first : first + BLOCK] for name in names])


def made(group: zarr.Group, name: str, shape: tuple[int, ...], chunks: tuple[int, ...]) -> zarr.Array:
    """An array as ours are."""
    chunk = chunks[: len(shape)]
    return group.create_array(
        name,
        shape=shape,
        chunks=chunk,
        dtype="float32",
        fill_value=np.nan,
        serializer=BytesCodec(),
        compressors=[Crc32cCodec()],
    )


WRITERS: dict[str, Callable[[Path, Mapping[str, np.ndarray]], None]] = {
    "ours": ours,
    "zarr-python, an array a signal": zarrs,
    "zarr-python, an array a shape": zarrs_by_shape,
}


def main() -> None:
    """Medians of the ratios of rounds, in each of which every writer writes once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    draw = np.random.default_rng(0)
    values = {name: draw.random(SHAPES[shape_of(name)], np.float32) for name in SIGNALS}
    trials()
    seconds: dict[str, list[float]] = {name: [] for name in WRITERS}
    for number in range(rounds + 2):
        for name, write in WRITERS.items():
            with tempfile.TemporaryDirectory() as folder:
                begin = time.perf_counter()
                write(Path(folder) / "out", values)
                if number >= 2:
                    seconds[name].append(time.perf_counter() - begin)
    for name, each in seconds.items():
        ratios = sorted(one / ours for one, ours in zip(each, seconds["ours"], strict=True))
        half = f"half of the rounds in {ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        print(f"{name}: {1000 * statistics.median(each):.1f} ms, {statistics.median(ratios):.2f} of ours ({half})")


if __name__ == "__main__":
    main()
