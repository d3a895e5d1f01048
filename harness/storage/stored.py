"""The results on disk, read: the one door through which everything of a store comes, and where it is checked.

What is read may come from a killed writer, a failing disk or a stranger. So metadata have to be as
`harness/storage/store.py` writes them, key by key; every chunk carries its own checksum, Zarr's codec `crc32c`; and a
complete pack also that of its attributes. No link is followed, and nothing is waited for that is no regular file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError
from harness.config.limits import LARGEST_SEED, SEGMENTS
from harness.storage.results_folder import FolderLost, ResultsPath
from harness.storage.zarr_files import METADATA, array_metadata, chunk_key, strict_json

FORMAT_VERSION = 6
READABLE = (4, 5, 6)  # 4: muP, DeepNorm and SwiGLU had other sizes; to 5: validation was on two batches, without error
STORE = "store.zarr"
CHECKSUM = "sha256"  # of a complete pack's other attributes
CRC_BYTES = 4
DIMS = (("trial", "step"), ("trial", "step", "layer"), ("trial", "segment"), ("trial", "step", "layer", "rank"))
_LONG = re.compile(rb"[0-9]{19}")
MOST_STEPS = 10**8  # of a pack; more are no results, but a damaged number


class DamagedStore(ConfigError):
    """A file of a store that is not what was written: named in the message."""


@dataclass(frozen=True)
class PackInfo:
    """What one pack's group says about itself: its attributes, and the Zarr metadata of each of its arrays."""

    place: ResultsPath
    attributes: dict[str, Any]
    arrays: dict[str, dict[str, Any]] = dataclasses.field(repr=False)

    @property
    def path(self) -> Path:
        return self.place.path

    @property
    def id(self) -> str:
        return self.place.name

    @property
    def complete(self) -> bool:
        return self.attributes["complete"]

    @property
    def steps(self) -> int:
        return self.arrays["loss"]["shape"][1]

    @property
    def layers(self) -> int:
        return self.arrays["activation_rms"]["shape"][2]

    @property
    def ranks(self) -> int:
        return ranks_of(self.attributes)

    @property
    def block(self) -> int:
        """Steps in a chunk."""
        return _chunk(self.arrays["loss"])[1]


# --- the store and its packs -------------------------------------------------------------------------------------


def read_root(out: Path) -> dict[str, Any]:
    """The attributes of the store in `out`: format and study.

    Raises ConfigError if there is no store, or one that this version cannot read.
    """
    try:
        attributes = json.loads((ResultsPath.at(out) / STORE / METADATA).read_bytes())["attributes"]
        version, study = attributes["format"], attributes["study"]
    except (FileNotFoundError, FolderLost):
        raise ConfigError(f"out={out}: holds no results; allowed: a folder that a sweep has written") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"its {STORE} cannot be read ({_reason(error)})"
        raise ConfigError(f"out={out}: {reason}; allowed: another folder") from None
    if version not in READABLE:
        *others, last = map(str, READABLE)
        allowed = f"format {', '.join(others)} or {last}, or a new folder"
        raise ConfigError(f"out={out}: holds a store of format {version!r:.40}; allowed: {allowed}")
    if not isinstance(study, str):
        raise ConfigError(f"out={out}: its {STORE} names no study; allowed: one as a sweep has written it")
    return {"format": version, "study": study}


def read_store(out: Path) -> tuple[dict[str, Any], Iterator[PackInfo]]:
    """`read_root` and `read_packs`, for one read of each file. Raises ConfigError as `read_root` does, at once."""
    attributes = read_root(out)
    places = (ResultsPath.at(out) / STORE).entries()
    groups = (place for place in places if not place.name.startswith(".") and place.name != METADATA)
    return attributes, (pack for pack in map(read_pack, groups) if pack is not None)


def read_packs(out: Path) -> Iterator[PackInfo]:
    """Every pack of the store in `out`, finished or not, by id. Raises ConfigError as `read_root` does.

    A pack that is being replaced at this moment, and one that cannot be read, is left out; the latter with a warning.
    """
    return read_store(out)[1]


def read_pack(place: ResultsPath) -> PackInfo | None:
    """The pack of that group; None if it is not there, or, with a warning, if it cannot be read."""
    try:
        return pack_of(place)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        warnings.warn(f"{place}: not a pack, left out ({_reason(error)})", stacklevel=3)
        return None


def pack_of(place: ResultsPath) -> PackInfo:
    """The pack of that group. Raises FileNotFoundError if it is not there, and DamagedStore if it cannot be read."""
    file = place / METADATA
    try:
        group = _parsed(file.read_bytes())
        pack = PackInfo(place, group["attributes"], group["consolidated_metadata"]["metadata"])
        _check(pack)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DamagedStore(f"{file}: cannot be read ({_reason(error)}); allowed: as a sweep has written it") from None
    return pack


