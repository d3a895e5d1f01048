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
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.config import Data, Trial, shown
from harness.data.corpus_files import (
    BYTES_PER_TOKEN,
    CorpusParts,
    LeftOut,
    check_memory,
    path_of,
    refuse,
    size_of,
    walk,
)
from harness.data.token_shards import join, read_shards, tail_cut
from harness.data.tokenizer import TRAINING_BYTES, Tokens, encode_bpe, encode_bytes

BYTES_PER_BYTE = 5  # of text, while it is read: documents, those joined, tokens of two bytes
MOST_LEFT_OUT = 0.1  # share of a folder's bytes that is left out without data.skip_bad
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

    @cached_property
    def pair_counts(self) -> npt.NDArray[np.int64]:
        """How often each token follows each other one in the training part: int64 [vocabulary before, vocabulary]."""
        total, pairs = np.zeros(self.vocabulary**2, np.int64), len(self.train) - 1
        for start in range(0, pairs, 1 << 22):
            tokens = self.train[start : min(start + (1 << 22), pairs) + 1].astype(np.int64)
            total += np.bincount(tokens[:-1] * self.vocabulary + tokens[1:], minlength=len(total))
        return total.reshape(self.vocabulary, self.vocabulary)


def refused(trial: Trial) -> Iterator[str]:
    """A source without its files, or with another tokenizer's."""
    data = trial.data
    tokenizer, vocabulary = f"data.tokenizer={data.tokenizer}", f"data.vocabulary={data.vocabulary}"
    if data.source in ("text", "tokens") and not data.path:
        why = f"missing for data.source={data.source}"
        yield f"data.path={shown(data.path)}: {why}; allowed: a file or a folder"
    if data.source == "tokens" and data.tokenizer != "bytes":
        yield f"{tokenizer}: data.source=tokens is tokenized already; allowed: bytes"
    if data.source != "tokens" and data.token_type != "auto":
        yield f"data.token_type={data.token_type}: data.source={data.source} has no token files; allowed: auto"
    if data.source != "text" and data.skip_bad:
        yield f"data.skip_bad=true: data.source={data.source} reads no text of yours; allowed: false"
    if data.tokenizer == "bytes" and data.source in ("stdlib", "text") and data.vocabulary != 256:
        yield f"{vocabulary}: {tokenizer} has 256 tokens; allowed: 256"
    if data.tokenizer == "bpe" and data.vocabulary < 257:
        yield f"{vocabulary}: too small for {tokenizer}; allowed: 257 to 65536"


def load_corpus(data: Data, context: int, cache: Path | None = None) -> Corpus:
    """The corpus that `data` describes, long enough for windows of `context` + 1 tokens.

    Equal data give equal tokens, whatever the order in which a file system lists them and wherever they lie. `cache`
    is the folder for byte-pair encodings (default: `harness.basics.cache_folder.cache_folder()`).
    Raises ConfigError, in one line, for data that cannot serve.
    """
    if data.source == "tokens":
        shards = read_shards(data, look_inside=True)
        sizes = {part: 2 * size for part, size in shards.sizes.items()}
        details = {"tokenizer": None, "files": shards.files, "bytes": sizes, **_left_out(shards)}
        return _corpus(data, context, (join(shards.train), join(shards.validation)), data.vocabulary, details)
    if data.source == "zipf":
        return _load_zipf(data, context)
    return _load_text(data, context, cache)


def check_data(data: Data, context: int) -> str:
    """Raise the ConfigError that `load_corpus` would, as far as it shows without tokenizing.

    Returns a line on the files that are left out, empty if there are none. Reads text files once, and little more than
    the size of token shards. What is left to `load_corpus`: ids inside token shards that the vocabulary lacks, and text
    that only byte-pair encoding makes too short.
    """
    if data.source == "tokens":
        shards = read_shards(data)
        _check_lengths(data, context, **shards.sizes)
        read = sum(shard.nbytes for shard in (*shards.train, *shards.validation))
        said = shards.left_out.said(read)
    elif data.source == "zipf":
        held = round(data.length * data.validation)
        check_memory(data, BYTES_PER_TOKEN * data.length)
        _check_lengths(data, context, data.length - held, held)
        said = ""
    else:
        text = _read_text(data, context)
        said = text.left_out.said(size_of(text.train) + size_of(text.validation))
    return f"data.path={data.path}: {said}" if said else ""


def _left_out(parts: CorpusParts[Any]) -> dict[str, Any]:
    """For a description: the files that are not read, if there are any."""
    return {"left_out": parts.left_out.to_dict()} if parts.left_out.files else {}


def _check_lengths(data: Data, context: int, train: int, validation: int) -> None:
    for part, held in (("training", train), ("validation", validation)):
        if held <= context:
            reason = f"{held} tokens for {part} at data.validation={data.validation}"
            refuse(data, f"{reason}, too few for model.context={context}", f"at least {context + 1} in each part")


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


# --- text -----------------------------------------------------------------------------------------------------------


