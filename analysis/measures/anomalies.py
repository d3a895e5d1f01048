"""Odd steps of a run: those at which a signal leaves what is usual, or fails a consistency check of the arithmetic.

- Jumps of the loss, of the gradient norm, of the update, of activations and of attention logits are told against the
  median of the `BEFORE` steps before, in deviations (1.4826 MAD) and as a difference or a ratio.
- The rate in force is that of the schedule.
- Adam's second moment v is an exponential mean of squares: |v_t| lies between beta2 |v_(t-1)| and that plus
  (1 - beta2) |g|^2, with g the gradient after clipping (cf. the bound of He et al. 2023, doi 10.1145/3579371.3589105).
- The weights' norm moves by no more than the norm of their update: what moves it further was no update.
- Where they were read (`signals.at_rest`), weights and moments are right before an update what they were when the step
  began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.again.batches import Setup
from analysis.measures.detectors import carried, last_step
from harness.detectors.windows import MAD_TO_STD

BEFORE, LEAST = 40, 10
ODD = 7.0  # deviations at which a step is odd
LOSS_RISE = 0.25  # nat, and at least so much
NORM_RATIO = 2.0  # and at least so many times the usual, or below one over it
UPDATE_RATIO = 1.6
RATE_RATIO = 1.05  # to that of the schedule
LAYER_RATIO = 3.0
SCALE_RATIO = 2.5  # of the loss scale, which by itself doubles or halves
SLACK = 1.02  # beyond a bound, for rounding
STILL = 1e-5  # of the weights' norm: less is no move
OWN_MOVE = 10.0  # times the usual move of the weights' norm in the user's own loop
AT_REST = {  # anomaly -> the signals that say whether an array changed while nothing may write to it
    "weights check": ("weights_changed",),
    "moments check": ("moment_1_changed", "moment_2_changed"),
}


@dataclass(frozen=True)
class TrialSignals:
    """One trial's signals [steps(, layers)], float64, NaN after its last step; and what watched it.

    At a step that was not taken, because its batch was dropped, signals stand still (`detectors.carried`).
    `setup` is what an operator knows of the recipe; None where it is not known, and checks that need it are not made.
    """

    trial: str
    signals: Mapping[str, np.ndarray] = field(repr=False)
    taken: np.ndarray = field(repr=False)  # [steps], bool
    said: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(repr=False)  # alarm and score, [steps] each
    outcome: str = ""  # the harness's word
    setup: Setup | None = None
    golden: np.ndarray | None = field(
        default=None, repr=False
    )  # loss of the same run undisturbed [steps], if there is one
    loss_unit: str = "nat/token"  # "" for a loss without one

    def __getitem__(self, name: str) -> np.ndarray:
        """A signal up to the last step that was trained."""
        return self.signals[name][: self.steps]

    @cached_property
    def steps(self) -> int:
        """Up to the last one that was trained."""
        return last_step(self.taken) + 1

    @cached_property
    def has_layers(self) -> bool:
        """Whether activations were measured by layer, as of a model of one's own they are not."""
        return bool(np.isfinite(self["activation_rms"]).any())

    def has_changed(self, name: str) -> np.ndarray:
        """Where one of the signals of `AT_REST` says so, bool [steps]; nowhere if it was not read."""
        return self[name] > 0 if name in self.signals else np.zeros(self.steps, bool)

    @cached_property
    def anomalies(self) -> Mapping[str, np.ndarray]:
        """Signal -> where it is odd, bool [steps]; those of checks end with " check"."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return _oddities(self)

    @cached_property
    def sizes(self) -> np.ndarray:
        """How far each step is from the usual [steps].

        That is the rise of the loss in nat, or how far the logarithm of the gradient norm or of the update is off;
        infinite where a check fails, the rate is wrong or a value is not finite.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            rise = self["loss"] - usual(self["loss"])[0]
            steep = np.abs(np.log(self["grad_norm"]) - usual(np.log(self["grad_norm"]))[0])
            speed = np.log(self["update_rms"] / self["learning_rate"])
            hasty = speed - usual(speed)[0]
        size = np.fmax(np.fmax(np.fmax(rise, steep), hasty), 0.0)
        broken = [of for name, of in self.anomalies.items() if name.endswith("check") or name == "learning_rate"]
        is_broken = np.any(broken, axis=0) | ~(np.isfinite(self["loss"]) & np.isfinite(self["grad_norm"]))
        return np.where(is_broken, np.inf, np.nan_to_num(size, posinf=np.inf))

    @cached_property
    def moment_check(self) -> np.ndarray:
        """|v_t| over its upper bound; or minus its lower bound over |v_t|, if larger; NaN: not known [steps]."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return _moment_check(self)

    @cached_property
    def weight_check(self) -> np.ndarray:
        """By how many norms of its update the weights' norm has moved; NaN: not known [steps]."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return _weight_check(self)


