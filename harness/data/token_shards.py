"""Token shards: files of ids, as nanoGPT and llm.c write them, for training and for validation."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np

from harness.config import ConfigError, Data
from harness.data.corpus_files import BYTES_PER_TOKEN, Parts, check_memory, path_of, refuse, size_of, walk
from harness.data.tokenizer import Tokens

LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_BYTES = 20240520, 1, 1024
LLMC_WIDE_MAGIC = 20240801
VALIDATION_NAME = re.compile(r"(?<![a-z])(e?val|valid|validation)(?![a-z])")


def read_shards(data: Data, look_inside: bool = False) -> Parts[Tokens]:
    """Shards as nanoGPT and llm.c write them: uint16, little-endian, bare or after a header.

    In a folder, shards are validation where their name under the folder has the word val (or valid, validation,
    eval), as in val.bin, fineweb_val_000000.bin or val/0.bin. Without such names the end of all tokens is validation.
    """
    path = path_of(data)
    try:
        files = list(walk(path)) if path.is_dir() else [(path.name, path)]
        named = [(name, _open_shard(data, file)) for name, file in files if file.suffix == ".bin" or file == path]
    except OSError as error:
        refuse(data, f"cannot read {error.filename} ({error.strerror})", "readable files")
    check_memory(data, BYTES_PER_TOKEN * size_of([shard for _, shard in named]))
    if not named:
        refuse(data, "no *.bin file in this folder", "a file or a folder of uint16 token shards, *.bin")
    unique: list[tuple[str, Tokens]] = []
    for name, shard in named:
        twin = next((other for other, tokens in unique if _equal(tokens, shard)), None)
        if twin is None:
            unique += [(name, shard)] if len(shard) else []
        elif _is_validation(twin) != _is_validation(name):
            refuse(data, f"{twin} and {name} are equal", "validation tokens that are not trained on")
    for name, shard in unique if look_inside else []:
        if shard.max() >= data.vocabulary:
            reason = f"data.vocabulary={data.vocabulary}: too small for token {shard.max()} in {name} of {path}"
            raise ConfigError(f"{reason}; allowed: above the largest token, up to 65536")
    train, validation = ([shard for name, shard in unique if _is_validation(name) == held] for held in (False, True))
    if not train or not validation:
        train, validation = tail_cut(train + validation, data.validation)
    return Parts(train, validation, sum(1 for _, shard in named if len(shard)) - len(unique))


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
            refuse(data, reason, f"version {LLMC_VERSION} and {start} bytes + 2 a token")
    elif magic == LLMC_WIDE_MAGIC:
        refuse(data, f"{path} holds 32-bit tokens", "uint16 tokens")
    elif size % 2:
        refuse(data, f"{path} is {size} bytes long, an odd number", "uint16 tokens, 2 bytes each")
    if size == start:
        return np.empty(0, np.uint16)
    return np.memmap(path, np.dtype("<u2"), mode="r", offset=start)


def _is_validation(name: str) -> bool:
    return VALIDATION_NAME.search(name.lower()) is not None


def _equal(one: Tokens, other: Tokens) -> bool:
    return np.array_equal(one[:512], other[:512]) and np.array_equal(one, other)


def join(shards: list[Tokens]) -> Tokens:
    """All tokens in one array; those of a single shard are not copied."""
    return shards[0] if len(shards) == 1 else np.concatenate([np.empty(0, np.uint16), *shards])


def tail_cut(shards: list[Tokens], share: float) -> tuple[list[Tokens], list[Tokens]]:
    """The end of all tokens, a share of them, is for validation."""
    left = size_of(shards) - round(share * size_of(shards))
    train, validation = [], []
    for shard in shards:
        cut = min(max(left, 0), len(shard))
        train += [shard[:cut]] if cut else []
        validation += [shard[cut:]] if cut < len(shard) else []
        left -= len(shard)
    return train, validation
