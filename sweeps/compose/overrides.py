"""One override of the command line or of a study: its key, its value or values, checked."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    OverrideType,
    Quote,
    QuotedString,
    RangeSweep,
    ValueType,
)
from hydra.errors import HydraException

from harness.basics.printing import printable
from harness.config import IDENTITY, ConfigError, Problems, Trial, checked, field_types, sections
from injectors import fault_types
from sweeps.compose import settings
from sweeps.compose.hydra_calls import own_folder
from sweeps.compose.places import JOINED, is_general, listed, options, parts_of, unknown_option
from sweeps.compose.unreadable import why
from sweeps.compose.usual_names import usual
from sweeps.compose.yaml_files import LARGEST, has_control

GROUPS = ("study", "search", "recipe", "mitigation", "fault", "detect", "playbook")
RUN_KEYS = frozenset(settings.keys())
MOST_JOBS = 100_000  # of a grid, and values of a key; a plan of so many takes a minute
MOST_SUGGESTED = 3  # keys
MOST_LETTERS = 20_000  # of an override
MOST_DEPTH = 20  # of its brackets
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_HOME = re.compile(r"(?<=[=,(])~[^,()]*")


@cache
def trial_fields() -> dict[str, tuple[type, str]]:
    """key -> (dataclass, field), for every key of a trial but those of its fault."""
    fields = {f"{part}.{name}": (cls, name) for part, cls in sections().items() for name in field_types(cls)}
    return {**fields, "seed": (Trial, "seed")}


@cache
def fault_fields() -> dict[str, tuple[type, ...]]:
    """key -> the kinds of fault that have this field."""
    kinds_with: dict[str, tuple[type, ...]] = {}
    kinds: Mapping[str, type] = fault_types()
    for kind, cls in kinds.items():
        for name in field_types(cls) if kind != "none" else ():
            if name not in IDENTITY:
                kinds_with[f"fault.{name}"] = (*kinds_with.get(f"fault.{name}", ()), cls)
    return kinds_with


@cache
def types_of(key: str) -> frozenset[type]:
    """The types of the fields that a key sets, of the trial or of all kinds of fault that have it; none of others."""
    fields = [trial_fields()[key]] if key in trial_fields() else []
    fields += [(cls, key.partition(".")[2]) for cls in fault_fields().get(key, ())]
    return frozenset(field_types(cls)[name][0] for cls, name in fields)


@cache
def known_keys() -> tuple[str, ...]:
    """Every key that the command line may have, `hydra.*` apart."""
    return tuple(sorted({*trial_fields(), *fault_fields(), *RUN_KEYS, *GROUPS}))


def unknown_key(key: str, value: Any, known: Iterable[str], where: str = "") -> ConfigError:
    """The error for a key that does not exist, with the nearest keys that do.

    Where some are of that name in another section, such as `optim.lr` for `lr`, or other programs call them so, as
    `learning_rate`, they are all that is said.
    """
    known = list(known)
    called, note = usual(key, known)
    if same := _elsewhere(key, known) or called:
        close, near = same, [*same, "and the other keys that `sweep --cfg job` prints"]
    else:
        close = _misspelt(key, known)
        section = f"{key.split('.')[0]}."
        near = [k for k in known if k.startswith(section)] or sorted({k.split(".")[0] for k in known})
    hint = f"did you mean {' or '.join(close)}{note}? " if close else ""
    return ConfigError(f"{key}={value}: unknown key{where}; {hint}allowed: {', '.join(near)}")


def _elsewhere(key: str, known: Sequence[str]) -> list[str]:
    """Keys of that name in other sections, where its own is none."""
    section, _, last = key.rpartition(".")
    if any(k.startswith(f"{section or key}.") for k in known):
        return []
    same = sorted((k for k in known if _last_part(k) == last), key=lambda k: k.count("."))
    return (difflib.get_close_matches(key, same, cutoff=0.7) if section else same)[:MOST_SUGGESTED]


def _misspelt(key: str, known: Sequence[str]) -> list[str]:
    """Keys that are written like it, as a whole, or, of one without a section, in their last part."""
    close = difflib.get_close_matches(key, known, n=MOST_SUGGESTED, cutoff=0.6)
    if "." in key or difflib.get_close_matches(key, [k for k in known if "." not in k], cutoff=0.75):
        return close
    parts = difflib.get_close_matches(key, {_last_part(k) for k in known}, n=1, cutoff=0.75)
    return sorted((k for k in known if _last_part(k) in parts), key=lambda k: k.count("."))[:MOST_SUGGESTED] or close


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


# --- one override ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=100_000)
def parse(text: str) -> Override:
    """Raises ConfigError for what is no override."""
    _check_form(text)
    try:
        return OverridesParser.create().parse_override(quoted(text))
    except (ValueError, ArithmeticError):
        reason = "a number of too many digits"
        raise ConfigError(f"{_start(text)}: not an override ({reason}); allowed: key=value") from None
    except HydraException as error:
        raise ConfigError(f"{text}: {why(text, str(error).splitlines()[0])}") from None


def _check_form(text: str) -> None:
    """Raises ConfigError for what would keep the grammar busy for long."""
    if len(text) > MOST_LETTERS:
        raise ConfigError(f"{_start(text)}: {len(text):,} letters; allowed: at most {MOST_LETTERS:,}")
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        raise ConfigError(f"{_start(text)}: brackets nested {deepest} deep; allowed: at most {MOST_DEPTH}")
    if has_control(text):
        raise ConfigError(f"{printable(_start(text))}: control characters; allowed: printable text")


def _start(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."


def quoted(override: str) -> str:
    """The override with quotes around each value that begins with `~`, a user's own folder.

    A shell leaves it alone behind `key=`, and Hydra's grammar knows no such sign. It is kept as it was given, in a
    trial's configuration too, so that a trial's id tells neither who trained it nor where; whoever opens the file
    expands it.
    """
    key, _, value = override.partition("=")
    if key.startswith("-") or "'" in value or '"' in value:
        return override
    return f"{key}{_HOME.sub(lambda match: repr(match[0]), override.removeprefix(key))}"


def with_homes(arguments: Sequence[str]) -> list[str]:
    """A command line as Hydra can read it, whose flags name folders in full."""
    parts = [(text, *text.partition("=")) for text in arguments]
    return [
        f"{key}={os.path.expanduser(value)}" if key.startswith("--") and is_given else quoted(text)
        for text, key, is_given, value in parts
    ]


def out_word(out: str | os.PathLike[str]) -> str:
    """`out=` of a folder, in quotes as Hydra reads them whatever its name is."""
    return f"out={QuotedString(os.fspath(out), Quote.single).with_quotes()}"


def quoted_out(text: str) -> str:
    """`out=DIR` in the quotes that Hydra wants, where it would take the folder for something else, or not at all.

    What Hydra takes for null, for several values or for quoted already, stays as it is.
    """
    key, _, word = text.partition("=")
    if key != "out" or not word or "${" in word or has_control(word) or len(word) > MOST_LETTERS:
        return text
    with contextlib.suppress(ConfigError):
        override = parse(text)
        if override.is_sweep_override() or isinstance(override.value(), str | list | dict | None):
            return text
    return f"out={QuotedString(word, Quote.double).with_quotes()}"


@lru_cache(maxsize=100_000)
def assignment(text: str) -> tuple[str, Any]:
    """The key and the value of an override that is no sweep. A trial's value is checked and has the field's type.

    Raises ConfigError.
    """
    key, _, word = text.partition("=")
    # The grammar takes a millisecond, which is long for the thousands of integers of a range.
    value = int(word) if _NUMBER.fullmatch(word) else parse(text).value()
    if value == "" and (key == "search.size" or str in types_of(key)):
        reason = "empty, as where a shell's variable is not set"
        raise ConfigError(f"{key}=: {reason}; allowed: a word, or leave {key} out for its default")
    checked_value = _checked_value(key, value)
    if type(checked_value) is int and abs(checked_value) > LARGEST:
        raise ConfigError(f"{key}={value}: out of range; allowed: {-LARGEST} to {LARGEST}")
    return key, checked_value


def _checked_value(key: str, value: Any) -> Any:
    """`value` as the key wants it. Raises ConfigError for a key that is none, or a value that it does not take."""
    if key in trial_fields():
        return checked(key, *trial_fields()[key], value)
    if key in RUN_KEYS:
        return settings.check_key(key, value)
    if key in fault_fields():
        problems = Problems()
        for cls in fault_fields()[key]:
            with problems.collect():
                checked(key, cls, key.partition(".")[2], value)
                return value
        raise ConfigError(next(iter(problems.reasons)))
    if key in GROUPS:
        return value
    raise unknown_key(key, value, known_keys())


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`, which a search may try; on a logarithmic scale if `is_log`."""

    low: float
    high: float
    is_log: bool


