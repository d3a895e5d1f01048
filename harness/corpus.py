"""The corpus: what trials read, as token ids in a training and a validation part that have no document in common.

Three kinds of source, a section each: text (Python's own source, or the user's files), token shards, and random
tokens that follow Zipf's law. A file that repeats another one, byte for byte, is left out. Passages that different
documents share, such as licences and tables, stay in both: of the windows of 65 bytes in the validation part of Python
3.11's source 8% stand in the training part too, of those of 257 bytes 5%.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers

from harness.config import ConfigError, Data
from harness.memory import in_units, main_memory
from harness.tokenizer import TRAINING_BYTES, Tokens, encode_bpe, encode_bytes

BYTES_PER_BYTE = 5  # of text, while it is read: documents, those joined, tokens of two bytes
BYTES_PER_TOKEN = 4  # the tokens, and a copy for batches
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_BYTES = 20240520, 1, 1024
LLMC_WIDE_MAGIC = 20240801
VALIDATION_NAME = re.compile(r"(?<![a-z])(e?val|valid|validation)(?![a-z])")
ZIPF_SEED = 20240229
DRAWN_AT_ONCE = 1 << 22  # tokens, of which each takes 32 bytes while it is drawn


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids below `vocabulary`: uint16 [N] for training and [M] for validation, both read-only.

    `fingerprint` hashes the tokens and the vocabulary: equal fingerprints mean equal data. `description` says in plain
    JSON values where they come from. `tokenizer` is the JSON of a trained tokenizer, for `Tokenizer.from_str`.
    """

    train: Tokens
    validation: Tokens
    vocabulary: int
    fingerprint: str
    description: dict[str, Any]
    tokenizer: str | None = field(default=None, repr=False)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each token occurs in the training part: int64 [vocabulary]."""
        total = np.zeros(self.vocabulary, np.int64)
        for start in range(0, len(self.train), 1 << 22):  # bincount copies what it counts to int64
            total += np.bincount(self.train[start : start + (1 << 22)], minlength=self.vocabulary)
        return total


def load_corpus(data: Data, context: int, cache: Path | None = None) -> Corpus:
    """The corpus that `data` describes, long enough for windows of `context` + 1 tokens.

    Equal data give equal tokens, whatever the order in which a file system lists them and wherever they lie. `cache`
    is the folder for byte-pair encodings (default: `harness.tokenizer.cache_folder()`).
    Raises ConfigError, in one line, for data that cannot serve.
    """
    if data.source == "tokens":
        return _load_shards(data, context)
    if data.source == "zipf":
        return _load_zipf(data, context)
    return _load_text(data, context, cache)


def check_data(data: Data, context: int) -> None:
    """Raise the ConfigError that `load_corpus` would, as far as it shows without tokenizing.

    Reads text files once, and little more than the size of token shards. What is left to `load_corpus`: ids inside
    token shards that the vocabulary lacks, and text that only byte-pair encoding makes too short.
    """
    if data.source == "tokens":
        shards = _read_shards(data)
        _check_lengths(data, context, _size(shards.train), _size(shards.validation))
    elif data.source == "zipf":
        held = round(data.length * data.validation)
        _check_memory(data, BYTES_PER_TOKEN * data.length)
        _check_lengths(data, context, data.length - held, held)
    else:
        _read_text(data, context)


Piece = TypeVar("Piece", bytes, Tokens)


@dataclass(frozen=True, eq=False)
class _Parts(Generic[Piece]):
    """The pieces that make up each part, and how many files were left out because they repeat another."""

    train: list[Piece]
    validation: list[Piece]
    repeated: int


def _size(pieces: Sequence[bytes] | Sequence[Tokens]) -> int:
    return sum(len(piece) for piece in pieces)


def _refuse(data: Data, reason: str, allowed: str) -> NoReturn:
    keys = {"stdlib": f"data.source={data.source}", "zipf": f"data.length={data.length}"}
    raise ConfigError(f"{keys.get(data.source, f'data.path={data.path}')}: {reason}; allowed: {allowed}")


def _check_lengths(data: Data, context: int, train: int, validation: int) -> None:
    for part, held in (("training", train), ("validation", validation)):
        if held <= context:
            reason = f"{held} tokens for {part} at data.validation={data.validation}"
            _refuse(data, f"{reason}, too few for model.context={context}", f"at least {context + 1} in each part")


def _check_memory(data: Data, needed: int) -> None:
    """Raise ConfigError for more than this machine's memory can hold: a process that asks for it would be killed."""
    if needed > (memory := main_memory()):
        reason = f"takes about {in_units(needed)} of memory"
        _refuse(data, reason, f"at most the {in_units(memory)} of this machine: less data")


