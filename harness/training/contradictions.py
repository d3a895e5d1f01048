"""Combinations of values that are each fine alone, and cannot be had together."""

from __future__ import annotations

from harness.config import LARGEST_SCALE, LARGEST_SEED, NO_FAULT, SMALLEST_SCALE, ConfigError, Model, Trial, shown
from harness.model.activations import ACTIVATIONS
from harness.model.scaling import DEPTH_INITS, INITS, ZERO_INITS
from harness.optim.optimizers import OPTIMIZERS
from harness.training.sites import AT_TAPS


def check_trial(trial: Trial) -> None:
    """Refuse combinations of values that are each fine alone.

    Raises ConfigError with every reason, a sentence each.
    """
    _check_tokens(trial)
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
    elif train.batch % train.parts:
        share = f"a rank's share of train.batch={train.batch}" if train.ranks > 1 else f"train.batch={train.batch}"
        reasons.append(f"train.micro_batches={train.micro_batches}: does not divide {share}; allowed: a divisor of it")
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
    reasons += _fused(trial)
    reasons += _growth(trial)
    reasons += _qk_clip(trial.model)
    reasons += _initial_sizes(trial)
    reasons += _parts(trial.model)
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


def _fused(trial: Trial) -> list[str]:
    """What the fused kernel of attention has no room for."""
    model, softmax, explicit = trial.model, trial.train.softmax, "model.attention=explicit"
    if model.explicit_attention:
        return []
    reasons = [
        f"model.{name}={getattr(model, name)}: model.attention=fused keeps no logits; allowed: null, or {explicit}"
        for name in ("attention_cap", "soft_clip_high", "dropout")
        if getattr(model, name) is not None
    ]
    if softmax != "fp32":
        why = f"attention is fused (model.attention={model.attention}, model.context={model.context})"
        reasons.append(f"train.softmax={softmax}: {why}, with a softmax of its own; allowed: fp32, or {explicit}")
    return reasons


def _growth(trial: Trial) -> list[str]:
    """What is wrong with sequences and batches that grow."""
    schedule, context, batch, fault = trial.schedule, trial.model.context, trial.train.batch, trial.fault
    reasons = []
    if (schedule.sequence_start or 0) > context:
        reasons.append(
            f"schedule.sequence_start={schedule.sequence_start}: longer than model.context={context}; "
            f"allowed: 1 to {context} or null"
        )
    if (schedule.batch_start or 0) > batch:
        reasons.append(
            f"schedule.batch_start={schedule.batch_start}: more than train.batch={batch}; allowed: 1 to {batch} or null"
        )
    # An element is a flat index into an activation of whole batches: a smaller one has another there, or none.
    site, has_elements = getattr(fault, "site", None), getattr(fault, "elements", None) is not None
    if site in AT_TAPS and has_elements and fault.start < (grown := trial.curriculum.grown):
        reasons.append(
            f"fault.start={fault.start}: activations are smaller at fault.site={site} while sequences or batches grow; "
            f"allowed: {grown} or later, or fault.elements=null"
        )
    return reasons


def _qk_clip(model: Model) -> list[str]:
    """What undoes that QK-Clip scales query and key weights, or hides the logits from it."""
    if model.qk_clip is None:
        return []
    undone = "divides out the scale of the weights that it shrinks"
    found = {
        ("qk_norm", "false"): (model.qk_norm, undone),
        ("qkv_norm", "false"): (model.qkv_norm, undone),
        ("sigma_reparam", "false"): (model.sigma_reparam, undone),
        ("attention_cap", "null"): (model.attention_cap is not None, "bounds the logits that it looks at"),
    }
    return [
        f"model.qk_clip={model.qk_clip}: model.{name}={shown(getattr(model, name))} {why}; "
        f"allowed: null, or model.{name}={off}"
        for (name, off), (is_set, why) in found.items()
        if is_set
    ]


