"""Text to token ids: bytes as they are, or a byte-pair encoding trained on the training text alone.

Bytes need no cache: reading the text is as fast as reading a copy of its tokens. Byte-pair encodings take seconds to
minutes to train and apply, so their result is kept in a cache folder, under a key made of the text itself.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from harness.basics.cache_folder import CACHE_VARIABLE, cache_folder
from harness.basics.errors import ConfigError
from harness.storage.results_folder import FolderLost, ResultsPath
from harness.storage.sealed import Damaged, read_sealed, write_sealed

if TYPE_CHECKING:  # the library is loaded where text is encoded by it, and not for bytes
    from tokenizers import Tokenizer

Tokens = npt.NDArray[np.uint16]

SEPARATOR = b"\0"
"""Stands between two documents in byte tokens; text documents never hold it."""
END = "<|endoftext|>"
"""Stands between two documents in byte-pair tokens, as token 0."""
TRAINING_BYTES = 16_000_000
"""Byte-pair encodings are trained on this many bytes of the training text at most."""
PIECE = 1_000_000
"""Characters encoded as one string; longer documents are cut, after a newline where there is one."""
FORMAT = 2


@dataclass(frozen=True, eq=False)
class Encoded:
    """Tokens uint16 [N] of the training text and [M] of the validation text, and the tokenizer's JSON."""

    train: Tokens
    validation: Tokens
    tokenizer: str


def encode_bytes(documents: Sequence[bytes]) -> Tokens:
    """One token a byte, documents joined by a NUL byte: uint16 [bytes + documents - 1]."""
    return np.frombuffer(SEPARATOR.join(documents), np.uint8).astype(np.uint16)


def encode_bpe(
    train: Sequence[bytes], validation: Sequence[bytes], vocabulary: int, cache: Path | None = None
) -> Encoded:
    """Byte-level byte-pair encoding (Radford et al. 2019, section 2.2), trained on at most 16 MB of the training text.

    Those 16 MB are whole documents in the order of their hash, the last one cut. Bytes that are not UTF-8 become the
    replacement character; all other text decodes to itself. Documents are joined by the token `<|endoftext|>`. A text
    too small for `vocabulary` leaves the highest ids unused.

    The result is kept in `cache` (default: `cache_folder()`). A damaged entry is rebuilt and a folder that cannot be
    written goes without a cache, both with a RuntimeWarning. Several processes may do this at once: each may build
    the entry, and one of the equal results stays.
    """
    entry = (cache_folder() if cache is None else cache) / f"bpe-{_key(train, validation, vocabulary)}.safetensors"
    encoded = _read(entry)
    if encoded is None:
        tokenizer = _train(train, vocabulary)
        encoded = Encoded(_encode(tokenizer, train), _encode(tokenizer, validation), tokenizer.to_str())
        _write(entry, encoded)
    return encoded


def _pieces(document: bytes) -> Iterator[str]:
    text, start = document.decode(errors="replace"), 0
    while start < len(text):
        stop = start + PIECE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _sample(documents: Sequence[bytes]) -> Iterator[str]:
    left = TRAINING_BYTES
    for document in sorted(documents, key=lambda text: hashlib.sha256(text).digest()):
        yield from _pieces(document[:left])
        left -= len(document)
        if left <= 0:
            return


def _train(documents: Sequence[bytes], vocabulary: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents), trainer)
    return tokenizer


def _strings(documents: Sequence[bytes]) -> Iterator[str]:
    for number, document in enumerate(documents):
        if number:
            yield END
        yield from _pieces(document)


def _encode(tokenizer: Tokenizer, documents: Sequence[bytes]) -> Tokens:
    parts: list[Tokens] = [np.empty(0, np.uint16)]
    batch: list[str] = []

    def flush() -> None:
        parts.extend(np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch_fast(batch))
        batch.clear()

    waiting = 0
    for string in _strings(documents):
        batch.append(string)
        waiting += len(string)
        if waiting >= 4 * PIECE:  # the library's encodings take a hundred bytes a token: hold few at a time
            flush()
            waiting = 0
    flush()
    return np.concatenate(parts)


def _key(train: Sequence[bytes], validation: Sequence[bytes], vocabulary: int) -> str:
    import tokenizers

    recipe = [FORMAT, tokenizers.__version__, vocabulary, TRAINING_BYTES, PIECE, END]
    texts = [[hashlib.sha256(text).hexdigest() for text in part] for part in (train, validation)]
    return hashlib.sha256(json.dumps([recipe, texts]).encode()).hexdigest()[:32]


# --- one entry of the cache -------------------------------------------------------------------------------------------


def _read(entry: Path) -> Encoded | None:
    try:
        parts, tokenizer = read_sealed(entry, FORMAT)
        return Encoded(parts["train"].numpy(), parts["validation"].numpy(), tokenizer)
    except OSError:
        return None
    except Damaged:
        warnings.warn(f"{entry}: damaged cache entry; building it again", RuntimeWarning, stacklevel=2)
        return None


def _write(entry: Path, encoded: Encoded) -> None:
    parts = {"train": torch.from_numpy(encoded.train), "validation": torch.from_numpy(encoded.validation)}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with (ResultsPath.at(entry.parent) / entry.name).whole_file(is_synced=True) as path:
            write_sealed(path, parts, encoded.tokenizer, FORMAT)
    except (OSError, ConfigError, FolderLost) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        message = f"{entry.parent}: cannot write the cache ({reason}); going on without. {CACHE_VARIABLE} names another"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
