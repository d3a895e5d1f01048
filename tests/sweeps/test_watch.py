"""`watch` in a real browser, against a sweep that trains meanwhile; and that it ends as commands do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from analysis import open_sweep
from harness.config import ConfigError
from tests.analysis import synthetic
from tests.browsing import Visit, visiting
from tests.sweeps import command

STEPS, BLOCK, PACKS = 1600, 20, 20  # seconds a pack; nobody waits for the last
GRID = [f"seed=range({2 * PACKS})", "fault=none,weight_bit", "fault.bit=30", "fault.start=100", "pack.size=4"]
GRID += [f"train.steps={STEPS}", f"telemetry.block={BLOCK}"]


@dataclass(frozen=True)
class Watched:
    """A sweep that trains, and the command that watches it."""

    out: Path
    sweep: Any
    watch: subprocess.Popen
    address: str


def begun(out: Path) -> bool:
    """Whether the store has a value."""
    try:
        return bool(np.isfinite(open_sweep(out)["loss"].values).any())
    except ConfigError:
        return False


@contextmanager
def watching(out: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command that watches a folder, and the address that it gives."""
    watch = subprocess.Popen(
        [sys.executable, "-m", "analysis", "watch", str(out)],
        cwd=command.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watch.stdout is not None
        line = watch.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line + (watch.stderr.read() if watch.stderr and not line else "")
        yield watch, found[0]
    finally:
        if watch.poll() is None:
            watch.kill()
        watch.communicate()


@pytest.fixture
def watched(empty: Path) -> Iterator[Watched]:
    out = empty / "out"
    sweep = command.fork(*command.tiny(*GRID, "out=out"), cwd=empty)
    command.until(lambda: begun(out), "a value in the store")
    with watching(out) as (watch, address):
        yield Watched(out, sweep, watch, address)


def steps_done(page: Any) -> int:
    found = re.search(r"; (\d+) of \d+ steps", page.inner_text("#progress"))
    return int(found[1]) if found else 0


def farthest(page: Any) -> int:
    """The last step of the curves that move."""
    return max((line["x"][-1] for line in lines(page, "#moving") if line["x"]), default=-1)


def lines(page: Any, box: str) -> list[dict[str, Any]]:
    """What plotly draws in a box."""
    told = "line => ({name: line.name, trial: line.meta, x: [...line.x], y: [...line.y]})"
    return page.evaluate(f"box => (document.querySelector(box).data || []).map({told})", box)


def test_a_sweep_is_watched_while_it_trains(watched: Watched, chromium: str) -> None:
    with visiting(chromium) as visit:
        page = visit.page
        page.goto(watched.address)
        page.wait_for_selector("#moving .scatterlayer .trace", state="attached")
        steps, last = steps_done(page), farthest(page)
        # Those of the next pack begin anew.
        command.until(lambda: -1 < farthest(page) != last and steps_done(page) > steps, "progress and curves that move")
        page.wait_for_selector("#incidents a")  # the bit is one of the exponent
        check_filter(visit)

        page.focus("#list tbody a")
        page.keyboard.press("Enter")
        page.wait_for_selector("#plot-loss .main-svg")
        trial = page.inner_text("#trial-title").removeprefix("Trial ")
        assert "stability-harness sweep out=results/alone" in page.inner_text("#command")
        loss = next(line for line in lines(page, "#plot-loss") if line["name"] == "loss")
        page.keyboard.press("Escape")
        page.wait_for_selector("#list tbody a", state="visible")

        visit.until("news.progress.done >= 4")
        assert watched.sweep.poll() is None, "the sweep ended before it was seen to move"
        watched.sweep.send_signal(signal.SIGINT)
        assert command.end(watched.sweep).status == 130
        sweep = open_sweep(watched.out)
        assert np.array_equal(np.array(loss["y"], "f4"), sweep["loss"].sel(trial=trial).values[loss["x"]])
        command.until(lambda: told_of(page) == stored_in(sweep), "what the store has")
        visit.check(watched.address)
    watched.watch.send_signal(signal.SIGINT)
    out, err = watched.watch.communicate(timeout=command.DEADLINE)
    assert (watched.watch.returncode, out, err) == (130, "", "interrupted\n")


def test_of_a_sweep_that_has_ended_no_empty_curves_are_shown(tmp_path: Path, chromium: str) -> None:
    synthetic.write_pack(tmp_path, [synthetic.make_trial(seed=seed) for seed in range(2)])
    with watching(tmp_path) as (_, address), visiting(chromium) as visit:
        page = visit.page
        page.goto(address)
        visit.until("document.getElementById('moving-note').textContent")
        assert page.inner_text("#moving-note") == "No trial has moved since this page was opened."
        assert not page.is_visible("#moving") and not page.is_visible("#moving-choice")
        page.wait_for_selector("#list tbody a")
        visit.check(address)


def check_filter(visit: Visit) -> None:
    """By keyboard alone: only faulty trials are listed and drawn."""
    page = visit.page
    page.focus("#add-filter")
    page.keyboard.press("Enter")
    page.keyboard.type("fault")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("weight_bit")
    visit.until("view.filters[0]?.value === 'weight_bit'")
    assert {*page.evaluate("shownRows.map(row => valueOf('fault', row))")} == {"weight_bit"}
    faults = (
        "new Set(document.getElementById('moving').data.map(l => valueOf('fault', overview.trials.indexOf(l.meta))))"
    )
    visit.until(f"[...{faults}].join() === 'weight_bit'")
    page.click("#filters button")
    visit.until("shownRows.length === overview.trials.length")


def told_of(page: Any) -> dict[str, Any]:
    """Trial -> outcome and final loss, as the page has them; None where there is none."""
    loss = "Number.isFinite(valueOf('final_loss', row)) ? valueOf('final_loss', row) : null"
    pairs = f"overview.trials.map((trial, row) => [trial, [valueOf('outcome', row), {loss}]])"
    return page.evaluate(f"Object.fromEntries({pairs})")


def stored_in(sweep: xr.Dataset) -> dict[str, Any]:
    rows = zip(sweep["trial"].values, sweep["outcome"].values, sweep["final_loss"].values, strict=True)
    return {trial: [outcome, loss if np.isfinite(loss) else None] for trial, outcome, loss in rows}
