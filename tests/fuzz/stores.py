"""A results folder with everything in it that one can have, and damage to each of its files."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from analysis.commands.figure import figure_names
from harness.storage.json_seal import SEAL, UNSEALED, sealed
from harness.storage.stored import STORE
from tests.fuzz import commands
from tests.sweeps.command import TINY

GRID = (*(f"{key}={value}" for key, value in TINY.items()), "seed=range(2)", "optim.lr=1e-2,1e-1")
FAULTS = (*GRID, "fault=none,weight_bit", "fault.start=3")
SEARCH = (*GRID[: len(TINY)], "search=max_stable_lr", "optim.lr=interval(1e-3,1e-1)", "search.trials=2")
MORE = (*GRID[: len(TINY)], "seed=range(3)", "optim.lr=1e-2")
UNFINISHED = ("seed=7,8", "train.steps=12")
WEIRD_JSON = [
    *("null", "true", "0", "-1", "1.5", "1e-320", "1e999", "NaN", "-Infinity", str(2**63), "9" * 400, "9" * 5000),
    *('""', '"x"', '"nan"', '"../../victims"', '"/etc/passwd"', '"0123456789abcdef"', '"2026-01-01T00:00:00+00:00"'),
    *('"\\u001b[2J"', '"$\\\\frac{$"', '"\\ud800"', '"\\u0000"', '"\\u202e"', f'"{"x" * 5000}"'),
    *("[]", "{}", "[[]]", "[0,1,2,3]", '["a",null]', '{"a":{"b":[{}]}}', "[" * 90 + "]" * 90, "[" * 100_000),
]


@dataclass(frozen=True)
class Damage:
    """What is done to one file or folder of a results folder, named by its place in the sorted list of all of them."""

    file: int
    kind: str
    place: int  # a byte, or the number of a value of some JSON
    text: str  # of JSON, or what is done to the value there
    is_signed: bool  # a checksum that fits again, as somebody with bad intentions would write it


KINDS_OF_ALL = (
    "removed",
    "a folder",
    "a pipe",
    "a link to a file",
    "a link to a folder",
    "a link to itself",
    "a device",
)
KINDS_OF_FILES = ("flipped", "truncated", "emptied", "grown", "binary", "enormous")
TWISTS = ("remove", "twice", "rename", "copy another", *WEIRD_JSON)

damages = st.builds(
    Damage,
    st.integers(0, 10_000),
    st.sampled_from([*KINDS_OF_ALL, *KINDS_OF_FILES, *["json"] * 15]),
    st.integers(0, 100_000),
    st.sampled_from(TWISTS),
    st.sampled_from([True, True, False]),
)
COMMANDS: dict[str, list[str]] = {
    **{name: [name, "out"] for name in ("status", "verify", "cancel", "report", "campaign", "open")},
    "goes on": ["sweep", *FAULTS, "out=out"],
    "searches on": ["sweep", *SEARCH, "out=out"],
    "trains more": ["sweep", *MORE, "out=out"],
    "finishes": ["sweep", *GRID[: len(TINY)], *UNFINISHED, "out=out"],
    "plans": ["sweep", *MORE, "out=out", "plan=true"],
    **{f"is {name}": ["export", "out", "--to", name] for name in ("csv", "netcdf", "tensorboard")},
}
figures = st.sampled_from(figure_names()).map(lambda name: ["figure", name, "out", "x.png"])
acts = st.one_of(st.sampled_from(list(COMMANDS.values())), figures)
stores: SearchStrategy[tuple[Sequence[Damage], Sequence[Sequence[str]]]] = st.tuples(
    st.lists(damages, min_size=1, max_size=2), st.lists(acts, min_size=1, max_size=4)
)


def check(folder: Path, harm: Sequence[Damage], words: Sequence[Sequence[str]]) -> None:
    """Run these commands on a damaged copy, in a furnished folder. Raises Failure."""
    out = folder / "out"
    shutil.copytree(template(), out, symlinks=True)
    names = _names(out)
    done = [
        f"{names[one.file % len(names)]}: {damage(folder, out / names[one.file % len(names)], one)}" for one in harm
    ]
    own = (out, folder / "x.png", folder / "export", folder / ".cache")  # which an AMD CPU's kernels are noted in
    before = commands.seen(folder, *own)
    for one in words:
        (folder / "x.png").unlink(missing_ok=True)
        try:
            commands.check(commands.run(one, folder, str(slurm())), most_errors=1)
            commands.check_same(before, commands.seen(folder, *own), one)
        except commands.Failure as failure:
            raise commands.Failure(f"{failure}\nAfter {', '.join(done)}") from None


def _names(out: Path) -> list[str]:
    """What may be damaged; the metadata of packs, in which nearly everything stands, more often than others."""
    names = sorted(str(path.relative_to(out)) for path in _inside(out))
    records = [name for name in names if name.endswith((".json", ".jsonl"))]
    return [*names, *records, *[name for name in records if re.fullmatch(rf"{STORE}/[0-9a-f]+/zarr.json", name)] * 15]


def _inside(out: Path) -> Iterator[Path]:
    """Every file and folder, but of the many alike chunks and figures only some."""
    for path in sorted(out.rglob("*")):
        is_chunk = path.name.startswith("c.") and (path.name.split(".")[2] != "1" or path.parent.name not in CHUNKS)
        is_signal = path.is_dir() and path.parent.parent.name == STORE and path.name not in CHUNKS
        if not is_chunk and not is_signal:
            yield path


MOST_BYTES = 2**20  # of what is damaged further
CHUNKS = ("loss", "validation_loss", "activation_rms", "final_segment_loss")


# --- damage ------------------------------------------------------------------------------------------------------


def damage(folder: Path, path: Path, how: Damage) -> str:
    """Do it; the words for it."""
    if not os.path.lexists(path):
        return "gone already"
    if how.kind in KINDS_OF_ALL or path.is_dir():
        return _replace(folder, path, how.kind if how.kind in KINDS_OF_ALL else KINDS_OF_ALL[how.place % 7])
    kind = how.kind if how.kind in KINDS_OF_FILES else KINDS_OF_FILES[how.place % len(KINDS_OF_FILES)]
    if path.lstat().st_size > MOST_BYTES or not stat.S_ISREG(path.lstat().st_mode):
        return "what it is already"
    if how.kind == "json" and path.suffix in (".json", ".jsonl"):
        return _twist(path, how)
    content = bytearray(path.read_bytes())
    at = how.place % max(1, len(content))
    if kind == "flipped" and content:
        content[at] ^= 1 << how.place % 8
    elif kind == "truncated":
        content = content[:at]
    elif kind == "emptied":
        content = bytearray()
    elif kind == "grown":
        content += b"{}\n" if how.is_signed else bytes(range(256))
    elif kind == "binary":
        content = bytearray(b"\x00\xff\xfe\x1b[2J\n")
    path.write_bytes(content)
    if kind == "enormous":
        os.truncate(path, 2**40)
    return f"{kind} at {at}"


def _replace(folder: Path, path: Path, kind: str) -> str:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind != "removed":
        victims = folder / "victims"
        to = {"a link to a file": victims / "thesis.tex", "a link to a folder": victims, "a device": Path("/dev/zero")}
        path.symlink_to(to.get(kind, path.name))
    return kind


def _twist(path: Path, how: Damage) -> str:
    """Change one value of some JSON, or of one line of it."""
    lines = (
        path.read_text(errors="replace").splitlines() if path.suffix == ".jsonl" else [path.read_text(errors="replace")]
    )
    number = how.place % max(1, len(lines))
    try:
        tree = json.loads(lines[number])
    except (ValueError, IndexError, RecursionError):
        return "damaged already"
    places = list(_places(tree))
    if not places:
        return "no value in it"
    inside, key = places[how.place // len(lines) % len(places)]
    mark = "the twisted value"
    before = repr(inside[key])[:60]
    if how.text == "remove":
        del inside[key]
    elif how.text == "twice" and isinstance(inside, list):
        inside.append(inside[key])
    elif how.text == "rename" and isinstance(inside, dict):
        inside[f"{key}x"] = inside.pop(key)
    elif how.text == "copy another":
        other, name = places[(how.place * 31 + 7) % len(places)]
        inside[key] = json.loads(json.dumps(other[name]))
    elif how.text in WEIRD_JSON:
        inside[key] = mark
    lines[number] = _text(tree, how.is_signed, mark, how.text)
    path.write_text("\n".join(lines) + ("\n" if path.suffix == ".jsonl" else ""))
    return f"{key!r} of {type(inside).__name__}, {before}: {how.text[:60]}, {'signed' if how.is_signed else ''}"


def _text(tree: Any, is_signed: bool, mark: str, text: str) -> str:
    """The JSON with `text` in place of the mark; signed, with a seal that fits, if it had one."""
    keeps = _sealed_part(tree)
    if is_signed and keeps is not None:
        del keeps[SEAL]
        keeps[SEAL] = UNSEALED  # the last of its name
    whole = json.dumps(tree, separators=(",", ":")).replace(json.dumps(mark), text)
    return sealed(whole).decode() if is_signed and keeps is not None else whole


def _sealed_part(tree: Any) -> dict[str, Any] | None:
    """What has the seal: the attributes of a group, or the object itself."""
    parts = [tree.get("attributes"), tree] if isinstance(tree, dict) else []
    return next((part for part in parts if isinstance(part, dict) and SEAL in part), None)


def _places(tree: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every value in it: the list or object, and its index or key there."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        yield from _places(value, depth + 1)


# --- what is damaged ---------------------------------------------------------------------------------------------


@functools.cache
def template() -> Path:
    """The folder before any damage: complete packs, one that goes on, a search, jobs of Slurm, a trace, a report."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = folder / "out"
    for words in (["sweep", *FAULTS, "out=out"], ["sweep", *SEARCH, "out=out"], ["report", "out"], ["campaign", "out"]):
        ended = commands.run(words, folder)
        assert ended.status == 0, ended
    _unfinished(out)
    (out / "errors").mkdir(exist_ok=True)
    (out / "errors" / "aaaaaaaaaaaaaaaa.txt").write_text("Traceback (most recent call last):\n  x\nValueError: bad\n")
    return out


def _unfinished(out: Path) -> None:
    """A pack that was killed after its checkpoint at step 9, and one that was submitted to Slurm."""
    from harness.storage.results_folder import ResultsPath
    from harness.testing.engine import Dying, Killed
    from sweeps.planning.planner import make_plan
    from sweeps.running.job import train_pack
    from sweeps.slurm.submitted import write_down_all
    from tests.jobs import job_of
    from tests.sweeps import command

    (pack,) = make_plan(command.tiny_trials(*UNFINISHED), (), 8, "cpu", 1).packs
    job = job_of(pack, out.absolute(), block=2, every=3)
    own = job.checkpoints
    with contextlib.suppress(Killed):
        train_pack(job, Dying(own.folder, every=3, about=own.about, dies_at=9))
    waiting = make_plan(command.tiny_trials(*UNFINISHED, "optim.lr=0.3"), (), 8, "cpu", 1).packs[0]
    write_down_all(ResultsPath.open(out), [[dataclasses.replace(job, pack=waiting)]], "17")


@functools.cache
def slurm() -> Path:
    """A folder of programs: a queue in which nothing waits."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-slurm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("cat", "id"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name in ("squeue", "scancel"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder
