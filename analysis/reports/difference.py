"""What `diff` says: in what two trials differ, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.again.batches import unknown_trial
from analysis.reading.groups import flat_config
from analysis.reading.open_sweep import Stored, dataset_of, kept_trials
from harness.basics.printing import label
from harness.config import ConfigError
from harness.config.fields import shown
from harness.storage.stored import read_store

TWIN = "golden"
ABSENT = "-"
ENDS = ("outcome", "nonfinite_step", "masked_step", "strikes", "changes", "final_loss", "final_validation_loss")
ENVIRONMENT = "environment"


def told_difference(out: Path, one: str, other: str) -> list[str]:
    """The fields in which the configurations of two trials differ, what they were trained by, and how they ended.

    Each trial is its id, or the first letters of it; the other one may be `golden`, the twin of the first. Raises
    ConfigError for a trial that there is not, for letters with which several begin, and as `open_sweep` does.
    """
    attributes, found = read_store(out)
    packs = list(found)
    trials = {str(trial.of("ids")): trial for trial in kept_trials(packs)}
    first = _named(out, trials, one)
    second = _named(out, trials, str(trials[first].of("golden")) if other == TWIN else other)
    parts = [_described(trials[name]) for name in (first, second)]
    sweep = dataset_of(attributes, packs)
    chosen = sweep.isel(trial=[sweep["trial"].values.tolist().index(name) for name in (first, second)])
    ends = [{name: _word(chosen[name].values[number]) for name in ENDS} for number in range(2)]
    differing = [key for key in dict.fromkeys(key for part in parts for key in part) if _differs(key, *parts)]
    rows = [(key, *(part.get(key, ABSENT) for part in parts)) for key in differing]
    same = sum(key not in differing and not key.startswith(f"{ENVIRONMENT}.") for key in parts[0])
    lines = _columns([("", first, second), *rows] if rows else [("", first, second)])
    told = "the same trial" if first == second else f"{same} other fields are the same"
    return [*lines, told, "", *_columns([(name, *(end[name] for end in ends)) for name in ENDS])]


def _named(out: Path, trials: Mapping[str, Stored], text: str) -> str:
    """The trial of that id, or whose id begins so."""
    if text in trials:
        return text
    begins = [name for name in trials if text and name.startswith(text)]
    if len(begins) == 1:
        return begins[0]
    if begins:
        raise ConfigError(f"TRIAL={text}: {len(begins)} trials begin so; allowed: more of it, as {label(begins[0])}")
    raise unknown_trial(out, text, iter(trials))


def _described(trial: Stored) -> dict[str, str]:
    """Path -> value, of the configuration and of what it was trained by."""
    environment = {ENVIRONMENT: trial.pack.attributes["environment"]}
    return {key: shown(value) for key, value in flat_config({**trial.of("trials", {}), **environment}).items()}


def _differs(key: str, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return one.get(key) != other.get(key)


def _word(value: Any) -> str:
    """As a table has it."""
    if isinstance(value, str):
        return label(value)
    return ABSENT if value != value else f"{value:.6g}"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
