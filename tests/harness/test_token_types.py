"""Token files of every type, with and without a header: the right ids, or one line that names the key."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest

from harness.config import ConfigError, Data
from harness.config.fields import field_types
from harness.data.corpus import check_data, load_corpus
from tests.harness.texts import CONTEXT, prose, raw, shards, write

TYPES = ["uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64"]
DRAW = np.random.default_rng(0)
IDS = DRAW.integers(0, 200, 6000)
WIDE = DRAW.integers(0, 50_257, 6000)


def bare(kind: str, ids: np.ndarray = IDS) -> bytes:
    return ids.astype(np.dtype(kind).newbyteorder("<")).tobytes()


def npy(kind: str, ids: np.ndarray = IDS, **options) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, ids.astype(kind), **options)
    return file.getvalue()


def llama3(ids: np.ndarray, version: int = 7, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, version, len(ids) if count is None else count
    return header.tobytes() + bare("uint32", ids)


def read(folder: Path, files: dict[str, bytes], **values) -> np.ndarray:
    """All ids that are read."""
    data = shards(write(folder, files), **values)
    assert check_data(data, CONTEXT) == ""
    corpus = load_corpus(data, CONTEXT)
    assert corpus.train.dtype == corpus.validation.dtype == np.uint16
    return np.concatenate([corpus.train, corpus.validation])


def refused(data: Data, *acts) -> str:
    """The one line with which the data are refused, by the check of a plan and by the reader."""
    lines = set()
    for act in acts or (check_data, load_corpus):
        with pytest.raises(ConfigError) as caught:
            act(data, CONTEXT)
        (line,) = caught.value.reasons
        lines.add(line)
    (line,) = lines
    assert "\n" not in line and "; allowed: " in line
    return line


# --- types that are read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.npy", "train.bin"])
@pytest.mark.parametrize("kind", [*TYPES, "int8", ">u2", ">i8"])
def test_numpys_header_names_the_type(tmp_path: Path, kind: str, name: str) -> None:
    ids = IDS % 128
    assert np.array_equal(read(tmp_path, {name: npy(kind, ids)}), ids)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_headers_of_two_versions(tmp_path: Path, version: tuple[int, int]) -> None:
    assert np.array_equal(read(tmp_path, {"a.npy": npy("<u4", version=version)}), IDS)


@pytest.mark.parametrize("kind", TYPES)
def test_the_key_names_the_type_of_bare_numbers(tmp_path: Path, kind: str) -> None:
    assert np.array_equal(read(tmp_path, {"a.bin": bare(kind)}, token_type=kind), IDS)


def test_every_type_that_the_key_allows_is_tested() -> None:
    choices = Data.__dataclass_fields__["token_type"].metadata["choices"]
    assert field_types(Data)["token_type"] == (str, False) and sorted(choices) == sorted(["auto", *TYPES])


def test_llmcs_wide_header(tmp_path: Path) -> None:
    assert np.array_equal(read(tmp_path, {"a_train.bin": llama3(WIDE)}), WIDE)


def test_equal_ids_have_one_fingerprint_whatever_their_type(tmp_path: Path) -> None:
    files = {"a": raw(IDS), "b": npy("i8"), "c": llama3(IDS)}
    write(tmp_path, files)
    assert len({load_corpus(shards(tmp_path / name), CONTEXT).fingerprint for name in files}) == 1


@pytest.mark.parametrize(
    "ids",
    [IDS, WIDE, WIDE % 2, WIDE % 65, np.zeros(6000), np.full(6000, 13)],
    ids=["small", "gpt2", "bits", "letters", "zeros", "equal"],
)
def test_bare_uint16_is_read_as_ever(tmp_path: Path, ids: np.ndarray) -> None:
    assert np.array_equal(read(tmp_path, {"a.bin": raw(ids)}), ids)


# --- what is no uint16 is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uint32", "uint64", "int32", "int64"])
@pytest.mark.parametrize(
    "ids",
    [IDS, WIDE, IDS % 2, DRAW.integers(0, 128_256, 6000), np.where(IDS % 5, IDS, 100_000)],
    ids=["small", "gpt2", "bits", "llama3", "some_large"],
)
@pytest.mark.parametrize("offset", [0, 1], ids=["even", "odd"])
def test_wider_numbers(tmp_path: Path, kind: str, ids: np.ndarray, offset: int) -> None:
    write(tmp_path, {"train.bin": bare(kind, ids[offset:])})
    wide = kind.replace("int", "uint") if not kind.startswith("u") else kind
    line = refused(shards(tmp_path))
    assert f"train.bin holds no uint16 tokens: their upper halves are those of small {wide} numbers" in line
    assert line.endswith(f"allowed: data.token_type={wide}, or data.token_type=uint16 if they are such")


def test_padding_does_not_hide_wider_numbers(tmp_path: Path) -> None:
    padded = np.where(DRAW.random(6000) < 0.05, -100, WIDE)  # as loss functions ignore it
    write(tmp_path, {"train.bin": bare("int32", padded)})
    assert "data.token_type=int32" in refused(shards(tmp_path))


def test_wider_numbers_behind_zeros(tmp_path: Path) -> None:
    ids = np.concatenate([np.zeros(200_000, int), WIDE])
    write(tmp_path, {"train.bin": bare("uint32", ids)})
    assert "data.token_type=uint32" in refused(shards(tmp_path))


def test_the_key_has_the_last_word(tmp_path: Path) -> None:
    ids = IDS * (np.arange(len(IDS)) % 2 == 0)  # every second token is 0
    write(tmp_path, {"train.bin": raw(ids)})
    assert "data.token_type=uint16 if they are such" in refused(shards(tmp_path))
    assert np.array_equal(read(tmp_path, {}, token_type="uint16"), ids)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (prose(1).encode(), "is text; allowed: token ids; or data.source=text"),
        (("数据 " * 200).encode(), "is text; allowed: token ids; or data.source=text"),
        (gzip.compress(raw(IDS)), "is a file of gzip; allowed: bare uint16 tokens"),
        (b"PK\x03\x04" + raw(IDS), "is a zip archive, as numpy.savez and torch.save write it; allowed: "),
    ],
    ids=["text", "chinese", "gzip", "zip"],
)
def test_files_of_other_kinds(tmp_path: Path, content: bytes, words: str) -> None:
    write(tmp_path, {"train.bin": content + b"x" * (len(content) % 2)})
    assert words in refused(shards(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy("f4"), "a.npy has 6000 values of type float32; allowed: whole numbers in one dimension"),
        (npy("?"), "a.npy has 6000 values of type bool; allowed: whole numbers in one dimension"),
        (npy("u2", IDS.reshape(60, 100)), "a.npy has 60 x 100 values of type uint16; allowed: "),
        (npy("u2", IDS[0]), "a.npy has one values of type uint16; allowed: "),
        (
            npy("u4")[:-4],
            "a.npy has a header of NumPy for 6000 tokens, but is 24124 bytes long; allowed: 128 bytes + 4",
        ),
        (npy("u4") + b"more", "for 6000 tokens, but is 24132 bytes long; allowed: 128 bytes + 4 a token"),
        (npy("u4")[:50], "a.npy has a damaged header of NumPy (EOF"),
        (npy("u4").replace(b"{'descr", b"{'d(scr"), "a.npy has a damaged header of NumPy ("),
        (b"\x93NUMPY\x09\x09" + raw(IDS), "a.npy has a damaged header of NumPy ("),
        (raw(IDS), "a.npy has no header of NumPy; allowed: a file as numpy.save writes it"),
        (b"", "a.npy has no header of NumPy"),
        (npy("u2", IDS[:0]), "0 tokens for training"),
    ],
)
def test_bad_files_of_numpy(tmp_path: Path, content: bytes, words: str) -> None:
    write(tmp_path, {"a.npy": content})
    assert words in refused(shards(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (llama3(IDS, version=1), "header of version 1 for 6000 tokens, but is 25024 bytes long; allowed: version 7"),
        (llama3(IDS, count=9000), "header of version 7 for 9000 tokens, but is 25024 bytes long"),
        (llama3(IDS)[:-1], "header of version 7 for 6000 tokens, but is 25023 bytes long"),
    ],
)
def test_bad_wide_headers(tmp_path: Path, content: bytes, words: str) -> None:
    write(tmp_path, {"a.bin": content})
    assert words in refused(shards(tmp_path))


def test_lengths_that_no_number_of_tokens_has(tmp_path: Path) -> None:
    write(tmp_path, {"a.bin": bare("uint32") + b"12"})
    line = refused(shards(tmp_path, token_type="uint32"))
    assert "a.bin is 24002 bytes long, no multiple of 4; allowed: uint32 tokens, 4 bytes each" in line


def test_a_header_that_says_otherwise(tmp_path: Path) -> None:
    write(tmp_path, {"a.npy": npy("i8"), "b.bin": llama3(WIDE)})
    line = "a.npy has int64 tokens, as its header says; allowed: auto, int64"
    assert line in refused(shards(tmp_path / "a.npy", token_type="uint32"))
    assert "allowed: auto, uint32" in refused(shards(tmp_path / "b.bin", token_type="uint16"))
    assert np.array_equal(read(tmp_path / "c", {"a.npy": npy("i8")}, token_type="int64"), IDS)


def test_ids_that_no_vocabulary_has(tmp_path: Path) -> None:
    """Only what reads all of a file sees these."""
    write(tmp_path, {"negative.npy": npy("i4", IDS - 1), "large.npy": npy("i4", IDS + 65_500)})
    assert "token -1 in negative.npy; allowed: ids from 0 up" in refused(shards(tmp_path / "negative.npy"), load_corpus)
    line = refused(shards(tmp_path / "large.npy"), load_corpus)
    assert "data.vocabulary=65536: too small for token 65699 in large.npy" in line
    assert "or another data.token_type than auto" in line


def test_the_key_is_for_token_files_alone() -> None:
    from harness.config import Trial
    from harness.training.config_checks import check_trial

    with pytest.raises(ConfigError, match="data.token_type=uint32: data.source=zipf has no token files; allowed: auto"):
        check_trial(Trial(data=Data(source="zipf", token_type="uint32")))
    with pytest.raises(ConfigError, match="data.skip_bad=true: data.source=zipf reads no text .*; allowed: false"):
        check_trial(Trial(data=Data(source="zipf", skip_bad=True)))
