"""A results folder whose metadata were read once, for all that is told of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xarray as xr

from analysis.again.batches import BatchReader, Setup, readings_of, setups_of, unknown_trial
from analysis.reading.incident_log import Logged, logs_of
from analysis.reading.open_sweep import open_with_packs
from harness.storage.stored import PackInfo


@dataclass(frozen=True, eq=False)
class SweepFolder:
    """The dataset of the results in `out`, as `open_sweep` gives it, and the packs that it was made of."""

    out: Path
    sweep: xr.Dataset
    packs: Sequence[PackInfo]

    @classmethod
    def open(cls, out: Path | str) -> SweepFolder:
        """Raises ConfigError as `open_sweep` does."""
        return cls(Path(out), *open_with_packs(out))

    @cached_property
    def setups(self) -> Mapping[str, Setup]:
        """Trial -> what is known of its recipe."""
        return setups_of(self.out, self.packs)

    @cached_property
    def logs(self) -> Mapping[str, Sequence[Logged]]:
        """Trial -> the incidents that its playbook has logged."""
        return logs_of(self.packs)

    def readings(self, data: Path | None = None) -> Callable[[str], BatchReader]:
        """The same as `analysis.again.batches.readings_of`."""
        return readings_of(self.out, data, self.packs)

    def check(self, trial: str) -> None:
        """Raises ConfigError for a trial that there is not."""
        if trial not in self.sweep["trial"].values:
            raise unknown_trial(self.out, trial, iter(map(str, self.sweep["trial"].values)))
