"""A policy: the model samples completions of prompts, and learns from what they are worth.

Policy gradients with groups of completions for each prompt, as GRPO, DAPO, GSPO, RLOO and their relatives have them,
whose formulas stand in harness/policy/. A step trains on the completions of the last rollout, which is made every
`policy.updates` steps, at its first one. The reported loss is minus the mean quality of these completions, so that it
falls as the policy learns; what is differentiated is the signal `surrogate_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import PER_TRIAL, STRUCTURAL, SWITCHED, Trial, anything, choice, number
from harness.config.limits import LARGEST_BATCH, LONGEST_CONTEXT, MOST_LABELS, MOST_STEPS
from harness.data.corpus import Corpus
from harness.model import sums
from harness.model.gpt import GPT
from harness.model.state import Rows, State
from harness.objectives.base import Steps
from harness.objectives.next_token import NextToken
from harness.objectives.outcome import PROXY, VARIETY, judge_policy
from harness.policy.advantages import BASELINES, SCALES
from harness.policy.losses import (
    CORRECTIONS,
    KINDS,
    LEVELS,
    LOSSES,
    MEANS,
    Completions,
    LossKind,
    LossParts,
    LossStrengths,
    mean_of_shares,
    mean_shares,
    surrogate,
)
from harness.policy.penalty import SCHEDULES
from harness.policy.proxy import LARGEST
from harness.policy.rollouts import SAME, Rollouts, prompt_tokens
from harness.policy.rows import PassingRows, SiteStrikes
from harness.policy.step_measures import PROXY_TAP, ROLLOUT_TAP, STEP_TAP, step_measures
from harness.rewards.table import REWARDS

FIXED = ("schedule.sequence_start", "schedule.batch_start", "screen.rarity", "screen.repetition", "screen.entropy")
"""Keys that have to be null."""


@dataclass(frozen=True)
class Options:
    """`policy.*`."""

    # Rollouts
    reward: str = choice(STRUCTURAL, "copy", "what a completion is worth", table="harness.rewards.table:REWARDS")
    sharpness: float | None = number(
        SWITCHED,
        None,
        "s of the reward sigmoid(s (q - q_0)), where q_0 is the median quality of what the start samples, and of unit "
        "spread there; null: the quality q itself",
        above=0,
    )
    prompt: int | None = number(
        STRUCTURAL,
        None,
        "tokens of a prompt; completions have the rest of model.context + 1; null: a quarter of model.context",
        low=1,
        high=LONGEST_CONTEXT,
    )
    end: int | None = number(
        STRUCTURAL, None, "id of the token that ends a completion; null: all are of full length", low=0, high=65535
    )
    group: int = number(STRUCTURAL, 8, "completions of each prompt; divides train.batch", low=1, high=LARGEST_BATCH)
    updates: int = number(STRUCTURAL, 1, "optimizer steps on each rollout", low=1, high=MOST_STEPS)
    temperature: float = number(PER_TRIAL, 1.0, "what logits are divided by, in sampling and in the loss", above=0)
    # The sampler, where it is not the trainer
    sampler: str = choice(
        STRUCTURAL, SAME, "number format of the sampler's matrix products", SAME, "fp32", "tf32", "bf16", "fp16", "fp8"
    )
    sampler_noise: float | None = number(
        SWITCHED, None, "standard deviation of uniform noise on the sampler's logits; null: none", low=0
    )
    sampler_temperature: float | None = number(
        SWITCHED, None, "what the sampler's logits are divided by beside the temperature; null: 1", above=0
    )
    sampler_lag: int = number(STRUCTURAL, 0, "rollouts by which the sampler's weights are older", low=0, high=64)
    sampler_apart: bool = anything(
        PER_TRIAL, True, "false: the sampler has the trainer's format, temperature and weights, whatever it is set to"
    )
    correction: str = choice(
        STRUCTURAL,
        "none",
        "weight p(trainer) / p(sampler), cut off or 0 beyond the cap, of tokens or sequences",
        *CORRECTIONS,
    )
    correction_cap: float = number(PER_TRIAL, 3.0, "largest such weight", above=0)
    off_policy: float | None = number(
        SWITCHED,
        None,
        "largest mean of log p(sampler) - log p of a completion with a negative advantage that trains; null: any",
        low=0,
    )
    # Advantages and loss
    baseline: str = choice(
        STRUCTURAL, "group", "what is taken off a reward: the mean of its group, or of the others", *BASELINES
    )
    scale: str = choice(STRUCTURAL, "group", "whose standard deviation an advantage is divided by", *SCALES)
    loss: str = choice(
        STRUCTURAL,
        "ppo",
        "ppo: clipped ratios; cispo: log-probabilities, weighed by ratios that are cut off above",
        *LOSSES,
    )
    level: str = choice(
        STRUCTURAL, "token", "what has a ratio: a token; a sequence, its geometric mean; or product, all of it", *LEVELS
    )
    mean: str = choice(
        STRUCTURAL,
        "tokens",
        "what the loss is a mean over: all tokens; sequences of their tokens; or as if all were the longest",
        *MEANS,
    )
    clip_low: float | None = number(PER_TRIAL, 0.2, "ratios are clipped below 1 less this; null: nowhere", low=0)
    clip_high: float | None = number(PER_TRIAL, 0.2, "ratios are clipped above 1 plus this; null: nowhere", low=0)
    dual_clip: float | None = number(
        SWITCHED, None, "largest ratio by which a negative advantage counts; null: any", above=1
    )
    # What holds the policy
    beta: float | None = number(
        SWITCHED, None, "constant of the penalty on KL(policy, reference); null: no penalty", low=0
    )
    beta_schedule: str = choice(
        PER_TRIAL,
        "constant",
        "over the run: constant; rising from 0 to twice beta; falling; or adaptive, so that the KL is kl_target",
        *SCHEDULES,
    )
    kl_target: float = number(PER_TRIAL, 6.0, "KL of a completion, nat, for beta_schedule adaptive", above=0)
    kl: str = choice(STRUCTURAL, "k3", "estimator of the KL: d, d^2/2 or e^-d + d - 1, with d = log p/p_ref", *KINDS)
    kl_in: str = choice(STRUCTURAL, "loss", "where the penalty stands", "loss", "reward")
    kl_weighted: bool = anything(
        STRUCTURAL, True, "a penalty in the loss is multiplied by the ratio, so that its gradient has no bias"
    )
    entropy: float | None = number(SWITCHED, None, "constant of a bonus on the entropy of tokens; null: none", low=0)
    # A learned reward in place of the gold one
    proxy: int | None = number(
        SWITCHED,
        None,
        "completions of the start, labelled by the reward, to which a learned one is fitted that trains in its place; "
        "null: the reward itself trains",
        low=2,
        high=MOST_LABELS,
    )
    proxy_noise: float = number(
        PER_TRIAL, 0.5, "standard deviation of the labels' noise over that of the labels themselves", low=0
    )


class Policy(NextToken):
    """Prompts are windows of the training text [R, B, P], or what the reward makes of them; one for each group."""

    may_replay = False
    is_sampled = True
    judged_by = (*VARIETY, PROXY)
    taps = (STEP_TAP, ROLLOUT_TAP, PROXY_TAP)

    def __init__(self, trials: Sequence[Trial], corpus: Corpus, dtype: torch.dtype, device: torch.device):
        super().__init__(trials, corpus, dtype, device)
        self._planned, self.options = trials, trials[0].section("policy")
        self._prompt = prompt_tokens(trials[0])
        self.rollouts: Rollouts | None = None
        self._kind = LossKind(
            self.options.loss,
            self.options.level,
            self.options.kl if self.options.beta is not None and self.options.kl_in == "loss" else None,
            self.options.kl_weighted,
            self.options.correction,
        )
        self._reward = REWARDS[self.options.reward](corpus.vocabulary, device)
        self._reward.read(corpus)

    def join(self, here: Sequence[Trial], model: GPT, weights: Rows, state: State) -> None:
        self.rollouts = Rollouts(self._planned, here, model, weights, state, self._reward, self._windows)
        self._model = model
        model.taps.names.extend(self.taps)

    def bind(self, trials: Sequence[Trial], numbers: Sequence[int]) -> None:
        super().bind(trials, numbers)
        if self.rollouts:
            self.rollouts.bind(trials, numbers)
        options = [trial.section("policy") for trial in trials]

        def column(field: str, none: float | None = None) -> Tensor | None:
            values = [getattr(one, field) for one in options]
            if none is None and values[0] is None:
                return None
            numbers = [none if value is None else value for value in values]
            return torch.tensor(numbers, dtype=self._dtype, device=self._device)[:, None, None]

        low, high = column("clip_low", np.inf), column("clip_high", np.inf)
        assert low is not None and high is not None
        names = ("dual_clip", "beta", "entropy", "correction_cap", "off_policy")
        self._strengths = LossStrengths(low, high, *(column(name) for name in names))

    def batch(self, steps: Steps) -> Tensor:
        """Sequences that begin with the prompts: those of a rollout are the same at all of its steps."""
        every = self.options.updates
        numbers = steps // every if isinstance(steps, int) else [step // every for step in steps]
        return self._windows(numbers, self.options.group)

    def _windows(self, numbers: Steps, group: int = 1) -> Tensor:
        """Batches by their numbers, with so many sequences of each prompt."""
        windows = self.batches(numbers)[:, ::group].repeat_interleave(group, 1)
        windows[..., : self._prompt] = self._reward.prompts(windows[..., : self._prompt])
        return windows

    def what_trains(
        self, batch_RxBxx: Tensor, steps: Steps, size: int, active_R: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The sequences as they were loaded: `roll_out` completes them."""
        self.dropped = torch.zeros(len(batch_RxBxx), dtype=self._dtype, device=self._device)
        self.trains = torch.ones_like(active_R)
        if self.rollouts:
            self.rollouts.stand_at([steps] * len(batch_RxBxx) if isinstance(steps, int) else steps)
        return batch_RxBxx, None

    def roll_out(self, batch_RxBxx: Tensor, rows: PassingRows, strike: SiteStrikes) -> Tensor:
        assert self.rollouts is not None
        self.rollouts.roll_out(batch_RxBxx, rows, strike)
        return self.rolled_out(batch_RxBxx)

    def rolled_out(self, batch_RxBxx: Tensor) -> Tensor:
        assert self.rollouts is not None
        self._mask = self.rollouts.mask
        self._share, self._token_share = (
            mean_shares(self._mask, mean, self._dtype) for mean in (self.options.mean, "tokens")
        )
        return self.rollouts.tokens

    def loss(self, model: GPT, batch_rxbxx: Tensor, weights_rxb: Tensor | None, rows: slice) -> Tensor:
        """Minus the mean quality, [r], with the gradient of the policy's loss."""
        rollouts, first = self.rollouts, model.first_sequence
        assert rollouts is not None
        here = rows, slice(first, first + batch_rxbxx.shape[1])
        scores = rollouts.scores(model, batch_rxbxx, rows)
        completions = Completions(
            *(scores.log_probability, scores.entropy),
            *(rollouts.old[here], rollouts.behaviour[here], rollouts.reference[here]),
            *(self._mask[here], rollouts.advantages[here], self._share[here], self._token_share[here]),
        )
        parts = surrogate(self._kind, self._of_rows(rows), completions)
        loss = parts.loss
        if self._z_loss is not None:
            z_loss = self._z_loss[rows]
            of_z = mean_of_shares(completions.token_share, scores.log_z * scores.log_z, completions.mask)
            loss = loss + torch.where(z_loss == 0, 0.0, z_loss * of_z)
        self._show(model, parts, completions, rows)
        return loss - loss.detach() - sums.mean(rollouts.quality[here].contiguous())

    def _of_rows(self, rows: slice) -> LossStrengths:
        beta = None
        if self._strengths.beta is not None and self.rollouts:
            beta = self.rollouts.penalty.at(self._model.at)[rows, None, None]
        of: dict[str, Any] = {name: None if x is None else x[rows] for name, x in vars(self._strengths).items()}
        return LossStrengths(**{**of, "beta": beta})

    def _show(self, model: GPT, parts: LossParts, completions: Completions, rows: slice) -> None:
        """What is read of this pass."""
        assert self.rollouts is not None
        if PROXY_TAP in model.taps and self.rollouts.proxy:
            model.taps(PROXY_TAP, self.rollouts.proxy_measures[rows], rows)
        if STEP_TAP in model.taps:
            model.taps(STEP_TAP, step_measures(parts, completions), rows)
        if ROLLOUT_TAP in model.taps:
            beta = self.rollouts.penalty.at(self._model.at)[rows, None].double()
            model.taps(ROLLOUT_TAP, torch.cat((self.rollouts.measures[rows], beta), 1), rows)

    def reset_reference(self, row: int) -> None:
        assert self.rollouts is not None
        self.rollouts.reset_reference(row)

    def judge(self, loss: np.ndarray, nonfinite_step: int | None, is_untrained: bool = True) -> str:
        return self.judge_with({}, loss, nonfinite_step, is_untrained)

    def judge_with(
        self, read: Mapping[str, np.ndarray], loss: np.ndarray, nonfinite_step: int | None, is_untrained: bool = True
    ) -> str:
        unread = np.full_like(loss, np.nan)
        names = VARIETY if self.options.proxy is None else self.judged_by
        signals = dict.fromkeys(names, unread) | dict(read)
        of_rollouts = {name: self._of_rollouts(values) for name, values in signals.items()}
        return judge_policy(self._of_rollouts(-loss), of_rollouts, nonfinite_step)

    def _of_rollouts(self, values: np.ndarray) -> np.ndarray:
        """From numbers of each step those of each rollout, read at any of its steps; NaN: at none."""
        every = self.options.updates
        padded = np.full((-(-len(values) // every), every), np.nan)
        padded.flat[: len(values)] = values
        is_read = ~np.isnan(padded)
        return np.asarray(padded[np.arange(len(padded)), is_read.argmax(1)])


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
    yield from REWARDS[options.reward].refused(trial, prompt, context + 1 - prompt)
