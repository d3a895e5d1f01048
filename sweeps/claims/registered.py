"""The claims that are known: one YAML each, `claim/NAME.yaml`, here, in an installed package or in a user's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import ConfigError, Problems
from sweeps.claims.checks import CHECKS
from sweeps.compose.places import check_folder, places, stems, unknown_option
from sweeps.compose.yaml_files import text_of, tree_of

GROUP = "claim"
NEEDED = {"claim": str, "source": str, "tags": list, "check": str}


@dataclass(frozen=True)
class RegisteredClaim:
    """What is claimed, by whom, and the check that decides it (`sweeps/claims/checks.py`)."""

    name: str
    claim: str
    source: str
    tags: tuple[str, ...]
    check: str

    @property
    def registration(self) -> str:
        """A hash of all that it says: of another text, source or check it is another."""
        told = json.dumps([self.name, self.claim, self.source, sorted(self.tags), self.check])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


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
                found[name] = _claim(name, file)
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
    _check_keys(tree, file)
    if tree["check"] not in CHECKS:
        raise ConfigError(f"{file}: {unknown_option('check', tree['check'], list(CHECKS))}")
    if not all(isinstance(tag, str) for tag in tree["tags"]):
        raise ConfigError(f"{file}: tags={tree['tags']}: not words; allowed: a list of words")
    return RegisteredClaim(name, tree["claim"], tree["source"], tuple(tree["tags"]), tree["check"])


def _check_keys(tree: Mapping[str, Any], file: Path) -> None:
    """Raises ConfigError for keys that are missing, unknown, or of another type."""
    problems = Problems()
    for key in tree.keys() - NEEDED.keys():
        problems.reasons[f"{file}: {key}: unknown key; allowed: {', '.join(NEEDED)}"] = None
    for key, kind in NEEDED.items():
        if key not in tree:
            problems.reasons[f"{file}: {key}: is missing; allowed: {', '.join(NEEDED)}, all of them"] = None
        elif not isinstance(tree[key], kind) or not tree[key]:
            what = "a list of words" if kind is list else "text"
            problems.reasons[f"{file}: {key}={tree[key]!r:.60}: not {what}; allowed: {what}"] = None
    problems.check()
