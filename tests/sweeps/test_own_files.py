"""What the commands may touch: their own files, in a results folder, and nothing that it links to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from analysis.__main__ import main
from harness.storage.progress_files import PLAN, PROGRESS
from harness.storage.results_folder import MARKER
from harness.storage.stored import STORE
from sweeps.running.job import CHECKPOINTS, ERRORS
from tests.sweeps import command

GRID = ("seed=range(2)", "fault=none,weight_bit", "fault.start=3")
MORE = ("seed=range(3)", *GRID[1:])
FILES = (
    "report.html",
    "figures/loss_curves.png",
    PLAN,
    f"{STORE}/zarr.json",
    f"{STORE}/*/loss/c.0.0",
    f"{STORE}/[!.]*/",
)
FILES += ("claims/ledger.jsonl",)
MADE_ANEW = ("report.html", PLAN)  # in place of the link
FOLDERS = ("claims", "figures", "locks", "search", "slurm", "slurm/packs", CHECKPOINTS, ERRORS, PROGRESS, STORE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep with a report."""
    out = tmp_path_factory.mktemp("trained") / "out"
    assert command.call(*command.tiny(*GRID, f"out={out}")).status == 0
    assert main(["report", str(out)]) == 0
    return out


@pytest.fixture
def out(trained: Path, empty: Path) -> Path:
    """A copy of it in the current folder."""
    return Path(shutil.copytree(trained, empty / "out"))


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Path]:
    """Somebody's own files, which are as they were afterwards."""
    folder = tmp_path / "victims"
    for name in ("thesis.tex", "aaaaaaaaaaaaaaaa.json", "0123456789abcdef.lock", "zarr.json", "inner/c.0.0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "inner" / ".bashrc").write_text("mine")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
    yield folder
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
    assert after == before


def run_everything(pages: Sequence[str] = ("report", "campaign")) -> list[int | None]:
    """Every command on `out`, also one that goes on training; their exit statuses."""
    ended = [command.call(*command.tiny(*MORE, "out=out"))]
    ended += [command.call(name, "out") for name in ("status", "verify", "cancel")]
    for one in ended:
        assert "Traceback" not in one.err and one.err.count("\n") <= 1, one.err
    return [one.status for one in ended] + [main([page, "out"]) for page in pages]


def test_a_folder_with_other_things_is_refused(empty: Path) -> None:
    """Whatever the names of those things are."""
    for name in ("progress/thesis.tex", "figures/holiday.png", PLAN, "report.html"):
        (empty / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (empty / "work" / name).write_text("mine")
    for more in ([], ["plan=true"]):
        (line,) = command.refused(empty, *command.tiny("out=work", *more))
        work = empty / "work"
        assert line == (
            f"error: out={work}: is not empty (figures, plan.json, progress and 1 more) and no results folder of this "
            f"version, which has a {MARKER}; allowed: a new or empty folder, such as out={work / 'sweep'}"
        )
    before = command.tree(empty)
    assert [main([name, "work"]) for name in ("report", "campaign")] == [2, 2]
    assert command.tree(empty) == before


def test_what_is_somebodys_own_in_a_results_folder_stays(out: Path) -> None:
    own = ["thesis.tex", "progress/thesis.tex", "progress/notes.json", "errors/.hidden", "locks/mine"]
    own += ["figures/mine.png", "figures/.x.png.0", "checkpoints/mine/file", "search/mine", f"{STORE}/.mine/file"]
    own += ["claims/mine", "report.md"]
    for name in own:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    assert run_everything() == [0, None, None, None, 0, 0]
    assert [(out / name).read_text() for name in own] == ["mine"] * len(own)


@pytest.mark.filterwarnings("ignore:.* not a pack, left out")
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_nothing_is_done_through_a_link(
    out: Path, victims: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger's results folder, in which something of ours is a link to somebody's own."""
    place = next((path for path in out.glob(name)), out / name)
    if place.is_dir() or name in FOLDERS:
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(victims / "inner" if name in FILES else victims)
    else:
        place.unlink(missing_ok=True)
        place.symlink_to(victims / "thesis.tex")
    run_everything() if name in (*FILES, "figures") else run_everything(["report"])
    assert place.is_symlink() == (name not in MADE_ANEW)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_one_line(
    trained: Path, out: Path, make: Callable[[Path], None]
) -> None:
    for name in ("claims/ledger.jsonl", PLAN, f"{STORE}/zarr.json", MARKER):
        (out / name).unlink()
        make(out / name)
        run_everything(["report"])
        (out / name).rmdir() if (out / name).is_dir() else (out / name).unlink()
        shutil.copy2(trained / name, out / name)