def _load_text(data: Data, context: int, cache: Path | None) -> Corpus:
    text = _read_text(data, context)
    details: dict[str, Any] = {"tokenizer": data.tokenizer, "files": text.files, "bytes": text.sizes, **_left_out(text)}
    if data.source == "stdlib":
        details["python"] = platform.python_version()
    if data.tokenizer == "bytes":
        tokens = encode_bytes(text.train), encode_bytes(text.validation)
        return _corpus(data, context, tokens, 256, details)
    import tokenizers

    encoded = encode_bpe(text.train, text.validation, data.vocabulary, cache)
    details["bpe"] = {
        "sha256": hashlib.sha256(encoded.tokenizer.encode()).hexdigest(),
        "library": f"tokenizers {tokenizers.__version__}",
        "trained_on_bytes": min(size_of(text.train), TRAINING_BYTES),
        "tokens": tokenizers.Tokenizer.from_str(encoded.tokenizer).get_vocab_size(),
    }
    return _corpus(data, context, (encoded.train, encoded.validation), data.vocabulary, details, encoded.tokenizer)


def _read_text(data: Data, context: int) -> CorpusParts[bytes]:
    left_out = LeftOut()
    try:
        named = list(_stdlib_documents() if data.source == "stdlib" else _text_documents(data, left_out))
    except OSError as error:
        refuse(data, f"cannot read {error.filename} ({error.strerror})", "readable files")
    unique = {text: name for name, text in reversed(named) if text}
    documents = [(name, text) for name, text in named if unique.get(text) == name]
    if not documents:
        refuse(data, "empty text", "text of at least two windows of model.context + 1 tokens")
    train, validation = _split(documents, data.validation)
    # No tokenizer makes more tokens of UTF-8 text than there are bytes and separators.
    _check_lengths(data, context, *(size_of(part) + len(part) - 1 for part in (train, validation)))
    return CorpusParts(train, validation, sum(1 for _, text in named if text) - len(documents), left_out)


def _stdlib_documents() -> Iterator[tuple[str, bytes]]:
    for name, path in walk(Path(sysconfig.get_paths()["stdlib"]), skip=("site-packages", "dist-packages")):
        # These two are written when Python is built, and tell of the machine that built it.
        built = name.startswith(("_sysconfigdata", "config-"))
        if path.suffix == ".py" and not built:
            yield name, path.read_bytes()


def _text_documents(data: Data, left_out: LeftOut) -> Iterator[tuple[str, bytes]]:
    """The text of `data.path`; files that are no text are added to `left_out`.

    Raises ConfigError if there is none, or if too much is left out unasked.
    """
    path = path_of(data)
    none, held = True, 0
    for name, file in walk(path, left_out=left_out) if path.is_dir() else [(path.name, path)]:
        text, size, why = _read_if_text(data, file, held)
        if text is None:
            left_out.add(name, size, why)
        else:
            none = False
            held += len(text)
            yield name, text
    if none:
        allowed = f"UTF-8 text without NUL bytes{f' ({left_out.named})' if left_out.files else ''}"
        refuse(data, f"no UTF-8 text in this {'folder' if path.is_dir() else 'file'}", allowed)
    if left_out.bytes > MOST_LEFT_OUT * (left_out.bytes + held) and not data.skip_bad:
        allowed = "UTF-8 text without NUL bytes, or data.skip_bad=true to train on the rest"
        refuse(data, left_out.said(held), allowed)


def _read_if_text(data: Data, path: Path, held: int) -> tuple[bytes | None, int, str]:
    """The content of a file if that is text, or None; its size in bytes; and why it is no text.

    Raises ConfigError if there is no room for it beside `held` bytes.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:  # some that a system makes up, in /proc, have no size and no end
            return b"", 0, ""
        head = file.read(8192)
        if b"\0" in head:  # spares reading the rest of a large binary file
            return None, size, f"byte {head.index(0)} is NUL"
        check_memory(data, BYTES_PER_BYTE * (held + size))
        content = head + file.read()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return None, size, f"byte {error.start} is no UTF-8"
    return (None, size, f"byte {content.index(0)} is NUL") if b"\0" in content else (content, size, "")


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
    smallest, size, held = min(order, key=lambda document: len(document[1]))[0], 0, set()
    for name, text in order:
        if abs(size + len(text) - target) < abs(size - target):
            held.add(name)
            size += len(text)
    held = (held or {smallest}) - ({smallest} if len(held) == len(documents) else set())
    train = [text for name, text in documents if name not in held]
    return train, [text for name, text in documents if name in held]


# --- Zipf's law -----------------------------------------------------------------------------------------------------


def _load_zipf(data: Data, context: int) -> Corpus:
    """Independent tokens, id k as frequent as (k + 1)^-exponent, the same for every seed of a trial."""
    check_memory(data, BYTES_PER_TOKEN * data.length)
    weights = np.arange(1, data.vocabulary + 1, dtype=np.float64) ** -data.exponent
    shares = np.cumsum(weights) / weights.sum()
    # numpy promises the raw numbers of this generator for all its versions, but not what it makes of them.
    generator, tokens = np.random.PCG64(ZIPF_SEED), np.empty(data.length, np.uint16)
    for start in range(0, data.length, DRAWN_AT_ONCE):
        part = tokens[start : start + DRAWN_AT_ONCE]
        uniform = (generator.random_raw(len(part)) >> np.uint64(11)) * 2.0**-53
        part[:] = np.minimum(np.searchsorted(shares, uniform, side="right"), data.vocabulary - 1)
    train, validation = map(join, tail_cut([tokens], data.validation))
    details = {"tokenizer": None, "exponent": data.exponent, "length": data.length}
    return _corpus(data, context, (train, validation), data.vocabulary, details)