def _initial_sizes(trial: Trial) -> list[str]:
    """Two answers to how branches shrink with depth, and divisions by the size of what starts at zero."""
    model, optimizer, reasons = trial.model, trial.optim.name, []
    answers = {
        "parametrization": model.parametrization == "completep",
        "placement": model.placement in ("deepnorm", "deepnorm_glm"),
        "init": model.init in DEPTH_INITS,
    }
    given = [f"model.{name}={getattr(model, name)}" for name, is_answer in answers.items() if is_answer]
    if len(given) > 1:
        reasons.append(f"{', '.join(given)}: each says how branches shrink with depth; allowed: one of them")
    if model.tied_head and (model.zero_head or model.init == "fixup"):
        zero, allowed = ("zero_head=true", "false") if model.zero_head else ("init=fixup", "another init")
        why = "starts the head at zero, which is the embedding with model.tied_head=true"
        reasons.append(f"model.{zero}: {why}; allowed: {allowed}, or model.tied_head=false")
    starts_at_zero, sized = model.init in ZERO_INITS, ", ".join(name for name in INITS if name not in ZERO_INITS)
    if starts_at_zero and OPTIMIZERS[optimizer].rule_of(trial).startswith("relative"):
        why = f"starts matrices at zero, and the steps of optim.name={optimizer} are relative to their size"
        reasons.append(f"model.init={model.init}: {why}; allowed: {sized}")
    if model.zero_head and OPTIMIZERS[optimizer].rule_of(trial).startswith("relative"):
        why = f"starts the head at zero, and the steps of optim.name={optimizer} are relative to its size"
        reasons.append(f"model.zero_head=true: {why}; allowed: false")
    if starts_at_zero and model.sigma_reparam:
        why = "starts matrices at zero, and model.sigma_reparam=true divides them by their size"
        reasons.append(f"model.init={model.init}: {why}; allowed: {sized}")
    return reasons


def _parts(model: Model) -> list[str]:
    """Parts of the model that are there twice, undo each other or have nothing to work on."""
    placement, init = f"model.placement={model.placement}", f"model.init={model.init}"
    norms = [name for name in OWN_NORMS if getattr(model, name)]
    reasons = []
    if model.swiglu_clamp is not None and not ACTIVATIONS[model.activation].gated:
        gated = ", ".join(name for name, activation in ACTIVATIONS.items() if activation.gated)
        reasons.append(
            f"model.swiglu_clamp={model.swiglu_clamp}: model.activation={model.activation} has no gate; "
            f"allowed: null, or model.activation={gated}"
        )
    if not model.qk_norm_shared and not model.qk_norm:
        reasons.append("model.qk_norm_shared=false: there is no model.qk_norm; allowed: true, or model.qk_norm=true")
    elif model.qk_norm_over == "heads" and not model.qk_norm_shared:
        reasons.append(
            "model.qk_norm_shared=false: model.qk_norm_over=heads has a gain for each feature already; allowed: true"
        )
    if model.embedding_norm and model.embedding_scale != "none":
        reasons.append(
            f"model.embedding_scale={model.embedding_scale}: model.embedding_norm=true divides it out; "
            "allowed: none, or model.embedding_norm=false"
        )
    if model.placement in ("sandwich", "branch"):
        reasons += [
            f"model.{name}=true: {placement} has a norm there already; allowed: false, or another placement"
            for name in ("projection_norm", "down_norm")
            if name in norms
        ]
    if model.init == "fixup" and model.biases:
        reasons.append(f"model.biases=true: {init} has summands of its own; allowed: false, or another init")
    if model.init == "fixup":
        if model.placement != "none":
            reasons.append(f"{placement}: {init} goes without norms; allowed: none, or another init")
        reasons += [f"model.{name}=true: {init} goes without norms; allowed: false, or another init" for name in norms]
    if model.sigma_reparam:
        undone = "model.sigma_reparam=true divides out the size of hidden matrices"
        reasons += [
            f"model.{name}={getattr(model, name)}: {undone}; allowed: {allowed}, or model.sigma_reparam=false"
            for name, refused, allowed in SIZES
            if getattr(model, name) in refused
        ]
    return reasons


OWN_NORMS = ("qk_norm", "qkv_norm", "projection_norm", "up_norm", "down_norm", "embedding_norm")
SIZES = (  # what says how large hidden matrices are: field, values that do, and the others
    ("init", INITS.keys() - {"standard", *ZERO_INITS}, "standard"),
    ("parametrization", {"mup", "completep"}, "standard"),
    ("placement", {"deepnorm", "deepnorm_glm"}, "another placement"),
)
