"""What docs/architecture.md promises, whatever a trial has: a setting in `FEATURES` is held to all of it.

The promises themselves stand in harness/testing/settings.py, for parts of plug-ins too.
"""

from __future__ import annotations

from functools import cache

import pytest

from harness.testing import engine
from harness.testing.settings import SettingPromises
from tests.harness.features import FEATURES, NEUTRAL, Fields

RUIN = "it_lets_ruined_trials_change_no_bit_of_the_others"
WAYS = {(True, True): 1, (False, False): 4, (True, False): 8}  # telemetry and detection -> one feature in so many


@cache
def promises(feature: str) -> SettingPromises:
    # Of clip_value's trial the fourth's element is at its bound.
    return SettingPromises(FEATURES[feature], spared=int(feature == "clips: clip_value"))


@pytest.mark.parametrize("promise", [name for name in SettingPromises.names() if name != RUIN])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_promise(feature: str, promise: str) -> None:
    promises(feature).check(promise)


@pytest.mark.parametrize(
    ("feature", "telemetry", "detection"),
    [(feature, *way) for way, share in WAYS.items() for feature in list(FEATURES)[::share]],
)
def test_ruined_trials_and_ways_of_training_change_no_bit_of_the_others(
    feature: str, telemetry: bool, detection: bool
) -> None:
    promises(feature).it_lets_ruined_trials_change_no_bit_of_the_others(telemetry, detection)


@pytest.mark.parametrize(("fields", "plain"), NEUTRAL.values(), ids=NEUTRAL)
def test_a_setting_of_no_strength_changes_no_bit(fields: Fields, plain: Fields) -> None:
    engine.assert_same_trials(*(engine.run(engine.different(3, **each)) for each in (fields, plain)))