def is_complete(out: Path, pack_id: str) -> bool:
    """Whether the store has this pack, finished."""
    pack = read_pack(ResultsPath.at(out) / STORE / pack_id)
    return pack is not None and pack.complete


def written_at(out: Path, pack_id: str) -> int | None:
    """When the attributes of a pack were last written, in nanoseconds: where it began, and where it was finished."""
    status = (ResultsPath.at(out) / STORE / pack_id / METADATA).status()
    return None if status is None else status.st_mtime_ns


def complete_trials(out: Path) -> set[str]:
    """The ids of the trials whose pack is finished."""
    return {trial for pack in read_packs(out) if pack.complete for trial in pack.attributes["ids"]}


def _parsed(content: bytes) -> Any:
    """The value of some JSON. Raises ValueError, also for an integer that no array of integers holds."""

    def integer(text: str) -> int:
        if abs(number := int(text)) > LARGEST_SEED:
            raise ValueError(f"{text:.40} is beyond 64 bits")
        return number

    return json.loads(content, parse_int=integer if _LONG.search(content) else None)


# --- metadata, checked -------------------------------------------------------------------------------------------


Checks = dict[str, Callable[[Any], bool]]


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_is_text, _is_facts = _is(str), _is(dict)


def _is_id(value: Any) -> bool:
    return _is_text(value) and re.fullmatch(r"[0-9a-f]{1,64}", value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_facts, value))


def _is_trial(value: Any) -> bool:
    """A configuration: sections of fields, and a fault that has a name."""
    parts = ("model", "optim", "schedule", "train", "data", "fault")
    has_parts = _is_facts(value) and all(_is_facts(value.get(part)) for part in parts)
    return has_parts and all(_is_text(value["fault"].get(key)) for key in ("name", "kind"))


def _is_index(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_count, value)))


PROVENANCE: Checks = {
    "step": _is_count,
    "direction": _is_text,
    "site": _is_text,
    "tensor": _is_text,
    "layer": _is_count_or_none,
    "head": _is_count_or_none,
    "index": _is_index,
    "rank": _is_count,
    "value": _is_text,
    "operation": _is_text,
    "cause": _is_text,
    "format": _is_text,
    "blamed": _is_text,
    "blamed_site": _is_text,
    "blamed_index": _is_index,
    "evidence": _is_text,
}
"""Of a trial's first non-finite value, as harness/training/provenance.py has it."""


def _is_provenance(value: Any) -> bool:
    is_whole = _is_facts(value) and value.keys() == PROVENANCE.keys()
    return value == {} or (is_whole and all(is_right(value[name]) for name, is_right in PROVENANCE.items()))


ABOUT: Checks = {
    "corpus": _is_facts,
    "environment": _is_facts,
    "created": _is_text,
    "steps_done": _is_count,
    "complete": _is(bool),
}
OF_TRIALS: Checks = {"trials": _is_trial, "ids": _is_id, "golden": _is_id}
OF_COMPLETE: Checks = {
    "outcome": _is_text,
    "nonfinite_step": _is_count_or_none,
    "masked_step": _is_count_or_none,
    "faults": _is_records,
    "strikes": _is_count,
    "changes": _is_count,
    "dropped": _is_records,
}
SINCE_6: Checks = {
    "acts": lambda value: _is_facts(value) and all(map(_is_count, value.values())),
    "idle": lambda value: _is_facts(value) and all(map(_is_text, value.values())),
    "digest": _is_text,
    "incidents": _is_records,
    "provenance": _is_provenance,
}
"""Of a complete pack as well, which one of an older format lacks."""