def _interval(override: Override) -> Interval:
    """Raises ConfigError for an interval that is empty, or that has other tags than `log`."""
    sweep, text = override.value(), override.input_line
    assert isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None
    if override.get_key_element() in GROUPS:
        raise ConfigError(f"{text}: names have no interval; allowed: values with commas, or glob()")
    if not sweep.start < sweep.end:
        raise ConfigError(f"{text}: an empty interval; allowed: interval(low, high) with low < high")
    if sweep.tags - {"log"}:
        raise ConfigError(f"{text}: unknown tag {', '.join(sorted(sweep.tags - {'log'}))}; allowed: log")
    is_log = "log" in sweep.tags
    if is_log and sweep.start <= 0:
        raise ConfigError(f"{text}: no logarithm at {sweep.start:g}; allowed: tag(log, interval(...)) above 0")
    return Interval(sweep.start, sweep.end, is_log)


def _texts(override: Override, loader: ConfigLoader) -> list[str]:
    """The values of an override that is no interval, one or many, each as its own text.

    Raises ConfigError for a glob that matches nothing, and for a range that does not end, or has more values than a
    grid may have jobs.
    """
    text = f"{override.input_line}"
    key = override.get_key_element()
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        if key not in GROUPS:
            allowed = "values, or glob() for recipe, mitigation, fault, detect, playbook"
            raise ConfigError(f"{text}: a glob needs names to match; allowed: {allowed}")
        (matched,) = OverridesParser.create(config_loader=loader).parse_overrides([text])
        names = list(matched.sweep_string_iterator())
        if not names:
            raise ConfigError(f"{text}: matches nothing; allowed: {listed(options(key, own_folder(loader)))}")
        # Those of one objective are named, unless nothing else matches.
        general = [name for name in names if is_general(key, name, own_folder(loader))]
        return general or names
    if override.is_range_sweep():
        sweep = override.value()
        assert isinstance(sweep, RangeSweep) and sweep.start is not None and sweep.stop is not None
        start, stop, step = (Decimal(number) for number in (sweep.start, sweep.stop, sweep.step))
        if not (start.is_finite() and stop.is_finite() and step.is_finite() and step):
            raise ConfigError(f"{text}: no such range; allowed: range(start, stop, step) of finite numbers, step not 0")
        if (values := (stop - start) / step) > MOST_JOBS:
            raise ConfigError(f"{text}: {values:,.0f} values; allowed: at most {MOST_JOBS:,}")
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


