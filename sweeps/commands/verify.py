"""Whether every file of a store, and every file of weights, is there as it was written."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console

from harness.basics.printing import count
from harness.storage.last_weights import damaged_weights
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import CHECKSUM, STORE, DamagedStore, checksum_of, damage, pack_of, read_root
from harness.storage.zarr_files import METADATA


def verify(out: Path, console: Console) -> int:
    """Read all of a store and say what is damaged, a line for each file. Returns the exit status: 1 if anything is.

    Raises ConfigError if there is no store.
    """
    read_root(out)
    packs = chunks = begun = 0
    damaged: list[str] = []
    for place in (ResultsPath.at(out) / STORE).entries():
        if place.name.startswith(".") or place.name == METADATA:
            continue
        try:
            pack = pack_of(place)
            damaged += [line for _, line in damage(pack)]
            if pack.complete and pack.attributes.get(CHECKSUM) != checksum_of(pack.attributes):
                damaged.append(f"{place / METADATA}: is damaged (its checksum is another)")
            packs, begun = packs + 1, begun + (not pack.complete)
            chunks += len(pack.arrays) * math.ceil(pack.attributes["steps_done"] / pack.block)
        except FileNotFoundError:
            damaged.append(f"{place / METADATA}: is missing")
        except DamagedStore as error:
            damaged.append(str(error))
    damaged += damaged_weights(out)
    for line in damaged:
        console.print(f"damaged: {line}", highlight=False, soft_wrap=True)
    unfinished = f" ({begun} not finished)" if begun else ""
    counts = f"{out}: {count(packs, 'pack')}{unfinished}, {count(chunks, 'chunk')}"
    verdict = count(len(damaged), "damaged file") if damaged else "every file is as it was written"
    console.print(f"{counts}: {verdict}", highlight=False, soft_wrap=True)
    return 1 if damaged else 0
