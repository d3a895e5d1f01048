"""What it costs to watch a large sweep, and to write the page of its trials, as ratios to what users do anyway.

    python -m tests.benchmarks.watch    # a synthetic store of 10,000 trials, in a temporary folder

One pack of the store is written to before each look, as by a sweep that goes on. The peers are `open_sweep` and a
report of the same store in the same process. Numbers are medians of some rounds, the first left out; the report is one.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS, TRIALS = 3, 10_000


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median of some rounds, the first of several left out."""
    taken = []
    for _ in range(rounds + (rounds > 1)):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[rounds > 1 :])


def main() -> None:
    from analysis import open_sweep
    from analysis.pages.follower import INCIDENT_SECONDS, Follower
    from analysis.pages.static_page import write_trials
    from analysis.reports.report import write_report
    from tests.benchmarks.scale import grid, write_store

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sweep"
        write_store(out, grid(TRIALS))
        pack = next((out / "store.zarr").glob("*/zarr.json"))
        follower = Follower(out)
        follower.look()

        def look() -> None:
            os.utime(pack)
            follower.store.looks = -1  # also at packs that were complete
            follower._overview_due = 0.0
            follower.look()

        opened, looked = seconds(lambda: open_sweep(out)), seconds(look)
        page, report = seconds(lambda: write_trials(out)), seconds(lambda: write_report(out), rounds=1)
        trial = next(iter(follower.news(0)["overview"]["trials"]))
        shown = seconds(lambda: follower.trial(trial))
    print(f"{TRIALS:,} trials; open_sweep {opened:.2f} s, report {report:.1f} s")
    print(f"a look at a store of which one pack has changed: {looked / opened:.2f} of open_sweep")
    print(f"  of it looking for incidents, at most: {INCIDENT_SECONDS / opened:.2f}")
    print(f"the page of one trial: {shown / opened:.2f} of open_sweep")
    print(f"trials.html: {page / report:.2f} of the report that writes it too")


if __name__ == "__main__":
    main()
