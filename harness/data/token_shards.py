"""Token shards: files of ids, as nanoGPT, llm.c and NumPy write them, for training and for validation."""

from __future__ import annotations

import re
from typing import cast

import numpy as np

from harness.config import ConfigError, Data
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
from harness.data.token_file import USUAL, Numbers, open_tokens
from harness.data.tokenizer import Tokens

SUFFIXES = (".bin", ".npy")
VALIDATION_NAME = re.compile(r"(?<![a-z])(e?val|valid|validation)(?![a-z])")


def read_shards(data: Data, look_inside: bool = False) -> CorpusParts[Tokens]:
    """Shards as nanoGPT, llm.c and numpy.save write them: token ids of any type of integer.

    In a folder, shards are validation where their name under the folder has the word val (or valid, validation,
    eval), as in val.bin, fineweb_val_000000.bin or val/0.bin. Without such names the end of all tokens is validation.
    Where `look_inside` says so, ids are checked and given as uint16; otherwise they are as they are stored.
    """
    path, left_out = path_of(data), LeftOut()
    try:
        files = list(walk(path, left_out=left_out)) if path.is_dir() else [(path.name, path)]
        named: list[tuple[str, Numbers]] = []
        for name, file in files:
            if file.suffix in SUFFIXES or file == path:
                named += [(name, open_tokens(data, file))]
            else:
                left_out.add(name, file.stat().st_size, "no *.bin or *.npy")
    except OSError as error:
        refuse(data, f"cannot read {error.filename} ({error.strerror})", "readable files")
    # Those that are not uint16 yet are copied.
    check_memory(data, sum((BYTES_PER_TOKEN + 2 * (shard.dtype != USUAL)) * len(shard) for _, shard in named))
    if not named:
        refuse(data, "no *.bin file in this folder", "a file or a folder of uint16 token shards, *.bin, or *.npy")
    unique: list[tuple[str, Numbers]] = []
    for name, shard in named:
        twin = next((other for other, tokens in unique if _equal(tokens, shard)), None)
        if twin is None:
            unique += [(name, shard)] if len(shard) else []
        elif _is_validation(twin) != _is_validation(name):
            refuse(data, f"{twin} and {name} are equal", "validation tokens that are not trained on")
    shards = [(name, _checked(data, name, shard) if look_inside else cast(Tokens, shard)) for name, shard in unique]
    train, validation = ([shard for name, shard in shards if _is_validation(name) == held] for held in (False, True))
    if not train or not validation:
        train, validation = tail_cut(train + validation, data.validation)
    return CorpusParts(train, validation, sum(1 for _, shard in named if len(shard)) - len(unique), left_out)


def _checked(data: Data, name: str, shard: Numbers) -> Tokens:
    """The ids of a shard as uint16. Raises ConfigError for one that the vocabulary lacks."""
    path, smallest, largest = path_of(data), int(shard.min()), int(shard.max())
    if smallest < 0:
        refuse(data, f"token {smallest} in {name}", "ids from 0 up, below data.vocabulary")
    if largest >= data.vocabulary:
        reason = f"data.vocabulary={data.vocabulary}: too small for token {largest} in {name} of {path}"
        others = f"or another data.token_type than {data.token_type}"
        raise ConfigError(f"{reason}; allowed: above the largest token, up to 65536; {others}")
    return cast(Tokens, shard if shard.dtype == USUAL else shard.astype(np.uint16))


def _is_validation(name: str) -> bool:
    return VALIDATION_NAME.search(name.lower()) is not None


def _equal(one: Numbers, other: Numbers) -> bool:
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
