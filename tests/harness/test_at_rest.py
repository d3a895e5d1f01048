"""Memory that does not keep what it was given: every changed bit of it is seen, is undone, and nothing else is taken
for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.formats import raw_words
from harness.readings.at_rest import COLUMNS, AtRest, checksums
from harness.testing import engine
from harness.testing.engine import left, run, same_bits
from injectors.value import Value
from tests.harness.features import FEATURES
from tests.harness.ladders import rung, struck, trained, verdicts

AT = 3
LOOKS = {"steps": 7, "signals": {"at_rest": 1}, "detect": {"name": "checksum"}}
NAMES = tuple(AtRest.signals)
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
@pytest.mark.parametrize("site", ["weight", "moment_1", "moment_2"])
def test_every_flipped_bit_is_seen(site: str, bit: int, forks: bool) -> None:
    golden = engine.trial(**LOOKS)
    flip = Value(site=site, tensor="blocks.0.feedforward.up", element=3, start=AT, bit=bit)
    found = run([golden, engine.trial(fault=flip, **LOOKS)], forks=forks)
    assert found.result.changes[1] == 1
    for name in NAMES:
        is_struck = name == ("weights_changed" if site == "weight" else f"{site}_changed")
        assert np.flatnonzero(found.signals[name][1] > 0).tolist() == ([AT] if is_struck else []), name
        assert not found.signals[name][0].any()
    alarms = np.flatnonzero(found.signals["alarm_checksum"][1] == 1)
    assert alarms[0] in (AT, AT + 1) and not found.signals["alarm_checksum"][0].any(), "judged when the step is over"


@pytest.mark.parametrize("site", ["reduced_gradient", "clipped_gradient", "update"])
def test_what_a_step_computes_is_not_looked_at(site: str) -> None:
    flip = Value(site=site, tensor="blocks.0.feedforward.up", element=3, start=AT, bit=22)
    found = run([engine.trial(**LOOKS), engine.trial(fault=flip, **LOOKS)])
    assert found.result.changes[1] == 1
    assert not any(found.signals[name].any() for name in NAMES)


@pytest.mark.parametrize("name", FEATURES)
def test_nothing_of_ours_writes_between_a_steps_beginning_and_its_update(name: str) -> None:
    fields = {"steps": 4, **FEATURES[name]}
    fields["signals"] = {**fields.get("signals", {}), "at_rest": 1}
    found = run(engine.different(2, **fields))
    for signal in NAMES:
        values = found.signals[signal]
        assert not np.nan_to_num(values).any() and (values == 0).any(), signal


def test_it_is_read_now_and_then() -> None:
    flips = [Value(site="weight", tensor="head", element=3, start=start, bit=2) for start in (2, 3)]
    looks = {**LOOKS, "signals": {"at_rest": 2}}
    found = run([engine.trial(fault=flip, **looks) for flip in flips])
    changed = found.signals["weights_changed"]
    assert np.flatnonzero(changed[0] == 1).tolist() == [2] and not np.nan_to_num(changed[1]).any()
    assert np.isnan(changed[:, 1::2]).all()


@pytest.mark.parametrize("bit", [0, 30])
@pytest.mark.parametrize("site", ["weight", "moment_1", "moment_2"])
def test_what_it_sees_is_undone_bit_for_bit(site: str, bit: int) -> None:
    """The lowest bit of one number, too, which no signal of the training shows."""
    looks = {"detect": "checksum", "signals": {"at_rest": 1}, "snapshot": {"every": 1, "kept": 4}}
    golden = trained(rung("re_execute"), **looks)
    found = run([golden, struck(golden, Value(site=site, tensor="head", element=5, bit=bit, start=4))], forks=True)
    assert verdicts(found, 1) == ["transient"] and found.result.incidents[1][0]["steps_lost"] <= 2
    assert same_bits(left(found, 0), left(found, 1)) == []
    assert verdicts(found, 0) == []


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 5, COLUMNS - 1, 2 * COLUMNS, 4 * COLUMNS + 3])
def test_a_checksum_is_of_every_bit_of_its_row(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0] = torch.nan
    before = checksums(x)
    assert before.dtype == torch.int64 and len(before) == 3
    for place in {0, size // 2, size - 1}:
        for bit in range(8 * x.element_size()):
            flip = 1 << bit if bit < 8 * x.element_size() - 1 else -(1 << bit)
            changed = x.clone()
            raw_words(changed)[1, place] ^= flip
            assert (checksums(changed) != before).any(1).tolist() == [False, True, False]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flips_of_the_same_bit_rarely_cancel(data: st.DataObject) -> None:
    """Of numbers next to each other they never do: each stands in a column of its own."""
    x = torch.randn(1, 4 * COLUMNS, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    first = data.draw(st.integers(0, 4 * COLUMNS - 3))
    places, bit = [first, first + 2], data.draw(st.integers(0, 31))
    changed = x.clone()
    raw_words(changed)[0, places] ^= 1 << bit if bit < 31 else -(1 << bit)
    assert (checksums(changed) != checksums(x)).any()
