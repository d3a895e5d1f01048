"""The results on disk, read: the one door through which everything of a store comes, and where it is checked.

What is read may come from a killed writer, a failing disk or a stranger. So metadata have to be as they were sealed
(`harness/storage/pack_info.py`), and every chunk has to have the checksum that its pack lists for its place, and its
own, Zarr's codec `crc32c`. No link is followed, and nothing is waited for that is no regular file.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError
from harness.config.limits import LARGEST_SEED
from harness.storage.json_seal import OTHER, SEAL, is_sealed
from harness.storage.pack_info import (
    CRC_BYTES,
    check_metadata,
    check_seal,
    chunk_of,
    with_checksum,
)
from harness.storage.pack_info import PackInfo as PackInfo
from harness.storage.pack_info import is_once as is_once
from harness.storage.results_folder import FolderLost, ResultsPath, no_results
from harness.storage.zarr_files import METADATA, chunk_key

FORMAT_VERSION = 7  # to 6: no seals, and no list of chunks
WRITABLE = (6, 7)
READABLE = (4, 5, *WRITABLE)  # 4: muP, DeepNorm, SwiGLU had other sizes; to 5: validation on two batches, without error
STORE = "store.zarr"
ROOT_KEYS = {"format", "study"}
TRIES = 5  # at a chunk of a pack that is being written
_LONG = re.compile(rb"[0-9]{19}")


class DamagedStore(ConfigError):
    """A file of a store that is not what was written: named in the message."""


# --- the store and its packs -------------------------------------------------------------------------------------


def read_root(out: Path) -> dict[str, Any]:
    """The attributes of the store in `out`: format and study.

    Raises ConfigError if there is no store, or one that this version cannot read.
    """
    file = ResultsPath.at(out) / STORE / METADATA
    try:
        content = file.read_bytes()
        has_seal, attributes = is_sealed(content), json.loads(content)["attributes"]
        version, study = attributes["format"], attributes["study"]
        if not has_seal and (version == FORMAT_VERSION or attributes.keys() != ROOT_KEYS):
            raise ValueError(OTHER)
    except (FileNotFoundError, FolderLost):
        raise _without_root(out) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"its {STORE}/{METADATA} cannot be read ({_reason(error)})"
        allowed = "another folder, or the same sweep once more without that file"
        raise ConfigError(f"out={out}: {reason}; allowed: {allowed}") from None
    if version not in READABLE:
        *others, last = map(str, READABLE)
        allowed = f"format {', '.join(others)} or {last}, or a new folder"
        raise ConfigError(f"out={out}: holds a store of format {version!r:.40}; allowed: {allowed}")
    if not isinstance(study, str):
        raise ConfigError(f"out={out}: its {STORE} names no study; allowed: one as a sweep has written it")
    return {"format": version, "study": study}


def _without_root(out: Path) -> ConfigError:
    """What is said of a folder that has no store, or one that has lost its first file."""
    try:
        places = (ResultsPath.at(out) / STORE).entries()
    except FolderLost:
        places = []
    if any(place.name != METADATA and not place.name.startswith(".") for place in places):
        allowed = "the same sweep once more, which writes it anew"
        return ConfigError(f"out={out}: its {STORE}/{METADATA} is missing; allowed: {allowed}")
    return no_results(out)


def read_store(out: Path) -> tuple[dict[str, Any], Iterator[PackInfo]]:
    """`read_root` and `read_packs`, for one read of each file. Raises ConfigError as `read_root` does, at once."""
    attributes = read_root(out)
    places = (ResultsPath.at(out) / STORE).entries()
    groups = (place for place in places if not place.name.startswith(".") and place.name != METADATA)
    return attributes, (pack for pack in map(read_pack, groups) if pack is not None)


def read_packs(out: Path) -> Iterator[PackInfo]:
    """Every pack of the store in `out`, finished or not, by id. Raises ConfigError as `read_root` does.

    A pack that is being replaced at this moment is left out, and so is, with a warning, one that cannot be read or is
    not as it was written.
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
        content = _metadata(place)
        has_seal, group = is_sealed(content), _parsed(content)
        pack = PackInfo(place, group["attributes"], group["consolidated_metadata"]["metadata"])
        check_metadata(pack)
        check_seal(pack, content, has_seal)
    except (FileNotFoundError, DamagedStore):
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DamagedStore(f"{file}: cannot be read ({_reason(error)}); allowed: as a sweep has written it") from None
    return pack


