"""What the same faults do with each mitigation: how far they drive the loss from golden, and for how long they show."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.outcomes import OUTCOMES, outcomes_and_notes
from analysis.reading.twins import Trials, deviation_blocks, numbers_of
from harness.config import NO_FAULT
from harness.config.names import LAST_BIT, Site
from harness.objectives.outcome import NON_FINITE


def felt_faults(sweep: xr.Dataset, table: pd.DataFrame) -> pd.DataFrame:
    """One row a fault's name, `place`, `mitigation` and `who` (a seed): `deviation`, `recovery`, `watched`, `trials`.

    `table` describes the trials of `sweep`, in its order: their `place`, `mitigation`, `who`, and whether they are
    `wanted`. Of those the faulty ones count that are finished, are judged (`analysis.measures.outcomes`) and changed
    something.

    - `deviation`: the largest loss_t(faulty) - loss_t(golden) over the steps since the strike at which both read the
      same batch: the loss of a poisoned batch says nothing about the model. At least 0; infinite if the trial became
      non-finite, unlike its twin; NaN if there is no such step.
    - `recovery`: steps until the loss is level with golden (`settling_steps`); infinite if it was not by the end.
    - `watched`: steps from the strike to the end of the run.

    Of several trials these are the medians. `recovered` of `trials` trials recovered.
    """
    fault, complete = sweep["fault"].values, sweep["complete"].values
    position = pd.Index(sweep["trial"].values).get_indexer(sweep["golden"].values)
    is_wanted = table["wanted"].to_numpy() & complete & ~np.isin(fault, (NO_FAULT.name, LAST_BIT)) & (position >= 0)
    rows = np.flatnonzero(is_wanted)
    kept = np.union1d(rows, position[rows])
    # The envelope plays no part in what is taken from the outcomes, so the notes on it are of no interest.
    judged, _ = outcomes_and_notes(sweep.isel(trial=kept))
    place = np.searchsorted(kept, rows)
    word = judged["fault_outcome"].values[place]
    recovery = judged["settling_steps"].values[place]
    trials = Trials.of(judged)
    felt = table.iloc[rows][["place", "mitigation", "who"]].assign(
        fault=fault[rows],
        deviation=np.where(word == NON_FINITE, np.inf, largest_deviation(judged)[place]),
        recovery=np.where(np.isnan(recovery), np.inf, recovery),
        recovered=~np.isnan(recovery),
        watched=(trials.steps - trials.begin)[place],
    )
    felt = felt[np.isin(word, OUTCOMES) & ~judged["idle"].values[place]]
    by = felt.groupby(["fault", "place", "mitigation", "who"])
    medians = by[["deviation", "recovery"]].median()
    counts = by.agg(watched=("watched", "max"), recovered=("recovered", "sum"), trials=("recovered", "size"))
    return medians.join(counts).reset_index()


def largest_deviation(sweep: xr.Dataset) -> np.ndarray:
    """[trial], NaN for trials without a finished twin and where no step counts."""
    trials = Trials.of(sweep)
    is_poisoned = sweep["struck_site"].values == Site.BATCH
    duration = numbers_of(sweep, "fault_duration", np.nan)
    # A fault without a duration is permanent: of a poisoned one no step is left.
    end = np.where(np.isnan(duration), trials.steps, trials.begin + np.nan_to_num(duration)).astype(int)
    begin = np.where(is_poisoned, end, trials.begin)
    largest = np.full(len(begin), np.nan)
    for block, deviation in deviation_blocks(sweep, trials, np.flatnonzero(trials.has_twin), begin):
        is_known = ~np.isnan(deviation)
        worst = np.where(is_known, deviation, 0.0).max(axis=1, initial=0.0)
        largest[block] = np.where(is_known.any(axis=1), worst, np.nan)
    return largest
