"""All claims in parts of half an hour, by subject, and one part that is trained."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from sweeps.claims.parts import MINUTES, parts
from sweeps.claims.registered import claims
from sweeps.commands import claims as command_of_claims
from tests.sweeps.test_claims_by_trials import ONE, call, own


def test_all_claims_come_in_parts_of_half_an_hour(capsys) -> None:
    """Each once, by subject; a part with its number is trained, and one that there is not is refused."""
    known = [claim for claim in claims().values() if claim.trials is not None]
    found = parts(known)
    names = [claim.name for part in found for claim in part.claims]
    assert sorted(names) == sorted(claim.name for claim in known)
    for part in found:
        assert {claim.tags[0] for claim in part.claims} == {part.subject}
        assert part.minutes <= MINUTES or len(part.claims) == 1
    for one, other in pairwise(found):
        assert one.subject < other.subject or one.minutes + other.minutes > MINUTES, "none is cut without need"
    status, said, _ = call(capsys, "parts")
    assert status == 0 and all(f"\n{number} " in said for number in range(1, len(found) + 1))
    status, _, err = call(capsys, "run", "--all", "--part", str(len(found) + 1), "out=o")
    assert status == 2 and f"--part {len(found) + 1}: there is none; allowed: 1 to {len(found)}" in err


def test_one_part_is_trained(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the user's own claims too, which are told from ours."""
    monkeypatch.setattr(command_of_claims, "_by_trials", lambda folder: [claims(folder)["mine"]])
    folder, out = own(tmp_path), tmp_path / "out"
    status, said, err = call(capsys, "run", "--all", "--part", "1", f"out={out}", "--config-dir", str(folder), ONE)
    assert status == 0, err
    assert "1 claim, 24 trials in all" in said and "confirmed" in said
