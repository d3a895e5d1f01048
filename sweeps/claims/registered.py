"""The claims that are known: one YAML each, `claim/NAME.yaml`, here, in an installed package or in a user's folder.

A claim is decided by arithmetic (`check`), or by trials (`sweep` and what follows from it).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from harness.config import ConfigError, Problems, shown
from sweeps.claims.checks import CHECKS
from sweeps.claims.measured import SeedMetric, metric_of
from sweeps.claims.verdicts import Claimed
from sweeps.compose.places import check_folder, places, stems, unknown_option
from sweeps.compose.yaml_files import text_of, tree_of

GROUP = "claim"
FIRST_SEED, FEWEST, MOST = 100, 4, 64  # fresh seeds: no constant was chosen with them in view
COMMON = {"claim": str, "source": str, "tags": list}
OF_TRIALS = {
    **{"sweep": list, "cells": list, "metric": str, "of": dict, "claimed": str},
    **{"threshold": float, "unit": str, "control": dict, "seeds": int},
}
MORE = {"opposite": str, "against": dict, "slope": str}  # may be left out
CONTROL = {"metric": str, "above": float, "because": str}
OF_CONTROL = {"of": dict}  # may be left out
KINDS = {str: "text", list: "a list of words", dict: "keys and values", float: "a number", int: "a whole number"}


@dataclass(frozen=True)
class Control:
    """What has to happen in the trials without the remedy: otherwise nothing could be seen, and nothing is refuted.

    `of`: in these trials of the sweep, and in those `against` if it is empty.
    """

    metric: str
    above: float
    because: str
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrialTest:
    """What is trained and compared: `metric` of the trials `of` less that of `against`, pair by pair of seeds.

    Without trials `against` it is the metric of those `of` itself, and the control is measured in them. `sweep` are
    words of a sweep without seeds, and `cells` coordinates in each of which the claim has to hold. With `slope`, a
    coordinate, it is by how much the metric rises with each doubling of that.
    """

    sweep: tuple[str, ...]
    cells: tuple[str, ...]
    metric: str
    of: tuple[str, ...]
    against: tuple[str, ...]
    claimed: Claimed
    threshold: float
    seeds: int
    control: Control
    unit: str  # of the threshold
    slope: str = ""


@dataclass(frozen=True)
class RegisteredClaim:
    """What is claimed, by whom, and what decides it: a check (`sweeps/claims/checks.py`), or trials."""

    name: str
    claim: str
    source: str
    tags: tuple[str, ...]
    check: str = ""
    trials: TrialTest | None = None
    opposite: str = ""  # who says otherwise
    folder: Path | None = None  # where it is a file, with whatever its sweep names; None: ours, or a package's

    @property
    def registration(self) -> str:
        """A hash of all that it says: of another text, source or test it is another."""
        told = dataclasses.asdict(dataclasses.replace(self, folder=None))
        if self.trials is not None and self.trials.against:
            del told["trials"]["unit"]  # that of the metric
        if self.trials is not None and not self.trials.control.of:
            del told["trials"]["control"]["of"]
        if self.trials is not None and not self.trials.slope:
            del told["trials"]["slope"]
        if self.trials is not None:
            names = {self.trials.metric, self.trials.control.metric}
            if versions := {name: version for name in names if (version := metric_of(name).version) > 1}:
                told["versions"] = versions
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def claims(folder: Path | None = None) -> dict[str, RegisteredClaim]:
    """Every claim by name, ours first. Raises ConfigError with all that is wrong with their files."""
    check_folder(folder)
    found: dict[str, RegisteredClaim] = {}
    problems = Problems()
    for place in places(folder):
        for name in stems(place / GROUP):
            file = place / GROUP / f"{name}.yaml"
            with problems.collect():
                if name in found:
                    raise ConfigError(f"{file}: there is a claim of that name already; allowed: another name")
                found[name] = dataclasses.replace(_claim(name, file), folder=folder if place == folder else None)
    problems.check()
    return found


def chosen(names: list[str], tag: str | None, folder: Path | None = None) -> list[RegisteredClaim]:
    """The claims of these names, all if there are none, with a tag if one is given. Raises ConfigError."""
    known = claims(folder)
    tags = sorted({one for claim in known.values() for one in claim.tags})
    if tag is not None and tag not in tags:
        raise ConfigError(f"--tag {tag}: no claim has it; allowed: {', '.join(tags)}")
    for name in names:
        if name not in known:
            raise unknown_option("claim", name, list(known))
    listed = [known[name] for name in names] if names else list(known.values())
    return [claim for claim in listed if tag is None or tag in claim.tags]


def _claim(name: str, file: Path) -> RegisteredClaim:
    tree = tree_of(file, text_of(file))
    is_checked = "check" in tree
    needed = {**COMMON, **({"check": str} if is_checked else OF_TRIALS)}
    _check_keys(tree, needed, f"{file}: ", {"opposite": str} if is_checked else MORE)
    _words(file, tree, "tags")
    common = (name, tree["claim"], tree["source"], tuple(tree["tags"]))
    if is_checked:
        if tree["check"] not in CHECKS:
            raise ConfigError(f"{file}: {unknown_option('check', tree['check'], list(CHECKS))}")
        return RegisteredClaim(*common, check=tree["check"], opposite=tree.get("opposite", ""))
    return RegisteredClaim(*common, trials=_test(file, tree), opposite=tree.get("opposite", ""))


def _test(file: Path, tree: Mapping[str, Any]) -> TrialTest:
    problems, control = Problems(), tree["control"]
    with problems.collect():
        _check_keys(control, CONTROL, f"{file}: control.", OF_CONTROL)
    for key in ("sweep", "cells"):
        with problems.collect():
            _words(file, tree, key)
    metrics: dict[str, SeedMetric] = {}
    for where, name in (("metric", tree["metric"]), ("control.metric", control.get("metric"))):
        try:
            metrics[where] = metric_of(str(name), where)
        except ConfigError as error:
            problems.reasons |= {f"{file}: {reason}": None for reason in error.reasons}
    if "metric" in metrics:
        _check_threshold(file, tree, metrics["metric"], problems)
    if tree["claimed"] not in get_args(Claimed):
        problems.reasons[f"{file}: claimed={tree['claimed']}: unknown; allowed: {', '.join(get_args(Claimed))}"] = None
    if not FEWEST <= tree["seeds"] <= MOST:
        problems.reasons[f"{file}: seeds={tree['seeds']}: out of range; allowed: {FEWEST} to {MOST}"] = None
    if any(str(word).startswith(("seed=", "out=", "study=")) for word in tree["sweep"]):
        problems.reasons[f"{file}: sweep: has a seed, an out or a study; allowed: other keys, and seeds={FEWEST}"] = (
            None
        )
    if tree["of"] == tree.get("against"):
        problems.reasons[f"{file}: of={tree['of']}: the same as against; allowed: two arms"] = None
    problems.check()
    of, against, of_control = (_wheres(arm) for arm in (tree["of"], tree.get("against"), control.get("of")))
    return TrialTest(
        tuple(tree["sweep"]),
        tuple(tree["cells"]),
        tree["metric"],
        of,
        against,
        tree["claimed"],
        float(tree["threshold"]),
        tree["seeds"],
        Control(control["metric"], float(control["above"]), control["because"], of_control),
        tree["unit"],
        tree.get("slope", ""),
    )


def _wheres(arm: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What selects the trials of an arm."""
    return tuple(f"{key}={shown(value)}" for key, value in (arm or {}).items())


