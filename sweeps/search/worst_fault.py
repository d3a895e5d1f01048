"""`search=worst_fault`: the smallest faults that do the most damage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import optuna
import pandas as pd
import xarray as xr

from analysis.measures.outcomes import outcomes_and_notes
from harness.config import NO_FAULT, ConfigError, Trial
from harness.config.names import WORST_FAULT
from harness.objectives.outcome import DIVERGENT, NON_FINITE
from injectors.value import Value
from injectors.value_strike import MOST_EVENTS
from sweeps.compose.overrides import fault_fields
from sweeps.search.goal import Goal, Judged, is_faults, is_seed, named, rows_of, told
from sweeps.search.space import CELLS, REPEATED, SEARCHED
from sweeps.search.studies import REASON

SMALLEST, LARGEST = 1e-45, 3.5e38  # of float32: what no change, and one that is not finite, count as


class WorstFault(Goal):
    """Over seeds, the median of both objectives; a fault breaks the run if it does so with most of the seeds."""

    kind = WORST_FAULT
    directions = ("minimize", "maximize")
    objectives = ("size of the fault, log10", "damage: final deviation from golden [nat/token]")
    wanted = "fault and fault.*"

    @staticmethod
    def role(key: str) -> str:
        return SEARCHED if is_faults(key) else REPEATED if is_seed(key) else CELLS

    def check(self, trials: Sequence[Trial]) -> None:
        size = self.settings.size
        if size is not None and size not in fault_fields():
            raise ConfigError(f"search.size={size}: no field of a fault; allowed: fault.NAME, or null")
        for trial in trials:
            fault = trial.fault
            if fault == NO_FAULT:
                raise ConfigError("fault=none: has no size; allowed with search=worst_fault: faults alone")
            if size is not None and not isinstance(getattr(fault, size.partition(".")[2], None), (int, float)):
                raise ConfigError(f"search.size={size}: no number of fault={fault.name}; allowed: one that it has")
            is_recorded = isinstance(fault, Value) and fault.elements is not None and fault.elements <= MOST_EVENTS
            if size is None and not is_recorded:
                raise ConfigError(
                    f"search.size=null: of fault={fault.name} no values are recorded before and after; "
                    f"allowed: search.size=fault.NAME, a field that says how large it is"
                )

    def first(self, trials: Sequence[Trial]) -> list[Trial]:
        return list({trial.golden.id: trial.golden for trial in trials}.values())

    def check_first(self, first: Sequence[Trial], sweep: xr.Dataset) -> None:
        lost = sweep["outcome"].values[rows_of(first, sweep)] == NON_FINITE
        for trial in (trial for trial, is_lost in zip(first, lost, strict=True) if is_lost):
            reason = "without a fault it became non-finite, so that nothing can be compared with it"
            raise ConfigError(f"optim.lr={trial.optim.lr:g}: {reason}; allowed: a recipe that trains")

    def judge(self, trials: Sequence[Trial], sweep: xr.Dataset, events: pd.DataFrame) -> Judged:
        judged, _ = outcomes_and_notes(sweep)
        rows = rows_of(trials, judged)
        outcome = judged["fault_outcome"].values[rows]
        most = math.log(trials[0].data.vocabulary)
        damage = np.where(outcome == NON_FINITE, most, np.minimum(judged["deviation_final"].values[rows], most))
        if np.isnan(damage).any():
            return Judged(None, {REASON: "no step at which both losses are finite"})
        is_breaking = float(np.isin(outcome, (NON_FINITE, DIVERGENT)).mean()) > 0.5
        size = float(np.median([self._size(trial, events) for trial in trials]))
        logarithm = math.log10(min(max(abs(size), SMALLEST), LARGEST))
        about = {"breaks": is_breaking, "outcomes": [str(word) for word in outcome], "size": f"{size:.6g}"}
        return Judged([logarithm, float(np.median(damage))], about)

    def _size(self, trial: Trial, events: pd.DataFrame) -> float:
        """The field that was asked for, or the norm of the change at the first strike; infinite if it is not finite."""
        if self.settings.size is not None:
            return float(getattr(trial.fault, self.settings.size.partition(".")[2]))
        changed = events[(events["trial"] == trial.id) & events["changed"].astype(bool)]
        changed = changed[changed["step"] == changed["step"].min()]
        change = changed["after"].astype(float) - changed["before"].astype(float)
        return float(np.nan_to_num(np.sqrt((change**2).sum(skipna=False)), nan=np.inf))

    def summary(self, study: optuna.Study) -> str:
        points = told(study)
        breaking = [point for point in points if point.user_attrs["breaks"]]
        if not breaking:
            return f"no fault of {len(points)} broke the run"
        smallest = min(breaking, key=lambda point: (point.values[0], -point.values[1]))
        first = 1 + min(points.index(point) for point in breaking)
        return (
            f"{len(breaking)} of {len(points)} faults broke the run, the first was number {first}; the smallest: "
            f"{named(smallest.params)} (size {smallest.user_attrs['size']}, {smallest.values[1]:.2f} nat/token)"
        )
