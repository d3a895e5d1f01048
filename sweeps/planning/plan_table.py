"""A plan on one screen, however many trials it has: what varies, and what is trained in which packs."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console

from harness.basics.printing import count, duration, label
from harness.config import CORE, Trial
from harness.config.fields import shown
from sweeps.planning.packs import PackPlan, Plan
from sweeps.planning.planner import pack_bytes, wall_seconds

MOST_FIELDS, MOST_ROWS = 8, 10  # lines of what varies, beside mitigations and faults, and of packs
MOST_LETTERS, MOST_VALUES = 1000, 8  # of the names of mitigations or faults, and values of another field
COLUMNS = 120


def print_plan(plan: Plan, device: str, workers: int, console: Console) -> None:
    """The trials, what varies between them, the packs by size of model, memory and time."""
    say_counts(plan, console)
    trials = [trial for pack in plan.packs for trial in pack.recorded]
    for line in (*_varying(trials), *_table(plan.packs, device)):
        console.print(line, soft_wrap=True)
    if plan.packs:
        seconds = wall_seconds(plan, device, workers)
        console.print(f"about {duration(seconds)} with {count(workers, 'worker')} on {device} (rough)")


# --- what varies -------------------------------------------------------------------------------------------------


def _varying(trials: Sequence[Trial]) -> list[str]:
    """A line for each field that varies between the trials, the names of recipes, mitigations and faults first."""
    keys = {"recipe": "recipe", "mitigation": "mitigation", "fault": "fault.name", "playbook": "playbook.name"}
    lines = [line for key, path in keys.items() for line in _names(key, set(map(attrgetter(path), trials)))]
    fields = [f"  {key}: {_values(values)}" for key, values in _varying_fields(trials).items()]
    more = [f"  and {count(len(fields) - MOST_FIELDS, 'field')} more"] if len(fields) > MOST_FIELDS else []
    return [*lines, *fields[:MOST_FIELDS], *more]


def _names(key: str, names: Iterable[str]) -> list[str]:
    """Some lines, if there are several names."""
    labels = [label(name) for name in sorted(names, key=lambda name: (name != "none", name))]
    if len(labels) < 2:
        return []
    ends = itertools.accumulate(len(name) + 2 for name in labels)
    named = [name for name, end in zip(labels, ends, strict=True) if end <= MOST_LETTERS]
    more = f", and {len(labels) - len(named)} more" if len(labels) > len(named) else ""
    line = f"{key} ({len(labels)}): {', '.join(named)}{more}"
    return textwrap.wrap(line, COLUMNS, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _values(values: Iterable[Any]) -> str:
    """The values of an axis on one line: words, then numbers by size; of many the first, or from where to where."""
    ordered = list(values)
    numbers = sorted(value for value in ordered if isinstance(value, int | float))
    ordered = [*(value for value in ordered if not isinstance(value, int | float)), *numbers]
    if len(ordered) <= MOST_VALUES:
        return ", ".join(label(shown(value)) for value in ordered)
    if len(numbers) == len(ordered):
        return f"{len(ordered)} values from {shown(numbers[0])} to {shown(numbers[-1])}"
    return f"{_values(ordered[:MOST_VALUES])}, and {len(ordered) - MOST_VALUES} more"


def _varying_fields(trials: Sequence[Trial]) -> dict[str, dict[Any, None]]:
    """Key -> its values, of the fields that vary between trials of one recipe, one mitigation and one fault."""
    groups: dict[tuple[str, ...], dict[str, dict[Any, None]]] = {}
    seen: set[tuple[tuple[str, ...], int]] = set()  # sections that were looked at: trials share them
    extras = dict.fromkeys(name for trial in trials for name, _ in trial.extras)  # some lack one, at its defaults
    for trial in trials:
        group = (trial.recipe, trial.mitigation, trial.fault.name, trial.playbook.name)
        by_key = groups.setdefault(group, {})
        by_key.setdefault("seed", {})[trial.seed] = None
        for name in (*CORE, "fault", *extras):
            section = trial.fault if name == "fault" else trial.section(name)
            if (group, id(section)) not in seen:
                seen.add((group, id(section)))
                for key, value in vars(section).items():
                    by_key.setdefault(f"{name}.{key}", {})[value] = None
    varying: dict[str, dict[Any, None]] = {}
    for by_key in groups.values():
        for key, values in by_key.items():
            if len(values) > 1:
                varying[key] = varying.get(key, {}) | values
    return varying


# --- packs -------------------------------------------------------------------------------------------------------


def _table(packs: Sequence[PackPlan], device: str) -> list[str]:
    """A row for each size of model, batch and length of training."""
    sizes: dict[tuple[Any, ...], list[PackPlan]] = {}
    for pack in packs:
        trial = pack.trials[0]
        key = (trial.model.width, trial.model.depth, trial.model.context, trial.train.batch, trial.steps)
        sizes.setdefault(key, []).append(pack)
    heading = ("width", "depth", "batch x tokens", "steps", "trials", "packs", "in a pack", "MiB a pack", "mitigations")
    ordered = sorted(sizes.items())
    kept = ordered if len(ordered) <= MOST_ROWS + 1 else ordered[:MOST_ROWS]
    rows = [heading, *(_row(size, packs, device) for size, packs in kept)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    if more := [pack for _, packs in ordered[len(kept) :] for pack in packs]:
        trials, sizes_left = sum(len(pack.recorded) for pack in more), count(len(ordered) - len(kept), "size")
        lines.append(f"  and {sizes_left} more: {count(trials, 'trial')}, {count(len(more), 'pack')}")
    return [line.rstrip() for line in lines] if packs else []


def _row(key: tuple[Any, ...], packs: Sequence[PackPlan], device: str) -> tuple[str, ...]:
    width, depth, context, batch, steps = key
    mitigations = list(dict.fromkeys(label(trial.mitigation) for pack in packs for trial in pack.trials))
    named = ", ".join(mitigations)
    return (
        str(width),
        str(depth),
        f"{batch} x {context}",
        str(steps),
        str(sum(len(pack.recorded) for pack in packs)),
        str(len(packs)),
        _span(packs, lambda pack: len(pack.trials)),
        _span(packs, lambda pack: round(pack_bytes(pack, device) / 2**20)),
        named if len(named) <= COLUMNS // 2 else str(len(mitigations)),
    )


def _span(packs: Sequence[PackPlan], number: Callable[[PackPlan], int]) -> str:
    numbers = [number(pack) for pack in packs]
    return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"


def say_counts(plan: Plan, console: Console) -> None:
    """What was asked for, and what of it is to be trained."""
    line = f"{count(plan.asked, 'trial')} asked for, {count(plan.added_twins, 'golden twin')} added, "
    line += f"{plan.complete} complete already: {plan.trials} to train in {count(len(plan.packs), 'pack')}"
    console.print(line, soft_wrap=True)