@dataclass(frozen=True)
class Axis:
    """A key and its values, each as text; or all of an interval, and its two ends as text."""

    key: str
    values: tuple[str, ...]
    interval: Interval | None
    is_range: bool  # numbers at equal distances
    text: str  # as it was given

    @property
    def overrides(self) -> list[str]:
        return [f"{self.key}={word}" for word in self.values]


def axis_of(text: str, loader: ConfigLoader) -> Axis:
    """The key of an override and all its values, each checked. Raises ConfigError."""
    override = parse(text)
    key, value = override.get_key_element(), override.get_value_string() if "=" in text else ""
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise ConfigError(f"{text}: keys cannot be added or removed; allowed: key=value")
    if key not in known_keys():
        raise unknown_key(key, value, known_keys())
    interval = _interval(override) if override.is_interval_sweep() else None
    texts = [f"{end:.12g}" for end in (interval.low, interval.high)] if interval else _texts(override, loader)
    if not texts:
        raise ConfigError(f"{text}: an empty range; allowed: at least one value")
    if len(texts) > 1 and (key in RUN_KEYS or key in ("study", "search")):
        raise ConfigError(f"{text}: belongs to the run and cannot be swept; allowed: one value")
    problems = Problems()
    allowed = options(key, own_folder(loader)) if key in GROUPS else []
    for word in texts:
        with problems.collect():
            named = assignment(f"{key}={word}")[1]
            if key in JOINED:
                parts_of(key, named, allowed)
            elif key in GROUPS and named not in allowed:
                raise unknown_option(key, word, allowed)
    problems.check()
    return Axis(key, tuple(texts), interval, override.is_range_sweep(), text)


def check_jobs(axes: Iterable[Axis], others: int = 0) -> None:
    """Raises ConfigError if there are too many combinations of the values of these axes, beside so many `others`."""
    wide = [axis for axis in axes if len(axis.values) > 1 and not axis.interval]
    jobs = others + math.prod(len(axis.values) for axis in wide)
    if jobs > MOST_JOBS:
        names = " x ".join(f"{axis.key} ({len(axis.values):,})" for axis in wide)
        names += f" and {others:,} of other grids" if others else ""
        raise ConfigError(f"{names}: {jobs:,} combinations; allowed: at most {MOST_JOBS:,}")


def combination(text: str) -> str | None:
    """The value of an override that chooses one combination of a `JOINED` group, as it is written; else None."""
    if text.partition("=")[0] not in JOINED or "+" not in text:
        return None
    override = parse(text)
    return None if override.is_sweep_override() else override.get_value_element_as_str()


def as_sweep(text: str) -> str:
    """A combination of names as a sweep of one value, which Hydra leaves alone; else it looks for such a file."""
    name = combination(text)
    return text if name is None else f"{text.partition('=')[0]}=choice({name})"