def usual(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Median and deviation of the finite values of the `BEFORE` steps before each, [steps]; NaN below `LEAST`."""
    series = pd.Series(np.where(np.isfinite(values), values, np.nan))
    middle = series.rolling(BEFORE, min_periods=LEAST).median().shift(1)
    # Of the distances from the median that each had when it came: close to the window's own, at a fraction of its cost.
    apart = (series - middle).abs().rolling(BEFORE, min_periods=LEAST).median().shift(1)
    return middle.to_numpy(), MAD_TO_STD * apart.to_numpy()


def _odd(values: np.ndarray, least: float, has_low: bool = False) -> np.ndarray:
    """Where a signal [steps] is `ODD` deviations and `least` above the usual, or below, if `has_low`; or no number."""
    middle, deviation = usual(values)
    moved = np.abs(values - middle) if has_low else values - middle
    is_known = ~np.isnan(middle)
    return np.asarray(
        is_known & ((moved > np.maximum(ODD * np.nan_to_num(deviation, nan=np.inf), least)) | ~np.isfinite(values))
    )


def _oddities(run: TrialSignals) -> dict[str, np.ndarray]:
    rate, scale = run["learning_rate"], run["loss_scale"]
    found = {
        "loss": _odd(run["loss"], LOSS_RISE),
        "grad_norm": _odd(np.log(run["grad_norm"]), np.log(NORM_RATIO), has_low=True),
        "update_rms": _odd(np.log(run["update_rms"] / rate), np.log(UPDATE_RATIO)),
        "learning_rate": _wrong_rate(run),
        "loss_scale": _moved(scale, SCALE_RATIO),
        "second_moment_norm check": np.abs(run.moment_check) > SLACK,
        "param_norm check": (run.weight_check > SLACK) & (run.setup is not None and not run.setup.is_own),
    }
    for name in ("activation_rms", "attention_logit_max"):
        layers = [_odd(np.log(np.abs(layer)), np.log(LAYER_RATIO)) for layer in run[name].T]
        found[name] = np.any(layers, axis=0) if layers else np.zeros(run.steps, bool)
    found["update_rms"] &= ~np.isnan(run["update_rms"])  # not measured
    found |= {name: np.any([run.has_changed(one) for one in read], axis=0) for name, read in AT_REST.items()}
    return found


def _wrong_rate(run: TrialSignals) -> np.ndarray:
    """Where the rate in force is well above the one that the schedule has."""
    return rate_ratio(run) > RATE_RATIO


def rate_ratio(run: TrialSignals) -> np.ndarray:
    """The rate in force over that of the schedule, [steps]; NaN where the schedule is not known."""
    scheduled = np.full(run.steps, np.nan)
    if run.setup is not None:
        known = np.array(run.setup.rates[: run.steps])
        scheduled[: len(known)] = known
    return np.asarray(run["learning_rate"] / carried(scheduled, run.taken[: run.steps]))


def _moved(values: np.ndarray, ratio: float) -> np.ndarray:
    """Where a factor has moved by more than `ratio` since the step before."""
    moved = np.abs(np.log(np.abs(values[1:] / values[:-1])))
    return np.concatenate([[False], moved > np.log(ratio)])


def _moment_check(run: TrialSignals) -> np.ndarray:
    """Whether Adam's second moment follows from the one before and the gradient, [steps]; NaN where that is not known.

    Its norm lies between beta2 times the one before and that plus (1 - beta2) times the squared gradient norm. The
    ratio to the upper bound, or minus that of the lower one to it, whichever is larger: beyond 1 it cannot be.
    """
    found, norm, setup = np.full(run.steps, np.nan), run["second_moment_norm"], run.setup
    if setup is None or not setup.is_adam:
        return found
    gradient = run["grad_norm"]
    clipped = gradient if setup.clip is None else np.minimum(gradient, setup.clip)
    low = setup.beta2 * norm[:-1]
    high = low + (1 - setup.beta2) * clipped[1:] ** 2
    above, below = norm[1:] / high, low / norm[1:]
    found[1:] = np.where(above >= below, above, -below)
    is_known = (low > 0) & (norm[1:] > 0) & np.isfinite(gradient[1:]) & ~np.isnan(found[1:])
    is_known &= run.taken[1 : run.steps]
    found[1:] = np.where(is_known, found[1:], np.nan)
    return found


def _weight_check(run: TrialSignals) -> np.ndarray:
    """By how many norms of its update the weights' norm has moved, [steps]; NaN where that is not known.

    The user's own loop may clamp its weights or add some at any step: there only a move of `OWN_MOVE` times the usual
    counts, and it is evidence, but no sign of an incident by itself.
    """
    found, norm, setup = np.full(run.steps, np.nan), run["param_norm"], run.setup
    if setup is None:
        return found
    moved = np.abs(np.diff(norm))
    update = run["update_rms"][1:] * setup.weights**0.5
    found[1:] = np.where(np.isinf(norm[1:]), np.inf, np.where(moved < STILL * norm[:-1], 0, moved / update))
    found[1:] = np.where(np.isfinite(norm[:-1]), found[1:], np.nan)
    if setup.is_own:
        found[1:] = np.where(moved > OWN_MOVE * usual(moved)[0], found[1:], np.nan)
    return found
