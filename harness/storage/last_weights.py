"""The last weights of trials: what `keep=weights` leaves in a results folder.

    <out>/weights/<trial>.safetensors   the tensors by name (harness/model/tensors.py), without the trial's axis
    <out>/weights/<trial>.json          the trial's configuration, and the SHA-256 of the other file

A trial that became non-finite leaves the weights with which it stood still; one that was masked, or that never came to
its fault, those of its golden twin.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from harness.config import ConfigError, Problems, Trial
from harness.storage.json_seal import sealed_json, sealed_record
from harness.storage.records import Missing, Unreadable, read_bytes
from harness.storage.results_folder import ResultsPath

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, TENSORS, REST = "weights", ".safetensors", ".json"
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class WeightsRecord:
    """What stands beside a trial's tensors."""

    trial: Mapping[str, Any]
    sha256: str
    id: str = ""  # of the trial; "" in a file of an earlier version


def write_weights(folder: ResultsPath, trial: Trial, tensors: Mapping[str, Tensor]) -> None:
    """Keep a trial's tensors; what was there of it is replaced. Raises OSError."""
    from safetensors.torch import save_file  # loads torch, which `verify` of a folder without weights does not need

    place = folder / FOLDER
    place.make_folder()
    for entry in place.entries():
        if entry.name.startswith(f".{trial.id}."):  # only one process trains a trial, so nobody is writing it
            entry.unlink()
    with (place / f"{trial.id}{TENSORS}").whole_file(is_synced=False) as path:
        save_file({name: values.detach().cpu().contiguous() for name, values in tensors.items()}, path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    (place / f"{trial.id}{REST}").write(sealed_json({"id": trial.id, "trial": trial.to_dict(), "sha256": digest}))


def has_weights(out: Path, trial: str) -> bool:
    """Whether a trial's weights are there, whole or not."""
    return (ResultsPath.at(out) / FOLDER / f"{trial}{REST}").exists()


def read_weights(out: Path, trial: str) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """The configuration of the trial with that id, and its tensors by name.

    Raises ConfigError where there are none, or damaged ones.
    """
    from safetensors.torch import load_file

    allowed = "the id of a trial of a sweep with keep=weights"
    if not _ID.fullmatch(trial):
        raise ConfigError(f"trial={trial!r:.40}: not an id; allowed: {allowed}")
    place = ResultsPath.at(out) / FOLDER
    file = place / f"{trial}{TENSORS}"
    try:
        path = (place / f"{trial}{REST}").path
        about = sealed_record(read_bytes(path), WeightsRecord, path, since=("id",))
        if about.id not in ("", trial):
            raise ConfigError(f"{path}: is that of trial {about.id:.40}; allowed: as a sweep has written it")
        with os.fdopen(file.descriptor(os.O_RDONLY), "rb") as handle:
            if hashlib.file_digest(handle, "sha256").hexdigest() != about.sha256:
                raise ConfigError(f"{file}: is damaged (its checksum is another); allowed: as a sweep has written it")
        return about.trial, load_file(file.path)
    except (Missing, FileNotFoundError):
        raise ConfigError(f"out={out}: holds no weights of trial {trial}; allowed: {allowed}") from None
    except (OSError, Unreadable, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); allowed: as a sweep has written it") from None


def configurations(out: Path) -> dict[str, Mapping[str, Any]]:
    """Trial -> its configuration, of all whose weights are there, whole or not. Raises ConfigError for a bad record."""
    place, found = ResultsPath.at(out) / FOLDER, {}
    for name in sorted(entry.name for entry in place.entries() if entry.name.endswith(REST) and _is_ours(entry.name)):
        path = (place / name).path
        try:
            found[name.removesuffix(REST)] = sealed_record(read_bytes(path), WeightsRecord, path, since=("id",)).trial
        except (OSError, Missing, Unreadable) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); allowed: as a sweep has written it") from None
    return found


def weights_file(out: Path, trial: str) -> Path:
    """Where the tensors of the trial with that id lie, if they are there."""
    return out / FOLDER / f"{trial}{TENSORS}"


def remove_weights(folder: ResultsPath, trial: str) -> None:
    """Take a trial's weights away, if there are any."""
    for end in (REST, TENSORS):
        (folder / FOLDER / f"{trial}{end}").unlink()


def copy_weights(out: Path, folder: ResultsPath, trial: str) -> None:
    """Have a trial's weights in another results folder as well, if there are any and it has none. Raises OSError."""
    place, source = folder / FOLDER, ResultsPath.at(out) / FOLDER
    if not has_weights(out, trial) or has_weights(folder.root, trial):
        return
    place.make_folder()
    for end in (TENSORS, REST):  # the record last: it says that the tensors are whole
        (place / f"{trial}{end}").write((source / f"{trial}{end}").read_bytes())


def damaged_weights(out: Path) -> list[str]:
    """What is wrong with the weights in `out`, a line for each trial."""
    problems, place = Problems(), ResultsPath.at(out) / FOLDER
    names = {entry.name for entry in place.entries() if not entry.name.startswith(".")}
    for trial in sorted({name.removesuffix(REST).removesuffix(TENSORS) for name in names if _is_ours(name)}):
        lacking = [f"{trial}{end}" for end in (REST, TENSORS) if f"{trial}{end}" not in names]
        with problems.collect():
            if lacking:
                raise ConfigError(f"{place / lacking[0]}: is missing")
            read_weights(out, trial)
    return list(problems.reasons)


def is_file(name: str) -> bool:
    """Whether a file of a results folder, by its path from there, is one of these."""
    folder, _, file = name.rpartition("/")
    return folder == FOLDER and _is_ours(file)


def _is_ours(name: str) -> bool:
    return any(name.endswith(end) and _ID.fullmatch(name.removesuffix(end)) for end in (REST, TENSORS))
