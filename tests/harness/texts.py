"""Small texts and token shards for the tests of the corpus and its tokenizers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from harness.config import Data

CONTEXT = 16


def prose(seed: int, words: int = 120) -> str:
    """Text that differs from seed to seed, in lines, with characters of one to four bytes."""
    draw = random.Random(seed)
    fixed = ["naïve", "größe", "数据", "🔥", "don't", "  x = 1", "\n", "\n\n"]
    syllables = ["gra", "di", "ent", "mo", "men", "tum", "spi", "ke", "lo", "ss", "co", "sine"]
    drawn = ("".join(draw.choices(syllables, k=3)) for _ in range(words))
    return f"document {seed} " + " ".join(draw.choice([word, word, *fixed]) for word in drawn)


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_prose(folder: Path, count: int = 40, first: int = 0) -> Path:
    return write(folder, {f"part{n % 3}/{n:03}.txt": prose(n, 60 + 7 * n) for n in range(first, first + count)})


def text(path: Path, **values) -> Data:
    return Data(source="text", path=str(path), **values)


def shards(path: Path, vocabulary: int = 65536, **values) -> Data:
    return Data(source="tokens", path=str(path), vocabulary=vocabulary, **values)


def raw(tokens) -> bytes:
    return np.asarray(tokens, "<u2").tobytes()


def llmc(tokens, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + raw(tokens)


def documents(tokens: np.ndarray) -> list[bytes]:
    return bytes(tokens.astype(np.uint8)).split(b"\0")


def bpe(path: Path, vocabulary: int = 400) -> Data:
    return text(path, tokenizer="bpe", vocabulary=vocabulary, validation=0.2)
