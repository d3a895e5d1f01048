"""MLflow: an experiment a sweep, in `mlflow.db` of the place, a SQLite file that `mlflow ui` opens.

Points go straight into MLflow's tables where these have the columns that we know, else through `log_batch`, which takes
some ten times as long. All else goes through its client.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import shlex
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from analysis.export.names import text
from analysis.export.registry import needed
from analysis.export.runs import MeasuredCurve, Source, TrackedRun
from analysis.export.tracking import Tracker
from harness.config import ConfigError

DATABASE = "mlflow.db"
MOST_PARAMETERS, MOST_POINTS = 100, 1000  # of one `log_batch`
COLUMNS = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")
PAGES_RUN = "report"  # the run that has what is on the whole sweep
CACHE = -262_144  # KiB of SQLite's pages in memory: each point is in three indices


class MLflow(Tracker):
    """See above."""

    about = "MLflow, into a SQLite file"
    extra = "mlflow"

    def open(self, source: Source, place: Path) -> bool:
        """The database and the sweep's experiment in it, which are made if they are not there."""
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported
        with needed("mlflow", "mlflow"):
            import mlflow
            import sqlalchemy  # noqa: F401
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        with _quiet():
            self._metric, self._param = Metric, Param
            self.errors = (MlflowException, sqlite3.Error)
            self._file, self._name = (place / DATABASE).resolve(), source.name
            _check_file(self._file)
            try:
                self._client = mlflow.MlflowClient(f"sqlite:///{self._file}")
                found = self._client.get_experiment_by_name(source.name)
                if found is not None and found.lifecycle_stage == "deleted":
                    self._client.restore_experiment(found.experiment_id)
                self._experiment = found.experiment_id if found else self._new_experiment(source, place)
            except Exception as error:  # MLflow's own, SQLAlchemy's and Alembic's
                reason = text(str(error))
                allowed = "one that this MLflow reads, or another folder"
                raise ConfigError(
                    f"--into {place}: MLflow cannot use its {DATABASE} ({reason}); allowed: {allowed}"
                ) from None
        self._tables = sqlite3.connect(self._file, timeout=60) if _has_known_tables(self._file) else None
        if self._tables is not None:
            self._tables.execute(f"PRAGMA cache_size={CACHE}")
        return found is not None

    def _new_experiment(self, source: Source, place: Path) -> str:
        pages = (place.resolve() / "artifacts" / source.name).as_uri()
        tags = {"study": text(source.sweep.attrs["study"]), "results": source.id}
        return self._client.create_experiment(source.name, artifact_location=pages, tags=tags)

    def has(self, handle: str) -> bool:
        """See `Tracker`."""
        try:
            return self._client.get_run(handle).info.lifecycle_stage == "active"
        except self.errors:
            return False

    def _found(self, query: str) -> Iterator[Any]:
        """Runs of the experiment."""
        token = None
        while True:
            runs = self._client.search_runs([self._experiment], query, max_results=1000, page_token=token)
            yield from runs
            if not (token := runs.token):
                return

    def remove(self, trial: str, handle: str) -> None:
        """Into MLflow's own bin, which `mlflow gc` empties."""
        for run in [*self._found(f"tags.trial = '{trial}'")]:
            self._client.delete_run(run.info.run_id)

    def put(self, run: TrackedRun, curves: Sequence[MeasuredCurve], handle: str | None) -> str:
        """See `Tracker`."""
        created = int(run.created * 1000)
        if handle is None:
            began = self._client.create_run(self._experiment, created, dict(run.tags), run.name)
            handle = began.info.run_id
            parameters = [self._param(name, text(value)) for name, value in run.parameters.items()]
            for begin in range(0, len(parameters), MOST_PARAMETERS):
                self._client.log_batch(handle, params=parameters[begin : begin + MOST_PARAMETERS])
        self._put_points(handle, created, curves)
        if run.complete:
            self._end(handle, run, created)
        return handle

    def _end(self, handle: str, run: TrackedRun, created: int) -> None:
        metrics = [self._metric(name, value, created, run.steps) for name, value in run.finals.items()]
        times = Counter((event.kind, event.step) for event in run.events)
        metrics += [self._metric(f"events/{kind}", n, created, step) for (kind, step), n in times.items()]
        for begin in range(0, len(metrics), MOST_POINTS):
            self._client.log_batch(handle, metrics=metrics[begin : begin + MOST_POINTS])
        self._client.set_tag(handle, "outcome", run.tags["outcome"])
        if run.events:
            lines = [
                f'{{"kind": "{event.kind}", "step": {event.step}, "detail": {event.json}}}' for event in run.events
            ]
            self._client.log_text(handle, "\n".join(lines) + "\n", "events.jsonl")
        self._client.set_terminated(handle, "FINISHED")

    def _put_points(self, handle: str, created: int, curves: Sequence[MeasuredCurve]) -> None:
        if self._tables is None:
            points = [
                self._metric(series.name, value, created, step)
                for series in curves
                for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True)
            ]
            for begin in range(0, len(points), MOST_POINTS):
                self._client.log_batch(handle, metrics=points[begin : begin + MOST_POINTS])
            return
        with self._tables as tables:
            for series in curves:
                steps, values = series.steps.tolist(), [_number(value) for value in series.values.tolist()]
                rows = zip(repeat(series.name), values, repeat(created), steps, repeat(0), repeat(handle), strict=False)
                tables.executemany(_insert("INSERT", "metrics"), rows)
                last = (series.name, values[-1], created, steps[-1], 0, handle)
                tables.execute(_insert("INSERT OR REPLACE", "latest_metrics"), last)

    def put_page(self, name: str, content: bytes, handle: str | None) -> None:
        """See `Tracker`."""
        if handle is None:
            known = [run.info.run_id for run in self._found("tags.kind = 'report'")]
            handle = known[0] if known else self._new_pages_run()
        self._client.log_text(handle, content.decode(errors="replace"), name)

    def _new_pages_run(self) -> str:
        handle = self._client.create_run(self._experiment, tags={"kind": "report"}, run_name=PAGES_RUN).info.run_id
        self._client.set_terminated(handle, "FINISHED")
        return str(handle)

    def close(self) -> None:
        """The database is nobody's any more."""
        if self._tables is not None:
            self._tables.close()

    def words(self, place: Path) -> str:
        """See `Tracker`."""
        look = f"`mlflow ui --backend-store-uri {shlex.quote(f'sqlite:///{self._file}')}`"
        # The extra brings what writes and no server.
        first = "" if importlib.util.find_spec("flask") else "`pip install mlflow` (the server) and then "
        return f"MLflow: experiment {self._name} in {self._file}; look at it with {first}{look}"


def _insert(verb: str, table: str) -> str:
    return f"{verb} INTO {table} ({', '.join(COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?)"


def _number(value: float) -> float:
    """As MLflow stores an infinity: as the largest number of 64 bits, beyond all that a store has."""
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _check_file(file: Path) -> None:
    """Raises ConfigError for what MLflow would try for minutes to open, or would take for another file."""
    if found := {*"?%"} & {*str(file)}:
        reason = f"MLflow reads {' and '.join(sorted(found))} in it as in the address of a page"
        raise ConfigError(f"--into {file.parent}: {reason}; allowed: a folder without")
    if file.exists():
        try:
            with contextlib.closing(sqlite3.connect(file)) as tables:
                tables.execute("PRAGMA schema_version")
        except sqlite3.Error as error:
            raise ConfigError(
                f"--into {file.parent}: its {DATABASE} is no database ({error}); allowed: another folder"
            ) from None


def _has_known_tables(file: Path) -> bool:
    with contextlib.closing(sqlite3.connect(file)) as tables:
        return all(
            {row[1] for row in tables.execute(f"PRAGMA table_info({table})")} == {*COLUMNS}
            for table in ("metrics", "latest_metrics")
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines on each migration of a new database."""
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
