"""Rollouts of a pack: completions that each row samples, what they are worth, and what of them the row keeps.

What is kept is state of the row, [R, ...] each: so forks, snapshots, roll-backs, twins and checkpoints have it. A row
samples at its own steps; the others keep what they have. Rows pass through the model in the pack's own parts, and
nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config import Trial, sections
from harness.config.ladder import rungs
from harness.config.names import Site
from harness.model import sums
from harness.model.gpt import GPT
from harness.model.heads import VALUE_HEAD
from harness.model.layers import for_each_trial
from harness.model.scaling import output_multiplier
from harness.model.state import Rows, State
from harness.policy.advantages import advantages, spread
from harness.policy.critic import estimated_advantages, state_values, token_rewards, whitened
from harness.policy.losses import penalties
from harness.policy.measures import MEASURES, ScoredTokens, correlation, measured
from harness.policy.penalty import EntropyConstant, PenaltyConstant
from harness.policy.probabilities import TokenScores, token_scores
from harness.policy.proxy import Proxy
from harness.policy.routes import RolloutRoutes
from harness.policy.rows import PassingRows, SiteStrikes
from harness.policy.sampler import Sampler
from harness.policy.sizes import prompt_tokens
from harness.rewards.base import Reward, cumulated


class Read(NamedTuple):
    """What one pass gives: logits of each token of the completions [r, b, T, V], and a critic's values [r, b, T].

    Where text is mixed in, logits of its tokens, too, [r, n, V].
    """

    logits: Tensor
    values: Tensor | None = None
    of_text: Tensor | None = None


class Rollouts:
    """Of a pack whose objective is a policy. `here` are the trials of its rows as it is made, `planned` all.

    `windows` gives batches of sequences [R, B, P + T] that begin with different prompts, by number.
    """

    def __init__(
        self,
        planned: Sequence[Trial],
        here: Sequence[Trial],
        model: GPT,
        weights: Rows,
        state: State,
        reward: Reward,
        windows: Callable[[int], Tensor],
    ):
        first, device, dtype = here[0], weights.used.device, weights.used.dtype
        self.options, self._planned, self._model = first.section("policy"), planned, model
        self.prompt, self._sequences = prompt_tokens(first), first.train.sequences
        self._device, self._dtype = device, dtype
        rows, batch, length = len(here), first.train.batch, first.model.context + 1
        self.proxy: Proxy | None = None
        self.reward, self._windows = reward, windows
        self._start, self._start_of = weights.used.clone(), {t.golden.id: row for row, t in enumerate(here)}
        self._trainer, self._reference = model.other(), model.other()  # with taps that nobody reads

        def kept(name: str, *shape: int, dtype: torch.dtype = dtype) -> Rows:
            return state.add(f"rollout_{name}", torch.zeros((rows, *shape), dtype=dtype, device=device))

        self._tokens = kept("tokens", batch, length, dtype=torch.int32)
        of_tokens = batch, length - self.prompt
        self._old, self._behaviour, self._of_reference = (
            kept(name, *of_tokens) for name in ("old", "behaviour", "reference")
        )
        self._quality = kept("quality", batch)
        self._advantages = kept("advantages", *(of_tokens if self.options.critic else (batch,)))
        names = ("values", "returns") if self.options.critic else ()
        self._of_critic = [kept(name, *of_tokens) for name in names]
        self._measures = kept("measures", len(MEASURES), dtype=torch.float64)
        self._usual = kept("start_quality", 2, dtype=torch.float64)  # median, and spread of what is made of it
        self.sampler = Sampler(here, model, weights, state)
        self.penalty = PenaltyConstant(here, dtype, device, state)
        # Where it may become another one, the reference is a row's own.
        may_reset = any("reset_reference" in rung.actions for trial in planned for rung in rungs(trial.playbook.ladder))
        is_own = may_reset or self.options.reference_every is not None
        self._own_reference = state.add("reference_weights", weights.used.clone()) if is_own else None
        self._weights = weights
        if self.options.proxy is not None:
            self.proxy = Proxy(rows, reward.vocabulary, device, state)
            self._of_proxy = kept("proxy", 2, dtype=torch.float64)
        has_experts, scorers = first.section("block").channel_mixer == "moe", (self._trainer, self.sampler.model)
        self.routes = RolloutRoutes(first, model, *scorers, weights, state) if has_experts else None
        self.entropy = EntropyConstant(here, device, state) if self.options.entropy_target is not None else None

    def bind(self, trials: Sequence[Trial], numbers: Sequence[int]) -> None:
        """Work on these rows from now on: their trials, and their numbers in the pack as planned."""
        self._trials, options = trials, [trial.section("policy") for trial in trials]
        self._starts = [self._start_of[self._planned[number].golden.id] for number in numbers]
        self._parts: Sequence[slice] = ()
        self.penalty.bind(trials)
        self.sampler.bind(trials)
        if self.proxy:
            self.proxy.bind(trials)
        if self.entropy:
            self.entropy.bind(trials)
        name = f"policy.{self.options.reward}"
        self.reward.bind([trial.section(name) if name in sections() else None for trial in trials])
        self._seeds = [trial.seeds["data"] for trial in trials]
        self._resets_every = [one.reference_every for one in options]

        def column(field: str) -> Tensor:
            values = [getattr(one, field) or 0.0 for one in options]
            return torch.tensor(values, dtype=torch.float64, device=self._device)

        self._sharpness = None if self.options.sharpness is None else column("sharpness")
        self._gamma, self._gae = column("gamma"), column("gae")

    def _meet(self, rows: PassingRows) -> None:
        """Let sampler and reference pass in the same parts as the model."""
        if self._parts:
            return
        self._parts = rows.parts
        reference = self._start[self._starts] if self._own_reference is None else self._own_reference.used
        of = {**self.sampler.meet(rows), self._reference: reference, self._trainer: rows.weights}
        self._others = list(of)
        for model, weights in of.items():
            model.bind(self._trials, rows.parts, weights, weights)

    # --- what a row keeps --------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> Tensor:
        """Prompts and completions of each row's last rollout, int64 [R, B, P + T]."""
        return self._tokens.used.long()

    @property
    def mask(self) -> Tensor:
        """Which tokens of the completions count: up to the first one that ends it, [R, B, T]."""
        return self.mask_of(self._tokens.used[:, :, self.prompt :])

    def mask_of(self, completions_RxBxT: Tensor) -> Tensor:
        """The same of these completions."""
        if self.options.end is None:
            return torch.ones_like(completions_RxBxT, dtype=torch.bool)
        is_end = (completions_RxBxT == self.options.end).long()
        counts: Tensor = cumulated(is_end) == is_end
        return counts

    @property
    def old(self) -> Tensor:
        """Log-probability of each token of the completions by the trainer, at the rollout, [R, B, T]."""
        return self._old.used

    @property
    def behaviour(self) -> Tensor:
        """The same by the sampler, [R, B, T]."""
        return self._behaviour.used

    @property
    def reference(self) -> Tensor:
        """The same by the reference, [R, B, T]."""
        return self._of_reference.used

    @property
    def advantages(self) -> Tensor:
        """Of each completion, [R, B]; with a critic, of each token, [R, B, T]."""
        return self._advantages.used

    @property
    def values_and_returns(self) -> tuple[Tensor, Tensor] | None:
        """With a critic: values of each token's state at the rollout, and what they are to be, [R, B, T] each."""
        if not self._of_critic:
            return None
        values, returns = self._of_critic
        return values.used, returns.used

    @property
    def quality(self) -> Tensor:
        """What each completion is worth, before sharpness, penalty and faults, [R, B]."""
        return self._quality.used

    @property
    def measures(self) -> Tensor:
        """Of the last rollout, float64 [R, n], in the order of `MEASURES`."""
        return self._measures.used

    def reset_reference(self, row: int) -> None:
        """The weights of this row, as they are now, are its reference from its next rollout on."""
        assert self._own_reference is not None
        self._own_reference.used[row].copy_(self._weights.used[row])

    @property
    def proxy_measures(self) -> Tensor:
        """Of the last rollout, float64 [R, 2]: the mean of the proxy, and its correlation with the quality."""
        return self._of_proxy.used

    # --- a rollout ---------------------------------------------------------------------------------------------------

    def stand_at(self, steps: Sequence[int]) -> None:
        """Be ready for a rollout of the rows that sample at these steps of theirs: what the host knows of it."""
        every = self.options.updates
        self._due = [step % every == 0 for step in steps]
        self._begins = [step == 0 for step in steps]
        if not any(self._due):
            return
        self._is_due = None if all(self._due) else sent(torch.tensor(self._due), self._device)
        numbers = zip((step // every for step in steps), self._resets_every, strict=True)
        resets = [of is not None and number > 0 and number % of == 0 for number, of in numbers]
        self._resets = sent(torch.tensor(resets), self._device) if any(resets) else None
        self.sampler.stand_at(self._seeds, [step // every for step in steps])

    def roll_out(self, prompts_RxBxxx: Tensor, passing: PassingRows, strike: SiteStrikes) -> None:
        """New completions for the rows that are there, and at a step at which they sample.

        Args:
            prompts_RxBxxx: Sequences [R, B, P + T] that begin with the prompts; the rest is not read.
            passing: The rows.
            strike: Injectors at REWARD, ADVANTAGE and SAMPLER_WEIGHT.
        """
        due = self._due
        if not any(due):
            return
        self._meet(passing)
        where = passing.here if self._is_due is None else passing.here & self._is_due
        if self._resets is not None and self._own_reference is not None:
            reference = self._own_reference.used
            torch.where((where & self._resets)[:, None], passing.weights, reference, out=reference)
        for model in self._others:
            model.stand_with(self._model)
        self._trainer.router_bias = self._model.router_bias
        self.sampler.update(passing.weights, where, strike)
        is_struck = strike.is_due(Site.SAMPLER_WEIGHT)
        if self.proxy and any(self._begins):
            self._learn_proxy(self.proxy, passing)
        tokens, scored = prompts_RxBxxx.clone(), ScoredTokens(self.old, self.options.critic)
        with torch.no_grad():
            for rows in passing.parts:
                if any(due[rows]):
                    self.sampler.complete(tokens, rows)
                    self._score(tokens, scored, rows, is_struck)
        if self.routes:
            self.routes.keep(self.sampler.is_apart or is_struck, where)
        self._judge(tokens, scored, where, strike)

    def _learn_proxy(self, proxy: Proxy, passing: PassingRows) -> None:
        """Fit the learned reward of the rows that are at their first step to what the start policy samples."""
        is_first = passing.here & (self._model.at == 0)
        found = []
        with torch.no_grad():
            for number in range(proxy.batches(self._tokens.used.shape[1])):
                tokens = self._windows(number)
                for rows in (part for part in passing.parts if any(self._begins[part])):
                    self.sampler.complete_by(self._reference, tokens, rows, proxy.streams(number))
                completions = tokens[:, :, self.prompt :]
                parts = tokens[:, :, : self.prompt], completions, self.mask_of(completions)
                found.append((proxy.pairs(*parts), self.reward.quality(*parts)))
            pairs, gold = (torch.cat(values, 1) for values in zip(*found, strict=True))
            proxy.fit(pairs, gold, [row for row, begins in enumerate(self._begins) if begins], is_first)

    def _score(self, tokens_RxBxxx: Tensor, scored: ScoredTokens, rows: slice, is_struck: bool) -> None:
        """What trainer, sampler and reference say of the completions of these rows."""
        batch = tokens_RxBxxx.shape[1]
        for first in range(0, batch, self._sequences):
            here = rows, slice(first, first + self._sequences)
            piece = tokens_RxBxxx[here]
            is_apart, behaviour = self.sampler.is_apart or is_struck, None
            if self.routes:
                self.routes.listen(first, is_apart)
            if is_apart:
                logits = self.sampler.logits(partial(self._logits, piece, rows), rows, first, batch)
                behaviour = self._scored(logits, piece).log_probability
            read = self.read(self._trainer, piece, rows)
            old = self.scores(read, piece, rows)
            reference = self.scores(self.read(self._reference, piece, rows), piece, rows).log_probability
            behaviour = old.log_probability if behaviour is None else behaviour
            scored.old[here], scored.behaviour[here], scored.reference[here] = (
                old.log_probability,
                behaviour,
                reference,
            )
            scored.entropy[here] = old.entropy
            if scored.values is not None and read.values is not None:
                scored.values[here] = read.values
            scored.k3[here] = penalties("k3", old.log_probability, reference)

    def read(self, model: GPT, tokens_rxbxxx: Tensor, rows: slice, text_rxbxxx: Tensor | None = None) -> Read:
        """By what a model chooses each token of the completions, in one pass with the windows of `text`, if any."""
        batch, length = tokens_rxbxxx.shape[1:]
        passing = tokens_rxbxxx if text_rxbxxx is None else torch.cat((tokens_rxbxxx, text_rxbxxx), 1)
        tools, states, logits = model.with_states(passing[:, :, :-1], rows)
        of_text = None if text_rxbxxx is None else logits[:, batch * (length - 1) :]
        values = None
        if self.options.critic:
            values = state_values(states, tools.leaf(VALUE_HEAD)) * output_multiplier(model.config)
            values = self._of_completions(values, batch, length)
        return Read(self._of_completions(logits, batch, length), values, of_text)

    def _logits(self, tokens_rxbxxx: Tensor, rows: slice, model: GPT) -> Tensor:
        return self.read(model, tokens_rxbxxx, rows).logits

    def _of_completions(self, x_rxnxxx: Tensor, batch: int, length: int) -> Tensor:
        """Of what a pass has of each of its tokens, that by which tokens of the completions are chosen."""
        x = x_rxnxxx[:, : batch * (length - 1)].unflatten(1, (batch, length - 1))
        of_completions: Tensor = x[:, :, self.prompt - 1 :]
        return of_completions

    def scores(self, read: Read, tokens_rxbxxx: Tensor, rows: slice) -> TokenScores:
        """What was said of each token of the completions, at the trainer's temperature, [r, b, T] each."""
        return self._scored(read.logits / self.sampler.temperature[rows], tokens_rxbxxx)

    def _scored(self, logits_rxbxTxV: Tensor, tokens_rxbxxx: Tensor) -> TokenScores:
        completions = tokens_rxbxxx[:, :, self.prompt :]
        scores = token_scores(logits_rxbxTxV.flatten(1, 2).contiguous(), completions.flatten(1))
        return TokenScores(*(x.view(completions.shape) for x in scores))

    def _judge(self, tokens_RxBxxx: Tensor, scored: ScoredTokens, where_R: Tensor, strike: SiteStrikes) -> None:
        """Reward the completions, and keep all of it in the rows where that is due."""
        prompts, completions = tokens_RxBxxx[:, :, : self.prompt], tokens_RxBxxx[:, :, self.prompt :]
        mask, options = self.mask_of(completions), self.options
        quality = self.reward.quality(prompts, completions, mask)
        worth = quality
        if self.proxy:
            worth = self.proxy(self.proxy.pairs(prompts, completions, mask))
            of_proxy = torch.stack((sums.mean(worth), correlation(worth, quality)), 1)
            self._of_proxy.used.copy_(torch.where(where_R[:, None], of_proxy, self._of_proxy.used))
        rewards = self._sharpened(worth, where_R).to(self._dtype)
        strike(Site.REWARD, lambda row: {"reward": rewards[row]})
        shown = rewards
        paid = None
        if options.kl_in == "reward" and options.beta is not None:
            apart = penalties(options.kl, scored.old, scored.reference)
            beta = self.penalty.at(self._model.at)
            if options.critic:
                paid = beta[:, None, None] * apart
            else:
                rewards = rewards - beta[:, None] * sums.total(torch.where(mask, apart, 0.0))
        of_critic: list[Tensor] = []
        if scored.values is not None:
            of_tokens = token_rewards(rewards, paid, mask).double()
            gains = estimated_advantages(of_tokens, scored.values, mask, self._gamma, self._gae)
            of_critic = [scored.values, (gains + scored.values).to(self._dtype)]
            gains = (whitened(gains, mask) if options.scale == "batch" else gains).to(self._dtype)
        else:
            gains = advantages(rewards.double(), options.group, options.baseline, options.scale).to(self._dtype)
        strike(Site.ADVANTAGE, lambda row: {"advantage": gains[row]})
        numbers = measured(quality, shown, options.group, completions, mask, scored)
        self.penalty.adapt(numbers[:, MEASURES.index("reference_kl")], where_R)
        if self.entropy:
            self.entropy.adapt(numbers[:, MEASURES.index("token_entropy")], where_R)
        for rows, values in (
            *((self._tokens, tokens_RxBxxx.int()), (self._old, scored.old), (self._behaviour, scored.behaviour)),
            *((self._of_reference, scored.reference), (self._quality, quality.to(self._dtype))),
            *((self._advantages, gains), (self._measures, numbers)),
            *zip(self._of_critic, of_critic, strict=True),
        ):
            is_new = where_R.view(-1, *[1] * (values.dim() - 1))
            torch.where(is_new, values, rows.used, out=rows.used)

    def _sharpened(self, quality_RxB: Tensor, where_R: Tensor) -> Tensor:
        """sigmoid(s (q - q_0)), of unit spread over what the start policy samples, float64 [R, B].

        q_0 is the median of what it samples; where that has no spread, nothing is divided.
        """
        if self._sharpness is None:
            return quality_RxB
        at_start = (where_R & (self._model.at == 0))[:, None]
        middle = quality_RxB.sort(-1).values[:, quality_RxB.shape[1] // 2]
        middle = torch.where(at_start[:, 0], middle, self._usual.used[:, 0])
        sharp = self._sharpness[:, None] * (quality_RxB - middle[:, None])
        sharp = for_each_trial(torch.sigmoid, sharp)
        width = spread(sharp)
        width = torch.where(width == 0, 1.0, width)
        usual = torch.stack((middle, torch.where(at_start[:, 0], width, self._usual.used[:, 1])), 1)
        self._usual.used.copy_(usual)
        return sharp / usual[:, 1:]
