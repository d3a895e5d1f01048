"""Names that other programs have for our keys lead to these."""

from __future__ import annotations

import pytest

from sweeps.compose.overrides import known_keys, unknown_key
from sweeps.compose.usual_names import UNLIKE, USUAL

KNOWN = known_keys()
NAMES = [name for names in USUAL.values() for name in names.split()]


def test_each_leads_to_a_key_and_is_none_itself() -> None:
    assert set(USUAL) <= set(KNOWN)
    taken = {key.rpartition(".")[2] for key in KNOWN}
    assert not taken & set(NAMES), "these would never be looked up"
    assert {name for names in UNLIKE for name in names.split()} <= set(NAMES)


@pytest.mark.parametrize("section", ["", "optim.", "training_args."])
def test_the_error_names_the_key(section: str) -> None:
    for name in NAMES:
        meant = [key for key, names in USUAL.items() if name in names.split()]
        said = str(unknown_key(f"{section}{name}", 3, KNOWN))
        assert said.startswith(f"{section}{name}=3: unknown key; did you mean {' or '.join(meant)}")
        assert f"allowed: {', '.join(meant)}, and the other keys" in said
