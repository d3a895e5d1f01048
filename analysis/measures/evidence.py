"""What stands in the signals and the batches of a run around an incident: numbers, on which `causes` decides.

Nothing here knows of faults. The onset of an incident is told from its worst step: from there back over odd steps
(`analysis.measures.anomalies`) of some size, with at most `GAP` steps from one to the next, to `BACK` steps before the
first alarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr

from analysis.again.batches import BatchReader
from analysis.again.odd_batches import is_stretch
from analysis.measures.anomalies import ODD, RATE_RATIO, TrialSignals, rate_ratio, usual
from analysis.measures.incidents import Incident
from analysis.reading.incident_log import number
from harness.config.limits import MOST_AGAIN, RECENT_BATCHES
from harness.detectors.windows import MAD_TO_STD

BACK, GAP = 12, 4
LEADS = 1.0  # nat, or e-folds of a norm: what is less odd and comes before is noise, and no cause of what follows
SHORTLY = 20  # steps from the onset on over which is counted how often loss and gradient norm are odd
JUMP = 4.0  # times the usual update, from which on it is told how fast it comes back
LATER = 3  # steps after the onset at which updates are looked at again
BATCHES = 24  # before the onset, with which its batch is compared
AHEAD = 6  # batches from the onset on that are looked at
LEAST_SPREAD = 0.01  # of scores of batches
PROVENANCE = "provenance_"
ARRAYS = ("weights", "moment_1", "moment_2")
REPAIRED = ("transient", "persistent")  # verdicts of a step that came out otherwise when it was run again


@dataclass(frozen=True)
class Evidence:
    """Around the onset `begin`; NaN where a signal was not measured, None where batches are not known."""

    begin: int
    odd: tuple[str, ...]  # the signals that are odd at the onset
    loss_rise: float  # nat/token, over the median before
    is_loss_finite: bool
    is_norm_finite: bool
    norm_ratio: float  # of the gradient norm to its median before
    rate_ratio: float  # of the learning rate to that of the schedule
    rate_until: int  # the step from which it is that again
    pace: float  # share of their own norm by which the weights moved at a step shortly before
    update_ratio: float  # of the update's root mean square, over the rate, to its median before
    update_kept: float  # share of such a jump that is left `LATER`, over that which a mean of gradients keeps
    moment_check: float  # of the second moment: times its upper bound, or minus its lower bound over it; NaN: not made
    weight_check: float  # by how many norms of its update the weights' norm has moved; NaN: not made
    is_weight_norm_finite: bool  # after the step before; False where it was not measured
    has_second_moment: bool  # whether its norm was measured
    changed: tuple[str, ...]  # of `weights`, `moment_1`, `moment_2`: those that the step found changed at its update
    activation_ratio: float  # of the layer in which it is largest
    activation_layer: int
    is_activation_finite: bool
    scale_ratio: float  # of the loss scale to that of the step before
    scale: float
    precision: str
    odd_steps: int  # of the next 20 at which loss or gradient norm is odd
    last_steps: int  # of these at which the loss is
    is_batch_seen: bool = False  # whether the batches could be made again
    rarity: float | None = None  # mean surprise of the onset's batch, nat/token
    rarity_sigma: float | None = None
    usual_rarity: float | None = None
    repetition: float | None = None  # share of its token pairs that have stood in the sequence before
    repetition_sigma: float | None = None
    usual_repetition: float | None = None
    same_as: int | None = None  # an earlier step with the same batch
    is_stretch: bool = False  # the sequences of the batch are one stretch of text, and those of others are not
    bad_batches: tuple[int, ...] = ()  # steps from the onset on whose batches are as unusual
    batch: str = ""  # of `odd_batches`, where those of the whole run told of the incident
    verdict: str = ""  # of the steps that were run again, where a playbook has had that done
    is_loss_again: bool = False  # the loss came out the same then, and the gradient norm another
    loss_unit: str = "nat/token"  # "" for none
    rerun_before: int = 0  # steps before it from which it had to be run again, for that
    provenance: Mapping[str, str] = field(default_factory=dict)  # where the first non-finite value arose, if stored


def provenance_of(sweep: xr.Dataset, trial: str) -> dict[str, str]:
    """Where a trial's first non-finite value arose, by field: what coordinates `provenance_*` say, if there are any.

    They are found by running the step once more, from values alone; one that is empty is left out.
    """
    names = [str(name) for name in sweep.coords if str(name).startswith(PROVENANCE)]
    if not names:
        return {}
    here = sweep[names].sel(trial=trial)
    texts = {name.removeprefix(PROVENANCE): str(here[name].values) for name in names}
    return {name: text for name, text in texts.items() if text not in ("", "nan")}


def as_alarmed(run: TrialSignals, incident: Incident) -> TrialSignals:
    """The run with what the log has seen at its alarms, which a rollback has taken out of the signals."""
    signals = dict(run.signals)
    for name in ("loss", "grad_norm"):
        seen = {act.step: getattr(act, name) for act in reversed(incident.acts) if getattr(act, name) is not None}
        if seen:
            signals[name] = signals[name].copy()
            for step, value in seen.items():
                if step < len(signals[name]):
                    signals[name][step] = number(value)
    return replace(run, signals=signals) if incident.acts else run


def onset(run: TrialSignals, incident: Incident) -> int:
    """The first of the odd steps that lead to the worst one; without any, the first alarm or odd batch."""
    if incident.batches:
        return incident.first
    first, stop = max(0, incident.first - BACK), incident.last + 1
    is_odd = np.any([of[first:stop] for of in run.anomalies.values()], axis=0)
    if not is_odd.any():
        return incident.first
    size = np.where(is_odd, run.sizes[first:stop], -1.0)
    at = int(size.argmax())
    is_odd = size >= min(LEADS, size[at] / 2)
    while len(before := np.flatnonzero(is_odd[max(0, at - GAP) : at])):
        at = max(0, at - GAP) + int(before[0])
    return first + at


def evidence_of(
    run: TrialSignals, incident: Incident, reading: BatchReader | None, known: Mapping[str, str] | None = None
) -> Evidence:
    """The evidence of an incident.

    `reading` gives the trial's batches and nothing else; None where they cannot be made again. `known` is what
    `provenance_of` has found. Raises ConfigError as `Reading.batch` does.
    """
    run = as_alarmed(run, incident)
    begin = onset(run, incident)
    odd = tuple(name for name, is_odd in run.anomalies.items() if is_odd[begin])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        numbers = _numbers(run, begin)
    batches = {} if reading is None else _batches(reading, begin)
    verdict, is_loss_again, before = _verdict(incident)
    if verdict in REPAIRED:  # the signals are those of the steps as they were run again
        numbers |= {"moment_check": np.nan, "weight_check": np.nan, "changed": ()}
    told: dict[str, Any] = {"verdict": verdict, "is_loss_again": is_loss_again, "rerun_before": before}
    told["loss_unit"] = run.loss_unit
    told["batch"] = incident.batches[0][1] if incident.batches else ""
    return Evidence(begin, odd, **numbers, **batches, **told, provenance=known or {})


def offending(evidence: Evidence, incident: Incident) -> list[int]:
    """The steps whose batches may be to blame: those as unusual as the onset's, or that of the onset."""
    if incident.batches:
        return [step for step, _ in incident.batches]
    bad = [step for step in evidence.bad_batches if step <= incident.last + 1]
    return bad if evidence.begin in bad else [evidence.begin]


