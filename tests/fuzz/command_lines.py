"""Command lines: keys and flags that exist, with values that they take and values of every other kind."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from analysis.commands.figure import figure_names
from harness.config import field_types
from harness.config.limits import LARGEST_SEED
from harness.optim.optimizers import OPTIMIZERS
from injectors import fault_types
from sweeps.commands import console
from sweeps.compose import settings
from sweeps.compose.overrides import known_keys
from tests.fuzz import commands, values
from tests.sweeps.command import TINY

HYDRA = [
    *("hydra/launcher", "hydra/sweeper", "hydra/job_logging", "hydra.mode", "hydra.run.dir", "hydra.sweep.dir"),
    *("hydra.sweep.subdir", "hydra.job.chdir", "hydra.verbose", "hydra.searchpath", "hydra.sweeper.params.seed"),
    *("hydra.launcher.workers", "hydra.launcher.time", "hydra.launcher.partition", "hydra.launcher.extra.nice"),
    *("hydra.launcher.setup", "hydra.launcher._target_", "hydra.nothing"),
]
ENDING = [name for name in console.commands() if name != "watch"]  # by themselves
FLAGS = [
    *("-m", "--multirun", "--help", "-h", "--hydra-help", "--list", "--version", "--cfg", "--cfg=job", "--cfg=hydra"),
    *("--cfg=all", "-c", "--info", "--info=searchpath", "--info=config", "--info=defaults-tree", "--info=plugins"),
    *("--resolve", "--package=model", "-p", "--run", "-r", "--config-dir=mine", "--config-dir=victims"),
    *("--config-dir=pipe", "--config-dir=", "--config-dir", "--config-name=x", "--config-path=x", "--shell-completion"),
    *("-sc", "--experimental-rerun=pipe", "--experimental-rerun=x", "--", "-", "--nothing", "--verbose"),
]
WRAPS = ("{}", "'{}'", '"{}"', "[{}]", "{{a:{}}}", "choice({})", "glob({})", "sort({})", "shuffle({})", "int({})")
PATHS = (
    "null",
    "text",
    "binary",
    "pipe",
    "folder",
    "loop",
    "victims",
    "nowhere",
    "/dev/zero",
    "~/text",
    "[text]",
    "tokens.bin",
)
PREFIXES = ("", "", "", "", "", "", "+", "++", "~", "=", " ", "@", "model.")

word = st.one_of(values.scalars.map(lambda value: "null" if value is None else _text(value)), values.texts)
wrapped = st.builds(lambda wrap, text: wrap.format(text), st.sampled_from(WRAPS), word)
number = st.one_of(values.integers, values.fractions).map(str)
spanned = st.builds(
    lambda form, a, b, c: form.format(a, b, c),
    st.sampled_from(
        ["range({})", "range({},{})", "range({},{},{})", "interval({},{})", "tag(log,interval({},{}))", "tag(x,{},{})"]
    ),
    number,
    number,
    number,
)
any_value = st.one_of(word, wrapped, spanned, st.lists(word, min_size=2, max_size=4).map(",".join))


def _text(value: Any) -> str:
    try:
        return str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # an integer of thousands of digits
        return hex(value)


@st.composite
def sensible(draw: st.DrawFn, largest: int) -> str:
    """One of a key that exists, with one or two values that it may take."""
    key = draw(st.sampled_from(values.keys()))
    found = draw(st.lists(values.sensible(key), min_size=1, max_size=2))
    small = [min(value, largest) if type(value) is int else value for value in found]
    return f"{key}={','.join('null' if value is None else _text(value) for value in small)}"


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """One, mostly of a key that exists, about half of them with a value that it may take."""
    kind = draw(st.integers(0, 9))
    if kind < 5:
        return draw(sensible(LARGEST_SEED))
    if kind < 9:
        key = draw(st.sampled_from([*known_keys(), *HYDRA]))
        return f"{draw(st.sampled_from(PREFIXES))}{key}={draw(any_value)}"
    return draw(st.one_of(values.texts, st.builds("{}={}".format, values.texts, any_value)))


folders = st.one_of(
    st.sampled_from(
        ["out", "mine", "victims", "pipe", "folder", "loop", "binary", "nowhere", "out=out", "--help", "-x"]
    ),
    values.texts,
)


@st.composite
def together(draw: st.DrawFn) -> list[str]:
    """A fault, an optimizer, a text or a search, and fields that belong to it, so that they are looked at together."""
    part, name, fields = draw(st.sampled_from(_parts()))
    found = [f"{part}={name}"]
    for key in draw(st.lists(st.sampled_from(fields), max_size=3, unique=True)):
        value = draw(st.one_of(values.sensible(key), values.sensible(key), values.scalars))
        found.append(f"{key}={'null' if value is None else _text(value)}")
    if part == "data.source":
        found.append(f"data.path={draw(st.sampled_from(PATHS))}")
    if part == "search":
        found.append(f"optim.lr={draw(st.one_of(spanned, st.just('interval(1e-3,1e-1)'), word))}")
    return found


@functools.cache
def _parts() -> list[tuple[str, str, list[str]]]:
    """A choice, and the keys that belong to it."""
    of_kind = {kind: [f"fault.{name}" for name in field_types(cls)] for kind, cls in fault_types().items()}
    known = {*values.keys()}
    found = [("fault", kind, sorted(known & {*keys})) for kind, keys in of_kind.items() if known & {*keys}]
    for part in ("search", "campaign", "data", "schedule", "checkpoint", "screen", "model", "train"):
        own = sorted(key for key in known if key.startswith(f"{part}."))
        choices = {"search": settings.SEARCHES, "data": ("text", "tokens", "stdlib", "zipf")}.get(part, ())
        key = {"search": "search", "data": "data.source"}.get(part, "seed")
        found += [(key, choice, own) for choice in choices or ("0",)]
    for name in OPTIMIZERS:
        own = sorted(key for key in known if key.startswith((f"{name}.", "optim.")))
        found.append(("optim.name", name, own))
    return found


def _once(words: Iterable[str]) -> list[str]:
    """Of the words with the same key the last one: a key that is given twice hides all else that is wrong."""
    return list({text.partition("=")[0]: text for text in words}.values())


sweep = st.builds(
    lambda flags, some, own: ["sweep", *_once([*flags, *itertools.chain(*some), *own])],
    st.lists(st.sampled_from(FLAGS), max_size=1) | st.just([]),
    st.lists(together(), max_size=2),
    st.lists(overrides(), max_size=2),
)


def is_quick(option: str) -> bool:
    """Not an option that a coordinate check may take, and with which it then computes for longer than a hang may."""
    name, _, value = option.partition("=")
    most = {"--steps": 9, "--seeds": 9, "--widths": 128, "--depths": 9}.get(name, math.inf)
    return not any(most < int(digits) < 10**7 for digits in re.findall("[0-9]+", value))


others = st.one_of(
    st.builds(
        lambda name, words: [name, *words],
        st.sampled_from(["status", "cancel", "verify"]),
        st.lists(folders, max_size=2),
    ),
    st.builds(
        lambda name, words: [name, *words], st.sampled_from(["report", "campaign"]), st.lists(folders, max_size=2)
    ),
    st.builds(
        lambda name, words: ["figure", name, *words],
        st.one_of(st.sampled_from(figure_names()), values.texts),
        st.lists(folders, max_size=3),
    ),
    st.builds(lambda words: ["list", *words], st.lists(st.one_of(st.sampled_from(FLAGS), values.texts), max_size=2)),
    st.builds(
        lambda shell, line, breaks: ["completion", shell, f"--line={line}", f"--breaks={breaks}"],
        st.sampled_from(["bash", "zsh", "fish", "sh"]),
        st.one_of(
            values.texts,
            sweep.map(lambda words: " ".join(["stability-harness", *words])),
            overrides().map("stability-harness sweep {}".format),
        ),
        values.texts,
    ),
    st.builds(lambda words: words, st.lists(st.one_of(st.sampled_from([*ENDING, *FLAGS]), values.texts), max_size=3)),
    st.builds(
        lambda out, own: ["coordinate-check", *out, "--steps=1", "--seeds=1", "--widths=32,64", *own],
        st.lists(folders, min_size=1, max_size=1) | st.just(["x.png"]),
        st.lists(
            st.sampled_from(["recipe=llama", "mitigation=none,mup", "optim.lr=1e-3,1e38", "fault=weight_bit"])
            | st.builds(
                "{}={}".format,
                st.sampled_from(["recipe", "mitigation", "seed", "optim.lr", "model.norm", "out", "playbook"]),
                values.texts,
            )
            | st.builds(
                "{}={}".format,
                st.sampled_from(["--widths", "--depths", "--steps", "--seeds", "--rate", "--optimizer"]),
                st.one_of(values.texts, number, st.sampled_from(["32", "32,64", "1,2", "lion"])),
            ).filter(is_quick),
            max_size=3,
        ),
    ),
)
trained = st.builds(
    lambda fault, mitigation, own: ["sweep", *fault, *mitigation, *own],
    st.lists(
        st.sampled_from(["fault=weight_bit", "fault=value", "fault=nan_gradient", "search=max_stable_lr"]), max_size=1
    ),
    st.lists(st.sampled_from(["mitigation=clip_1", "mitigation=none,zclip", "mitigation=qk_norm+spam"]), max_size=1),
    st.lists(sensible(16), min_size=1, max_size=4),
)
command_lines: SearchStrategy[tuple[Sequence[str], bool]] = st.one_of(
    *[st.tuples(sweep, st.just(False))] * 3, st.tuples(others, st.just(False)), st.tuples(trained, st.just(True))
)
"""The words of a command, and whether a sweep trains what it plans."""


def furnish(folder: Path) -> None:
    """What the words may name; nothing of it may be changed."""
    (folder / "victims").mkdir(parents=True)
    (folder / "victims" / "thesis.tex").write_text("mine")
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    (folder / "text").write_text("All of this is text. " * 500)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")


def check(folder: Path, words: Sequence[str], is_trained: bool) -> None:
    """Run it in a furnished folder. Raises Failure."""
    words = [os.fsdecode(word.encode(errors="surrogatepass").replace(b"\0", b"")) for word in words]  # as systems do
    out = folder / "out"
    if words[:1] == ["sweep"]:
        taken = {text.partition("=")[0].lstrip("+~ @") for text in words[1:]}
        small = [f"{key}={value}" for key, value in TINY.items() if key not in taken]
        words += [*small, "out=out", *([] if is_trained else ["plan=true"])]
    before = commands.seen(folder, out)
    ended = commands.check(commands.run(words, folder))
    is_asked = words[:1] in (["figure"], ["coordinate-check"]) and ended.status == 0
    if not is_asked:
        commands.check_same(before, commands.seen(folder, out), words)
    if words[:1] == ["sweep"] and not is_trained and out.exists():
        raise commands.Failure(f"a plan has made {out}:\n  {words}")
