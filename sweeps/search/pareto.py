"""`search=pareto`: final loss against the worst deviation under faults, over mitigations and their strengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import optuna
import pandas as pd
import xarray as xr

from analysis.measures.mitigated_faults import largest_deviation
from analysis.reading.finals import final_validation_loss
from harness.config import NO_FAULT, ConfigError, Trial
from harness.config.names import PARETO
from sweeps.search.goal import Goal, Judged, is_faults, is_seed, named, rows_of, told
from sweeps.search.space import CELLS, REPEATED, SEARCHED

SHAPES = ("model.width", "model.depth")


class Pareto(Goal):
    """A width and a depth are a cell. Every point is trained with each seed, with each fault and without."""

    kind = PARETO
    directions = ("minimize", "minimize")
    objectives = ("final validation loss [nat/token]", "worst deviation from golden [nat/token]")
    wanted = "mitigation and other fields, but neither faults, seeds, width nor depth"

    @staticmethod
    def role(key: str) -> str:
        return REPEATED if is_faults(key) or is_seed(key) else CELLS if key in SHAPES else SEARCHED

    def check(self, trials: Sequence[Trial]) -> None:
        if all(trial.fault == NO_FAULT for trial in trials):
            raise ConfigError("fault=none: no deviation without a fault; allowed with search=pareto: fault=NAME,...")

    def judge(self, trials: Sequence[Trial], sweep: xr.Dataset, events: pd.DataFrame) -> Judged:
        most = math.log(trials[0].data.vocabulary)
        golden = {trial.golden.id: trial.golden for trial in trials}
        loss = final_validation_loss(sweep).values[rows_of(list(golden.values()), sweep)]
        faulty = [trial for trial in trials if trial.fault != NO_FAULT]
        rows = rows_of(faulty, sweep)
        is_lost = ~np.isnan(sweep["nonfinite_step"].values[rows])
        deviation = np.where(is_lost, most, np.nan_to_num(largest_deviation(sweep)[rows], nan=0.0))
        by_fault = pd.Series(np.minimum(deviation, most)).groupby([self._named(trial) for trial in faulty]).median()
        capped = np.minimum(np.nan_to_num(loss, nan=most), most)
        return Judged([float(capped.mean()), float(by_fault.max())], {"worst": str(by_fault.idxmax())})

    @staticmethod
    def _named(trial: Trial) -> str:
        """The fault, however often seeds repeat it."""
        fields = {name: value for name, value in vars(trial.fault).items() if name not in ("seed", "kind", "name")}
        return f"{trial.fault.name} {fields}"

    def summary(self, study: optuna.Study) -> str:
        front = sorted(study.best_trials, key=lambda point: point.values)
        ends = "; ".join(
            f"{named(point.params)}: {point.values[0]:.3f} and {point.values[1]:.3f} nat/token"
            for point in (*front[:1], *front[1:][-1:])
        )
        return f"front of {len(front)} of {len(told(study))} points{': ' if ends else ''}{ends}"