def _check_threshold(file: Path, tree: Mapping[str, Any], metric: SeedMetric, problems: Problems) -> None:
    """Notes a unit that is not the metric's, and a threshold that no ratio or margin has."""
    is_own_unit = metric.is_ratio and "against" not in tree  # then it is no ratio, and has whatever unit it has
    if tree["unit"] != metric.unit and not is_own_unit:
        problems.reasons[f"{file}: unit={tree['unit']}: not that of {tree['metric']}; allowed: {metric.unit}"] = None
    least = 1 if metric.is_ratio and tree["claimed"] == "within" else 0
    if (metric.is_ratio or tree["claimed"] == "within") and not tree["threshold"] > least:
        kind = "margin" if tree["claimed"] == "within" else "ratio"
        problems.reasons[f"{file}: threshold={tree['threshold']}: no {kind}; allowed: above {least}"] = None


def _words(file: Path, tree: Mapping[str, Any], key: str) -> None:
    if not all(isinstance(word, str) for word in tree[key]):
        raise ConfigError(f"{file}: {key}={tree[key]}: not words; allowed: a list of words")


def _check_keys(
    tree: Mapping[str, Any], needed: Mapping[str, type], where: str, more: Mapping[str, type] | None = None
) -> None:
    """Raises ConfigError for keys that are missing, unknown, or of another type."""
    problems, known = Problems(), {**needed, **(more or {})}
    allowed = ", ".join(known)
    for key in tree.keys() - known.keys():
        problems.reasons[f"{where}{key}: unknown key; allowed: {allowed}"] = None
    for key, kind in known.items():
        if key not in tree:
            if key in needed:
                problems.reasons[f"{where}{key}: is missing; allowed: {', '.join(needed)}, all of them"] = None
        elif not _is_of(tree[key], kind):
            problems.reasons[f"{where}{key}={tree[key]!r:.60}: not {KINDS[kind]}; allowed: {KINDS[kind]}"] = None
    problems.check()


def _is_of(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and bool(value)
