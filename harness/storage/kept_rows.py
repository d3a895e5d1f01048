"""Packs of a results folder, copied: whole, as they are, or some of their trials as a pack of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import numpy as np

from harness.storage.json_seal import SEAL
from harness.storage.pack_info import CHECKSUMS, NAME, OF_COMPLETE, OF_TRIALS, PENDING, SINCE_6, is_once
from harness.storage.results_folder import ResultsPath
from harness.storage.store import ENDS, Described, PackStore, guarded_in
from harness.storage.stored import STORE, DamagedStore, PackInfo, damage, pack_of, read_signal

BLOCKS = 64  # that are in memory at a time


def copy_pack(pack: PackInfo, folder: ResultsPath) -> None:
    """Have the same pack in another results folder, byte for byte; whoever reads there sees all of it or nothing.

    Raises OSError, and DamagedStore for a copy that is not what was written.
    """
    place = folder / STORE / pack.id
    aside = place.parent / f".{pack.id}.{uuid.uuid4().hex}"
    for names in _files(pack.place):
        copy = aside
        for name in names[:-1]:
            copy = copy / name
        copy.make_folder()
        source = pack.place
        for name in names:
            source = source / name
        (copy / names[-1]).write(source.read_bytes())
    aside.rename(pack.id)
    if damaged := next(damage(pack_of(place)), None):
        raise DamagedStore(f"{damaged[1]}; allowed: the same command once more")


def _files(place: ResultsPath, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for entry in place.entries():
        if entry.name.startswith("."):
            continue
        names = (*before, entry.name)
        if entry.path.is_dir() and not entry.path.is_symlink():
            yield from _files(entry, names)
        else:
            yield names


def write_rows(pack: PackInfo, rows: Sequence[int], name: str) -> None:
    """Write these trials of a complete pack as a complete pack of that name into the same folder, in its place if any.

    Raises DamagedStore for values that are not as they were written.
    """
    kept = {key: value for key, value in pack.attributes.items() if key not in (SEAL, CHECKSUMS, PENDING, NAME)}
    columns = [key for key in (*OF_TRIALS, *OF_COMPLETE, *SINCE_6) if key in kept]
    of_rows = {key: [kept[key][row] for row in rows] for key in columns}
    ended = {key: of_rows[key] for key in (*OF_COMPLETE, *SINCE_6) if key in of_rows}
    attributes = kept | of_rows | {"steps_done": 0, "complete": False, NAME: name, CHECKSUMS: {}}
    attributes = {key: value for key, value in attributes.items() if key not in ended}
    signals = {key: array for key, array in pack.arrays.items() if not is_once(array)}
    store = PackStore(pack.place.parent / name, attributes, pack.steps, pack.layers, pack.block, guarded_in(pack))
    store.install()
    done, length = pack.attributes["steps_done"], BLOCKS * pack.block
    for first in range(0, done, length):
        stop = min(done, first + length)
        store.write(first, {key: read_signal(pack, key, first, stop)[list(rows)] for key in signals})
    sizes = {key: pack.arrays[key]["shape"][1] for key in ENDS if key in pack.arrays}
    store.write_ends({key: read_signal(pack, key, 0, size)[list(rows)] for key, size in sizes.items()})
    store.finish(**ended)


def begin_longer(
    folder: ResultsPath,
    name: str,
    trials: Sequence[Described],
    steps: int,
    rows: Sequence[tuple[PackInfo, int]],
    kept: int,
) -> None:
    """Begin a pack of `trials` with so many steps, in whole blocks before step `kept` equal to stored trials of fewer.

    `rows` says where those are, trial by trial; their packs have one structure. Raises DamagedStore for values that are
    not as they were written.
    """
    first, _ = rows[0]
    signals = {key: array for key, array in first.arrays.items() if not is_once(array)}
    about = (first.attributes["corpus"], first.attributes["environment"], first.block)
    store = PackStore.create(folder, name, trials, steps, first.layers, *about, guarded_in(first))
    packs = {pack.id: pack for pack, _ in rows}
    for begin in range(0, kept // first.block * first.block, BLOCKS * first.block):
        stop = min(begin + BLOCKS * first.block, kept // first.block * first.block)
        block: dict[str, np.ndarray] = {}
        for key in signals:
            read = {pack_id: read_signal(pack, key, begin, stop) for pack_id, pack in packs.items()}
            block[key] = np.stack([read[pack.id][row] for pack, row in rows])
        store.write(begin, block)
