"""One file of token ids: bare numbers, or numbers behind the header of NumPy or of llm.c.

A header names the type of the numbers. Bare ones are uint16, as nanoGPT writes them, unless `data.token_type` names
another type. Numbers of another type look like tokens when they are read as uint16, so a bare file is refused where
its numbers cannot be uint16 tokens.
"""

from __future__ import annotations

import codecs
import math
import struct
import tokenize
import unicodedata
import warnings
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.basics.printing import printable
from harness.config import ConfigError, Data
from harness.data.corpus_files import refuse

Numbers = npt.NDArray[np.integer[Any]]

USUAL = np.dtype("<u2")
LLMC_HEADER_BYTES = 1024
# By the magic: the version, and the type of the tokens.
LLMC: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, USUAL), 20240801: (7, np.dtype("<u4"))}
NUMPY_MAGIC = b"\x93NUMPY"
# What NumPy raises for a header that is no text of Python, or one that is too deep.
BAD_HEADER = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
OTHERS = {  # how files of other kinds begin, of which no token file does
    b"PK\x03\x04": "a zip archive, as numpy.savez and torch.save write it",
    b"\x1f\x8b\x08": "a file of gzip",
    b"\x28\xb5\x2f\xfd": "a file of zstandard",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"MMIDIDX": "an index of Megatron-LM",
}
STRETCH = 1 << 17  # numbers that are looked at in the beginning, the middle and the end of a file
FEWEST = 32  # numbers in a file that tell of what type they are
SMALL = 15  # the upper half of a 32-bit id is at most so large in vocabularies up to a million


class _Layout(NamedTuple):
    """Where the numbers of a file begin, what they are, and how many a header promises."""

    start: int
    kind: np.dtype[Any]
    tokens: int | None = None
    header: str = ""  # in words, for errors
    allowed: str = ""


def open_tokens(data: Data, path: Path) -> Numbers:
    """The numbers of one file, [N], of the type in which they are stored, read as they are needed.

    Raises ConfigError for a file that is not whole, is of another kind, or has another type than `data.token_type`.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(12)
        layout = _layout(data, path, file, head)
    start, kind, promised = layout.start, layout.kind, layout.tokens
    if promised is not None and size != start + kind.itemsize * promised:
        refuse(data, f"{path} has {layout.header} for {promised} tokens, but is {size} bytes long", layout.allowed)
    if (size - start) % kind.itemsize:
        how = "an odd number" if kind.itemsize == 2 else f"no multiple of {kind.itemsize}"
        refuse(data, f"{path} is {size} bytes long, {how}", f"{kind.name} tokens, {kind.itemsize} bytes each")
    if size == start:
        return np.empty(0, kind)
    numbers = np.memmap(path, kind, mode="r", offset=start)
    if data.token_type == "auto" and promised is None:
        _check_tokens(data, path, head, numbers)
    return numbers


def _layout(data: Data, path: Path, file: BinaryIO, head: bytes) -> _Layout:
    """What the head of a file says of it, or `data.token_type`. Raises ConfigError where these contradict."""
    magic, version, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if head.startswith(NUMPY_MAGIC):
        layout = _of_numpy(data, path, file)
    elif magic in LLMC:
        known, kind = LLMC[magic]
        allowed = f"version {known} and {LLMC_HEADER_BYTES} bytes + {kind.itemsize} a token"
        layout = _Layout(LLMC_HEADER_BYTES, kind, count, f"a header of version {version}", allowed)
        if version != known or count < 0:
            size = path.stat().st_size
            refuse(data, f"{path} has {layout.header} for {count} tokens, but is {size} bytes long", allowed)
    elif path.suffix == ".npy":
        refuse(data, f"{path} has no header of NumPy", "a file as numpy.save writes it, or bare tokens in a *.bin")
    else:
        named = USUAL if data.token_type == "auto" else np.dtype(data.token_type).newbyteorder("<")
        return _Layout(0, named)
    if data.token_type not in ("auto", layout.kind.name):
        reason = f"{path} has {layout.kind.name} tokens, as its header says"
        raise ConfigError(f"data.token_type={data.token_type}: {reason}; allowed: auto, {layout.kind.name}")
    return layout


def _of_numpy(data: Data, path: Path, file: BinaryIO) -> _Layout:
    """The header that numpy.save writes. Raises ConfigError unless it is that of whole numbers, [N]."""
    file.seek(0)
    allowed = "whole numbers in one dimension, as numpy.save writes them"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a header that Python 2 has written, which is as good
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
    except BAD_HEADER as error:
        refuse(data, f"{path} has a damaged header of NumPy ({printable(str(error))[:80]})", allowed)
    if kind.kind not in "ui" or len(shape) != 1:
        shown = " x ".join(map(str, shape)) or "one"
        refuse(data, f"{path} has {shown} values of type {kind.name}", allowed)
    count, start = math.prod(shape), file.tell()
    return _Layout(start, kind, count, "a header of NumPy", f"{start} bytes + {kind.itemsize} a token")


# --- whether bare numbers are uint16 tokens ------------------------------------------------------------------------


def _check_tokens(data: Data, path: Path, head: bytes, numbers: Numbers) -> None:
    """Raises ConfigError for bare numbers that are no uint16 tokens, each with the key that says otherwise."""
    for magic, what in OTHERS.items():
        if head.startswith(magic):
            refuse(data, f"{path} is {what}", "bare uint16 tokens, or data.token_type=uint16 if they are such")
    if len(numbers) < FEWEST:
        return
    if _is_text(numbers[:STRETCH].tobytes()):
        allowed = "token ids; or data.source=text; or data.token_type=uint8, a token a byte, or uint16 if they are such"
        refuse(data, f"{path} is text", allowed)
    if wide := _wider(_looked_at(numbers)):
        reason = f"{path} holds no uint16 tokens: their upper halves are those of small {wide} numbers"
        refuse(data, reason, f"data.token_type={wide}, or data.token_type=uint16 if they are such")


def _looked_at(numbers: Numbers) -> Numbers:
    """The beginning, the middle and the end of a file, each from a multiple of four numbers on."""
    starts = (0, len(numbers) // 2 // 4 * 4, max(0, len(numbers) - STRETCH) // 4 * 4)
    return np.concatenate([numbers[start : start + STRETCH] for start in starts])


def _wider(numbers: Numbers) -> str:
    """The type of which uint16 `numbers` are the halves or quarters; empty if there is none.

    In a text every second token is like every other one. In wider numbers the second halves are (almost) all small, or
    those of a small negative number, and the first ones are not.
    """
    numbers = numbers[: len(numbers) // 4 * 4].reshape(-1, 4)
    is_small = ((numbers <= SMALL) | (numbers == 0xFFFF)).mean(axis=0)
    has_zeros = not numbers[:, 1::2].any() and numbers[:, 0::2].any()
    if not has_zeros and not (is_small[1::2].min() >= 0.9 and is_small[0] <= 0.5):
        return ""
    width = 64 if is_small[2] >= 0.9 > is_small[0] or not numbers[:, 2].any() else 32
    return f"{'int' if (numbers[:, width // 16 - 1] == 0xFFFF).any() else 'uint'}{width}"


def _is_text(content: bytes) -> bool:
    """Whether it is UTF-8 that a person could read. In the bytes of uint16 tokens are zeros and controls."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return not any(unicodedata.category(letter) in ("Cc", "Cn") for letter in set(text) - set("\t\n\r\f"))
