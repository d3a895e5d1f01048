"""Every file of a results folder, damaged in four ways: `verify` names it, and what is read is right or an error."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import xarray as xr

import analysis
from harness.basics.errors import ConfigError
from harness.storage.last_weights import read_weights
from harness.storage.progress_files import read_asked
from harness.storage.records import Unreadable
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import DamagedStore
from sweeps.running.ledger import all_claims
from tests.sweeps import command
from tests.user_loop.test_conformance import trained

SEED = 7
IDLE = (".lock",)  # hold nothing
GRID = ("fault=none,weight_bit", "fault.start=4", "train.steps=8", "keep=weights")


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a sweep, with a playbook, weights, a plan and a ledger."""
    out = tmp_path_factory.mktemp("damage") / "out"
    words = command.tiny("--multirun", f"out={out}", *GRID, "detect=combined", "playbook=repair")
    assert command.call(*words).status == 0
    return out


@pytest.fixture(scope="module")
def attached_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the user's own loop, with an incident."""
    out = tmp_path_factory.mktemp("own") / "out"
    fault = {"name": "weight_bit", "start": 8, "bit": -2, "tensor": "0.weight"}
    trained("plain", fault=fault, recover="repair", twin=True, out=out)
    return out


def files(out: Path) -> list[Path]:
    return sorted(file for file in out.rglob("*") if file.is_file() and file.suffix not in IDLE)


# --- four kinds of damage ----------------------------------------------------------------------------------------


def flip(file: Path, draw: np.random.Generator, others: list[Path]) -> None:
    content = bytearray(file.read_bytes())
    content[draw.integers(len(content))] ^= 1 << int(draw.integers(8))
    file.write_bytes(content)


def truncate(file: Path, draw: np.random.Generator, others: list[Path]) -> None:
    os.truncate(file, int(draw.integers(file.stat().st_size)))


def delete(file: Path, draw: np.random.Generator, others: list[Path]) -> None:
    file.unlink()


def swap(file: Path, draw: np.random.Generator, others: list[Path]) -> None:
    """With a file of other content; of the same name somewhere else, if there is one."""
    content = file.read_bytes()
    unequal = [other for other in others if other.read_bytes() != content]
    alike = [other for other in unequal if other.suffix == file.suffix and other.stat().st_size == len(content)]
    other = (alike or unequal)[draw.integers(len(alike or unequal))]
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


TOGETHER = 20  # files of arrays


def groups(all_files: list[Path]) -> list[list[Path]]:
    """The files, each damaged alone, but for those of arrays, which are read one by one: of these, some at once."""
    of_arrays = [file for file in all_files if file.parent.parent.parent.name == "store.zarr"]
    kinds = [[file for file in of_arrays if file.name.startswith(first)] for first in ("c.", "zarr")]
    together = [
        kind[first :: -(-len(kind) // TOGETHER)] for kind in kinds for first in range(-(-len(kind) // TOGETHER))
    ]
    return [[file] for file in all_files if file not in of_arrays] + together


# --- what is read ------------------------------------------------------------------------------------------------


def readings(out: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that a results folder tells, part by part."""

    def values(sweep: xr.Dataset, name: str) -> bytes:
        return np.ascontiguousarray(sweep[name].values).tobytes()

    sweep = analysis.open_sweep(out).sortby("trial")
    trials = tuple(sweep["trial"].values.tolist())
    for name in sorted(map(str, sweep.variables)):
        if not name.startswith("provenance"):
            yield f"{name} of {trials}", lambda name=name: values(sweep, name)
    for trial, events in analysis.fault_events(out).groupby("trial"):
        yield f"events of {trial}", lambda events=events: events.to_csv(index=False)
    yield (
        "claims",
        lambda: sorted((claim.pack, tuple(sorted(claim.trials))) for claim in all_claims(ResultsPath.at(out))),
    )
    if (out / "plan.json").exists():
        yield "plan", lambda: read_asked(out)
    for file in sorted((out / "weights").glob("*.json")):
        trial = file.stem

        def weights(trial: str = trial) -> object:
            about, tensors = read_weights(out, trial)
            return repr(about), {name: x.numpy().tobytes() for name, x in tensors.items()}

        yield f"weights of {trial}", weights


def read(out: Path) -> tuple[dict[str, object], list[str]]:
    """What can be read, and the words of errors and warnings."""
    found: dict[str, object] = {}
    said: list[str] = []
    with warnings.catch_warnings(record=True) as warned, dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("always")
        try:
            for name, reading in readings(out):
                try:
                    found[name] = reading()
                except (ConfigError, DamagedStore, Unreadable) as error:
                    said.append(str(error))
        except (ConfigError, DamagedStore, Unreadable) as error:
            said.append(str(error))
    return found, [*said, *(str(warning.message) for warning in warned)]


@pytest.mark.parametrize("harm", [flip, truncate, delete, swap])
@pytest.mark.parametrize("which", ["sweep_folder", "attached_folder"])
def test_damage_is_named_and_nothing_wrong_is_read(
    which: str, harm: Callable[..., None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    whole: Path = request.getfixturevalue(which)
    draw = np.random.default_rng([SEED, len(harm.__name__)])
    right, silent = read(whole)
    assert not silent and len(right) > 50
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    counts: Counter[str] = Counter()
    for group in groups(files(whole)):
        places = [file.relative_to(whole) for file in group]
        others = [other for other in files(out) if other.relative_to(out) not in places]
        for place in places:
            harm(out / place, draw, others)
        changed = [p.relative_to(whole) for p in files(whole) if not _same(p, out / p.relative_to(whole))]
        assert set(places) <= set(changed)
        ended = command.call("verify", str(out))
        named = [line for line in (ended.out + ended.err).splitlines() if line.startswith(("damaged: ", "error: "))]
        assert ended.status in (1, 2), (places, ended)
        if len(places) == 1:
            assert any(str(one) in line for one in changed for line in named), (places, ended)
        else:
            assert all(any(str(place) in line for line in named) for place in places), (places, ended)
        found, said = read(out)
        wrong = [name for name, value in found.items() if name in right and value != right[name]]
        assert not wrong or (wrong == ["claims"] and _is_fewer(found, right)), (places, wrong)
        counts["read as it was" if found.keys() >= right.keys() and not said else "an error or left out"] += len(places)
        for one in changed:
            shutil.copyfile(whole / one, out / one)
    print(f"{which}, {harm.__name__}: {sum(counts.values())} files, each named by verify; {dict(counts)}")
    assert sum(counts.values()) == len(files(whole))


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def _is_fewer(found: dict[str, object], right: dict[str, object]) -> bool:
    """A damaged line of the ledger claims nothing; the trials of its pack are known from that."""
    return set(found["claims"]) <= set(right["claims"])  # type: ignore[call-overload]
