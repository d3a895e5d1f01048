"""Combinations of values that are each fine alone, and cannot be had together."""

from __future__ import annotations

from harness.config import LARGEST_SCALE, NO_FAULT, SMALLEST_SCALE, Trial
from harness.fields import ConfigError, shown


def check_trial(trial: Trial) -> None:
    """Refuse combinations of values that are each fine alone.

    Raises ConfigError with every reason, a sentence each.
    """
    model, train, data, fault = trial.model, trial.train, trial.data, trial.fault
    reasons = []
    if model.width % model.head_dim:
        reasons.append(
            f"model.width={model.width}: not divisible by model.head_dim={model.head_dim}; allowed: a multiple of it"
        )
    if model.positions == "rotary" and model.head_dim % 2:
        reasons.append(f"model.head_dim={model.head_dim}: odd; allowed with model.positions=rotary: an even number")
    if trial.schedule.warmup is not None and trial.schedule.warmup > trial.steps:
        reasons.append(
            f"schedule.warmup={trial.schedule.warmup}: longer than train.steps={train.steps}; "
            f"allowed: 0 to {trial.steps}"
        )
    if train.batch % train.ranks:
        reasons.append(
            f"train.ranks={train.ranks}: does not divide train.batch={train.batch}; allowed: a divisor of it"
        )
    if train.loss_scaling == "dynamic" and train.loss_scale < SMALLEST_SCALE:
        reasons.append(
            f"train.loss_scale={train.loss_scale}: below {SMALLEST_SCALE}, where train.loss_scaling=dynamic gives up; "
            f"allowed: {SMALLEST_SCALE} to {LARGEST_SCALE}"
        )
    if train.loss_scaling == "none" and getattr(fault, "site", None) == "loss_scale":
        reasons.append(
            "fault.site=loss_scale: train.loss_scaling=none has no scale; "
            "allowed: another site, or train.loss_scaling=static or dynamic"
        )
    if fault != NO_FAULT and fault.start >= trial.steps:
        reasons.append(
            f"fault.start={fault.start}: after the last step of train.steps={train.steps}; "
            f"allowed: 0 to {trial.steps - 1}"
        )
    if data.source in ("text", "tokens") and not data.path:
        reasons.append(
            f"data.path={shown(data.path)}: missing for data.source={data.source}; allowed: a file or a folder"
        )
    if data.source == "tokens" and data.tokenizer != "bytes":
        reasons.append(f"data.tokenizer={data.tokenizer}: data.source=tokens is tokenized already; allowed: bytes")
    if data.tokenizer == "bytes" and data.source in ("stdlib", "text") and data.vocabulary != 256:
        reasons.append(f"data.vocabulary={data.vocabulary}: data.tokenizer=bytes has 256 tokens; allowed: 256")
    if data.tokenizer == "bpe" and data.vocabulary < 257:
        reasons.append(f"data.vocabulary={data.vocabulary}: too small for data.tokenizer=bpe; allowed: 257 to 65536")
    if reasons:
        raise ConfigError(*reasons)
