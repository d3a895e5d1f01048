"""Whether every file of a results folder is there as it was written, and which of them nothing can be said of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage import last_weights
from harness.storage.json_seal import sealed_record
from harness.storage.kept_states import damaged_states, is_state
from harness.storage.progress_files import PLAN, read_asked
from harness.storage.records import Missing, Unreadable, read_bytes
from harness.storage.results_folder import MARKER, ResultsPath
from harness.storage.stored import STORE, DamagedStore, PackInfo, damage, pack_of, read_root
from harness.storage.zarr_files import METADATA, chunk_key, strict_json
from sweeps.claims.registration import REGISTERED, Registration
from sweeps.running.ledger import CLAIMS, LEDGER, TURN, lines_of


def verify(out: Path, console: Console) -> int:
    """Read all of a results folder, a line for each damaged file. Returns the exit status: 1 if anything is damaged.

    Files that have no checksum are counted, and the first is named. Raises ConfigError if there is no store.
    """
    folder = ResultsPath.at(out)
    if not (out / STORE).is_dir():
        read_root(out)
    damaged = list(_roots(out, folder))
    packs, covered = [], {MARKER, PLAN, f"{STORE}/{METADATA}", f"{CLAIMS}/{LEDGER}", f"{CLAIMS}/{TURN}"}
    for place in (folder / STORE).entries():
        if place.name.startswith(".") or place.name == METADATA:
            continue
        covered.add(f"{STORE}/{place.name}/{METADATA}")
        try:
            pack = pack_of(place)
        except FileNotFoundError:
            damaged.append(f"{place / METADATA}: is missing")
        except DamagedStore as error:
            damaged.append(str(error))
            covered |= {f"{STORE}/{place.name}/{name}" for name in _files(place)}  # unknown, as their pack is
        else:
            packs.append(pack)
            damaged += [*_arrays(pack), *(line for _, line in damage(pack))]
            covered |= set(_named(pack))
    damaged += [
        *_plan(out, packs),
        *_ledger(folder, packs),
        *last_weights.damaged_weights(out),
        *damaged_states(folder),
    ]
    damaged += list(_registered(folder, covered))
    covered |= {name for name in _files(folder) if last_weights.is_file(name) or is_state(name)}
    others = [name for name in _files(folder) if name not in covered]
    for line in damaged:
        console.print(f"damaged: {line}", highlight=False, soft_wrap=True)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        console.print(f"not covered by a checksum: {out}/{others[0]}{more}", highlight=False, soft_wrap=True)
    old = sum(not pack.is_listed for pack in packs)
    if old:
        what = f"{count(old, 'pack')} of an earlier version, whose chunks have their own checksum alone"
        console.print(f"not covered by a checksum: which chunk stands where in {what}", highlight=False, soft_wrap=True)
    begun = sum(not pack.complete for pack in packs)
    unfinished = f" ({begun} not finished)" if begun else ""
    chunks = sum(len(pack.arrays) * math.ceil(pack.attributes["steps_done"] / pack.block) for pack in packs)
    counts = f"{out}: {count(len(packs), 'pack')}{unfinished}, {count(chunks, 'chunk')}"
    verdict = count(len(damaged), "damaged file") if damaged else "every file is as it was written"
    console.print(f"{counts}: {verdict}", highlight=False, soft_wrap=True)
    return 1 if damaged else 0


def _roots(out: Path, folder: ResultsPath) -> Iterator[str]:
    """What is wrong with the marker and the store's own file. Raises ConfigError where there is no store at all."""
    has_packs = any(not place.name.startswith(".") for place in (folder / STORE).entries())
    try:
        read_root(out)
    except ConfigError as error:
        if not has_packs:
            raise
        yield str(error)
    try:
        ResultsPath.open(out)
    except ConfigError as error:
        yield str(error) if (folder / MARKER).exists() else f"{folder / MARKER}: is missing"


def _registered(folder: ResultsPath, covered: set[str]) -> Iterator[str]:
    """What is wrong with the registrations of claims, which are covered."""
    for entry in (folder / REGISTERED).entries():
        covered.add(f"{REGISTERED}/{entry.name}")
        try:
            sealed_record(read_bytes(entry.path), Registration, entry.path)
        except (Missing, Unreadable) as error:
            yield str(error)


def _arrays(pack: PackInfo) -> Iterator[str]:
    """What is wrong with the metadata of each array, for other readers of Zarr: they stand in the pack's as well."""
    for name, array in pack.arrays.items():
        file = pack.place / name / METADATA
        try:
            if file.read_bytes() != strict_json(array).encode():
                yield f"{file}: is damaged (its pack says otherwise)"
        except FileNotFoundError:
            yield f"{file}: is missing"
        except (OSError, ConfigError) as error:
            yield f"{file}: cannot be read ({error})"


def _named(pack: PackInfo) -> Iterator[str]:
    """The files of a pack that `_arrays` and `damage` look at, from the results folder on."""
    blocks = math.ceil(pack.attributes["steps_done"] / pack.block)
    for name, array in pack.arrays.items():
        place = f"{STORE}/{pack.id}/{name}"
        yield f"{place}/{METADATA}"
        is_known = pack.is_listed or "step" in array["dimension_names"]
        for number in range(max(blocks, 1) if is_known else 1):
            yield f"{place}/{chunk_key(number, len(array['shape']))}"


def _plan(out: Path, packs: list[PackInfo]) -> Iterator[str]:
    """What is wrong with the plan, which every sweep has that trains."""
    try:
        read_asked(out)
    except Missing:
        if (ResultsPath.at(out) / CLAIMS).exists() and any(pack.is_listed for pack in packs):
            yield f"{out / PLAN}: is missing"
    except Unreadable as error:
        yield str(error)


def _ledger(folder: ResultsPath, packs: list[PackInfo]) -> Iterator[str]:
    """What is wrong with the ledger of a sweep: a line that is damaged, or that a pack should have and has not."""
    claims = lines_of(folder)
    ledger = folder / CLAIMS / LEDGER
    for number, claim in enumerate(claims, start=1):
        if claim is None:
            yield f"{ledger}: line {number} is damaged (its checksum is another, or it is none)"
    if not (folder / PLAN).exists() and not (folder / CLAIMS).exists():
        return  # no sweep, but a run of the user's own loop
    there = {claim.pack for claim in claims if claim is not None}
    lacking = [pack.id for pack in packs if pack.id not in there and pack.is_listed]
    if lacking and None not in claims:
        yield f"{ledger}: lacks pack {lacking[0]}" if ledger.exists() else f"{ledger}: is missing"


def _files(place: ResultsPath, prefix: str = "") -> Iterator[str]:
    """Every file below a folder that is no lock and nobody's rest, from it on."""
    for entry in place.entries():
        name = f"{prefix}{entry.name}"
        if entry.name.startswith(".") or entry.name.endswith(".lock"):
            continue
        if entry.path.is_dir() and not entry.path.is_symlink():
            yield from _files(entry, f"{name}/")
        else:
            yield name
