"""Old names that a user's package may import: each is still what its new name is, and says so."""

from __future__ import annotations

import importlib

import pytest

from harness.basics import renamed

OLD = {
    ("harness.training.sites", "Visit"): "SiteCall",
    ("harness.training.sites", "Agenda"): "FaultSchedule",
    ("harness.guards", "Seen"): "GuardInput",
    ("harness.guards.base", "Seen"): "GuardInput",
    ("harness.readings.base", "Shown"): "ReadingSignal",
    ("harness.readings.base", "Known"): "ReadingContext",
}


@pytest.mark.parametrize(("module", "old"), OLD)
def test_an_old_name_is_read_with_a_warning(module: str, old: str) -> None:
    found, now = importlib.import_module(module), OLD[module, old]
    with pytest.warns(DeprecationWarning, match=f"^{module}.{old} is called {now} now$"):
        assert getattr(found, old) is getattr(found, now)


def test_what_never_was_is_not_there() -> None:
    with pytest.raises(AttributeError, match="^module 'json' has no attribute 'nothing'$"):
        renamed.names("json", loads="dumps")("nothing")
