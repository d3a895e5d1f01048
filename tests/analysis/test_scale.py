"""What sweeps of very many trials cost, in files that are opened and calls that are made: once, and in proportion."""

from __future__ import annotations

import cProfile
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from analysis import open_sweep
from analysis.pages.static_page import MOST_PAGES
from analysis.pages.trial_page import AT_ONCE
from analysis.reports.campaign import write_campaign
from analysis.reports.report import write_report
from harness.storage.stored import STORE
from sweeps.commands.status import status_of
from tests.analysis import synthetic
from tests.analysis.reads import count_reads
from tests.benchmarks import scale

SEEDS = (1, 2, 4)  # of 60 trials each


class Opened(Counter[Path]):
    """How often each file was opened, while `is_on`: by its path, or below a descriptor of its folder."""

    is_on = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.is_on and event == "open" and isinstance(arguments[0], str):
            self[Path(arguments[0])] += 1

    def during(self, work: Callable[[], object], out: Path) -> dict[str, Counter[int]]:
        """Of the files in the store, by name of the signal or `zarr.json`: how many were opened how often."""
        self.clear()
        with pytest.MonkeyPatch.context() as patch:
            below = count_reads(patch)
            self.is_on = True
            work()
            self.is_on = False
        self.update(below)
        found: dict[str, Counter[int]] = {}
        for path, number in self.items():
            if path.is_relative_to(out / STORE):
                name = path.name if path.name == "zarr.json" else path.parent.name
                found.setdefault(name, Counter())[number] += 1
        return found


@pytest.fixture(scope="module")
def all_opened() -> Opened:
    """An audit hook stays for as long as the process does."""
    opened = Opened()
    sys.addaudithook(opened)
    return opened


@pytest.fixture
def opened(all_opened: Opened) -> Iterator[Opened]:
    yield all_opened
    all_opened.is_on = False


PAGES = MOST_PAGES // AT_ONCE


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest store that the benchmark makes."""
    out = tmp_path_factory.mktemp("scale")
    scale.write_store(out, scale.grid(scale.GRID))
    return out


def packs_of(out: Path) -> int:
    return sum(path.is_dir() for path in (out / STORE).iterdir())


def test_the_benchmarks_store_is_a_sweep_like_others(store: Path) -> None:
    ds = open_sweep(store)
    assert ds.sizes == {"trial": scale.GRID, "step": scale.STEPS, "layer": 2, "segment": 64}
    assert {name: len(np.unique(ds[name])) for name in ("width", "lr", "mitigation", "fault")} == {
        "width": 4,
        "lr": 5,
        "mitigation": 5,
        "fault": 5,
    }
    assert {"trained", "divergent", "non-finite"} >= set(ds["outcome"].values) >= {"trained", "non-finite"}
    status = status_of(store)
    assert len(status.asked) == scale.GRID and status.asked == status.complete


def test_opening_opens_each_file_once(store: Path, opened: Opened) -> None:
    found = opened.during(lambda: open_sweep(store), store)
    assert found == {"zarr.json": {1: packs_of(store) + 1}}


def test_the_status_opens_no_pack_twice(store: Path, opened: Opened) -> None:
    found = opened.during(lambda: status_of(store), store)
    assert set(found) == {"zarr.json"} and found["zarr.json"][1] == packs_of(store)


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("write", [write_report, write_campaign])
def test_report_and_campaign_open_each_file_once(store: Path, opened: Opened, write: Callable[[Path], object]) -> None:
    """But for the pages of trials, of which there are so many at most: once for each hundred of them."""
    found = opened.during(lambda: write(store), store)
    assert found.pop("zarr.json") == {1: packs_of(store) + 1}
    assert {"loss", "grad_norm"} <= set(found)
    assert all(max(own) <= 1 + PAGES for own in found.values()), found


@pytest.mark.usefixtures("unrendered")
def test_losses_that_do_not_fit_into_memory_are_read_some_thirty_times(
    store: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many trials there are: once a table, and once a panel of a figure. All else is still read once."""
    monkeypatch.setattr("analysis.reports.report.KEPT_IN_MEMORY", 0)
    found = opened.during(lambda: write_report(store), store)
    losses = found.pop("loss")
    assert max(losses) <= 38 + PAGES
    assert all(max(own) <= 1 + PAGES for own in found.values()), found


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, those in C included."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small sweep, and those of `SEEDS`."""
    outs = [tmp_path_factory.mktemp("growing") for _ in range(1 + len(SEEDS))]
    for out, seeds in zip(outs, (1, *SEEDS), strict=True):
        synthetic.write_realistic_sweep(out, widths=(32, 64), seeds=seeds, steps=20)
    return outs


@pytest.mark.parametrize("work", [open_sweep, write_report], ids=["open_sweep", "report"])
def test_work_grows_in_proportion_to_the_trials(
    growing: list[Path], monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], object]
) -> None:
    """Three times as many more trials, three times as many more calls; what is quadratic would make five times as many.

    Of the report without its figures, since how many ticks an axis has would drown what the trials cost.
    """
    monkeypatch.setattr("analysis.reports.report.figures", lambda *needs: {})
    work(growing[0])  # the first time, modules are loaded
    few, more, most = counts = [calls(lambda out=out: work(out)) for out in growing[1:]]
    assert few < more < most
    assert (most - few) / (more - few) < 3.5, counts
