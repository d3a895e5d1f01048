"""Where a trial's tokens come from: the section `data`, with every default."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import STRUCTURAL, anything, choice, number, seed
from harness.config.limits import MOST_TOKENS, STEEPEST


@dataclass(frozen=True)
class Data:
    """Where the tokens come from."""

    source: str = choice(
        STRUCTURAL,
        "stdlib",
        "stdlib: Python's own source; text: your files; tokens: shards of token ids; zipf: synthetic",
        "stdlib",
        "text",
        "tokens",
        "zipf",
    )
    path: str | None = anything(STRUCTURAL, None, "file or folder, for source text and tokens")
    skip_bad: bool = anything(
        STRUCTURAL, False, "train on the rest where over a tenth of the bytes of source text is no UTF-8"
    )
    token_type: str = choice(
        STRUCTURAL,
        "auto",
        "type of the numbers in the files of source tokens; auto: that of a header, uint16 without one",
        "auto",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int16",
        "int32",
        "int64",
    )
    tokenizer: str = choice(STRUCTURAL, "bytes", "how text becomes tokens", "bytes", "bpe")
    vocabulary: int = number(
        STRUCTURAL, 256, "size of the vocabulary, for tokenizer bpe and source zipf and tokens", low=2, high=65536
    )
    exponent: float = number(STRUCTURAL, 1.0, "exponent of Zipf's law, for source zipf", low=0, high=STEEPEST)
    length: int = number(STRUCTURAL, 2_000_000, "tokens to make, for source zipf", low=1000, high=MOST_TOKENS)
    validation: float = number(STRUCTURAL, 0.1, "share of the text that is held out", above=0, below=1)
    seed: int | None = seed("seed of the order of batches; null: the trial's seed")
