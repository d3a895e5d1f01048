"""What a trial is known by: its id, and the structure that a pack shares."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.config import STRUCTURAL, SWITCHED, Model, Optim, Trial, sections
from harness.config import trial as trial_module
from harness.config.fields import scope_of
from injectors.value import Value


def other(value: Any) -> Any:
    """A value of the same type that is not the same."""
    if value is None or isinstance(value, str):
        return f"{value or 3}x"
    return not value if isinstance(value, bool) else value + 1


def trials() -> Iterator[Trial]:
    """One for each field of each section, which alone is not the usual one; and others."""
    for name, cls in sections().items():
        for field in dataclasses.fields(cls):
            yield Trial.of({name: dataclasses.replace(cls(), **{field.name: other(getattr(cls(), field.name))})})
    yield from (Trial(seed=3), Trial(recipe="gpt2", mitigation='a "b"'), Trial(fault=Value(start=3, value=-0.0)))


def test_an_id_is_that_of_the_stored_configuration() -> None:
    """Text for text, in whichever order trials are asked."""
    ids = set()
    for trial in [*trials(), *trials()]:
        text = json.dumps(trial.to_dict(), sort_keys=True)
        assert trial.id == hashlib.sha256(text.encode()).hexdigest()[:16]
        ids.add(trial.id)
    assert len(ids) == len(list(trials()))


def test_equal_fields_that_are_written_otherwise_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are of text, in which 1 is not 1.0; also where there is no room for more texts."""
    monkeypatch.setattr(trial_module, "MOST_TEXTS", 2)
    whole, broken = Trial(optim=Optim(lr=1)), Trial(optim=Optim(lr=1.0))
    assert whole == broken and whole.id != broken.id
    assert [Trial(optim=Optim(lr=rate)).id for rate in (1, 1.0, 1)] == [whole.id, broken.id, whole.id]
    options = dataclasses.make_dataclass("Shared", [("size", float, 1.0)], frozen=True)()
    one, two = (Trial(extras=((name, options),)) for name in ("one", "two"))  # one object, under two names
    assert one.id != two.id
    minus, plus = (Trial(fault=Value(value=zero)) for zero in (-0.0, 0.0))
    assert minus == plus and minus.id != plus.id


def test_a_section_that_may_change_is_read_anew() -> None:
    @dataclasses.dataclass
    class Loose:
        size: float = 1.0

    options = Loose()
    before = Trial(extras=(("loose", options),)).id
    options.size = 2.0
    assert Trial(extras=(("loose", options),)).id != before


def test_a_structure_is_every_structural_field_and_which_switched_ones_are_on() -> None:
    def plainly(trial: Trial) -> list[tuple[str, str, Any]]:
        found = []
        for name, cls in sections().items():
            for field in dataclasses.fields(cls):
                value, scope = getattr(trial.section(name), field.name), scope_of(cls, field.name)
                if scope in (STRUCTURAL, SWITCHED):
                    found.append((name, field.name, value if scope == STRUCTURAL else value is not None))
        return found

    alike: dict[str, set[str]] = {}
    for trial in trials():
        alike.setdefault(repr(plainly(trial)), set()).add(repr(trial.structure))
    assert all(len(structures) == 1 for structures in alike.values())
    assert len({next(iter(structures)) for structures in alike.values()}) == len(alike) > 50
    assert Trial(model=Model(width=48)).structure != Trial().structure == Trial(seed=4).structure
