"""A fault that stops the process that trains at a chosen step in a chosen way, and what a sweep that it stopped leaves.

It is added as any new fault is: by a file in a copy of the folder of injectors (fixture `rigged`).
"""

from __future__ import annotations

from pathlib import Path

from harness.storage.progress_files import PROGRESS
from harness.storage.stored import read_packs
from sweeps.running.job import ERRORS
from tests.sweeps import command

TRAPS = ("seed=range(3)", "fault=rigged", "fault.switch=switch", "pack.size=2", "out=out")  # 3 packs of golden and trap
STOPPING = "stopping once checkpoints are saved; again to stop at once\n"
RIGGED = '''
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from harness.config import PER_TRIAL, anything, number
from harness.training.sites import Site
from harness.faults.fault import InjectableFault
from injectors.fault import Strike


@dataclass(frozen=True)
class Rigged(InjectableFault):
    """Does what the file `switch` says to trials of its seeds, and nothing if there is none."""

    kind: str = "rigged"
    start: int = number(PER_TRIAL, 3, "step of the strike", low=0)
    switch: str = anything(PER_TRIAL, "", "file with words raise, kill or wait, each with a seed")

    def arm(self, facts):
        return _Trap(Site.WEIGHT, self.strike_steps(facts), False, switch=Path(self.switch), seed=facts.seed)


@dataclass
class _Trap(Strike):
    switch: Path = Path()
    seed: int = 0

    def strike(self, visit):
        given = self.switch.read_text().split() if self.switch.exists() else []
        words = [word for word, seed in zip(given[::2], given[1::2]) if int(seed) == self.seed]
        for word in words:
            self.switch.with_suffix(".reached").touch()
            if word == "raise":
                raise RuntimeError("the trap\\nhas sprung")
            if word == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while word == "wait" or (word == "hold" and not self.switch.with_suffix(".go").exists()):
                time.sleep(0.01)
        return []
'''


def recorded(out: Path) -> list[str]:
    """Every trial that a complete pack has, as often as it is there."""
    return sorted(trial for pack in read_packs(out) if pack.complete for trial in pack.attributes["ids"])


def is_spotless(out: Path) -> bool:
    """No trace of an error, no progress file, no temporary file."""
    left = [*(out / PROGRESS).glob("*"), *(out / ERRORS).glob("*"), *(out / "store.zarr").rglob(".*")]
    return not left


def goes_on(rigged: Path, folder: Path, unsprung: Path) -> str:
    """The same command without the trap finishes, and nothing shows that it was ever disturbed. Returns its output."""
    (folder / "switch").unlink()
    already = len(recorded(folder / "out"))
    again = command.end(command.fork(*command.tiny(*TRAPS), cwd=folder, path=[rigged]))
    assert (again.status, again.err) == (0, "")
    assert f"trained {6 - already} of {6 - already} trials" in again.out
    assert recorded(folder / "out") == recorded(unsprung)
    assert not command.differing(command.results(folder / "out"), command.results(unsprung))
    assert is_spotless(folder / "out")
    return again.out
