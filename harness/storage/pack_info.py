"""What one pack's group says about itself, and whether a sweep can have written that.

Metadata have to be as `harness/storage/store.py` writes them, key by key. The file has a seal, which covers every byte
of it; among its attributes stand the pack's own name and, under `checksums`, the CRC-32C of every chunk, signal by
signal. So a chunk, or a whole file, that lies in another one's place is found out. In a pack of an earlier version only
the attributes of a complete one have a checksum, and chunks their own alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.limits import SEGMENTS
from harness.storage.json_seal import OTHER, SEAL
from harness.storage.results_folder import ResultsPath
from harness.storage.zarr_files import array_metadata, strict_json

OLD_SEAL = "sha256"  # of a complete pack's other attributes, to format 6
NAME, CHECKSUMS, PENDING = "pack", "checksums", "pending"
CRC_BYTES = 4
DIGITS, NONE = 2 * CRC_BYTES, "-" * 2 * CRC_BYTES  # of a checksum in the list of a signal's, and in place of one
DIMS = (("trial", "step"), ("trial", "step", "layer"), ("trial", "segment"), ("trial", "step", "layer", "rank"))
MOST_STEPS = 10**8  # of a pack; more are no results, but a damaged number


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
        complete: bool = self.attributes["complete"]
        return complete

    @property
    def steps(self) -> int:
        steps: int = self.arrays["loss"]["shape"][1]
        return steps

    @property
    def layers(self) -> int:
        layers: int = self.arrays["activation_rms"]["shape"][2]
        return layers

    @property
    def ranks(self) -> int:
        return ranks_of(self.attributes)

    @property
    def block(self) -> int:
        """Steps in a chunk."""
        return chunk_of(self.arrays["loss"])[1]

    @property
    def is_listed(self) -> bool:
        """Whether it says which chunks it has: one of an earlier version does not."""
        return CHECKSUMS in self.attributes

    def checksums(self, signal: str, number: int) -> tuple[str, ...]:
        """What the checksum of a chunk may be, in hexadecimal digits; none of one that is not written.

        There are several while a chunk is being replaced.
        """
        return checksums_in(self.attributes, signal, number)


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


def _is_list_of_checksums(value: Any) -> bool:
    return _is_facts(value) and all(_is_text(text) and _LIST.fullmatch(text) for text in value.values())


def _is_pending(value: Any) -> bool:
    return _is_facts(value) and all(
        _is_facts(chunks) and all(isinstance(some, list) and all(map(_is_text, some)) for some in chunks.values())
        for chunks in value.values()
    )


_LIST = re.compile(rf"(?:[0-9a-f]{{{DIGITS}}}|{NONE})*")


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
"""Of a trial's first non-finite value, as harness/nonfinite/provenance.py has it."""


def _is_provenance(value: Any) -> bool:
    is_whole = _is_facts(value) and value.keys() == PROVENANCE.keys()
    return value == {} or (is_whole and all(is_right(value[name]) for name, is_right in PROVENANCE.items()))


NOT_RECORDED = "not_recorded"  # in a pack's environment: what of it a GPU could not replay, and so did slowly
KERNELS_CHANGED = "kernels_changed"  # there, too: from where on a CPU's matrix products were others

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


OF_LISTED: Checks = {NAME: _is_text, CHECKSUMS: _is_list_of_checksums, PENDING: _is_pending}
"""Since format 7; the last is there while chunks are being replaced."""


def check_metadata(pack: PackInfo) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError for what no sweep has written."""
    attributes = pack.attributes
    listed = {name: is_right for name, is_right in OF_LISTED.items() if name in attributes}
    for name, is_right in (ABOUT | listed).items():
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
    ranks: int = attributes["trials"][0]["train"].get("ranks", 1)
    return ranks


def chunk_shape(shape: tuple[int, ...], dims: tuple[str, ...], block: int) -> tuple[int, ...]:
    """That of a chunk: all trials, and `block` steps if there are steps."""
    return tuple(block if dim == "step" else size for dim, size in zip(dims, shape, strict=True))


def is_once(array: Mapping[str, Any]) -> bool:
    """Whether an array has no steps: one chunk, written when the pack is complete."""
    return "step" not in array["dimension_names"]


def chunk_of(array: Mapping[str, Any]) -> list[int]:
    """The shape of one chunk, from the metadata of a Zarr array."""
    shape: list[int] = array["chunk_grid"]["configuration"]["chunk_shape"]
    return shape


def checksums_in(attributes: Mapping[str, Any], signal: str, number: int) -> tuple[str, ...]:
    """`PackInfo.checksums` of a pack with these attributes."""
    known = attributes[CHECKSUMS].get(signal, "")[number * DIGITS : (number + 1) * DIGITS]
    if known in ("", NONE):
        return ()
    return (known, *attributes.get(PENDING, {}).get(signal, {}).get(str(number), ()))


def with_checksum(listed: str, number: int, checksum: str) -> str:
    """The list of a signal's checksums, in which chunk `number` has this one."""
    before = listed[: number * DIGITS]
    before += NONE * (number - len(before) // DIGITS)
    return before + checksum + listed[(number + 1) * DIGITS :]


def checksum_of(attributes: Mapping[str, Any]) -> str:
    """What a complete pack of format 6 says of itself under `OLD_SEAL`: SHA-256 of its other attributes."""
    rest = {name: value for name, value in attributes.items() if name != OLD_SEAL}
    return hashlib.sha256(strict_json(rest).encode()).hexdigest()


def check_seal(pack: PackInfo, content: bytes, has_seal: bool) -> None:
    """Raises ValueError if a pack is not as it was written; `content` is that of its file, whose seal is right."""
    attributes = pack.attributes
    if has_seal:
        if attributes[NAME] != pack.id:
            raise ValueError(f"it is that of pack {attributes[NAME]!r:.40}")
        return
    if SEAL in attributes or CHECKSUMS in attributes or NAME in attributes:
        raise ValueError(OTHER)
    if OLD_SEAL in attributes:
        if not _fits_old_seal(content, attributes):
            raise ValueError(OTHER)
    elif any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in attributes.values()):
        raise ValueError(OTHER)  # the name of the checksum itself is damaged


_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEGIN, _LAST = b'"attributes":', f',"{OLD_SEAL}":"'.encode()


def _fits_old_seal(content: bytes, attributes: Mapping[str, Any]) -> bool:
    """The sealed text stands in the file as it was hashed, but for its end; making it again takes far longer."""
    begin, end = content.find(_BEGIN) + len(_BEGIN), content.rfind(_LAST)
    told = str(attributes[OLD_SEAL])
    is_last = content[end + len(_LAST) :].startswith(f'{told}"}}'.encode())
    if is_last and hashlib.sha256(content[begin:end] + b"}").hexdigest() == told:
        return True
    return checksum_of(attributes) == told
