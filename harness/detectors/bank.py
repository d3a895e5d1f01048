"""The detectors that runs have chosen, made and asked together: by a pack for its rows, by a loop for its one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from harness.config import Trial, sections
from harness.detectors import table  # which looks through this folder, so it may not be there yet
from harness.detectors.base import AFTER_THE_STEP, Values
from harness.model.state import State
from harness.readings.table import SHOWN


def chosen_options(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Detector -> the options of each of these trials, which choose the same detectors; None each where it has none."""
    name = trials[0].section("detect").name
    names = [] if name == "none" else name.split("+")
    has_options = {name: f"detect.{name}" in sections() for name in names}
    return {
        name: [trial.section(f"detect.{name}") if has_options[name] else None for trial in trials] for name in names
    }


def watched_by(names: Sequence[str]) -> list[str]:
    """All signals that these detectors watch, once each."""
    return list(dict.fromkeys(signal for name in names for signal in table.DETECTORS[name].watches))


class DetectorBank:
    """The detectors of some rows, by name; what they remember is in `state`.

    `options` and `like` and `there` as `Detector` has them. `lagging` are the signals that are known when a step is
    over: detectors judge those of the step before, once there is one.
    """

    def __init__(
        self,
        options: Mapping[str, Sequence[Any]],
        like: Values,
        state: State,
        there: Mapping[str, Sequence[bool]] | None = None,
    ):
        self._detectors = {
            name: table.DETECTORS[name](f"detect_{name}", chosen, like, state, there)
            for name, chosen in options.items()
        }
        self._lags = {name: bool(AFTER_THE_STEP.intersection(each.watches)) for name, each in self._detectors.items()}
        self.lagging = sorted(AFTER_THE_STEP.intersection(watched_by(list(options))))

    def bind(self, options: Mapping[str, Sequence[Any]]) -> None:
        """Work on the rows in use from now on, which have these options."""
        for name, detector in self._detectors.items():
            detector.bind(options[name])

    def judge(
        self, values: Values, is_new_R: Tensor, has_before_R: Tensor | None, new_rate_R: Tensor | None
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Show a step to each: its name, alarms and scores, [R] each.

        Rows that take no step (`is_new_R`), or of which no step before is known (`has_before_R`; None: of all), are
        silent. `new_rate_R` are the rows whose rate left its schedule in the step before; None: no row's did. One that
        watches what nobody measures in this run is left out.
        """
        for name, detector in self._detectors.items():
            if new_rate_R is not None:
                detector.see_new_rate(new_rate_R)
            if any(signal not in values and signal not in SHOWN for signal in detector.watches):
                continue
            takes = is_new_R & has_before_R if self._lags[name] and has_before_R is not None else is_new_R
            is_alarm, score = detector.judge(values, takes)
            yield name, is_alarm, score

    def late(self, name: str, is_alarm_R: Tensor) -> Tensor:
        """Which of the alarms of a detector, at the step that it judged last, are of the step before, [R]."""
        return self._detectors[name].late(is_alarm_R)

    def restart(self, where_R: Tensor) -> None:
        """The detectors of these rows begin anew."""
        for detector in self._detectors.values():
            detector.restart(where_R)
