"""TensorBoard: a folder a trial with event files, which are written here as TFRecords."""

from __future__ import annotations

import shlex
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from analysis.export.names import text
from analysis.export.pages import SEAL
from analysis.export.registry import needed
from analysis.export.runs import MeasuredCurve, Source, TrackedRun
from analysis.export.tracking import Tracker, write_whole
from analysis.reports.words import markdown_text

VERSION = "brain.Event:2"
PARTS = "events.out.tfevents.{:012d}.stability-harness"  # by the first step, so that they are read in order


class TensorBoard(Tracker):
    """See above."""

    about = "TensorBoard's event files"
    extra = "tensorboard"

    def open(self, source: Source, place: Path) -> bool:
        """The folder of the sweep, which is made if it is not there."""
        with needed("tensorboard", "tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
            from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
        self._event, self._summary, self._metadata = Event, Summary, SummaryMetadata
        self._status, self._session = api_pb2.Status.Value("STATUS_SUCCESS"), plugin_data_pb2
        self._about_session = metadata
        self._folder = place / source.name
        is_there = self._folder.is_dir()
        self._folder.mkdir(exist_ok=True)
        return is_there

    def has(self, handle: str) -> bool:
        """See `Tracker`."""
        return (self._folder / handle).is_dir()

    def remove(self, trial: str, handle: str) -> None:
        """See `Tracker`."""
        folder = self._folder / trial
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)

    def put(self, run: TrackedRun, curves: Sequence[MeasuredCurve], handle: str | None) -> str:
        """A file more: one that is there may be read at this moment."""
        folder = self._folder / run.trial
        folder.mkdir(exist_ok=True)
        first = min((int(series.steps[0]) for series in curves), default=run.steps)
        events = [self._event(wall_time=run.created, file_version=VERSION), *self._points(run, curves)]
        events += self._ending(run) if run.complete else []
        write_whole(folder / PARTS.format(first), b"".join(map(_record, events)))
        return run.trial

    def _points(self, run: TrackedRun, curves: Sequence[MeasuredCurve]) -> Iterator[Any]:
        """One event a step, with all that was measured then."""
        value = self._summary.Value
        steps = np.unique(np.concatenate([series.steps for series in curves])) if curves else np.empty(0, int)
        values: dict[int, list[Any]] = {step: [] for step in steps.tolist()}
        for series in curves:
            for step, number in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                values[step].append(value(tag=series.name, simple_value=number))
        for step, measured in values.items():
            yield self._event(wall_time=run.created, step=step, summary=self._summary(value=measured))

    def _ending(self, run: TrackedRun) -> Iterator[Any]:
        """Last values, events and tags as text, and parameters where the table of hyperparameters looks for them."""
        value, at = self._summary.Value, {"wall_time": run.created}
        finals = [value(tag=f"final/{name}", simple_value=number) for name, number in run.finals.items()]
        yield self._event(**at, step=run.steps, summary=self._summary(value=finals))
        rows = [f"| {name} | {markdown_text(tag)} |" for name, tag in run.tags.items()]
        yield self._text(run, "tags", run.steps, "\n".join(["| tag | value |", "|---|---|", *rows]))
        for event in run.events:
            yield self._text(run, f"events/{event.kind}", event.step, markdown_text(f"{event.title} {event.json}"))
        yield from self._sessions(run)

    def _sessions(self, run: TrackedRun) -> Iterator[Any]:
        """For the table of hyperparameters."""
        about, session = self._about_session, self._session
        start = session.SessionStartInfo(group_name=run.trial, start_time_secs=run.created)
        for name, value in ({**run.parameters} | {f"tag.{name}": tag for name, tag in run.tags.items()}).items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = text(value)
        end = session.SessionEndInfo(status=self._status, end_time_secs=run.created)
        for tag, known in ((about.SESSION_START_INFO_TAG, {"session_start_info": start}),
                           (about.SESSION_END_INFO_TAG, {"session_end_info": end})):  # fmt: skip
            metadata = about.create_summary_metadata(session.HParamsPluginData(**known))
            value = self._summary.Value(tag=tag, metadata=metadata, tensor=about.NULL_TENSOR)
            yield self._event(wall_time=run.created, summary=self._summary(value=[value]))

    def _text(self, run: TrackedRun, tag: str, step: int, words: str) -> Any:
        metadata = self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
        value = self._summary.Value(tag=tag, metadata=metadata)
        value.tensor.dtype = 7  # strings
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.string_val.append(words.encode())
        return self._event(wall_time=run.created, step=step, summary=self._summary(value=[value]))

    def put_page(self, name: str, content: bytes, handle: str | None) -> None:
        """TensorBoard shows no pages: they lie beside the event files."""
        assert content.startswith(SEAL)
        write_whole((self._folder / handle if handle else self._folder) / name, content)

    def words(self, place: Path) -> str:
        """See `Tracker`."""
        return f"TensorBoard: {self._folder}; look at it with `tensorboard --logdir {shlex.quote(str(self._folder))}`"


def _record(event: Any) -> bytes:
    """A TFRecord. With its checksums in Python, as the library has them, a sweep would take minutes."""
    content: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _masked(length) + content + _masked(content)


def _masked(content: bytes) -> bytes:
    found = google_crc32c.value(content)
    return struct.pack("<I", (((found >> 15) | (found << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
