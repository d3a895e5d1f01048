"""The root cause of an incident, told from its evidence alone by written rules, the first that holds.

Each rule is a function that says why, in a sentence with the numbers, or nothing. They stand in the order in which they
are asked: what fails a consistency check comes before what is merely unusual, and what is in the data before what
is in a gradient, since a gradient follows from its data. The fault of a trial is looked at nowhere. A rule that
takes for granted that the batch was ordinary, or that a check held, tells no cause where that was not seen (`NEEDS`).

| cause | rule |
|---|---|
| corrupted gradient, or weight | a step that a playbook ran again has another gradient norm alone, or another loss |
| unknown | the steps before it had to be run again for that |
| rate too high | the rate in force is above the one of the schedule |
| as of a strike there | weights, first or second moments changed between a step's beginning and its update |
| stale second moment | it left its bounds; has no root; gradients and updates stay high; updates come back too fast |
| corrupted gradient | the provenance of the first non-finite value names a first moment |
| corrupted weight | the weights' norm moved by more than their update; or the loss jumps and stays, batch ordinary |
| rare tokens | tokens of the batch are far rarer than those of the batches before, or of the whole run's |
| repetition | it repeats itself far more than those or all of the run's, or is an earlier batch again |
| unknown | its sequences are one stretch of text, as it is: each goes on where the one before ended |
| number format | a half format has overflowed; or, in one, the loss scale left its course, or a pass is not finite |
| corrupted gradient | it is not finite; or it jumps for a few steps, on an ordinary batch; or updates grow without it |
| rate too high | everything grows together, over many steps, while each update moves much of the weights |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from analysis.again.odd_batches import RARE as RARE_BATCH
from analysis.again.odd_batches import REPEATED, STRETCH
from analysis.measures.anomalies import RATE_RATIO, SCALE_RATIO, SLACK
from analysis.measures.evidence import LATER, REPAIRED, Evidence
from harness.config.limits import MORE_REPEATED, ODD_BATCH, RARER

RARE, REPETITION, STALE, RATE = "rare tokens", "repetition", "stale second moment", "rate too high"
FORMAT, GRADIENT, WEIGHT, UNKNOWN = "number format", "corrupted gradient", "corrupted weight", "unknown"
CAUSES = (RARE, REPETITION, STALE, RATE, FORMAT, GRADIENT, WEIGHT, UNKNOWN)


class Thresholds:
    """What rules compare with."""

    rarity: float = ODD_BATCH  # of a batch's mean surprise above those before it
    rarity_nat: float = RARER  # and at least so much more, nat/token
    repetition: float = ODD_BATCH  # of its share of repeated pairs
    repetition_share: float = MORE_REPEATED
    kept: float = 0.9  # of what a mean of gradients keeps: with less the update came back faster than one can
    update: float = 1.6  # times the usual update at this rate
    ordinary_norm: float = 1.5  # times the usual gradient norm, up to which gradients have not grown
    jump: float = 2.0  # times the usual gradient norm, or one over it
    stays: int = 8  # of the next 20 steps at which the loss is high: it stays
    brief: int = 6  # of these that a corrupted gradient may take
    loss_jump: float = 0.5  # nat/token
    pace: float = 0.02  # of their norm by which weights move in a step, when the rate is high


HALF = ("fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Finding:
    """A cause, and why."""

    cause: str
    reason: str


Rule = Callable[[Evidence], str | None]


def cause_of(evidence: Evidence) -> Finding:
    """The first cause whose rule holds; `UNKNOWN` if none does."""
    for cause, rule in RULES:
        if reason := rule(evidence):
            needs = NEEDS.get(rule, ())
            unseen = [need for need in needs if not need.is_seen(evidence)]
            if unseen:
                granted = " and ".join(need.granted for need in unseen)
                missing = " and ".join(need.missing for need in unseen)
                return Finding(UNKNOWN, f"{reason} The cause would be {cause}, if {granted}; but {missing}.")
            return Finding(cause, " ".join([reason, *(need.told for need in needs if need.told)]))
    checks = {
        "the batches": evidence.is_batch_seen,
        "the bounds of the second moment": not np.isnan(evidence.moment_check),
        "the rate of the schedule": not np.isnan(evidence.rate_ratio),
    }
    if unknown := [what for what, is_seen in checks.items() if not is_seen]:
        return Finding(UNKNOWN, f"no rule holds for what was seen. Not seen: {', '.join(unknown)}.")
    return Finding(
        UNKNOWN, "no rule holds: every consistency check holds, batch and rate are usual, and no jump stands alone."
    )


def _other_gradient(e: Evidence) -> str | None:
    if e.verdict not in REPAIRED or not e.is_loss_again:
        return None
    return f"run again, the step had the same loss and another gradient norm: the fault was {e.verdict}."


def _other_loss(e: Evidence) -> str | None:
    if e.verdict not in REPAIRED or e.rerun_before:
        return None
    return f"run again, the step had another loss, of the same weights and batch: the fault was {e.verdict}."


def _older(e: Evidence) -> str | None:
    if e.verdict not in REPAIRED:
        return None
    since = f"run again from {e.rerun_before} before, the step had another loss"
    return f"{since}: what was wrong is older, an update, a moment, a rate or a weight, and the fault was {e.verdict}."


def _wrong_rate(e: Evidence) -> str | None:
    if not e.rate_ratio > RATE_RATIO:
        return None
    return f"the learning rate in force is {e.rate_ratio:.3g} times the one of the schedule, until step {e.rate_until}."


def _changed(name: str, words: str) -> Rule:
    def rule(e: Evidence) -> str | None:
        if name not in e.changed:
            return None
        return f"the {words} were not the same before the update as when the step began: something else wrote to them."

    return rule


def _moment_check(e: Evidence) -> str | None:
    if not abs(e.moment_check) > SLACK:
        return None
    much = f"{abs(e.moment_check):.3g} times"
    what = (
        f"{much} the most that its last value and this gradient allow" if e.moment_check > 0 else f"1/{much} the least"
    )
    return f"the norm of Adam's second moment is {what}, so it is not the mean of the squares that were seen."


def _weight_check(e: Evidence) -> str | None:
    if not e.weight_check > SLACK:
        return None
    if np.isinf(e.weight_check):
        # From an ordinary pass the weights went where an update took them: what that is made of is not ordinary.
        is_ordinary = 1 / Thresholds.jump < e.norm_ratio < Thresholds.ordinary_norm
        if np.isinf(e.update_ratio) and is_ordinary and e.loss_rise < Thresholds.loss_jump:
            return None
        return "the norm of the weights went to infinity in one step, to which no healthy update takes them."
    much = f"by {e.weight_check:.3g} times the norm of their update"
    return f"the norm of the weights moved {much}, which no update of that step explains: something else wrote to them."


def _first_moment(e: Evidence) -> str | None:
    if "moment_1" not in (e.provenance.get("site"), e.provenance.get("blamed_site")):
        return None
    where = e.provenance.get("blamed") or e.provenance.get("tensor", "an unknown tensor")
    return f"run again, the update of {where} came from its first moment, which no mean of gradients seen can be."


def _rootless_moment(e: Evidence) -> str | None:
    if "moment_2" not in (e.provenance.get("site"), e.provenance.get("blamed_site")):
        return None
    where = e.provenance.get("tensor", "an unknown tensor")
    return f"run again, the update of {where} had no result: its second moment has no root, which squares always have."


def _rare(e: Evidence) -> str | None:
    if e.rarity is None or e.rarity_sigma is None or e.usual_rarity is None:
        return None
    is_rare = e.rarity_sigma > Thresholds.rarity and e.rarity - e.usual_rarity > Thresholds.rarity_nat
    if not is_rare and e.batch != RARE_BATCH:
        return None
    numbers = f"{e.rarity:.2f} nat a token against {e.usual_rarity:.2f} before, {e.rarity_sigma:.0f} deviations"
    return f"the tokens of the batch are rare: a mean surprise of {numbers}."


def _repeated(e: Evidence) -> str | None:
    if e.same_as is not None and (e.odd or e.batch):
        return f"the batch is that of step {e.same_as} again, token for token."
    if e.repetition is None or e.repetition_sigma is None or e.usual_repetition is None:
        return None
    more = e.repetition - e.usual_repetition
    is_repeated = e.repetition_sigma > Thresholds.repetition and more > Thresholds.repetition_share
    if not is_repeated and e.batch != REPEATED:
        return None
    shares = (
        f"{e.repetition:.0%} of its token pairs stood in the same sequence before, against {e.usual_repetition:.0%}"
    )
    return f"the batch repeats itself: {shares}."


def _one_text(e: Evidence) -> str | None:
    if not (e.is_stretch and e.odd) and e.batch != STRETCH:
        return None
    return (
        "the batch is text as it is, but one stretch of it: each sequence goes on where the one before it ended, so "
        "their gradients agree more than those of shuffled text."
    )


def _overflowed(e: Evidence) -> str | None:
    told = e.provenance
    if told.get("cause") != "overflow" or not told.get("format", "").startswith(HALF):
        return None
    where = told.get("tensor", "an unknown place")
    if not (operation := told.get("operation")):
        return f"infinities and numbers of {where} are all of {told['format']}: it has overflowed in that format."
    beyond = f"beyond what {told['format']} can hold"
    return f"the first value that is not finite is the result of {operation} at {where}, {beyond}."


def _blamed_weight(e: Evidence) -> str | None:
    # By a weight that the step's own update made so large, of an ordinary gradient, the moment is to blame.
    if e.provenance.get("blamed_site") not in ("weight", "update") or _grown_update(e):
        return None
    return (
        f"run again, the step became non-finite by the values of the weight {e.provenance.get('blamed', 'of no name')}."
    )


def _scale_jump(e: Evidence) -> str | None:
    if not e.precision.startswith(HALF):
        return None
    if e.scale_ratio > SCALE_RATIO:
        return f"the loss scale rose by {e.scale_ratio:.3g} times in one step, to {e.scale:.3g}: gradients overflow."
    return None


def _format(e: Evidence) -> str | None:
    if not e.precision.startswith(HALF):
        return None
    if not e.is_activation_finite:
        where = f"block {e.activation_layer}"
        return f"activations of {where} are not finite in {e.precision}."
    if not e.is_loss_finite:
        return f"the loss is not finite in {e.precision}."
    return None


def _broken_gradient(e: Evidence) -> str | None:
    return None if e.is_norm_finite or not e.is_loss_finite else "the gradient is not finite, but the loss is."


def _broken_forward(e: Evidence) -> str | None:
    return None if e.is_loss_finite else "the forward pass of one step has a result that is not finite."


def _loss_stays(e: Evidence) -> str | None:
    if not (e.loss_rise > Thresholds.loss_jump and "loss" in e.odd and e.last_steps >= Thresholds.stays):
        return None
    return (
        f"the loss jumped by {_nat(e)} at once and was high at {e.last_steps} of the next 20 steps, as "
        "if its weights were not those that were learned."
    )


def _grown_update(e: Evidence) -> str | None:
    if not (e.update_ratio > Thresholds.update and e.norm_ratio < Thresholds.ordinary_norm and e.is_norm_finite):
        return None
    numbers = f"{_times(e.update_ratio)} the usual at this rate, the gradient {e.norm_ratio:.2g} times its own"
    return f"the update is {numbers}, as if the mean of gradients were not that of the gradients seen."


def _mended_moment(e: Evidence) -> str | None:
    if not (_grown_update(e) and e.update_kept < Thresholds.kept):
        return None
    numbers = f"{_times(e.update_ratio)} the usual at this rate, of an ordinary gradient"
    faster = f"and {LATER} steps later {e.update_kept:.0%} of what a first moment keeps was left"
    return f"the update was {numbers}, {faster}: the second moment was too small, until gradients put it right."


def _lagging_moment(e: Evidence) -> str | None:
    if not (
        e.update_ratio > Thresholds.update
        and e.norm_ratio > Thresholds.jump
        and e.odd_steps > Thresholds.brief
        and e.is_loss_finite
    ):
        return None
    numbers = (
        f"gradients grew to {_times(e.norm_ratio)} their usual and stayed, and updates to {_times(e.update_ratio)}"
    )
    return f"{numbers}: the second moment, by which they are divided, was still that of small gradients."


def _jumped_gradient(e: Evidence) -> str | None:
    is_odd = e.norm_ratio > Thresholds.jump or e.norm_ratio < 1 / Thresholds.jump
    if not (is_odd and "grad_norm" in e.odd and e.odd_steps <= Thresholds.brief):
        return None
    plus = "+" if e.loss_rise >= 0 else ""
    loss = f", and the loss {plus}{_nat(e)} from its own" if np.isfinite(e.loss_rise) else ""
    return f"the gradient norm is {_times(e.norm_ratio)} its usual at {e.odd_steps} of 20 steps{loss}."


def _jumped_forward(e: Evidence) -> str | None:
    is_jump = {"loss", "activation_rms", "attention_logit_max"} & set(e.odd)
    if not (is_jump and e.odd_steps <= Thresholds.brief):
        return None
    return f"{', '.join(sorted(is_jump))} jumped at one step, and came back with the next ones."


def _unstable(e: Evidence) -> str | None:
    if not (e.pace > Thresholds.pace and e.odd_steps > 1):
        return None
    numbers = f"{e.pace:.1%} of their own norm at each step, and {e.odd_steps} of 20 steps are odd"
    return (
        f"no step stands out, nothing is broken, and the weights moved by {numbers}: the run is beyond its stable rate."
    )


def _nat(e: Evidence) -> str:
    """The rise of the loss, with its unit."""
    value = f"{e.loss_rise:.2f}" if abs(e.loss_rise) < 1e4 else f"{e.loss_rise:.3g}"
    return f"{value} {e.loss_unit.removesuffix('/token')}".strip()


def _times(ratio: float) -> str:
    return "without bound" if np.isinf(ratio) else f"{ratio:.3g} times"


RULES: tuple[tuple[str, Rule], ...] = (
    (GRADIENT, _other_gradient),
    (WEIGHT, _other_loss),
    (UNKNOWN, _older),
    (RATE, _wrong_rate),
    (WEIGHT, _changed("weights", "weights")),
    (GRADIENT, _changed("moment_1", "first moments")),
    (STALE, _changed("moment_2", "second moments")),
    (GRADIENT, _first_moment),
    (STALE, _rootless_moment),
    (WEIGHT, _weight_check),
    (STALE, _moment_check),
    (RARE, _rare),
    (REPETITION, _repeated),
    (UNKNOWN, _one_text),
    (WEIGHT, _blamed_weight),
    (FORMAT, _overflowed),
    (FORMAT, _scale_jump),
    (FORMAT, _format),
    (GRADIENT, _broken_gradient),
    (GRADIENT, _broken_forward),
    (WEIGHT, _loss_stays),
    (STALE, _lagging_moment),
    (STALE, _mended_moment),
    (GRADIENT, _grown_update),
    (GRADIENT, _jumped_gradient),
    (GRADIENT, _jumped_forward),
    (RATE, _unstable),
)
"""In the order in which they are asked."""


@dataclass(frozen=True)
class Need:
    """What a rule takes for granted: how it is known to be seen, and the words for each case."""

    is_seen: Callable[[Evidence], bool]
    told: str  # where it was seen, if that is worth a sentence
    granted: str  # after "if", where it was not
    missing: str  # after "but"


BATCH = Need(
    lambda e: e.is_batch_seen, "The batch was ordinary.", "the batch were ordinary", "the batches were not seen"
)
WEIGHTS = Need(
    lambda e: e.is_weight_norm_finite,
    "The norm of the weights was finite after the step before.",
    "the weights were finite before",
    "their norm was not measured then",
)
MOMENT_CHECK = Need(
    lambda e: not np.isnan(e.moment_check),
    "The second moment is within its bounds.",
    "the second moment were within its bounds",
    "no such check can be made of this optimizer",
)
MOMENT = Need(
    lambda e: e.has_second_moment,
    "",
    "the optimizer divided by a second moment",
    "none was measured",
)
NEEDS: Mapping[Rule, tuple[Need, ...]] = {
    _format: (BATCH,),
    _broken_forward: (BATCH, WEIGHTS),
    _loss_stays: (BATCH,),
    _lagging_moment: (BATCH, MOMENT),
    _grown_update: (MOMENT_CHECK,),
    _jumped_gradient: (BATCH,),
    _jumped_forward: (BATCH,),
    _unstable: (BATCH,),
}
"""Rule -> what it needs; rules that are not listed rest on the evidence that they name."""
