"""What a tracker or a table has of a sweep, read through its own API, in one form: `READ` by the target's name."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

Points = dict[int, float]  # step -> value


@dataclass
class Tracked:
    """Of one trial. `events` are pairs of kind and step, each once."""

    curves: dict[str, Points] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    finals: dict[str, float] = field(default_factory=dict)
    events: set[tuple[str, int]] = field(default_factory=set)

    def add(self, name: str, step: int, value: float) -> None:
        """Of a step that has a value already there would be two."""
        points = self.curves.setdefault(name, {})
        assert step not in points, (name, step)
        points[step] = value


def stored(sweep: xr.Dataset) -> dict[str, Tracked]:
    """The curves that a sweep has, by trial."""
    trials = sweep["trial"].values.tolist()
    found = {trial: Tracked() for trial in trials}
    for name in sweep.data_vars:
        if "step" not in (variable := sweep.variables[name]).dims:
            continue
        values = variable.transpose("trial", "step", ...).values.astype(float)
        for row, step, *place in np.argwhere(~np.isnan(values)).tolist():
            parts = [f"{dim}_{index}" for dim, index in zip(variable.dims[2:], place, strict=True)]
            found[trials[row]].add("/".join([str(name), *parts]), step, float(values[row, step, *place]))
    return found


# --- trackers ----------------------------------------------------------------------------------------------------


def read_mlflow(place: Path) -> dict[str, Tracked]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place.resolve() / 'mlflow.db'}")
    found = {}
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            if "trial" not in run.data.tags:
                continue
            assert run.data.tags["trial"] not in found
            own = found[run.data.tags["trial"]] = Tracked(tags=run.data.tags, parameters=run.data.params)
            for name in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, name)
                kind, _, rest = name.partition("/")
                if kind == "events":
                    own.events |= {(rest, point.step) for point in history}
                elif name.startswith(("final_", "initial_")) and len(history) == 1:
                    own.finals[name] = history[0].value
                else:
                    for point in history:
                        own.add(name, point.step, point.value if abs(point.value) < 1e300 else np.inf * point.value)
                    last = max(history, key=lambda point: point.step)
                    assert run.data.metrics[name] == last.value
    return found


def read_tensorboard(place: Path) -> dict[str, Tracked]:
    from tensorboard.backend.event_processing import event_accumulator as events
    from tensorboard.plugins.hparams import plugin_data_pb2

    found = {}
    for folder in (path for path in place.glob("*/*") if path.is_dir()):
        own = found[folder.name] = Tracked()
        everything = dict.fromkeys((events.SCALARS, events.TENSORS), 0)
        reader = events.EventAccumulator(str(folder), everything, purge_orphaned_data=False).Reload()
        for name in reader.Tags()["scalars"]:
            for point in reader.Scalars(name):
                if name.startswith("final/"):
                    own.finals[name.removeprefix("final/")] = point.value
                else:
                    own.add(name, point.step, point.value)
        for name in reader.Tags()["tensors"]:
            if name.startswith("events/"):
                own.events |= {(name.removeprefix("events/"), event.step) for event in reader.Tensors(name)}
        if content := reader.summary_metadata.get("_hparams_/session_start_info"):
            data = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
            hparams = data.session_start_info.hparams.items()
            known = {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams}
            own.tags = {name.removeprefix("tag."): value for name, value in known.items() if name.startswith("tag.")}
            own.parameters = {name: value for name, value in known.items() if not name.startswith("tag.")}
    return found


def read_wandb(place: Path) -> dict[str, Tracked]:
    from wandb.proto import wandb_internal_pb2

    found = {}
    for file in place.glob("*/wandb/offline-run-*/run-*.wandb"):
        own = Tracked()
        for content in _leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert record.run.run_id not in found
                found[record.run.run_id] = own
                own.parameters |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = json.loads(items["_step"])
                for name, text in items.items():
                    if name.startswith("events/"):
                        own.events.add((name.removeprefix("events/"), step))
                    elif not name.startswith("_"):
                        own.add(name, step, float(json.loads(text)))
            elif kind == "summary":
                told = {item.key: json.loads(item.value_json) for item in record.summary.update}
                finals = {name: value for name, value in told.items() if name.startswith("final.")}
                own.finals |= {name.removeprefix("final."): value for name, value in finals.items()}
                own.tags |= {name: value for name, value in told.items() if isinstance(value, str)}
    return found


def _leveldb_records(content: bytes) -> Iterator[bytes]:
    """Of a log of LevelDB with wandb's seven bytes before it: records in blocks of 32 KiB, cut where a block ends."""
    assert content[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_trackio(place: Path) -> dict[str, Tracked]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    found = {}
    for project in SQLiteStorage.get_projects():
        for run in trackio.Api().runs(project):
            own = found[run.id] = Tracked()
            for name, value in run.config.items():
                kind, _, rest = name.partition(".")
                part = {"tag": own.tags, "final": own.finals}.get(kind, own.parameters)
                part[rest if kind in ("tag", "final") else name] = value
            own.events = {(alert["title"].split()[0].strip(":"), alert["step"]) for alert in run.alerts()}
            for row in SQLiteStorage.get_logs(project, run.name, run_id=run.id):
                for name, value in row.items():
                    if name not in ("step", "timestamp"):
                        own.add(name, row["step"], value)
    return found


# --- tables ------------------------------------------------------------------------------------------------------


def _read_tables(trials: pd.DataFrame, curves: pd.DataFrame, events: pd.DataFrame) -> dict[str, Tracked]:
    found = {trial: Tracked() for trial in trials["trial"]}
    for trial, signal, step, value in curves.itertuples(index=False):
        found[trial].add(signal, step, float(value))
    for row in events.itertuples():
        found[row.trial].events.add((row.kind, row.step))
    for row in trials.to_dict("records"):
        found[row["trial"]].tags = {str(name): str(value) for name, value in row.items()}
        finals = {str(name): value for name, value in row.items() if str(name).startswith(("final_", "initial_"))}
        found[row["trial"]].finals = {name: value for name, value in finals.items() if not np.isnan(value)}
    return found


def read_csv(place: Path) -> dict[str, Tracked]:
    (folder,) = place.iterdir()
    texts: dict[str, Any] = {"keep_default_na": False, "na_values": {}, "dtype": {"trial": str}}
    curves = pd.read_csv(folder / "curves.csv", dtype={"trial": str})
    trials = pd.read_csv(folder / "trials.csv", dtype={"trial": str, "golden": str})
    return _read_tables(trials, curves, pd.read_csv(folder / "events.csv", **texts))


def read_parquet(place: Path) -> dict[str, Tracked]:
    (folder,) = place.iterdir()
    return _read_tables(*(pd.read_parquet(folder / f"{name}.parquet") for name in ("trials", "curves", "events")))


def read_netcdf(place: Path) -> dict[str, Tracked]:
    (file,) = place.glob("*.nc")
    with xr.open_dataset(file, engine="h5netcdf") as sweep:
        return stored(sweep.load())


TRACKERS: Mapping[str, Callable[[Path], dict[str, Tracked]]] = {
    "mlflow": read_mlflow,
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "wandb": read_wandb,
}
READ = {**TRACKERS, "csv": read_csv, "parquet": read_parquet, "netcdf": read_netcdf}
LIBRARIES = {"mlflow": "mlflow", "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}
LIBRARIES |= {"parquet": "pyarrow", "netcdf": "h5netcdf"}


def is_in_ci() -> bool:
    return bool(os.environ.get("CI"))
