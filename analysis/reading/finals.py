"""Where a trial began and ended: losses in nat/token. Trials of a sweep may have different numbers of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

from analysis.reading.twins import blocks, final_window


def final_loss(ds: xr.Dataset) -> xr.DataArray:
    """Mean training loss over the last 5% of a trial's steps, but at least 5 of them (or all): [trial].

    One step's batch is too noisy to compare trials by. NaN if any of those losses is not finite, or not there yet; but
    steps whose whole batch was dropped, which have no loss, are left out of the mean.
    """
    steps = ds["steps"].values
    window = final_window(steps)
    # A trial that is finished and never became non-finite has a loss at every step that read a batch.
    is_finite, mean = np.isnan(ds["nonfinite_step"].values), np.full(len(steps), np.nan)
    has_all = ds["complete"].values & is_finite
    begin = int((steps - window).min(initial=ds.sizes["step"]))
    step = ds["step"].values[begin:]
    for block in blocks(ds["loss"], np.arange(len(steps))):
        loss = ds["loss"].isel(trial=slice(block[0], block[-1] + 1), step=slice(begin, None)).values
        end, size = steps[block, None], window[block, None]
        counted = (step >= end - size) & (step < end) & ~(np.isnan(loss) & has_all[block, None])
        total, number = np.where(counted, loss, 0).sum(axis=1, dtype="float64"), counted.sum(axis=1)
        is_known = np.isfinite(total) & (number > 0) & is_finite[block]
        mean[block] = np.where(is_known, total / np.maximum(number, 1), np.nan)
    return xr.DataArray(mean, ds["steps"].coords, "trial")


def final_validation_loss(ds: xr.Dataset) -> xr.DataArray:
    """Validation loss of a trial's last step, which always validates: [trial]. NaN if it is not finite or not there."""
    return _last(ds["validation_loss"], ds["steps"])


def final_validation_loss_error(ds: xr.Dataset) -> xr.DataArray:
    """Standard error of `final_validation_loss`, from that segments of the held-out text differ: [trial].

    It is that of one trial alone. Of a difference between trials, which are validated on the same windows, it is
    smaller: take the difference in each segment, from `final_segment_loss`. NaN if it was not measured.
    """
    return _last(ds["validation_loss_error"], ds["steps"])


def _last(signal: xr.DataArray, steps: xr.DataArray) -> xr.DataArray:
    """A signal at each trial's last step."""
    begin = int(steps.min()) - 1 if len(steps) else 0
    values = signal.isel(step=slice(begin, None))
    value = values.where(values["step"] == steps - 1, 0).sum("step", skipna=False, dtype="float64").compute()
    return value.where(np.isfinite(value))


def initial_validation_loss(ds: xr.Dataset) -> xr.DataArray:
    """Validation loss before the first step, the mean over segments: [trial]. NaN if it was not measured or is none."""
    value = ds["initial_segment_loss"].astype("float64").mean("segment").compute()
    return value.where(np.isfinite(value))


FINALS: Mapping[str, tuple[str, Callable[[xr.Dataset], xr.DataArray]]] = {
    "final_loss": ("final training loss", final_loss),
    "final_validation_loss": ("final validation loss", final_validation_loss),
    "final_validation_loss_error": ("standard error of the final validation loss", final_validation_loss_error),
    "initial_validation_loss": ("validation loss before the first step", initial_validation_loss),
}
"""What `open_sweep` adds under these names, in nat/token: its long name, and how it is taken."""
