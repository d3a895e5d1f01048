"""The corpus: sources, the split into two parts, tokenizers, the cache, and every error line."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from harness.config import ConfigError, Data
from harness.data.corpus import check_data, load_corpus
from tests.harness.texts import CONTEXT, documents, llmc, prose, raw, shards, text, write, write_prose

pytestmark = pytest.mark.usefixtures("own_cache")


# --- Python's own source ----------------------------------------------------------------------------------------


def test_stdlib_is_the_running_pythons_source():
    corpus = load_corpus(Data(), CONTEXT)
    assert corpus.vocabulary == 256 and corpus.train.dtype == corpus.validation.dtype == np.uint16
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert share == pytest.approx(0.1, abs=0.001)
    source = Path(sysconfig.get_paths()["stdlib"], "json", "__init__.py").read_bytes()
    assert [source in documents(part) for part in (corpus.train, corpus.validation)].count(True) == 1
    assert not set(documents(corpus.train)) & set(documents(corpus.validation))
    assert corpus.description["python"] == platform.python_version()
    assert json.loads(json.dumps(corpus.description)) == corpus.description
    assert np.array_equal(corpus.counts, np.bincount(corpus.train, minlength=256)) and corpus.counts.dtype == np.int64


def test_stdlib_takes_source_alone_and_bad_encodings_as_bytes(tmp_path, monkeypatch):
    wanted = {"a.py": prose(1), "b/c.py": b"# bad: \xff\xfe\n" * 40, "b/test/d.py": prose(2)}
    others = ["site-packages/x.py", "dist-packages/x.py", "__pycache__/x.py", "_sysconfigdata_x.py", "config-3/x.py"]
    unwanted = {name: prose(n) for n, name in enumerate([*others, "notes.txt"], 10)}
    write(tmp_path, {**wanted, **unwanted})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus(Data(validation=0.3), CONTEXT)
    found = documents(corpus.train) + documents(corpus.validation)
    assert sorted(found) == sorted(x if isinstance(x, bytes) else x.encode() for x in wanted.values())
    encoded = load_corpus(Data(validation=0.3, tokenizer="bpe", vocabulary=300), CONTEXT, tmp_path / "cache")
    assert encoded.train.max() < 300


# --- text -----------------------------------------------------------------------------------------------------------


def test_each_document_is_in_exactly_one_part(tmp_path):
    corpus = load_corpus(text(write_prose(tmp_path), validation=0.25), CONTEXT)
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert sorted(train + validation) == sorted(path.read_bytes() for path in tmp_path.rglob("*.txt"))
    assert not set(train) & set(validation)
    assert sum(map(len, validation)) / sum(map(len, train + validation)) == pytest.approx(0.25, abs=0.03)
    assert corpus.description["files"] == {"train": len(train), "validation": len(validation), "repeated": 0}


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_copies_of_a_file_are_never_in_both_parts(tmp_path, share):
    names = {f"{copy}/{n}.txt": prose(n) for n in range(8) for copy in "abc"}
    corpus = load_corpus(text(write(tmp_path, names), validation=share), CONTEXT)
    assert not set(documents(corpus.train)) & set(documents(corpus.validation))
    assert corpus.description["files"]["repeated"] == 16


def test_copies_of_one_file_alone_are_cut_like_one_file(tmp_path):
    write(tmp_path, {"a.txt": prose(3), "b.txt": prose(3)})
    corpus = load_corpus(text(tmp_path), CONTEXT)
    assert bytes(np.concatenate([corpus.train, corpus.validation]).astype(np.uint8)) == prose(3).encode()


@pytest.mark.parametrize("share", [0.001, 0.1, 0.999])
def test_both_parts_get_a_document_whatever_the_share(tmp_path, share):
    corpus = load_corpus(text(write_prose(tmp_path, count=2), validation=share), CONTEXT)
    assert len(documents(corpus.train)) == len(documents(corpus.validation)) == 1


def test_one_file_is_cut_between_characters(tmp_path):
    whole = "数据" * 500
    write(tmp_path, {"a.txt": whole})
    for share in (0.1, 0.1004, 0.1008):
        corpus = load_corpus(text(tmp_path / "a.txt", validation=share), CONTEXT)
        train, validation = (bytes(part.astype(np.uint8)).decode() for part in (corpus.train, corpus.validation))
        assert train + validation == whole
        assert len(validation) == pytest.approx(share * len(whole), abs=1)


def test_the_corpus_depends_on_contents_and_names_but_not_on_where_or_when_files_were_written(tmp_path):
    files = {f"{n}.txt": prose(n) for n in range(12)}
    write(tmp_path / "one", files)
    write(tmp_path / "two", dict(reversed(files.items())))
    one, two = (load_corpus(text(tmp_path / name), CONTEXT) for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint and np.array_equal(one.train, two.train)
    write(tmp_path / "two", {"3.txt": prose(3) + "!"})
    assert load_corpus(text(tmp_path / "two"), CONTEXT).fingerprint != one.fingerprint


def test_only_visible_text_files_are_read(tmp_path):
    write(tmp_path, {"a.txt": prose(1), "b": prose(2)})
    hidden = {".c.txt": prose(3), ".git/d.txt": prose(4), "__pycache__/e.txt": prose(5)}
    write(tmp_path, {**hidden, "f.bin": b"\xff" * 99, "g.bin": b"a\0b", "h.bin": b"x" * 9000 + b"\0", "i.txt": ""})
    os.mkfifo(tmp_path / "pipe.txt")
    corpus = load_corpus(text(tmp_path, validation=0.5, skip_bad=True), CONTEXT)
    found = documents(corpus.train) + documents(corpus.validation)
    assert sorted(found) == sorted([prose(1).encode(), prose(2).encode()])


def test_tokens_cannot_be_changed(tmp_path):
    corpus = load_corpus(text(write_prose(tmp_path)), CONTEXT)
    for part in (corpus.train, corpus.validation):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1


# --- token shards ---------------------------------------------------------------------------------------------------

COUNT = np.arange(1000, dtype=np.uint16) * 65


def test_nanogpt_layout(tmp_path):
    write(tmp_path, {"train.bin": raw(COUNT), "val.bin": raw(COUNT[:100] + 1), "meta.txt": "no shard"})
    corpus = load_corpus(shards(tmp_path), CONTEXT)
    assert np.array_equal(corpus.train, COUNT) and np.array_equal(corpus.validation, COUNT[:100] + 1)
    assert corpus.vocabulary == 65536 and corpus.counts[65] == 1 and corpus.counts[66] == 0


def test_llmc_layout(tmp_path):
    parts = {f"fineweb_train_{n:06}.bin": llmc(COUNT + n) for n in (2, 0, 1)}
    write(tmp_path, {**parts, "fineweb_val_000000.bin": llmc(COUNT[::-1])})
    corpus = load_corpus(shards(tmp_path), CONTEXT)
    assert np.array_equal(corpus.train, np.concatenate([COUNT, COUNT + 1, COUNT + 2]))
    assert np.array_equal(corpus.validation, COUNT[::-1])


def test_shards_without_a_validation_name_are_cut_at_the_end(tmp_path):
    write(tmp_path, {"a/0.bin": raw(COUNT), "a/1.bin": llmc(COUNT + 1), "interval.bin": raw(COUNT + 2)})
    corpus = load_corpus(shards(tmp_path, validation=0.4), CONTEXT)
    assert len(corpus.validation) == 1200
    expected = np.concatenate([COUNT, COUNT + 1, COUNT + 2])
    assert np.array_equal(np.concatenate([corpus.train, corpus.validation]), expected)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokens"])
def test_one_shard_is_cut_at_the_end(tmp_path, name):
    write(tmp_path, {name: raw(COUNT)})
    corpus = load_corpus(shards(tmp_path / name), CONTEXT)
    assert np.array_equal(corpus.train, COUNT[:900]) and np.array_equal(corpus.validation, COUNT[900:])


def test_copies_of_a_shard_count_once(tmp_path):
    write(tmp_path, {"0.bin": raw(COUNT), "1.bin": llmc(COUNT)})
    corpus = load_corpus(shards(tmp_path), CONTEXT)
    assert np.array_equal(np.concatenate([corpus.train, corpus.validation]), COUNT)
    assert corpus.description["files"]["repeated"] == 1


def test_fingerprint_depends_on_tokens_parts_and_vocabulary_but_not_on_files(tmp_path):
    one, three = write(tmp_path, {"0.bin": raw(COUNT)}) / "0.bin", tmp_path / "three"
    write(three, {f"{n}.bin": llmc(COUNT[n * 100 : n * 100 + 500 * n + 100]) for n in (0,)})
    write(three, {"1.bin": raw(COUNT[100:700]), "2.bin": raw(COUNT[700:])})
    same = load_corpus(shards(one), CONTEXT).fingerprint
    assert load_corpus(shards(three), CONTEXT).fingerprint == same
    others = [shards(one, vocabulary=65535), shards(one, validation=0.2)]
    assert len({same, *(load_corpus(data, CONTEXT).fingerprint for data in others)}) == 3


# --- Zipf's law -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_zipf_frequencies(exponent):
    data = Data(source="zipf", vocabulary=50, exponent=exponent, length=200_000, validation=0.25)
    corpus = load_corpus(data, CONTEXT)
    assert (len(corpus.train), len(corpus.validation)) == (150_000, 50_000)
    weights = np.arange(1, 51) ** -exponent
    expected = 150_000 * weights / weights.sum()
    # Chi-square with 49 degrees of freedom stays below 95 but once in 10,000 draws; the draw is fixed.
    assert (np.square(corpus.counts - expected) / expected).sum() < 95
    pairs = np.bincount(50 * corpus.train[0::2].astype(int) + corpus.train[1::2], minlength=2500)
    both = 75_000 * np.outer(weights, weights).ravel() / weights.sum() ** 2
    likely = both > 5
    chi_square = (np.square(pairs - both) / both)[likely].sum()
    assert abs(chi_square - likely.sum()) < 4 * np.sqrt(2 * likely.sum())
    assert load_corpus(data, CONTEXT).fingerprint == corpus.fingerprint


def test_zipf_reaches_the_largest_vocabulary():
    corpus = load_corpus(Data(source="zipf", vocabulary=65536, exponent=0.0, length=400_000), CONTEXT)
    assert corpus.train.max() == 65535 and len(corpus.counts) == 65536


# --- errors: one line that names the key, the value and what is allowed ---------------------------------------------

LONG, SHORT = "text " * 100, "x" * 170

ERRORS = [
    ("text", {}, "missing", {}, r"data.path=.*missing: no such file or folder; allowed: a file or a folder"),
    ("tokens", {}, "missing", {}, r"data.path=.*missing: no such file or folder; allowed: a file or a folder"),
    ("text", {}, None, {}, r"data.path=None: no such file or folder; allowed: a file or a folder"),
    ("text", {"a": b"\xff"}, "", {}, r"data.path=.*: no UTF-8 text in this folder; allowed: UTF-8 text"),
    ("text", {".a": LONG}, "", {}, r"data.path=.*: no UTF-8 text in this folder; allowed: UTF-8 text"),
    ("text", {"a": LONG.encode("utf-16")}, "a", {}, r"data.path=.*a: no UTF-8 text in this file; allowed: UTF-8 text"),
    ("text", {"a": ""}, "a", {}, r"data.path=.*a: empty text; allowed: text of at least two windows"),
    ("text", {"a": "", "b": ""}, "", {}, r"data.path=.*: empty text; allowed: text of at least two windows"),
    ("text", {"a": "x"}, "a", {}, r"data.path=.*a: 1 tokens for training .* model.context=16; allowed: at least 17"),
    ("text", {"a": SHORT[:160]}, "a", {}, r"16 tokens for validation at data.validation=0.1.* allowed: at least 17"),
    ("text", {"a": LONG, "b": "short"}, "", {}, r"5 tokens for validation at data.validation=0.1"),
    ("text", {"a": SHORT}, "a", {"validation": 0.95}, r"a: 9 tokens for training at data.validation=0.95"),
    ("text", {"a": SHORT[:160]}, "a", {"tokenizer": "bpe", "vocabulary": 300}, r"16 tokens for validation"),
    ("tokens", {"a.txt": LONG}, "", {}, r"data.path=.*: no \*.bin file in this folder; allowed: .*uint16"),
    ("tokens", {"a.bin": raw(COUNT), "b.bin": b"odd"}, "", {}, r"b.bin is 3 bytes long, an odd .*; allowed: uint16"),
    ("tokens", {"a.bin": raw(COUNT[:20] % 9)}, "", {}, r"data.path=.*: 2 tokens for validation .* at least 17"),
    ("tokens", {"a.bin": b""}, "", {}, r"data.path=.*: 0 tokens for training .*; allowed: at least 17"),
    ("tokens", {"a.bin": llmc(COUNT)[:-2]}, "", {}, r"a.bin has a header .* for 1000 tokens, but is 3022 bytes long"),
    ("tokens", {"a.bin": llmc(COUNT, version=2)}, "", {}, r"a.bin has a header of version 2 .*; allowed: version 1"),
    ("tokens", {"a.bin": llmc(COUNT, 20240801, 7)}, "", {}, r"is 3024 bytes long; allowed: version 7 .* 4 a token"),
    ("tokens", {"train.bin": raw(COUNT), "val.bin": llmc(COUNT)}, "", {}, r"train.bin and val.bin are equal; allowed"),
    ("zipf", {}, None, {"length": 1000, "validation": 0.01}, r"data.length=1000: 10 tokens for validation at .*=0.01"),
]


@pytest.mark.parametrize(("source", "files", "path", "values", "line"), ERRORS)
@pytest.mark.parametrize("act", [check_data, load_corpus])
def test_error_lines(tmp_path, source, files, path, values, line, act):
    write(tmp_path, files)
    data = Data(source=source, path=None if path is None else str(tmp_path / path), **values)
    with pytest.raises(ConfigError, match=line) as caught:
        act(data, CONTEXT)
    assert not (tmp_path / "own_cache").exists()
    assert "\n" not in str(caught.value)


def test_token_beyond_the_vocabulary_names_the_shard(tmp_path):
    write(tmp_path, {"0.bin": raw(COUNT % 200), "1.bin": raw(COUNT % 201)})
    line = r"data.vocabulary=200: too small for token 200 in 1.bin of .*; allowed: above the largest token"
    with pytest.raises(ConfigError, match=line):
        load_corpus(shards(tmp_path, vocabulary=200), CONTEXT)
    assert load_corpus(shards(tmp_path, vocabulary=201), CONTEXT).vocabulary == 201


def test_text_that_only_tokenizing_makes_too_short(tmp_path):
    data = text(write(tmp_path, {"a": LONG}) / "a", tokenizer="bpe", vocabulary=300)
    check_data(data, CONTEXT)
    with pytest.raises(ConfigError, match=r"data.path=.*a: \d+ tokens for validation .*; allowed: at least 17"):
        load_corpus(data, CONTEXT, tmp_path / "cache")


def test_good_data_pass_the_check(tmp_path):
    write(tmp_path / "tokens", {"train.bin": raw(COUNT), "val.bin": raw(COUNT[:17])})
    for data in (text(write_prose(tmp_path / "text")), shards(tmp_path / "tokens"), Data(), Data(source="zipf")):
        check_data(data, CONTEXT)
    with pytest.raises(ConfigError, match="17 tokens for validation .* model.context=17"):
        check_data(shards(tmp_path / "tokens"), 17)