def _check(pack: PackInfo) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError for what no sweep has written."""
    attributes = pack.attributes
    for name, is_right in ABOUT.items():
        if not is_right(attributes[name]):
            raise ValueError(f"{name} is {attributes[name]!r:.60}")
    count = len(attributes["ids"])
    columns = {**OF_TRIALS, **(OF_COMPLETE if attributes["complete"] else {})}
    columns |= {name: is_right for name, is_right in SINCE_6.items() if attributes["complete"] and name in attributes}
    for name, is_right in columns.items():
        values = attributes[name]
        if not isinstance(values, list) or len(values) != count or not all(map(is_right, values)):
            raise ValueError(f"{name} is not one value for each of {count} trials")
    sizes = {"trial": count, "step": pack.steps, "layer": pack.layers, "segment": SEGMENTS, "rank": pack.ranks}
    if not count or any(not _is_count(size) or not size for size in sizes.values()) or pack.steps > MOST_STEPS:
        raise ValueError(f"sizes are {sizes!r:.100}")
    for name, array in pack.arrays.items():
        dims = tuple(array["dimension_names"])
        if dims not in DIMS or not all(_is_text(value) for value in array["attributes"].values()):
            raise ValueError(f"array {name} is along {dims!r:.60}")
        shape = tuple(sizes[dim] for dim in dims)
        expected = array_metadata(shape, chunk_shape(shape, dims, pack.block), dims, array["attributes"])
        if array != expected:
            raise ValueError(f"array {name} is not of shape {shape}, in chunks of {pack.block} steps")
    if attributes["steps_done"] > pack.steps or not 0 < pack.block <= pack.steps:
        raise ValueError(f"steps_done is {attributes['steps_done']} of {pack.steps}, in chunks of {pack.block}")


def ranks_of(attributes: Mapping[str, Any]) -> int:
    """The data-parallel ranks of the trials in a pack, which have one structure."""
    return attributes["trials"][0]["train"].get("ranks", 1)


def chunk_shape(shape: tuple[int, ...], dims: tuple[str, ...], block: int) -> tuple[int, ...]:
    """That of a chunk: all trials, and `block` steps if there are steps."""
    return tuple(block if dim == "step" else size for dim, size in zip(dims, shape, strict=True))


def is_once(array: Mapping[str, Any]) -> bool:
    """Whether an array has no steps: one chunk, written when the pack is complete."""
    return "step" not in array["dimension_names"]


def _chunk(array: Mapping[str, Any]) -> list[int]:
    return array["chunk_grid"]["configuration"]["chunk_shape"]


def checksum_of(attributes: Mapping[str, Any]) -> str:
    """What a complete pack says of itself under `CHECKSUM`: SHA-256 of its other attributes."""
    rest = {name: value for name, value in attributes.items() if name != CHECKSUM}
    return hashlib.sha256(strict_json(rest).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text:.200}"


# --- values, checked ---------------------------------------------------------------------------------------------


def packed(values: np.ndarray) -> bytes:
    """A chunk as it is stored: float32, then their checksum."""
    content = values.astype("<f4", copy=False).tobytes()
    return content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    import google_crc32c  # packs are trained without it, and stored with it

    return google_crc32c.value(content).to_bytes(CRC_BYTES, "little")


def read_chunk(pack: PackInfo, signal: str, number: int) -> np.ndarray:
    """Block `number` of a signal: [R, block(, layers)], float32.

    Raises, with the name of the file, FileNotFoundError if it is not there, and DamagedStore if it is not as written.
    """
    chunk = _chunk(pack.arrays[signal])
    file = pack.place / signal / chunk_key(number, len(chunk))
    expected = 4 * math.prod(chunk) + CRC_BYTES
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: is missing") from None
    except (OSError, ConfigError) as error:
        raise DamagedStore(f"{file}: cannot be read ({_reason(error)})") from None
    if len(content) != expected:
        raise DamagedStore(f"{file}: is damaged ({len(content)} bytes instead of {expected})")
    values, checksum = content[:-CRC_BYTES], content[-CRC_BYTES:]
    if _checksum(values) != checksum:
        raise DamagedStore(f"{file}: is damaged (its checksum is another)")
    return np.frombuffer(values, "<f4").reshape(chunk)


def read_signal(pack: PackInfo, signal: str, first: int, stop: int) -> np.ndarray:
    """Steps `first` to `stop` of a signal: [R, n(, layers)], NaN where nothing was measured or trained.

    Of an array without steps it is these segments, [R, n]. Raises DamagedStore, with the name of the file, for a chunk
    that is damaged, and for one that a complete pack lacks.
    """
    shape = pack.arrays[signal]["shape"]
    first, stop = min(first, shape[1]), min(stop, shape[1])
    values = np.full((shape[0], max(0, stop - first), *shape[2:]), np.nan, np.float32)
    once, size = is_once(pack.arrays[signal]), _chunk(pack.arrays[signal])[1]
    written = 1 if once else math.ceil(pack.attributes["steps_done"] / pack.block)
    for number in range(first // size, math.ceil(stop / size) if stop > first else 0):
        begin = number * size
        try:
            chunk = read_chunk(pack, signal, number)
        except FileNotFoundError as error:
            if pack.complete and number < written:
                raise DamagedStore(str(error)) from None
            continue
        low, high = max(first, begin), min(stop, begin + size)
        values[:, low - first : high - first] = chunk[:, low - begin : high - begin]
    return values


def damage(pack: PackInfo, steps: int | None = None) -> Iterator[tuple[int, str]]:
    """What is wrong with the chunks of the first `steps`, by default of all that are done: (first step, words)."""
    done = pack.attributes["steps_done"] if steps is None else steps
    blocks = math.ceil(done / pack.block)
    once = [signal for signal, array in pack.arrays.items() if is_once(array)]
    chunks = [(signal, number) for number in range(blocks) for signal in pack.arrays if signal not in once]
    for signal, number in chunks + [(signal, 0) for signal in once if pack.complete]:
        begin = pack.steps if signal in once else number * pack.block
        try:
            read_chunk(pack, signal, number)
        except (FileNotFoundError, DamagedStore) as error:
            yield begin, str(error)
