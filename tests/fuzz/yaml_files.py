"""Folders with studies, mitigations and faults of one's own: as they should be, and with all else that YAML has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from sweeps.compose.hydra_calls import FOLDER
from tests.fuzz import commands, values

GROUPS = ("study", "mitigation", "fault")
RAW = [
    b"",
    b"\x00\xff\xfe",
    b"\xef\xbb\xbfseed: 1\n",
    "seed: 1".encode("utf-16"),
    b"---\nseed: 1\n---\nseed: 2\n",
    b"%YAML 1.1\n---\nseed: 1\n",
    b"%TAG ! tag:x,2000:\n---\n!x seed: 1\n",
    b"a: &a [*a]\n",
    b"a: &a {b: *a}\n",
    b"a: *b\n",
    b"model: &m {width: 16}\noptim: *m\n",
    b"<<: {seed: 1}\n",
    b"model: {<<: [{width: 16}, {depth: 1}]}\n",
    b"a: &a [%s]\nb: &b [%s]\nc: &c [%s]\nd: [%s]\n" % (b"x," * 9, b"*a," * 9, b"*b," * 9, b"*c," * 9),
    b"[" * 5000,
    b"{a: " * 5000,
    b"- " * 5000,
    b"? " * 3000,
    b"&a " * 100,
    b"!" * 100,
    b"? [a, {b: c}]\n: 1\n",
    b"? {a: b}\n: 1\n",
    b"seed: 1\nseed: 2\n",
    b"seed: !!python/object/apply:os.mkdir [called]\n",
    b"seed: !!binary AAAA\n",
    b"seed: !!timestamp 2026-01-01\n",
    b"seed: 2026-01-01\n",
    b"seed: 1:30:00\n",
    b"seed: 0b11\n",
    b"!!set {a, b}\n",
    b"!!omap [a: 1]\n",
    b"model: |\n  width: 16\n",
    b"optim.lr: 0.1\n",
    b"optim: {lr: .inf}\n",
    b"\tseed: 1\n",
    b"seed: 'x\n",
    b'seed: "\\ud800"\n',
    b'seed: "\\x1b[2J"\n',
    b"k" * 2000 + b": 1\n",
    b"x: " + b"9" * 5000 + b"\n",
    b"x: 1e" + b"9" * 50 + b"\n",
    b"# @package hydra\nverbose: true\n",
    b"# @package a.b.c\nseed: 1\n",
    b"# @package _global_.x\nseed: 1\n",
    b"# @package _name_\nseed: 1\n",
    b"# @package _group_.x.${seed}\nseed: 1\n",
    b"#" * 1000 + b"\n",
    b"seed: 1\n" * 30_000,
]
DEFAULTS = [
    "_self_",
    "base",
    "mine",
    "grid",
    "none",
    "/study/grid",
    "/hydra/launcher: slurm",
    "override /hydra/launcher: slurm",
    "override /hydra/launcher: local",
    "override /hydra/sweeper: basic",
    "override /fault: weight_bit",
    "optional nothing",
    "base@hydra",
    "base@_global_",
    "?",
    "${seed}",
    "../../../victims",
    "/victims",
    "..",
    "",
    "weight_bit",
    "value",
    "clip_1",
    "schema",
]
HYDRA = [
    {"sweeper": {"params": {"seed": "range(2)"}}},
    {"sweeper": {"params": {"optim.lr": "1e-3,1e-2", "fault": "none,weight_bit"}}},
    {"launcher": {"workers": 1}},
    {"launcher": {"time": 5, "partition": "debug"}},
    {"hydra_logging": {"version": 1}},
    {"job_logging": {}},
    {"run": {"dir": "x"}},
    {"mode": "RUN"},
    {"verbose": True},
    {"searchpath": ["file://victims"]},
    {"callbacks": {"x": {"_target_": "os.mkdir"}}},
]

wild_keys = st.one_of(
    st.sampled_from([*values.SECTIONS, "seed", "out", "hydra", "defaults", "fault", "mitigation"]), values.scalars
)


@functools.cache
def _ours(group: str) -> list[dict[str, Any]]:
    found = [yaml.safe_load(file.read_text()) or {} for file in sorted((FOLDER / group).glob("*.yaml"))]
    return [tree for tree in found if isinstance(tree, dict)]


@st.composite
def _tree(draw: st.DrawFn, group: str) -> dict[Any, Any]:
    """One of ours, or a few sensible fields; then with something else put in."""
    tree: dict[Any, Any] = dict(draw(st.sampled_from(_ours(group)))) if draw(st.booleans()) else {}
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from(values.keys()))
        part, _, name = key.rpartition(".")
        value = draw(values.sensible(key))
        if group == "fault":
            if part == "fault":
                tree[name] = value
        elif part and isinstance(tree.get(part, {}), dict):
            tree[part] = {**tree.get(part, {}), name: value}
        else:
            tree[key] = value
    kind = draw(st.integers(0, 7))
    if kind < 3 and tree:
        key = draw(st.sampled_from(sorted(tree, key=str)))
        if isinstance(tree[key], dict) and tree[key] and draw(st.booleans()):
            inner = draw(st.sampled_from(sorted(tree[key], key=str)))
            tree[key] = {**tree[key], inner: draw(values.trees)}
        else:
            tree[key] = draw(values.trees)
    elif kind == 3:
        tree[draw(wild_keys)] = draw(values.trees)
    elif kind == 4:
        listed = st.one_of(st.sampled_from(DEFAULTS), values.scalars).map(_entry)
        tree["defaults"] = draw(st.one_of(st.lists(listed, max_size=3), values.trees))
    elif kind == 5:
        tree["hydra"] = draw(st.one_of(st.sampled_from(HYDRA), values.trees))
    elif kind == 6:
        params = st.dictionaries(st.one_of(st.sampled_from(values.keys()), values.texts), values.trees, max_size=2)
        tree["hydra"] = {"sweeper": {"params": draw(params)}}
    return tree


def _entry(value: Any) -> Any:
    if isinstance(value, str) and ": " in value:
        key, _, name = value.partition(": ")
        return {key: name}
    return value


@st.composite
def _content(draw: st.DrawFn, group: str) -> bytes:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(RAW))
    if kind == 1:
        return draw(
            st.one_of(st.binary(max_size=30), values.texts.map(lambda text: text.encode(errors="surrogatepass")))
        )
    try:
        text = yaml.dump(draw(_tree(group)), allow_unicode=draw(st.booleans()), sort_keys=False)
    except (ValueError, yaml.YAMLError, TypeError):  # an integer of thousands of digits
        return b"x: " + b"9" * 5000
    header = (
        "" if group == "fault" else draw(st.sampled_from(["# @package _global_\n"] * 5 + ["", "# @package hydra\n"]))
    )
    content = (header + text).encode(errors="surrogatepass")
    if kind == 2:
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=4)) + content[at + draw(st.integers(0, 4)) :]
    return content


file_names = st.sampled_from(
    ["mine", "mine", "mine", "base", "grid", "é", "a b", "a.b", "-x", "a=b", "a,b", "x" * 200, "\x1b", "_self_"]
)
one_file = st.sampled_from(GROUPS).flatmap(lambda group: st.tuples(st.just(group), file_names, _content(group)))
asked = st.sampled_from(
    [
        *[["plan=true"]] * 6,
        ["--help"],
        ["--list"],
        ["--cfg=job"],
        ["--cfg=all"],
        ["--cfg=hydra"],
        ["--info=defaults"],
        ["--info=config"],
        ["--info=searchpath"],
        ["--shell-completion", "query=bash"],
        ["plan=true", "hydra/launcher=slurm"],
    ]
)
yaml_files: SearchStrategy[tuple[Sequence[tuple[str, str, bytes]], Sequence[str]]] = st.tuples(
    st.lists(one_file, min_size=1, max_size=3), asked
)
"""Files of a folder, and what is asked of the command that reads it."""


def check(folder: Path, files: Sequence[tuple[str, str, bytes]], words: Sequence[str]) -> None:
    """Write the files into a furnished folder and have each of them read. Raises Failure."""
    for group, name, content in files:
        (folder / "mine" / group).mkdir(parents=True, exist_ok=True)
        (folder / "mine" / group / f"{name}.yaml").write_bytes(content)
    chosen = {group: name for group, name, _ in files}
    before = commands.seen(folder)
    line = ["sweep", "--config-dir=mine", *(f"{group}={name}" for group, name in chosen.items() if "," not in name)]
    for one in ([*line, *SMALL, *words], ["list", "--config-dir=mine"]):
        try:
            commands.check(commands.run(one, folder))
            commands.check_same(before, commands.seen(folder), one)
        except commands.Failure as failure:
            shown = "\n".join(f"  {group}/{name}.yaml: {content!r:.3000}" for group, name, content in files)
            raise commands.Failure(f"{failure}\nwith\n{shown}") from None


SMALL = ("train.steps=6", "schedule.warmup=2", "data.source=zipf", "data.length=2000")