def _verdict(incident: Incident) -> tuple[str, bool, int]:
    """What the first re-executed step showed, by what was wrong there.

    That is the verdict, whether its loss was the same again, and how many steps before it the re-execution began.
    """
    first = next((act for act in incident.acts if act.detectors), None)
    place = next((place for place, act in enumerate(incident.acts) if "verdict" in act.detail), 0)
    if first is None or not place:
        return "", False, 0
    ruled, begun = incident.acts[place], incident.acts[place - 1].detail
    is_same = first.step == ruled.step and number(first.loss) == number(ruled.loss)
    return str(ruled.detail["verdict"]), is_same, int(begun.get("before", 0))


def _numbers(run: TrialSignals, begin: int) -> dict[str, Any]:
    loss, norm, rate, scale = (run[name] for name in ("loss", "grad_norm", "learning_rate", "loss_scale"))
    ratio, size = rate_ratio(run), run.setup.weights**0.5 if run.setup else np.nan
    paces = (run["update_rms"] * size / run["param_norm"])[max(0, begin - 10) : begin + 1]
    levels, spreads = usual(loss)
    log_levels, log_spreads = usual(np.log(norm))
    level, spread, log_level = levels[begin], spreads[begin], log_levels[begin]
    speed = run["update_rms"] / rate
    activation, layer = _largest_layer(run["activation_rms"], begin) if run.has_layers else (np.nan, 0)
    here = slice(begin, begin + SHORTLY)
    is_high = ~(loss[here] - level <= max(1.0, ODD * np.nan_to_num(spread)))
    is_steep = ~(np.abs(np.log(norm[here]) - log_level) <= max(np.log(2), ODD * np.nan_to_num(log_spreads[begin])))
    before = max(begin - 1, 0)
    return {
        "loss_rise": float(loss[begin] - level),
        "is_loss_finite": bool(np.isfinite(loss[begin])),
        "is_norm_finite": bool(np.isfinite(norm[begin])),
        "norm_ratio": float(norm[begin] / np.exp(log_level)),
        "rate_ratio": float(ratio[begin]),
        "rate_until": int(begin + np.flatnonzero(np.append(~(ratio[begin:] > RATE_RATIO), True))[0]),
        "update_ratio": float(speed[begin] / usual(speed)[0][begin]),
        "update_kept": _kept(run, begin, speed),
        "moment_check": float(run.moment_check[begin]),
        "weight_check": float(run.weight_check[begin]),
        "is_weight_norm_finite": bool(begin > 0 and np.isfinite(run["param_norm"][before])),
        "has_second_moment": bool(run["second_moment_norm"][before] > 0),
        "changed": tuple(name for name in ARRAYS if run.has_changed(f"{name}_changed")[begin]),
        "activation_ratio": activation,
        "activation_layer": layer,
        "is_activation_finite": not run.has_layers or bool(np.isfinite(run["activation_rms"][begin]).all()),
        "scale_ratio": float(scale[begin] / scale[before]),
        "scale": float(scale[begin]),
        "precision": run.setup.precision if run.setup else "",
        "pace": float(np.median(paces[~np.isnan(paces)])) if not np.isnan(paces).all() else np.nan,
        "odd_steps": int((is_high | is_steep).sum()),
        "last_steps": int(is_high.sum()),
    }