def _corpus(
    data: Data,
    context: int,
    tokens: tuple[Tokens, Tokens],
    vocabulary: int,
    details: dict[str, Any],
    tokenizer: str | None = None,
) -> Corpus:
    train, validation = tokens
    _check_lengths(data, context, len(train), len(validation))
    digest = hashlib.sha256(f"{vocabulary} {len(train)} {len(validation)}\n".encode())
    for part in tokens:
        part.flags.writeable = False
        digest.update(np.ascontiguousarray(part, "<u2").data)
    description = {
        "source": data.source,
        "path": data.path,
        "validation": data.validation,
        "vocabulary": vocabulary,
        "tokens": {"train": len(train), "validation": len(validation)},
        **details,
    }
    return Corpus(train, validation, vocabulary, digest.hexdigest()[:32], description, tokenizer)


# --- files ----------------------------------------------------------------------------------------------------------


def _path(data: Data) -> Path:
    path = Path(os.path.expanduser(data.path or ""))  # Path's own raises an error where there is no such user
    reason = "no such file or folder"
    try:
        mode = os.stat(path).st_mode if data.path else 0
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return path
        reason = "neither a file nor a folder" if mode else reason
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except ValueError as error:
        reason = f"no name of a file ({error})"
    _refuse(data, reason, f"a file or a folder, for data.source={data.source}")


def _walk(folder: Path, skip: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
    """(name under the folder, path) of the files that are not hidden, nor in folders `skip`, in order of the names."""

    def fail(error: OSError) -> NoReturn:
        raise error

    found = []
    for root, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("__pycache__", *skip)]
        found += [Path(root, name) for name in files if not name.startswith(".")]
    named = [(path.relative_to(folder).as_posix(), path) for path in found]
    return ((name, path) for name, path in sorted(named) if path.is_file())


# --- text -----------------------------------------------------------------------------------------------------------


def _load_text(data: Data, context: int, cache: Path | None) -> Corpus:
    text = _read_text(data, context)
    details = {
        "tokenizer": data.tokenizer,
        "files": {"train": len(text.train), "validation": len(text.validation), "repeated": text.repeated},
        "bytes": {"train": _size(text.train), "validation": _size(text.validation)},
    }
    if data.source == "stdlib":
        details["python"] = platform.python_version()
    if data.tokenizer == "bytes":
        tokens = encode_bytes(text.train), encode_bytes(text.validation)
        return _corpus(data, context, tokens, 256, details)
    encoded = encode_bpe(text.train, text.validation, data.vocabulary, cache)
    details["bpe"] = {
        "sha256": hashlib.sha256(encoded.tokenizer.encode()).hexdigest(),
        "library": f"tokenizers {tokenizers.__version__}",
        "trained_on_bytes": min(_size(text.train), TRAINING_BYTES),
        "tokens": tokenizers.Tokenizer.from_str(encoded.tokenizer).get_vocab_size(),
    }
    return _corpus(data, context, (encoded.train, encoded.validation), data.vocabulary, details, encoded.tokenizer)


def _read_text(data: Data, context: int) -> _Parts[bytes]:
    try:
        named = list(_stdlib_documents() if data.source == "stdlib" else _text_documents(data))
    except OSError as error:
        _refuse(data, f"cannot read {error.filename} ({error.strerror})", "readable files")
    unique = {text: name for name, text in reversed(named) if text}
    documents = [(name, text) for name, text in named if unique.get(text) == name]
    if not documents:
        _refuse(data, "empty text", "text of at least two windows of model.context + 1 tokens")
    train, validation = _split(documents, data.validation)
    # No tokenizer makes more tokens of UTF-8 text than there are bytes and separators.
    _check_lengths(data, context, *(_size(part) + len(part) - 1 for part in (train, validation)))
    return _Parts(train, validation, sum(1 for _, text in named if text) - len(documents))


