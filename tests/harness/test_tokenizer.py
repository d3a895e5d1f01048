"""Byte-pair encoding and its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import harness.data.tokenizer
from harness.data.corpus import load_corpus
from harness.data.tokenizer import encode_bpe
from tests.harness.texts import CONTEXT, bpe, documents, prose, text, write_prose

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("piece", [1_000_000, 50])
def test_bpe_decodes_to_the_documents(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(harness.data.tokenizer, "PIECE", piece)
    folder = write_prose(tmp_path / "text")
    corpus = load_corpus(bpe(folder), CONTEXT, tmp_path / "cache")
    plain = load_corpus(text(folder, validation=0.2), CONTEXT)
    tokenizer = Tokenizer.from_str(corpus.tokenizer)
    for tokens, expected in ((corpus.train, plain.train), (corpus.validation, plain.validation)):
        decoded = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert decoded.split("<|endoftext|>") == [document.decode() for document in documents(expected)]
        assert len(tokens) < 0.6 * len(expected)
    assert corpus.vocabulary == 400 and corpus.train.max() == 399


def test_bpe_learns_from_the_training_text_alone(tmp_path):
    train = [prose(n).encode() for n in range(5)]
    one, two = (encode_bpe(train, [word * 200], 400, tmp_path) for word in (b"zyzzyva ", b"training "))
    assert one.tokenizer == two.tokenizer
    assert "zyz" not in one.tokenizer


def test_bpe_vocabulary_larger_than_the_text_can_fill(tmp_path):
    corpus = load_corpus(bpe(write_prose(tmp_path / "text"), 60_000), CONTEXT, tmp_path / "cache")
    assert corpus.vocabulary == len(corpus.counts) == 60_000
    assert corpus.train.max() < corpus.description["bpe"]["tokens"] < 60_000


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def forbid_training(monkeypatch):
    def fail(*arguments):
        raise AssertionError("trained again")

    monkeypatch.setattr(harness.data.tokenizer, "_train", fail)


def test_cache_is_used_again_wherever_the_text_lies(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = load_corpus(bpe(write_prose(tmp_path / "one")), CONTEXT, cache)
    assert len(entries(cache)) == 1
    write_prose(tmp_path / "two")
    forbid_training(monkeypatch)
    second = load_corpus(bpe(tmp_path / "two"), CONTEXT + 1, cache)
    assert np.array_equal(first.train, second.train) and np.array_equal(first.validation, second.validation)
    assert first.fingerprint == second.fingerprint and first.tokenizer == second.tokenizer
    assert {**second.description, "path": str(tmp_path / "one")} == first.description
    with pytest.raises(ValueError, match="read-only"):
        second.train[0] = 1


def test_cache_knows_what_matters(tmp_path):
    cache, folder = tmp_path / "cache", write_prose(tmp_path / "text")
    small = load_corpus(bpe(folder, 300), CONTEXT, cache)
    assert load_corpus(bpe(folder, 301), CONTEXT, cache).train.max() == 300 > small.train.max()
    load_corpus(text(folder, tokenizer="bpe", vocabulary=300, validation=0.5), CONTEXT, cache)
    path = next(folder.rglob("*.txt"))
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"d", b"D", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load_corpus(bpe(folder, 300), CONTEXT, cache).fingerprint != small.fingerprint
    assert len(entries(cache)) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-2],
        lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        lambda content: content.replace(b"endoftext", b"endoftexT", 1),
        lambda content: content[:10],
        lambda content: b"",
    ],
    ids=["short", "bit", "tokenizer", "stub", "empty"],
)
def test_damaged_entry_is_built_again(tmp_path, damage):
    cache, folder = tmp_path / "cache", write_prose(tmp_path / "text")
    first = load_corpus(bpe(folder), CONTEXT, cache)
    (entry,) = entries(cache)
    intact = entry.read_bytes()
    entry.write_bytes(damage(intact))
    with pytest.warns(RuntimeWarning, match="damaged cache entry"):
        second = load_corpus(bpe(folder), CONTEXT, cache)
    assert second.fingerprint == first.fingerprint and second.tokenizer == first.tokenizer
    assert entries(cache) == [entry] and entry.read_bytes() == intact


def test_cache_that_cannot_be_written_only_warns(tmp_path):
    folder = write_prose(tmp_path / "text")
    expected = load_corpus(bpe(folder), CONTEXT, tmp_path / "cache")
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="cannot write the cache.*STABILITY_HARNESS_CACHE"):
        found = load_corpus(bpe(folder), CONTEXT, tmp_path / "file" / "cache")
    assert found.fingerprint == expected.fingerprint


def test_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        corpus = load_corpus(bpe(write_prose(tmp_path / "text")), CONTEXT, tmp_path / "cache")
    assert len(corpus.train) and entries(tmp_path / "cache") == []


def test_environment_names_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path / "chosen"))
    load_corpus(bpe(write_prose(tmp_path / "text")), CONTEXT)
    assert len(entries(tmp_path / "chosen")) == 1


def test_two_processes_build_at_once(tmp_path):
    cache, folder = tmp_path / "cache", write_prose(tmp_path / "text", count=120)
    code = (
        "import sys; from pathlib import Path\n"
        "from harness.config import Data; from harness.data.corpus import load_corpus\n"
        "data = Data(source='text', path=sys.argv[1], tokenizer='bpe', vocabulary=2000, validation=0.2)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(load_corpus(data, 16, Path(sys.argv[2])).fingerprint)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(folder), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(Path(harness.data.tokenizer.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [process.communicate()[0].strip() for process in processes]
    data = text(folder, tokenizer="bpe", vocabulary=2000, validation=0.2)
    assert found == [load_corpus(data, CONTEXT, tmp_path / "other").fingerprint] * 2
    assert [entry.name for entry in entries(cache)] == [entry.name for entry in entries(tmp_path / "other")]
