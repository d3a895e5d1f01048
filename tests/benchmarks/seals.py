"""What checks cost where a store is opened: every pack's metadata, sealed and compared, against parsing the same files.

python -m tests.benchmarks.seals [PACKS]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness.storage.json_seal import is_sealed
from harness.storage.store import PackStore, open_store
from harness.storage.stored import STORE, read_packs
from harness.storage.zarr_files import METADATA
from tests.sweeps import command

ROUNDS, STEPS = 10, 200


def main() -> None:
    """Medians over rounds of the times of each, one after the other."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        store = open_store(out, "grid")
        trials = command.tiny_trials("seed=range(8)", f"train.steps={STEPS}")
        for number in range(count):
            PackStore.create(store, f"{number:016x}", trials, STEPS, 1, {"kind": "", "fingerprint": ""}, {}, 50)
        files = sorted((out / STORE).glob(f"*/{METADATA}"))
        times: dict[str, list[float]] = {"parsed": [], "sealed": [], "checked": []}
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            contents = [file.read_bytes() for file in files]
            groups = [json.loads(content) for content in contents]
            parsed = time.perf_counter()
            sealed = sum(map(is_sealed, contents))
            ended = time.perf_counter()
            packs = list(read_packs(out))
            times["checked"].append(time.perf_counter() - ended)
            times["sealed"].append(ended - parsed)
            times["parsed"].append(parsed - begin)
            assert len(groups) == len(packs) == sealed == count
    plain = statistics.median(times["parsed"])
    print(f"{count} packs of {len(trials)} trials, {len(contents[0]):,} bytes each; reading and parsing: {plain:.3f} s")
    print(f"seals alone {statistics.median(times['sealed']) / plain:.2f} of that")
    print(f"all that opening reads and checks {statistics.median(times['checked']) / plain:.2f} of that")


if __name__ == "__main__":
    main()
