"""Draws that are the same on every machine and with every version of every library: hashes of a key and a counter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice

from harness.config import ConfigError


def stream(*key: int | str) -> Iterator[int]:
    """Uniform 128-bit integers that follow from `key` alone."""
    prefix = "\0".join(f"{type(part).__name__}:{part}" for part in key).encode()
    counter = 0
    while True:
        digest = hashlib.blake2b(prefix, digest_size=16, salt=counter.to_bytes(16, "little")).digest()
        yield int.from_bytes(digest, "little")
        counter += 1


def shuffled(total: int, *key: int | str) -> Iterator[int]:
    """The integers of range(total), each once, in a uniformly random order that follows from `key`.

    A Fisher-Yates shuffle that keeps only what it has moved, so the first n of many cost n. The bias of taking 128 bits
    modulo a number up to `total` is below total / 2^128.
    """
    moved: dict[int, int] = {}
    for i, word in zip(range(total), stream(*key), strict=False):
        j = i + word % (total - i)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)


def distinct(total: int, count: int, *key: int | str) -> list[int]:
    """`count` different integers of range(total), uniform, in the order drawn: fewer are the beginning of more.

    Raises ConfigError if there are not so many.
    """
    if not 0 <= count <= total:
        raise ConfigError(f"{count} different draws: there are only {total}; allowed: 0 to {total}")
    return list(islice(shuffled(total, *key), count))
