"""Who samples the completions of a rollout: the trainer, or a model in another format, with noise, warmer or older."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config import Trial
from harness.config.names import Site
from harness.model.gpt import GPT
from harness.model.key_values import KeyValues, may_read_alone
from harness.model.parameters import Views
from harness.model.precision import precision_of
from harness.model.state import Rows, State
from harness.policy.rows import PassingRows, SiteStrikes
from harness.policy.sampling import NOISE, TEXT, drawn, streams_of, uniforms
from harness.policy.sizes import prompt_tokens

SAME = "same"  # the sampler's format: that of the trainer
Chooser = Callable[[Tensor, int], Tensor]  # tokens [r, b, n] that were not read, and a place -> logits of it [r, b, V]


class Sampler:
    """Of the rows of a pack whose trials are `here`. `model` is a copy of the trainer's with its own weights."""

    def __init__(self, here: Sequence[Trial], trainer: GPT, weights: Rows, state: State):
        first, self._device, self._dtype = here[0], weights.used.device, weights.used.dtype
        self.options, self._trainer, self._layout = first.section("policy"), trainer, trainer.layout
        self.prompt, self._sequences = prompt_tokens(first), first.train.sequences
        self._tokens = first.model.context + 1 - self.prompt
        self._reads_alone = may_read_alone(first, self._device)
        of = first.train if self.options.sampler == SAME else replace(first.train, precision=self.options.sampler)
        self.model = trainer.other(precision_of(of, self._device))
        self._as_trainer = trainer.other()  # for rows whose sampler is not apart
        lag = self.options.sampler_lag
        ring = weights.used[:, None].expand(-1, lag, -1).clone()
        self._ring = state.add("sampler_weights", ring) if lag else None

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        options = [trial.section("policy") for trial in trials]

        def column(field: str) -> Tensor:
            values = [getattr(one, field) or 0.0 for one in options]
            return torch.tensor(values, dtype=torch.float64, device=self._device).to(self._dtype)[:, None, None]

        self.temperature = column("temperature")[..., None]  # the trainer's, [R, 1, 1, 1]
        self._of_sampling = self.temperature
        if self.options.sampler_temperature is not None:
            self._of_sampling = self.temperature * column("sampler_temperature")[..., None]
        self._noise = None if self.options.sampler_noise is None else column("sampler_noise") * 3**0.5
        # Which rows sample as they train, [R]; None: none does.
        joined = [not one.sampler_apart for one in options]
        self._joined = sent(torch.tensor(joined), self._device) if any(joined) else None
        is_other = self.options.sampler != SAME or self._ring is not None
        self.is_apart = is_other or self._noise is not None or self._of_sampling is not self.temperature

    def meet(self, passing: PassingRows) -> dict[GPT, Tensor]:
        """The models that sample, and the weights of these rows that each is to be bound to."""
        self._weights = torch.empty_like(passing.weights)
        models = [self.model] if self._joined is None else [self.model, self._as_trainer]
        return dict.fromkeys(models, self._weights)

    def stand_at(self, seeds: Sequence[int], rollouts: Sequence[int]) -> None:
        """Be ready for these rollouts of the rows: what the host knows of it."""
        places = [TEXT] if self._noise is None else [TEXT, *(f"{NOISE} {i}" for i in range(self._tokens))]
        self._streams = sent(streams_of(seeds, rollouts, places), self._device)

    def update(self, current_RxP: Tensor, where_R: Tensor, strike: SiteStrikes) -> None:
        """The sampler has the weights of now, or of so many rollouts ago, and what strikes them."""
        flat, layout = self._weights, self._layout
        if self._ring is None:
            flat.copy_(current_RxP)
        else:
            ring = self._ring.used
            slots = torch.arange(ring.shape[1], device=self._device)
            place = self._trainer.at // self.options.updates % ring.shape[1]
            flat.copy_(ring[torch.arange(len(ring), device=self._device), place])
            is_place = (place[:, None] == slots) & where_R[:, None]
            torch.where(is_place[..., None], current_RxP[:, None], ring, out=ring)
            if self._joined is not None:
                torch.where(self._joined[:, None], current_RxP, flat, out=flat)
        strike(Site.SAMPLER_WEIGHT, lambda row: Views(layout, {"": flat[row : row + 1]}))
        self._as_trainer.router_bias = self.model.router_bias = self._trainer.router_bias

    def complete(self, tokens_RxBxxx: Tensor, rows: slice) -> None:
        """Complete the sequences of these rows, token by token."""
        batch = tokens_RxBxxx.shape[1]
        self._complete(tokens_RxBxxx, rows, self._streams[0], lambda first: self._by_itself(rows, first, batch))

    def complete_by(self, model: GPT, tokens_RxBxxx: Tensor, rows: slice, streams_R: Tensor) -> None:
        """The same by another model, as it is, with random numbers of its own."""
        self._complete(tokens_RxBxxx, rows, streams_R, lambda first: self._by(model, rows))

    def _complete(
        self, tokens_RxBxxx: Tensor, rows: slice, streams_R: Tensor, chooser: Callable[[int], Chooser]
    ) -> None:
        batch, length = tokens_RxBxxx.shape[1:]
        chances = uniforms(streams_R[rows], (batch, self._tokens))
        for first in range(0, batch, self._sequences):
            piece, logits_of = tokens_RxBxxx[rows, first : first + self._sequences], chooser(first)
            chosen = chances[:, first : first + self._sequences]
            ended = torch.zeros_like(piece[:, :, 0], dtype=torch.bool)
            for place in range(self.prompt, length):
                first_new = place - 1 if self._reads_alone and place > self.prompt else 0
                logits = logits_of(piece[:, :, first_new:place], place - self.prompt)
                token = drawn(logits, chosen[:, :, place - self.prompt])
                if self.options.end is not None:
                    token = torch.where(ended, self.options.end, token)
                    ended |= token == self.options.end
                piece[:, :, place] = token

    def _by(self, model: GPT, rows: slice) -> Chooser:
        """By what a model chooses the next token of sequences, over the trainer's temperature."""
        cached = KeyValues() if self._reads_alone else None
        return lambda piece, place: model.last_logits(piece, rows, cached) / self.temperature[rows][..., 0]

    def _by_itself(self, rows: slice, first: int, batch: int) -> Chooser:
        """The same by the sampler, of the sequences from `first` on."""
        cached, as_trainer = KeyValues() if self._reads_alone else None, self._by(self._as_trainer, rows)

        def logits_of(piece: Tensor, place: int) -> Tensor:
            logits = self._noisy(self.model.last_logits(piece, rows, cached), rows, place, first, batch)
            logits = logits / self._of_sampling[rows][..., 0]
            if self._joined is None:
                return logits
            return torch.where(self._joined[rows, None, None], as_trainer(piece, place), logits)

        return logits_of

    def logits(self, read: Callable[[GPT], Tensor], rows: slice, first: int, batch: int) -> Tensor:
        """By what the tokens of completions from `first` on were chosen, [r, b, T, V], over the temperature.

        `read` gives what a model says of each of them.
        """
        logits = read(self.model)
        if self._noise is not None:
            places = [self._noisy(logits[:, :, i], rows, i, first, batch) for i in range(logits.shape[2])]
            logits = torch.stack(places, 2)
        logits = logits / self._of_sampling[rows]
        if self._joined is None:
            return logits
        own = read(self._as_trainer) / self.temperature[rows]
        return torch.where(self._joined[rows, None, None, None], own, logits)

    def _noisy(self, logits_rxbxV: Tensor, rows: slice, place: int, first: int, batch: int) -> Tensor:
        """Logits of the sequences from `first` on for one token, with the sampler's noise, if it has some."""
        if self._noise is None:
            return logits_rxbxV
        count, vocabulary = logits_rxbxV.shape[1:]
        drawn_noise = uniforms(self._streams[1 + place, rows], (batch, vocabulary))
        noise = (2 * drawn_noise[:, first : first + count] - 1).to(logits_rxbxV.dtype)
        width = self._noise[rows]
        return torch.where(width == 0, logits_rxbxV, logits_rxbxV + width * noise)
