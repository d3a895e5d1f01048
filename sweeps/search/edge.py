"""`search=max_stable_lr`: the largest stable learning rate of each cell, by bisection."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import optuna
import pandas as pd
import xarray as xr
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from harness.basics.printing import count
from harness.config import ConfigError, Trial
from harness.config.names import MAX_STABLE_RATE
from harness.objectives.outcome import TRAINED
from sweeps.compose.overrides import Axis
from sweeps.compose.settings import SearchSettings
from sweeps.search.goal import Goal, Judged, is_seed, rows_of, told
from sweeps.search.space import CELLS, REPEATED, SEARCHED, geometric
from sweeps.search.studies import Studies, known_points

RATE = "optim.lr"


class MaxStableRate(Goal):
    """A rate is stable if every seed trains at it to the end. What is stable above an unstable rate does not count."""

    kind = MAX_STABLE_RATE
    directions = ("maximize",)
    objectives = ("learning rate, 0 if a seed did not train",)
    wanted = RATE

    def __init__(self, axes: Sequence[Axis], settings: SearchSettings):
        super().__init__(axes, settings)
        axis = self.space.searched[RATE]
        if axis.interval and axis.interval.low <= 0:
            raise ConfigError(f"{axis.text}: no rate at its lower end; allowed: above 0")
        values = sorted({float(word) for word in axis.values})
        self.rates = geometric(values[0], values[-1], settings.tolerance) if axis.interval else values

    @staticmethod
    def role(key: str) -> str:
        return SEARCHED if key == RATE else REPEATED if is_seed(key) else CELLS

    def ask(self, studies: Studies, study: optuna.Study, batch: int) -> list[optuna.Trial]:
        distribution = {RATE: FloatDistribution(self.rates[0], self.rates[-1], log=True)}
        waiting = study.get_trials(deepcopy=False, states=[TrialState.WAITING])
        new = [studies.ask(study, distribution) for _ in waiting]
        while len(new) < batch:
            known = {trial.params[RATE] for trial in known_points(study).values()}
            stable = self._stable(study)
            rate = next_rate(self.rates, stable, known - stable.keys())
            if rate is None:
                break
            study.enqueue_trial({RATE: rate})
            new.append(studies.ask(study, distribution))
        return new

    def _stable(self, study: optuna.Study) -> dict[float, bool]:
        return {trial.params[RATE]: bool(trial.values[0]) for trial in told(study)}

    def judge(self, trials: Sequence[Trial], sweep: xr.Dataset, events: pd.DataFrame) -> Judged:
        outcome = sweep["outcome"].values[rows_of(trials, sweep)]
        share = float((outcome == TRAINED).mean())
        return Judged([trials[0].optim.lr if share == 1 else 0.0], {"stable": share})

    def summary(self, study: optuna.Study) -> str:
        stable = self._stable(study)
        below, above = bracket(self.rates, stable)
        number = f"{len(stable)} of {len(self.rates)} rates tried, {count(len(self.space.repeats), 'seed')} each"
        if below is None:
            return f"none is stable: {self.rates[0]:.4g}, the smallest, is not ({number})"
        beyond = f"{above:.4g} is not" if above is not None else "no larger one was asked for"
        return f"largest stable {RATE} {below:.4g}, {beyond} ({number})"


def bracket(rates: Sequence[float], stable: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """The smallest rate that is unstable, and the largest stable one below it, as (stable, unstable)."""
    above = next((rate for rate in rates if stable.get(rate) is False), None)
    below = [rate for rate in rates if stable.get(rate) and (above is None or rate < above)]
    return (below[-1] if below else None), above


def next_rate(rates: Sequence[float], stable: Mapping[float, bool], running: Collection[float]) -> float | None:
    """The rate that tells most: in the middle of what is not known yet, and far from those that run.

    None if the edge is known, or will be once those that run have ended. `rates` rise.
    """
    below, above = bracket(rates, stable)
    first = -1 if below is None else rates.index(below)
    last = len(rates) if above is None else rates.index(above)
    between = range(first + 1, last)
    taken = [first, last, *(number for number in between if rates[number] in running)]
    free = [number for number in between if number not in taken]
    if not free:
        return None
    return rates[max(free, key=lambda number: (min(abs(number - other) for other in taken), -number))]