def _stdlib_documents() -> Iterator[tuple[str, bytes]]:
    for name, path in _walk(Path(sysconfig.get_paths()["stdlib"]), skip=("site-packages", "dist-packages")):
        # These two are written when Python is built, and tell of the machine that built it.
        built = name.startswith(("_sysconfigdata", "config-"))
        if path.suffix == ".py" and not built:
            yield name, path.read_bytes()


def _text_documents(data: Data) -> Iterator[tuple[str, bytes]]:
    path = _path(data)
    none, held = True, 0
    for name, file in _walk(path) if path.is_dir() else [(path.name, path)]:
        text = _read_if_text(data, file, held)
        if text is not None:
            none = False
            held += len(text)
            yield name, text
    if none:
        _refuse(data, f"no UTF-8 text in this {'folder' if path.is_dir() else 'file'}", "UTF-8 text without NUL bytes")


def _read_if_text(data: Data, path: Path, held: int) -> bytes | None:
    """The content of a file, if that is text. Raises ConfigError if there is no room for it beside `held` bytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:  # some that a system makes up, in /proc, have no size and no end
            return b""
        head = file.read(8192)
        if b"\0" in head:  # spares reading the rest of a large binary file
            return None
        _check_memory(data, BYTES_PER_BYTE * (held + size))
        content = head + file.read()
    try:
        content.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in content else content


def _split(documents: list[tuple[str, bytes]], share: float) -> tuple[list[bytes], list[bytes]]:
    """Whole documents for training and validation, close to `share` of the bytes in the latter.

    The hash of a document's name decides, so one more document moves few others. One document is cut in two: its end
    is for validation.
    """
    if len(documents) == 1:
        text = documents[0][1]
        cut = round(len(text) * (1 - share))
        while 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
            cut -= 1
        return [text[:cut]], [text[cut:]]
    order = sorted(documents, key=lambda document: hashlib.sha256(os.fsencode(document[0])).digest())
    target = share * sum(len(text) for _, text in documents)
    held: list[tuple[str, bytes]] = []
    size = 0
    for document in order:
        if abs(size + len(document[1]) - target) < abs(size - target):
            held.append(document)
            size += len(document[1])
    if not held:
        held.append(min(order, key=lambda document: len(document[1])))
    if len(held) == len(documents):
        held.remove(min(held, key=lambda document: len(document[1])))
    names = {name for name, _ in held}
    train = [text for name, text in documents if name not in names]
    return train, [text for name, text in documents if name in names]


# --- token shards ---------------------------------------------------------------------------------------------------


def _load_shards(data: Data, context: int) -> Corpus:
    shards = _read_shards(data, look_inside=True)
    details = {
        "tokenizer": None,
        "files": {"train": len(shards.train), "validation": len(shards.validation), "repeated": shards.repeated},
        "bytes": {"train": 2 * _size(shards.train), "validation": 2 * _size(shards.validation)},
    }
    return _corpus(data, context, (_join(shards.train), _join(shards.validation)), data.vocabulary, details)


def _read_shards(data: Data, look_inside: bool = False) -> _Parts[Tokens]:
    """Shards as nanoGPT and llm.c write them: uint16, little-endian, bare or after a header.

    In a folder, shards are validation where their name under the folder has the word val (or valid, validation,
    eval), as in val.bin, fineweb_val_000000.bin or val/0.bin. Without such names the end of all tokens is validation.
    """
    path = _path(data)
    try:
        files = list(_walk(path)) if path.is_dir() else [(path.name, path)]
        named = [(name, _open_shard(data, file)) for name, file in files if file.suffix == ".bin" or file == path]
    except OSError as error:
        _refuse(data, f"cannot read {error.filename} ({error.strerror})", "readable files")
    _check_memory(data, BYTES_PER_TOKEN * _size([shard for _, shard in named]))
    if not named:
        _refuse(data, "no *.bin file in this folder", "a file or a folder of uint16 token shards, *.bin")
    unique: list[tuple[str, Tokens]] = []
    for name, shard in named:
        twin = next((other for other, tokens in unique if _equal(tokens, shard)), None)
        if twin is None:
            unique += [(name, shard)] if len(shard) else []
        elif _is_validation(twin) != _is_validation(name):
            _refuse(data, f"{twin} and {name} are equal", "validation tokens that are not trained on")
    for name, shard in unique if look_inside else []:
        if shard.max() >= data.vocabulary:
            reason = f"data.vocabulary={data.vocabulary}: too small for token {shard.max()} in {name} of {path}"
            raise ConfigError(f"{reason}; allowed: above the largest token, up to 65536")
    train, validation = ([shard for name, shard in unique if _is_validation(name) == held] for held in (False, True))
    if not train or not validation:
        train, validation = _tail_cut(train + validation, data.validation)
    return _Parts(train, validation, sum(1 for _, shard in named if len(shard)) - len(unique))


def _open_shard(data: Data, path: Path) -> Tokens:
    """The tokens of one file, read as they are needed."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(12)
    magic, version, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    start = 0
    if magic == LLMC_MAGIC:
        start = LLMC_HEADER_BYTES
        if version != LLMC_VERSION or count < 0 or size != start + 2 * count:
            reason = f"{path} has a header of version {version} for {count} tokens, but is {size} bytes long"
            _refuse(data, reason, f"version {LLMC_VERSION} and {start} bytes + 2 a token")
    elif magic == LLMC_WIDE_MAGIC:
        _refuse(data, f"{path} holds 32-bit tokens", "uint16 tokens")
    elif size % 2:
        _refuse(data, f"{path} is {size} bytes long, an odd number", "uint16 tokens, 2 bytes each")
    if size == start:
        return np.empty(0, np.uint16)
    return np.memmap(path, np.dtype("<u2"), mode="r", offset=start)


