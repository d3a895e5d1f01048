"""The whole state of packs near the end of their run: what `keep=state` leaves in a results folder.

    <out>/states/<pack>/<step>.safetensors   as a checkpoint (harness/storage/checkpoint.py), before that step

`stability-harness extend` goes on from there with more steps. The pack of that name need not be in the store any more;
which trials a state has stands in it.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath

if TYPE_CHECKING:  # both load torch, which `verify` of a folder without states does not need
    from torch import Tensor

    from harness.storage.checkpoint import Saved

STATES = "states"
_PACK, _FILE = re.compile(r"[0-9a-f]{16}"), re.compile(r"([0-9]{1,12})\.safetensors")


@dataclass(frozen=True, eq=False)
class KeptState:
    """One file: the next step of the row that is farthest, and what its pack was planned as."""

    file: ResultsPath
    step: int
    pack: Mapping[str, Any]  # `PackPlan.to_dict()`, and the ids of its trials

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.pack["ids"])

    def read(self) -> Saved:
        """All of it. Raises ConfigError where it is damaged."""
        from harness.storage.checkpoint import VERSION, checked_path, saved_in
        from harness.storage.sealed import read_sealed

        with _named(self.file):
            return saved_in(*read_sealed(checked_path(self.file), VERSION))


@dataclass(frozen=True)
class StateKeeper:
    """Keeps the states of one pack in training before these `steps`, in a folder of its own; `about`: `KeptState`."""

    place: ResultsPath
    steps: Collection[int]
    about: Mapping[str, Any]

    def is_due(self, front: int, steps: Sequence[int]) -> bool:
        """Whether to keep the state after `front`, the last step that was done, with rows that stand at `steps`."""
        return front + 1 in self.steps and max(steps) == front + 1

    def keep(self, step: int, number: int, tensors: Mapping[str, Tensor], values: Any) -> None:
        """Keep the state before a step, which is pass `number` next. Where that fails it warns; the run goes on."""
        from safetensors import SafetensorError

        from harness.storage.checkpoint import VERSION
        from harness.storage.sealed import write_sealed

        content = {"step": number, "about": {**self.about, "kept": step}, "values": values}
        try:
            self.place.make_folder()
            with (self.place / f"{step}.safetensors").whole_file(is_synced=True) as path:
                write_sealed(path, tensors, content, VERSION)
        except (OSError, ConfigError, SafetensorError) as error:
            why = f"no state of step {step} is kept ({error}); training goes on"
            warnings.warn(f"{self.place}: {why}", stacklevel=2)


def kept_states(folder: ResultsPath) -> list[KeptState]:
    """All that are there, those of late steps first. Raises ConfigError for a damaged one."""
    states = []
    for file in _files(folder):
        with _named(file):
            about = _about(file)
            states.append(KeptState(file, int(about["kept"]), about))
    return sorted(states, key=lambda state: (-state.step, state.file.parent.name))


def copy_states(source: ResultsPath, folder: ResultsPath, trials: AbstractSet[str]) -> None:
    """Have the states of packs with some of these trials in another results folder as well. Raises OSError."""
    for state in kept_states(source):
        target = folder / STATES / state.file.parent.name
        if not trials.isdisjoint(state.ids) and not (target / state.file.name).exists():
            target.make_folder()
            (target / state.file.name).write(state.file.read_bytes())


def remove_states(folder: ResultsPath, left: Collection[str]) -> None:
    """Take those away that have no trial that is left."""
    for file in list(_files(folder)):
        with contextlib.suppress(ConfigError), _named(file):
            if set(_about(file)["ids"]) & set(left):
                continue
            file.unlink()
    for place in (folder / STATES).entries():
        if _PACK.fullmatch(place.name) and not list(place.entries()):
            place.remove_tree()


def damaged_states(folder: ResultsPath) -> Iterator[str]:
    """What is wrong with the states in a results folder, a line for each file."""
    for file in _files(folder):
        try:
            KeptState(file, 0, {}).read()
        except ConfigError as error:
            yield str(error)


def is_state(name: str) -> bool:
    """Whether a file of a results folder, by its path from there, is one of these."""
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == STATES and bool(_PACK.fullmatch(parts[1]) and _FILE.fullmatch(parts[2]))


def _files(folder: ResultsPath) -> Iterator[ResultsPath]:
    for place in (folder / STATES).entries():
        if _PACK.fullmatch(place.name):
            yield from (file for file in place.entries() if _FILE.fullmatch(file.name))


def _about(file: ResultsPath) -> dict[str, Any]:
    """Whose it is, without its tensors."""
    from harness.storage.checkpoint import VERSION, checked_path
    from harness.storage.sealed import values_of

    about: dict[str, Any] = values_of(checked_path(file), VERSION)["about"]
    return about


@contextlib.contextmanager
def _named(file: ResultsPath) -> Iterator[None]:
    """Raises ConfigError for what reading objects to."""
    from harness.storage.sealed import Damaged

    try:
        yield
    except ConfigError:
        raise
    except (Damaged, OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, Damaged) else f"cannot be read ({error})"
        raise ConfigError(f"{file}: {reason}; allowed: as a sweep has written it") from None
