"""The promises that every detector keeps, whatever its rule: it is fed with the same signals as all others."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness.detectors.base import AFTER_THE_STEP, Detector
from harness.detectors.replay import replay
from harness.model.state import State
from harness.readings.table import SHOWN
from harness.storage.store import SIGNALS
from harness.testing.promises import Promises

ROWS, STEPS, LAYERS, RANKS, STRUCK = 8, 700, 2, 3, 400
JUMP = 6  # steps that it lasts: some rules ask for several
LATER = (1, 10, 100)  # steps after what is not finite
BROKEN = (np.nan, np.inf, -np.inf)


def check_detector(detector: type[Detector], **options: Any) -> None:
    """Hold a detector to every promise of this page, on signals that are made here; some seconds.

    What a rule cannot do its class says, and is not asked for it: `blind`, `falling`, `keeps`, `of_zero`, `reach`.

    Args:
        detector: The class of a plug-in's file.
        **options: Fields of the file's `Options` that are not the defaults.

    Raises:
        AssertionError: It breaks a promise; the text names it.
    """
    DetectorPromises(detector, options).check_all()


class DetectorPromises(Promises):
    """The promises, each a method."""

    def __init__(self, detector: type[Detector], options: Mapping[str, Any] | None = None):
        super().__init__(detector.__name__)
        self.detector, self._options = detector, dict(options or {})

    # --- the promises -------------------------------------------------------------------------------------------

    def it_is_silent_where_nothing_changes(self) -> None:
        """Signals that stand still are no alarm."""
        steady = 0.0 if self.detector.of_zero else 3.1
        assert not self.fed(np.full((ROWS, STEPS), steady))[0].any()

    def it_takes_no_falling_loss_for_an_alarm(self) -> None:
        """Unless the rule is such, as `falling` says."""
        alarms, _ = self.fed(falling())
        assert self.detector.of_zero or alarms.any() == bool(self.detector.falling)

    def it_sees_a_jump(self) -> None:
        """On a plateau, in a loss that falls, and among heavy tails."""
        curves = np.concatenate([jumping(curve(), STRUCK, 20) for curve in (plateau, falling, heavy_tails)])
        alarms, _ = self.fed(curves, **self.detector.reach)
        assert self.detector.blind or alarms[:, STRUCK : STRUCK + JUMP].any(1).all()

    def it_sees_a_jump_after_a_slow_drift(self) -> None:
        """What is usual follows the signal."""
        values = plateau() + np.clip(np.arange(STEPS) - 100, 0, 200) / 200
        alarms, _ = self.fed(jumping(values, STRUCK, 12), **self.detector.reach)
        assert self.detector.blind or alarms[:, STRUCK : STRUCK + JUMP].any(1).all()

    def it_sees_a_jump_after_what_is_not_finite(self) -> None:
        """Which is an alarm itself, and which it does not remember."""
        values = np.concatenate([jumping(plateau(), STRUCK + later) for later in LATER])
        values[:, STRUCK] = np.resize(BROKEN, len(values))
        alarms, scores = self.fed(values, **self.detector.reach)
        if self.detector.blind:
            return
        assert alarms[:, STRUCK].all() and np.isnan(scores[:, STRUCK]).all()
        for said, later in zip(np.split(alarms, len(LATER)), LATER, strict=True):
            assert said[:, STRUCK + later : STRUCK + later + JUMP].any(1).all(), later
            assert said[:, STRUCK + 1 : STRUCK + later].sum() <= 0.02 * ROWS * later, "it is nervous afterwards"

    def it_lets_no_row_know_of_another(self) -> None:
        """Rows say the same beside others, and alone."""
        values = jumping(heavy_tails(), STRUCK)
        alarms, scores = self.fed(values)
        mixed = values.copy()
        mixed[::2, 50:] = np.nan
        others = self.fed(mixed)
        assert np.array_equal(alarms[1::2], others[0][1::2])
        assert np.array_equal(scores[1::2], others[1][1::2], equal_nan=True)
        for alone in (slice(0, 1), slice(3, 5)):
            again = self.fed(values[alone])
            assert np.array_equal(alarms[alone], again[0])
            assert np.array_equal(scores[alone], again[1], equal_nan=True)

    def it_remembers_and_says_nothing_of_a_row_that_waits(self) -> None:
        """One that takes every other step of the loop sees what it would have seen."""
        values = jumping(plateau(), 150)[:, :250]
        values[::2] *= 0.11  # shares of 0.33, and then of 0.88
        cls, given = self.detector, self.signals(values)
        detector, expected = self.made(**cls.reach), self.fed(values, **cls.reach)
        lags, slow = bool(AFTER_THE_STEP.intersection(cls.watches)), []
        for pack_step in range(2 * values.shape[1]):
            step = pack_step // 2
            shown = {k: torch.from_numpy(x[:, max(0, step - (k in AFTER_THE_STEP))]) for k, x in given.items()}
            is_new = pack_step % 2 == 1 and not (lags and step == 0)
            is_alarm, score = detector.judge(shown, torch.full((ROWS,), is_new))
            if pack_step % 2:
                slow.append((is_alarm.numpy(), score.numpy()))
            else:
                assert not is_alarm.any() and score.isnan().all()
        for found, whole in zip(zip(*slow, strict=True), expected, strict=True):
            assert np.array_equal(np.stack(found, 1), whole, equal_nan=True)

    def it_begins_anew_where_a_row_does(self) -> None:
        """Unless it keeps something, as `keeps` says."""
        detector, fresh, values = self.made(), self.made(), self.signals(heavy_tails())
        everyone = torch.ones(ROWS, dtype=torch.bool)
        for step in range(300):
            detector.judge({k: torch.from_numpy(x[:, step]) for k, x in values.items()}, everyone)
        detector.restart(everyone)
        if self.detector.keeps:
            return
        for step in range(300, STEPS):
            shown = {k: torch.from_numpy(x[:, step]) for k, x in values.items()}
            for left, right in zip(detector.judge(shown, everyone), fresh.judge(shown, everyone), strict=True):
                assert torch.equal(left.nan_to_num(-1.0), right.nan_to_num(-1.0))

    # --- what it is fed with ------------------------------------------------------------------------------------

    def options(self, **given: Any) -> Any:
        """`Options` of the detector's file; None where it has none."""
        options = getattr(sys.modules[self.detector.__module__], "Options", None)
        return None if options is None else dataclasses.replace(options(**self._options), **given)

    def fed(self, values: np.ndarray, **given: Any) -> tuple[np.ndarray, np.ndarray]:
        """Alarms and scores, [R, steps] each, where every signal that it watches has these values at these steps."""
        return replay(self.detector, self.options(**given), self.signals(values), np.ones(values.shape, bool))

    def signals(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """By name, [R, steps], and the axes of each; what is known after a step is seen at the same one."""
        shifted = np.concatenate([values[:, 1:], values[:, -1:]], 1)
        of = {signal: shifted if signal in AFTER_THE_STEP else values for signal in self.detector.watches}
        sizes = {"layer": LAYERS, "rank": RANKS}
        shapes = {signal: [sizes[dim] for dim in along_of(signal)] for signal in of}
        return {
            signal: np.broadcast_to(x.reshape(*x.shape, *[1] * len(shapes[signal])), (*x.shape, *shapes[signal])).copy()
            for signal, x in of.items()
        }

    def made(self, **given: Any) -> Detector:
        """A detector of ROWS rows that has seen nothing yet."""
        like = {signal: torch.from_numpy(x[:, 0]) for signal, x in self.signals(plateau()).items()}
        return self.detector("detector", [self.options(**given)] * ROWS, like, State(ROWS))


def along_of(signal: str) -> Sequence[str]:
    """The axes of a signal beside trial and step; one that no store has, has none."""
    return SHOWN[signal].along if signal in SHOWN else SIGNALS[signal].dims[2:] if signal in SIGNALS else ()


def _noise(spread: float = 0.02) -> np.ndarray:
    return spread * np.random.default_rng(1).standard_normal((ROWS, STEPS))


def plateau() -> np.ndarray:
    """[R, steps] around 3."""
    return 3 + _noise()


def falling() -> np.ndarray:
    """[R, steps] from 6 to 2."""
    curve: np.ndarray = 2 + 4 * np.exp(-np.arange(STEPS) / 150) + _noise()
    return curve


def heavy_tails() -> np.ndarray:
    """[R, steps] around 3, with Student's noise of three degrees of freedom."""
    return 3 + 0.02 * np.random.default_rng(2).standard_t(3, (ROWS, STEPS))


def jumping(values: np.ndarray, step: int, to: float = 8) -> np.ndarray:
    """The same, and another value for JUMP steps from this one on."""
    struck = values.copy()
    struck[:, step : step + JUMP] = to
    return struck
