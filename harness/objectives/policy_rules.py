"""What a policy cannot be trained with: rules between the fields of `policy` and those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config import Trial, shown
from harness.optim.optimizers import OPTIMIZERS
from harness.policy.proxy import LARGEST
from harness.policy.sizes import prompt_tokens
from harness.rewards.table import REWARDS

FIXED = ("schedule.sequence_start", "schedule.batch_start", "screen.rarity", "screen.repetition", "screen.entropy")
"""Keys that have to be null."""
OF_CRITIC = ("gamma", "gae", "value_loss", "value_clip")


def refused(trial: Trial) -> Iterator[str]:
    """What a policy cannot be trained with."""
    if trial.objective.name != "policy":
        return
    options, train, context = trial.section("policy"), trial.train, trial.model.context
    prompt = prompt_tokens(trial)
    if prompt > context:
        yield f"policy.prompt={prompt}: model.context={context} has no room for a completion; allowed: 1 to {context}"
        return
    if train.batch % options.group:
        yield f"policy.group={options.group}: does not divide train.batch={train.batch}; allowed: a divisor of it"
    if options.baseline == "leave_one_out" and options.group == 1:
        yield "policy.baseline=leave_one_out: policy.group=1 has no others; allowed: group, none, or a larger group"
    if options.end is not None and options.end >= trial.data.vocabulary:
        yield f"policy.end={options.end}: beyond the vocabulary; allowed: 0 to {trial.data.vocabulary - 1}, or null"
    if options.beta is None and options.beta_schedule != "constant":
        yield f"policy.beta_schedule={options.beta_schedule}: policy.beta=null; allowed: constant, or a policy.beta"
    for key in FIXED:
        section, _, field = key.partition(".")
        if (value := getattr(trial.section(section), field)) is not None:
            yield f"{key}={value}: objective=policy samples what trains, in batches of one size; allowed: null"
    if trial.model.sigma_reparam:
        yield "model.sigma_reparam=true: the reference of objective=policy has no singular vectors; allowed: false"
    if trial.model.placement == "branchnorm":
        yield "model.placement=branchnorm: the reference of objective=policy would grow; allowed: another placement"
    experts = trial.section("moe") if trial.section("block").channel_mixer == "moe" else None
    if experts and (experts.lag or experts.routing == "frozen"):
        key = f"moe.lag={experts.lag}" if experts.lag else "moe.routing=frozen"
        yield f"{key}: objective=policy samples what trains, so nobody looks at it before; allowed: lag 0, routing live"
    if options.proxy is not None and trial.data.vocabulary > LARGEST:
        why = f"data.vocabulary={trial.data.vocabulary} has too many pairs"
        yield f"policy.proxy={options.proxy}: {why}; allowed: a vocabulary up to {LARGEST}, or null"
    if options.routing_replay and not options.sampler_apart:
        why = "policy.routing_replay=true has no other experts to replay"
        yield f"policy.sampler_apart=false: {why}; allowed: true, or no replay"
    for rule in (_minibatches, _critic, _entropy, _mix_in, _replay):
        yield from rule(trial)
    yield from REWARDS[options.reward].refused(trial, prompt, context + 1 - prompt)


def _minibatches(trial: Trial) -> Iterator[str]:
    """Minibatches that are not of equal size, or not all of which are trained on."""
    options, train = trial.section("policy"), trial.train
    count = options.minibatches
    if train.batch % (count * train.parts):
        why = f"does not divide train.batch={train.batch} into parts for each rank and micro-batch"
        yield f"policy.minibatches={count}: {why}; allowed: a divisor of {train.batch // train.parts}"
    if options.updates % count:
        why = f"does not divide policy.updates={options.updates}, so that some completions would train less often"
        yield f"policy.minibatches={count}: {why}; allowed: a divisor of it"


def _critic(trial: Trial) -> Iterator[str]:
    """What belongs to a critic without one, and what a critic is in the place of."""
    options = trial.section("policy")
    if not options.critic:
        for name in OF_CRITIC:
            value, usual = getattr(options, name), getattr(type(options)(), name)
            if value != usual:
                allowed = f"{shown(usual)}, or policy.critic=true"
                yield f"policy.{name}={shown(value)}: policy.critic=false; allowed: {allowed}"
        return
    if options.baseline != "none":
        yield f"policy.baseline={options.baseline}: policy.critic=true has its values in that place; allowed: none"
    if options.scale == "group":
        why = "a critic's advantages are of tokens, not of groups"
        yield f"policy.scale=group: {why}; allowed: none, or batch, which whitens them over all tokens of a rollout"
    if options.level != "token":
        yield f"policy.level={options.level}: a critic's advantages are of tokens; allowed: token"
    rule = OPTIMIZERS[trial.optim.name].rule_of(trial)
    if rule.startswith("relative"):
        why = f"starts its head at zero, and the steps of optim.name={trial.optim.name} are relative to its size"
        yield f"policy.critic=true: {why}; allowed: false"


def _entropy(trial: Trial) -> Iterator[str]:
    """How a bonus on entropy moves, where it has nothing to move by."""
    options = trial.section("policy")
    step, usual = options.entropy_step, type(options)().entropy_step
    if options.entropy_target is None and step != usual:
        allowed = f"{usual}, or a policy.entropy_target"
        yield f"policy.entropy_step={step}: policy.entropy_target=null has a constant bonus; allowed: {allowed}"


def _mix_in(trial: Trial) -> Iterator[str]:
    """What is drawn for each sequence by its number, of which sequences of text have none of their own."""
    mixes, moe = trial.section("policy").mix_in, trial.section("moe")
    has_experts = trial.section("block").channel_mixer == "moe"
    drawn = {"model.dropout": (trial.model.dropout, "null")}
    if has_experts:
        drawn["moe.jitter"] = (moe.jitter or None, "0")
    for key, (value, allowed) in drawn.items():
        if mixes is not None and value is not None:
            why = f"of the text of policy.mix_in={mixes} it would depend on ranks and micro-batches"
            yield f"{key}={value}: {why}; allowed: {allowed}, or policy.mix_in=null"


def _replay(trial: Trial) -> Iterator[str]:
    """A replay of experts without any."""
    mixer = trial.section("block").channel_mixer
    if trial.section("policy").routing_replay and mixer != "moe":
        allowed = "false, or block.channel_mixer=moe"
        yield f"policy.routing_replay=true: block.channel_mixer={mixer} has no experts; allowed: {allowed}"
