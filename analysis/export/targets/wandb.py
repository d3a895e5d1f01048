"""Weights & Biases, offline: a folder a finished trial, which `wandb sync` sends to a server when its user says so.

An offline run cannot be gone on with, so trials are exported once they are finished.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.export.names import text
from analysis.export.registry import needed
from analysis.export.runs import MeasuredCurve, Source, TrackedRun
from analysis.export.tracking import Tracker, write_whole
from harness.basics.printing import label


class WandB(Tracker):
    """See above."""

    about = "Weights & Biases, offline"
    extra = "wandb"
    finished_only = True

    def open(self, source: Source, place: Path) -> bool:
        """The folder of the sweep, which is made if it is not there."""
        os.environ["WANDB_MODE"] = "offline"
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # else its own crashes are reported
        with needed("wandb", "wandb"):
            import wandb
        self.errors = (wandb.Error,)
        self._wandb, self._project = wandb, source.name
        self._folder = place / source.name
        is_there = self._folder.is_dir()
        self._folder.mkdir(exist_ok=True)
        return is_there

    def has(self, handle: str) -> bool:
        """See `Tracker`."""
        return bool(self._folders(handle))

    def _folders(self, trial: str) -> list[Path]:
        return [*(self._folder / "wandb").glob(f"offline-run-*-{trial}")]

    def remove(self, trial: str, handle: str) -> None:
        """See `Tracker`. What was sent to a server stays there."""
        for folder in self._folders(trial):
            shutil.rmtree(folder)

    def put(self, run: TrackedRun, curves: Sequence[MeasuredCurve], handle: str | None) -> str:
        """See `Tracker`."""
        tags = [label(text(f"{name}={value}")) for name, value in run.tags.items() if name not in ("trial", "pack")]
        began = self._wandb.init(
            project=self._project,
            id=run.trial,
            name=run.name,
            group=label(run.tags["golden"]),
            tags=tags,
            config={name: text(value) if isinstance(value, str) else value for name, value in run.parameters.items()},
            dir=str(self._folder),
            mode="offline",
            settings=self._settings(run),
        )
        points: dict[int, dict[str, Any]] = {}
        for series in curves:
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                points.setdefault(step, {})[series.name] = value
        for event in run.events:
            at = points.setdefault(event.step, {})
            name = f"events/{event.kind}"
            at[name] = f"{at[name]}\n{event.title} {event.json}" if name in at else f"{event.title} {event.json}"
        for step in sorted(points):
            began.log(points[step], step=step)
        began.summary.update({**run.tags, **{f"final.{name}": value for name, value in run.finals.items()}})
        began.finish()
        return run.trial

    def _settings(self, run: TrackedRun) -> Any:
        """Nothing of this machine or its user is put into the file."""
        return self._wandb.Settings(
            mode="offline",
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            save_code=False,
            x_save_requirements=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )

    def put_page(self, name: str, content: bytes, handle: str | None) -> None:
        """Into the files of a run, which are sent with it; one on the whole sweep lies beside the runs."""
        for folder in [folder / "files" for folder in self._folders(handle)] if handle else [self._folder]:
            folder.mkdir(exist_ok=True)
            write_whole(folder / name, content)

    def close(self) -> None:
        """Its own process ends."""
        self._wandb.teardown()

    def words(self, place: Path) -> str:
        """See `Tracker`."""
        runs = f"{shlex.quote(str(self._folder))}/wandb/offline-run-*"
        kept = f"W&B: project {self._project} in {self._folder}, finished trials alone"
        return f"{kept}; nothing was sent, `wandb sync {runs}` would"