def _is_validation(name: str) -> bool:
    return VALIDATION_NAME.search(name.lower()) is not None


def _equal(one: Tokens, other: Tokens) -> bool:
    same_start = len(one) == len(other) and np.array_equal(one[:512], other[:512])
    return same_start and np.array_equal(one, other)


def _join(shards: list[Tokens]) -> Tokens:
    return shards[0] if len(shards) == 1 else np.concatenate([np.empty(0, np.uint16), *shards])


def _tail_cut(shards: list[Tokens], share: float) -> tuple[list[Tokens], list[Tokens]]:
    left = _size(shards) - round(share * _size(shards))
    train, validation = [], []
    for shard in shards:
        train.append(shard[: max(left, 0)])
        validation.append(shard[max(left, 0) :])
        left -= len(shard)
    return [piece for piece in train if len(piece)], [piece for piece in validation if len(piece)]


# --- Zipf's law -----------------------------------------------------------------------------------------------------


def _load_zipf(data: Data, context: int) -> Corpus:
    """Independent tokens, id k as frequent as (k + 1)^-exponent, the same for every seed of a trial."""
    _check_memory(data, BYTES_PER_TOKEN * data.length)
    weights = np.arange(1, data.vocabulary + 1, dtype=np.float64) ** -data.exponent
    shares = np.cumsum(weights) / weights.sum()
    # numpy promises the raw numbers of this generator for all its versions, but not what it makes of them.
    generator, tokens = np.random.PCG64(ZIPF_SEED), np.empty(data.length, np.uint16)
    for start in range(0, data.length, DRAWN_AT_ONCE):
        part = tokens[start : start + DRAWN_AT_ONCE]
        uniform = (generator.random_raw(len(part)) >> np.uint64(11)) * 2.0**-53
        part[:] = np.minimum(np.searchsorted(shares, uniform, side="right"), data.vocabulary - 1)
    train, validation = map(_join, _tail_cut([tokens], data.validation))
    details = {"tokenizer": None, "exponent": data.exponent, "length": data.length}
    return _corpus(data, context, (train, validation), data.vocabulary, details)