def _metadata(place: ResultsPath) -> bytes:
    """The file of a pack's group. Raises FileNotFoundError where there is no such group, and OSError as open does."""
    for _ in range(2):  # the pack may be replaced in between
        try:
            return (place / METADATA).read_bytes()
        except FileNotFoundError:
            if not place.entries():
                raise
    raise DamagedStore(f"{place / METADATA}: is missing")


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

    return int(google_crc32c.value(content)).to_bytes(CRC_BYTES, "little")


def read_chunk(pack: PackInfo, signal: str, number: int) -> np.ndarray:
    """Block `number` of a signal: [R, block(, layers)], float32.

    Raises, with the name of the file, FileNotFoundError if it is not there, and DamagedStore if it is not as written.
    A pack in training may have replaced it since its metadata were read: then these are read again.
    """
    for _ in range(TRIES):
        try:
            return _read_chunk(pack, signal, number)
        except (FileNotFoundError, DamagedStore):
            newer = None if pack.complete or not pack.is_listed else _newer(pack, signal)
            if newer is None:
                raise
            pack = newer
    return _read_chunk(pack, signal, number)


def _newer(pack: PackInfo, signal: str) -> PackInfo | None:
    """The pack as it is now, if it was written since and has this signal in chunks of the same shape."""
    try:
        newer = pack_of(pack.place)
    except (FileNotFoundError, ConfigError):
        return None
    is_other = newer.attributes.get(SEAL) != pack.attributes.get(SEAL)
    return newer if is_other and newer.arrays.get(signal) == pack.arrays[signal] else None


def _read_chunk(pack: PackInfo, signal: str, number: int) -> np.ndarray:
    chunk = chunk_of(pack.arrays[signal])
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
        raise DamagedStore(f"{file}: {OTHER}")
    if pack.is_listed and checksum.hex() not in pack.checksums(signal, number):
        raise DamagedStore(f"{file}: is damaged (it is whole, and not what was written there)")
    return np.frombuffer(values, "<f4").reshape(chunk)


def read_signal(pack: PackInfo, signal: str, first: int, stop: int) -> np.ndarray:
    """Steps `first` to `stop` of a signal: [R, n(, layers)], NaN where nothing was measured or trained.

    Of an array without steps it is these segments, [R, n]. Raises DamagedStore, with the name of the file, for a chunk
    that is damaged, and for one that a pack has written and lacks.
    """
    shape = pack.arrays[signal]["shape"]
    first, stop = min(first, shape[1]), min(stop, shape[1])
    values = np.full((shape[0], max(0, stop - first), *shape[2:]), np.nan, np.float32)
    once, size = is_once(pack.arrays[signal]), chunk_of(pack.arrays[signal])[1]
    written = 1 if once else math.ceil(pack.attributes["steps_done"] / pack.block)
    for number in range(first // size, math.ceil(stop / size) if stop > first else 0):
        begin, is_due = number * size, pack.complete and number < written
        if pack.is_listed and not is_due and not pack.checksums(signal, number):
            continue
        try:
            chunk = read_chunk(pack, signal, number)
        except FileNotFoundError as error:
            if is_due or pack.is_listed:
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


def checksum_in(content: bytes) -> str:
    """The checksum of a chunk as it is stored, in hexadecimal digits."""
    return content[-CRC_BYTES:].hex()


def found_checksums(pack: PackInfo) -> dict[str, str]:
    """What a pack of an earlier version would list: the checksums of the chunks that are there and whole."""
    blocks = math.ceil(pack.attributes["steps_done"] / pack.block)
    found = {}
    for signal, array in pack.arrays.items():
        found[signal] = ""
        for number in range(1 if is_once(array) else blocks):
            try:
                listed = packed(read_chunk(pack, signal, number))
            except (FileNotFoundError, DamagedStore):
                continue
            found[signal] = with_checksum(found[signal], number, checksum_in(listed))
    return found