def _kept(run: TrialSignals, begin: int, speed: np.ndarray) -> float:
    """Of a jump of the update: what is left of it `LATER`, over beta1 to the power of as many steps.

    Adam's first moment forgets a wrong value by beta1 at each step, and the update with it. It falls faster where the
    second moment is what was wrong, because each gradient puts that right. NaN for a jump of which little would be left
    anyway, and where Adam's moments are not all that an update is made of.
    """
    later, level = begin + LATER, usual(speed)[0][begin]
    if run.setup is None or not run.setup.is_adam or not run.setup.beta1 or later >= run.steps:
        return np.nan
    if not run.taken[begin : later + 1].all() or not speed[begin] > JUMP * level:
        return np.nan
    left = np.sqrt(max(speed[later] ** 2 - level**2, 0.0) / (speed[begin] ** 2 - level**2))
    return float(left / run.setup.beta1**LATER)


def _largest_layer(layers: np.ndarray, step: int) -> tuple[float, int]:
    """The largest ratio of a layer [steps, layers] at a step to its median before, and the layer."""
    ratios = [layers[step, each] / usual(layers[:, each])[0][step] for each in range(layers.shape[1])]
    values = np.where(np.isfinite(layers[step]), ratios, np.inf)
    at = int(values.argmax())
    return float(values[at]), at


def _batches(reading: BatchReader, begin: int) -> dict[str, Any]:
    """Of the onset's batch and those after it, against those before."""
    first = max(0, begin - BATCHES)
    steps = range(max(0, begin - RECENT_BATCHES), min(begin + AHEAD, reading.trial.steps))
    batches = {step: reading.batch(step) for step in steps}
    near = [step for step in steps if step >= first]
    rarity = np.array([reading.rarity(batches[step]) for step in near])
    repetition = np.array([reading.repetition(batches[step]) for step in near])
    at = begin - first
    found: dict[str, Any] = {}
    is_bad = np.zeros(len(near) - at, bool)
    # What repeats says nothing new: the mean over a batch of few other tokens is the less sure.
    fresh = 1 - repetition[at:]
    usual_fresh = float(np.nanmedian(1 - repetition[:at])) if at else np.nan
    for name, values, times in (("rarity", rarity, (usual_fresh / fresh) ** 0.5), ("repetition", repetition, 1.0)):
        level = float(np.nanmedian(values[:at])) if at else np.nan
        spread = max(float(MAD_TO_STD * np.nanmedian(np.abs(values[:at] - level))) if at else 0.0, LEAST_SPREAD)
        sigma = (values[at:] - level) / (spread * np.maximum(times, 1.0))
        found |= {name: float(values[at]), f"{name}_sigma": float(sigma[0]), f"usual_{name}": level}
        is_bad |= sigma > ODD
    same = [step for step in steps if step < begin and np.array_equal(batches[step], batches[begin])]
    bad = tuple(int(step) for step in begin + np.flatnonzero(is_bad))
    before = [is_stretch(reading, batches[step]) for step in near if step < begin]
    stretches = is_stretch(reading, batches[begin]) and sum(before) <= MOST_AGAIN * len(before)
    found |= {"same_as": same[-1] if same else None, "is_stretch": stretches, "bad_batches": bad}
    return {**found, "is_batch_seen": True}
