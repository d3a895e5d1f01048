"""What would have helped: the same incident, by fault and seed, under other mitigations and playbooks of its sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.again.sweep_folder import SweepFolder
from analysis.measures.causes import FORMAT, GRADIENT, RARE, RATE, REPETITION, STALE, UNKNOWN, WEIGHT
from analysis.measures.incidents import TYPES, Incident, of_one, runs, worst
from analysis.reading.loss_words import with_unit
from harness.basics.printing import count
from harness.objectives.outcome import ENDED_BADLY
from harness.storage.stored import PackInfo

SAME = ("fault", "seed", "data", "model.width", "model.depth", "model.context", "train.batch", "train.steps")
SUGGESTED = {
    RARE: ("screen_rarity", "clip_1", "beta2_095"),
    REPETITION: ("screen_repetition", "clip_1"),
    STALE: ("stable_adamw", "beta2_095", "clip_update"),
    RATE: ("long_warmup", "clip_update", "qk_norm"),
    FORMAT: ("fp16_dynamic", "norms_fp32", "softmax_fp32"),
    GRADIENT: ("zclip", "clip_tensor", "spam"),
    WEIGHT: ("qk_norm", "rms_norm"),
    UNKNOWN: ("zclip", "clip_1"),
}
"""Mitigations that act on a cause, to be tried where the sweep has not."""
MOST_NAMED = 5
LOSSES = ("peak of the loss", "final loss")
COLUMNS = ("under", "trial", "outcome", "peak of the loss", "final loss", "steps lost")


def relatives(packs: Iterable[PackInfo], trial: str) -> dict[str, str]:
    """Trial -> in what it differs, of those with the same fault, seed, data and sizes as this one."""
    configs: dict[str, Mapping[str, Any]] = {}
    for pack in packs:
        if pack.complete:
            configs |= dict(zip(pack.attributes["ids"], pack.attributes["trials"], strict=True))
    if trial not in configs:
        return {}
    own = _flat(configs[trial])
    flat = {name: _flat(config) for name, config in configs.items()}
    near = {
        name: other
        for name, other in flat.items()
        if not any(own.get(key) != other.get(key) for key in _same_keys(own, other))
    }
    varied = _varied(near.values())
    return {name: _differences(own, other, varied) for name, other in near.items() if name != trial}


def _varied(configs: Iterable[Mapping[str, Any]]) -> set[str]:
    """The keys that differ under the same mitigation and playbook, so that they do not come with either."""
    groups: dict[tuple[Any, Any], Mapping[str, Any]] = {}
    found: set[str] = set()
    for config in configs:
        first = groups.setdefault((config.get("mitigation"), config.get("playbook.name")), config)
        found |= {key for key in config.keys() | first.keys() if config.get(key) != first.get(key)}
    return found


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Path -> value; what is no section has its own name."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _same_keys(*configs: Mapping[str, Any]) -> set[str]:
    keys = {key for config in configs for key in config}
    return {key for key in keys if key in SAME or key.partition(".")[0] in SAME}


def _differences(own: Mapping[str, Any], other: Mapping[str, Any], varied: set[str]) -> str:
    """The mitigation, and whatever else is not as in the trial itself and does not come with a mitigation."""
    named = [f"mitigation={other['mitigation']}"] if own.get("mitigation") != other.get("mitigation") else []
    playbooks = [config.get("playbook.name", "none") for config in (own, other)]
    named += [f"playbook={playbooks[1]}"] if playbooks[0] != playbooks[1] else []
    keys = [key for key in other if own.get(key) != other[key] and key != "mitigation"]
    if named:  # what comes with a mitigation or a playbook needs no words
        watched = [key for key in keys if key.split(".")[0] == "detect" and playbooks[0] == playbooks[1]]
        keys = [key for key in keys if key in watched or key in varied]
    gone = [key for key in own if key.split(".")[0] == "detect" and key not in other and playbooks[0] == playbooks[1]]
    words = [*named, *(f"{key}={json.dumps(other[key])}" for key in sorted(keys))]
    return " ".join([*words, *(f"without {key}" for key in gone)]) or "the same"


def followed(folder: SweepFolder, incident: Incident) -> tuple[list[str], pd.DataFrame]:
    """Sentences on what would have helped, and a row for each relative: `COLUMNS`."""
    sweep, names = folder.sweep, relatives(folder.packs, incident.trial)
    kept = [name for name in names if name in sweep["trial"].values]
    if not kept:
        return [], pd.DataFrame(columns=list(COLUMNS))
    rows, ranks = [], []
    chosen = [incident.trial, *kept]
    finals, planned = (sweep[name].sel(trial=chosen).values for name in ("final_loss", "steps"))
    for run, final, steps in zip(runs(sweep, folder.setups, chosen), finals, planned, strict=True):
        found = of_one(run, folder.logs.get(run.trial), is_asked=True)
        near = [one for one in found if abs(one.first - incident.first) <= max(10, run.steps // 20)]
        same = incident if run.trial == incident.trial else worst(near)
        under = "as it was" if run.trial == incident.trial else names[run.trial]
        outcome, peak, lost = (same.outcome, same.loss_peak, same.steps) if same else (0, np.nan, 0)
        if same is None and run.outcome in ENDED_BADLY:  # of something else, sooner or later
            other = worst(found)
            outcome, lost = 3, int(steps) - (other.first if other else run.steps)
        words = TYPES[outcome] if outcome else "no incident"
        rows.append(dict(zip(COLUMNS, (under, run.trial, words, peak, float(final), lost), strict=True)))
        ranks.append((outcome, lost))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table = table.rename(columns={name: with_unit(sweep, name) for name in LOSSES})
    better = [number for number in range(1, len(rows)) if ranks[number] < ranks[0]]
    best = sorted(better, key=lambda number: (ranks[number], rows[number]["under"]))
    cheaper = [number for number in best if ranks[number][1] <= ranks[0][1]]
    dearer = [number for number in best if number not in cheaper]
    of = f"of {len(kept)} other trials with the same fault and seed"
    if not best:
        return [f"None {of} fared better."], table
    said = [_line(rows[0])]
    for heading, numbers in (("fared better", cheaper), ("came back further, but lost more steps", dearer)):
        if numbers:
            said.append(f"{len(numbers)} {of} {heading}:")
            said += [_line(rows[number]) for number in numbers[:MOST_NAMED]]
    return said, table


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['under']}: {row['outcome']}, {count(row['steps lost'], 'step')} lost."
