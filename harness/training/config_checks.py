"""Combinations of values that are each fine alone, and cannot be had together.

What a part refuses stands beside its code, as `refused`; here are the rules between several of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.config import LARGEST_SEED, NO_FAULT, ConfigError, Trial
from harness.data import corpus, curriculum
from harness.guards import playbook
from harness.model import branches, hyper_connections, hypersphere, placements, scaling
from harness.model.scaling import SIZED_INITS, ZERO_INITS
from harness.objectives import policy_rules
from harness.optim import loss_scale, schedules
from harness.optim.optimizers import OPTIMIZERS
from harness.optim.optimizers.adamw import Adam
from harness.training import readings
from harness.training.sites import AT_TAPS

PARTS = (
    branches,
    schedules,
    loss_scale,
    corpus,
    curriculum,
    scaling,
    placements,
    hyper_connections,
    hypersphere,
    playbook,
    readings,
    policy_rules,
)


def check_trial(trial: Trial) -> None:
    """Refuse combinations of values that are each fine alone.

    Raises ConfigError with every reason, a sentence each.
    """
    _check_tokens(trial)
    reasons = [reason for part in PARTS for reason in part.refused(trial)]
    reasons += OPTIMIZERS[trial.optim.name].refused(trial)
    reasons += [reason for rule in (_batches, _fault, _rising_beta2, _relative) for reason in rule(trial)]
    if reasons:
        raise ConfigError(*reasons)


def _check_tokens(trial: Trial) -> None:
    """Raises ConfigError where an int64 cannot count the tokens of a run, without which its length is not known."""
    train, growth, context = trial.train, trial.schedule, trial.model.context
    steps = max(train.steps, growth.batch_steps, growth.sequence_steps)
    if steps * train.batch * context > LARGEST_SEED:
        raise ConfigError(
            f"train.batch={train.batch}: {steps} steps of so many sequences of {context} tokens are "
            f"{steps * train.batch * context:.2g} tokens; allowed: at most {LARGEST_SEED:.2g}, which an int64 counts"
        )


def _batches(trial: Trial) -> Iterator[str]:
    """Batches that do not fall into equal parts."""
    train = trial.train
    if train.batch % train.ranks:
        yield f"train.ranks={train.ranks}: does not divide train.batch={train.batch}; allowed: a divisor of it"
    elif train.batch % train.parts:
        share = f"a rank's share of train.batch={train.batch}" if train.ranks > 1 else f"train.batch={train.batch}"
        yield f"train.micro_batches={train.micro_batches}: does not divide {share}; allowed: a divisor of it"


def _fault(trial: Trial) -> Iterator[str]:
    """Strikes at what is not there, or not yet."""
    fault, site = trial.fault, getattr(trial.fault, "site", None)
    if fault != NO_FAULT and fault.start >= trial.steps:
        is_usual = fault.start == type(fault).start
        why = f"after the last step of train.steps={trial.train.steps}"
        allowed = f"0 to {trial.steps - 1}, such as fault.start={trial.steps // 2}"
        yield f"fault.start={fault.start}{' (the default)' if is_usual else ''}: {why}; allowed: {allowed}"
    # An element is a flat index into an activation of whole batches: a smaller one has another there, or none.
    has_elements = getattr(fault, "elements", None) is not None
    if site in AT_TAPS and has_elements and fault.start < (grown := trial.curriculum.grown):
        why = f"activations are smaller at fault.site={site} while sequences or batches grow"
        yield f"fault.start={fault.start}: {why}; allowed: {grown} or later, or fault.elements=null"


def _rising_beta2(trial: Trial) -> Iterator[str]:
    """A second moment whose decay rises, where there is none."""
    name, exponent = trial.optim.name, trial.optim.beta2_exponent
    if exponent is not None and not issubclass(OPTIMIZERS[name], Adam):
        others = ", ".join(other for other, cls in OPTIMIZERS.items() if issubclass(cls, Adam))
        why = f"optim.name={name} has no such second moment"
        yield f"optim.beta2_exponent={exponent}: {why}; allowed: null, or optim.name={others}"


def _relative(trial: Trial) -> Iterator[str]:
    """Steps that are relative to the size of what starts at zero."""
    model, optimizer = trial.model, trial.optim.name
    if not OPTIMIZERS[optimizer].rule_of(trial).startswith("relative"):
        return
    steps = f"and the steps of optim.name={optimizer} are relative to"
    if model.init in ZERO_INITS:
        yield f"model.init={model.init}: starts matrices at zero, {steps} their size; allowed: {SIZED_INITS}"
    if model.zero_head:
        yield f"model.zero_head=true: starts the head at zero, {steps} its size; allowed: false"
    if model.residual_streams > 1 and model.stream_mixing == "free":
        yield f"model.stream_mixing=free: starts mixers at zero, {steps} their size; allowed: manifold"
