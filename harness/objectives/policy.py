"""A policy: the model samples completions of prompts, and learns from what they are worth.

Policy gradients with groups of completions for each prompt, as GRPO, DAPO, GSPO, RLOO and their relatives have them,
whose formulas stand in harness/policy/. A step trains on the completions of the last rollout, which is made every
`policy.updates` steps, at its first one. The reported loss is minus the mean quality of these completions, so that it
falls as the policy learns; what is differentiated is the signal `surrogate_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from harness.objectives.loss import cross_entropy
from harness.objectives.next_token import NextToken
from harness.objectives.outcome import PROXY, VARIETY, judge_policy
from harness.policy.advantages import BASELINES, SCALES
from harness.policy.critic import Values, value_loss
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
    surrogate,
)
from harness.policy.minibatches import Minibatch, Minibatches
from harness.policy.penalty import SCHEDULES
from harness.policy.rollouts import Rollouts
from harness.policy.rows import PassingRows, SiteStrikes
from harness.policy.sampler import SAME
from harness.policy.sizes import prompt_tokens
from harness.policy.step_measures import (
    ENTROPY_TAP,
    PROXY_TAP,
    ROLLOUT_TAP,
    ROUTES_TAP,
    STEP_TAP,
    TEXT_TAP,
    VALUE_TAP,
    step_measures,
    value_measures,
)
from harness.rewards.table import REWARDS


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
    minibatches: int = number(
        STRUCTURAL,
        1,
        "parts of a rollout, of which each step has one in turn; divides train.batch and policy.updates",
        low=1,
        high=LARGEST_BATCH,
    )
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
    routing_replay: bool = anything(
        STRUCTURAL, False, "of a mixture of experts: tokens train with the experts to which the sampler sent them"
    )
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
    # A critic, in the place of baselines
    critic: bool = anything(
        STRUCTURAL, False, "a value head on the last hidden states, from which each token has an advantage of its own"
    )
    gamma: float = number(PER_TRIAL, 1.0, "of a critic: discount of the next token's value", low=0, high=1)
    gae: float = number(PER_TRIAL, 0.95, "of a critic: lambda of generalized advantage estimation", low=0, high=1)
    value_loss: float = number(PER_TRIAL, 0.1, "of a critic: weight of half its mean squared error", low=0)
    value_clip: float | None = number(
        PER_TRIAL, 0.2, "of a critic: by how much a value may move from that at the rollout; null: any", above=0
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
    reference_every: int | None = number(
        SWITCHED, None, "rollouts after which the policy becomes its own reference; null: it is the start", low=1
    )
    kl_target: float = number(PER_TRIAL, 6.0, "KL of a completion, nat, for beta_schedule adaptive", above=0)
    kl: str = choice(STRUCTURAL, "k3", "estimator of the KL: d, d^2/2 or e^-d + d - 1, with d = log p/p_ref", *KINDS)
    kl_in: str = choice(STRUCTURAL, "loss", "where the penalty stands", "loss", "reward")
    kl_weighted: bool = anything(
        STRUCTURAL, True, "a penalty in the loss is multiplied by the ratio, so that its gradient has no bias"
    )
    entropy: float | None = number(SWITCHED, None, "constant of a bonus on the entropy of tokens; null: none", low=0)
    entropy_target: float | None = number(
        SWITCHED, None, "entropy of a token, nat, below which the bonus acts and grows; null: it is constant", above=0
    )
    entropy_step: float = number(
        PER_TRIAL, 0.005, "by how much the bonus moves after a rollout, where it has a target", low=0, high=1
    )
    mix_in: float | None = number(
        SWITCHED, None, "weight of the next-token loss on training text beside the policy's own loss; null: none", low=0
    )
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
    reported = ("1", "minus the mean quality")
    judged_by = (*VARIETY, PROXY)
    taps = (STEP_TAP, ROLLOUT_TAP, PROXY_TAP, VALUE_TAP, ENTROPY_TAP, TEXT_TAP, ROUTES_TAP)

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
        self._minibatches = Minibatches(self.options.minibatches, trials[0].train.batch, self.options.updates, device)
        self._text: Tensor | None = None

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
        of_values = column("value_loss"), column("value_clip", np.inf)
        self._value_strengths = [x for x in of_values if x is not None]
        self._mix_in, self._seeds = column("mix_in"), [trial.seeds["data"] for trial in trials]

    def batch(self, steps: Steps) -> Tensor:
        """Sequences that begin with the prompts: those of a rollout are the same at all of its steps."""
        every = self.options.updates
        numbers = steps // every if isinstance(steps, int) else [step // every for step in steps]
        if self.options.mix_in is not None:
            self._text = self.batches(steps)
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
            of_rows = [steps] * len(batch_RxBxx) if isinstance(steps, int) else steps
            self.rollouts.stand_at(of_rows)
            self._minibatches.stand_at(self._seeds, of_rows)
        return batch_RxBxx, None

    def roll_out(self, batch_RxBxx: Tensor, rows: PassingRows, strike: SiteStrikes) -> Tensor:
        assert self.rollouts is not None
        self.rollouts.roll_out(batch_RxBxx, rows, strike)
        return self.rolled_out(batch_RxBxx)

    def rolled_out(self, batch_RxBxx: Tensor) -> Tensor:
        assert self.rollouts is not None
        index = self._minibatches.index()
        self._part = Minibatch(self.rollouts, index, self.options.mean)
        if self.rollouts.routes:
            self.rollouts.routes.train_on(index)
        return self._part.tokens

    def loss(self, model: GPT, batch_rxbxx: Tensor, weights_rxb: Tensor | None, rows: slice) -> Tensor:
        """Minus the mean quality, [r], with the gradient of the policy's loss."""
        rollouts, first, part = self.rollouts, model.first_sequence, self._part
        assert rollouts is not None
        here = rows, slice(first, first + batch_rxbxx.shape[1])
        text = None if self._text is None else self._text[here]
        read = rollouts.read(model, batch_rxbxx, rows, text)
        scores = rollouts.scores(read, batch_rxbxx, rows)
        completions = Completions(
            *(scores.log_probability, scores.entropy),
            *(part.old[here], part.behaviour[here], part.reference[here]),
            *(part.mask[here], part.advantages[here], part.share[here], part.token_share[here]),
        )
        parts = surrogate(self._kind, self._of_rows(rows), completions)
        loss = parts.loss
        if read.values is not None and part.values_and_returns is not None:
            old, returns = (x[here] for x in part.values_and_returns)
            values = Values(read.values, old, returns, *(x[rows] for x in self._value_strengths))
            loss = loss + self._loss_of_critic(model, values, completions, rows)
        if read.of_text is not None and text is not None:
            loss = loss + self._loss_of_text(model, read.of_text, text, rows)
        if self._z_loss is not None:
            z_loss = self._z_loss[rows]
            of_z = mean_of_shares(completions.token_share, scores.log_z * scores.log_z, completions.mask)
            loss = loss + torch.where(z_loss == 0, 0.0, z_loss * of_z)
        self._show(model, parts, completions, rows)
        return loss - loss.detach() - sums.mean(part.quality[here].contiguous())

    def _loss_of_critic(self, model: GPT, values: Values, completions: Completions, rows: slice) -> Tensor:
        parts = value_loss(values, completions.token_share, completions.mask)
        if VALUE_TAP in model.taps:
            model.taps(VALUE_TAP, value_measures(parts, values, completions.mask), rows)
        return parts.loss

    def _loss_of_text(self, model: GPT, logits_rxnxV: Tensor, text_rxbxxx: Tensor, rows: slice) -> Tensor:
        assert self._mix_in is not None
        # In memory of its own: what is kept of the logits becomes their gradient in place.
        loss = cross_entropy(logits_rxnxV.clone(), text_rxbxxx[:, :, 1:].flatten(1))
        if TEXT_TAP in model.taps:
            model.taps(TEXT_TAP, loss.detach().double()[:, None], rows)
        weight = self._mix_in[rows].flatten()
        return torch.where(weight == 0, 0.0, weight * loss)

    def _of_rows(self, rows: slice) -> LossStrengths:
        of: dict[str, Any] = {name: None if x is None else x[rows] for name, x in vars(self._strengths).items()}
        rollouts = self.rollouts
        if rollouts and of["beta"] is not None:
            of["beta"] = rollouts.penalty.at(self._model.at)[rows, None, None]
        if rollouts and rollouts.entropy:
            of["entropy"] = rollouts.entropy.now[rows, None, None].to(self._dtype)
        return LossStrengths(**of)

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
        if ENTROPY_TAP in model.taps and self.rollouts.entropy:
            model.taps(ENTROPY_TAP, self.rollouts.entropy.now[rows, None], rows)
        if ROUTES_TAP in model.taps and self.rollouts.routes:
            model.taps(ROUTES_TAP, self.rollouts.routes.flips[rows], rows)

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
