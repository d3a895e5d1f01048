"""Trackio: a project a sweep, in a SQLite file, written as its own importers write it; no server is started."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from analysis.export.names import text
from analysis.export.registry import needed
from analysis.export.runs import MeasuredCurve, Source, TrackedRun
from analysis.export.tracking import Tracker, write_whole
from harness.config import ConfigError

REMOTE: tuple[str, ...] = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DATASET_ID", "TRACKIO_BUCKET_ID")
REMOTE += ("SPACE_REPO_NAME", "SYSTEM", "SPACE_ID")  # by which it knows that it runs on a Space
NAMES = ("project", "run", "timestamp", "step", "time", "metrics")  # which it keeps for itself


class Trackio(Tracker):
    """See above."""

    about = "Trackio, into a SQLite file"
    extra = "trackio"

    def open(self, source: Source, place: Path) -> bool:
        """The project, which is made with its first run."""
        place = place.resolve()
        os.environ["TRACKIO_DIR"] = str(place)  # read when it is imported
        os.environ["HF_HUB_OFFLINE"] = "1"
        with needed("trackio", "trackio"), _without(REMOTE):
            from trackio import sqlite_storage
        used_place = Path(vars(sqlite_storage)["TRACKIO_DIR"])
        if used_place != place:
            used = f"trackio writes to {used_place} in this process"
            raise ConfigError(f"--into {place}: {used}; allowed: that folder, or another process")
        self.errors = (sqlite3.Error,)
        self._storage, self._project, self._folder = sqlite_storage.SQLiteStorage, source.name, place
        return self._storage.get_project_db_path(self._project).exists()

    def has(self, handle: str) -> bool:
        """See `Tracker`."""
        return self._storage.get_log_count(self._project, handle, run_id=handle) > 0

    def remove(self, trial: str, handle: str) -> None:
        """See `Tracker`."""
        with _without(REMOTE):
            self._storage.delete_run(self._project, trial, run_id=trial)

    def put(self, run: TrackedRun, curves: Sequence[MeasuredCurve], handle: str | None) -> str:
        """A row a step. Of a finished trial the configuration is written again, with tags and last values."""
        points: dict[int, dict[str, Any]] = {}
        for series in curves:
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                points.setdefault(step, {})[_name(series.name)] = value
        config = {
            _name(name): text(value) if isinstance(value, str) else value for name, value in run.parameters.items()
        }
        config |= {f"tag.{name}": tag for name, tag in run.tags.items()}
        config |= {f"final.{name}": value for name, value in run.finals.items()}
        steps = sorted(points) or [run.steps]  # without a row it takes no configuration
        time = datetime.fromtimestamp(run.created, UTC).isoformat()
        with _without(REMOTE):
            self._storage.bulk_log(
                self._project,
                run.name,
                [points.get(step, {}) for step in steps],
                steps,
                [time] * len(steps),
                config,
                run_id=run.trial,
            )
            self._storage.bulk_alert(
                self._project,
                run.name,
                [event.title for event in run.events],
                [event.json for event in run.events],
                ["warn" if event.kind == "incident" else "info" for event in run.events],
                [event.step for event in run.events],
                [time] * len(run.events),
                run_id=run.trial,
            )
        return run.trial

    def put_page(self, name: str, content: bytes, handle: str | None) -> None:
        """Beside the database: of a run in a folder of its own."""
        folder = self._folder / f"{self._project}-pages"
        folder.mkdir(exist_ok=True)
        write_whole(folder / (f"{handle}-{name}" if handle else name), content)

    def words(self, place: Path) -> str:
        """See `Tracker`."""
        show = f"TRACKIO_DIR={shlex.quote(str(self._folder))} trackio show --project {self._project}"
        return f"Trackio: {self._storage.get_project_db_path(self._project)}; look at it with `{show}`"


def _name(name: str) -> str:
    return f"{name}_" if name in NAMES else name


@contextlib.contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """None of these in the environment."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
