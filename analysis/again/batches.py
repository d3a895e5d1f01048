"""The batches that a stored trial has read, made again: they follow from its configuration, its corpus and the step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from harness.config import NO_FAULT, ConfigError, Data, Fault, Trial, trial_from_dict
from harness.config.names import OWN
from harness.data.corpus import Corpus, load_corpus
from harness.data.screening import Scores
from harness.incidents.batches_ahead import is_like_the_text
from harness.objectives.base import Objective
from harness.objectives.table import OBJECTIVES
from harness.storage.stored import PackInfo, read_packs
from harness.training.sites import Injector, Site, SiteCall
from injectors import Facts, InjectableFault, facts_of, fault_types

OWN_SOURCES = ("stdlib", "zipf")  # of text, for which no file is opened that a results folder names
_corpus_of = lru_cache(maxsize=4)(load_corpus)
CPU = torch.device("cpu")
MOST_BYTES = 2**28  # of a text that is looked through
MOST_STEPS = 10**7  # of a run whose rates are kept in memory


@lru_cache(maxsize=2)
def _raw(corpus: Corpus) -> bytes:
    return corpus.train.tobytes()


class BatchesUnseen(ConfigError):
    """The batches of a trial cannot be made again; `sentence` says why in a report."""

    def __init__(self, key: str, why: str, allowed: str, sentence: str):
        super().__init__(f"{key}: {why}; allowed: {allowed}")
        self.sentence = sentence


@dataclass(frozen=True)
class Setup:
    """What an operator knows of a recipe beside its signals."""

    beta2: float
    clip: float | None
    weights: int
    precision: str
    is_adam: bool  # with one beta2 at all steps
    rates: tuple[float, ...]  # of the schedule, by step
    beta1: float
    is_own: bool = False  # of the user's own loop, of which the number of weights alone is known

    @classmethod
    def of(cls, trial: Trial) -> Setup:
        facts, optim = facts_of(trial), trial.optim
        rates = tuple(facts.rate(step) for step in range(trial.steps))
        weights = sum(math.prod(shape) for shape in facts.tensors.values())
        is_adam = optim.name == "adamw" and optim.beta2_exponent is None
        return cls(optim.beta2, optim.clip, weights, trial.train.precision, is_adam, rates, optim.beta1)


@dataclass(frozen=True, eq=False)
class BatchReader:
    """What a stored trial has read: its configuration, the corpus, and with these every batch."""

    trial: Trial
    corpus: Corpus

    @cached_property
    def _objective(self) -> Objective:
        made = OBJECTIVES[self.trial.objective.name]([self.trial], self.corpus, torch.float32, CPU)
        made.bind([self.trial], [0])
        return made

    @cached_property
    def facts(self) -> Facts:
        """What a fault may know of the trial."""
        return facts_of(self.trial, self.corpus.train, self.corpus.counts)

    @property
    def clean(self) -> BatchReader:
        """The same without the fault."""
        return BatchReader(self.trial.golden, self.corpus)

    @cached_property
    def _injector(self) -> Injector | None:
        fault = self.trial.fault
        return fault.arm(self.facts) if isinstance(fault, InjectableFault) else None

    @cached_property
    def _calls(self) -> list[int]:
        """The steps at which the fault looks at the batch, or strikes it, that are still to come."""
        calls = self._injector.calls if self._injector else ()
        return sorted({step for site, step in calls if site is Site.BATCH})

    @cached_property
    def _struck(self) -> dict[int, torch.Tensor]:
        """What the fault has left of the batches that it was shown so far, by step."""
        return {}

    def batch(self, step: int) -> np.ndarray:
        """The token ids of a step as it has trained on them, poison included: int64 [sequences, T + 1].

        Sequences that were dropped by screening are left out. Raises ConfigError for an objective whose batches are no
        tokens.
        """
        try:
            return self._made(step)
        except (RuntimeError, MemoryError, ValueError, IndexError, AssertionError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise _not_of_this_version(self.trial.id, "batches", error) from None

    def _made(self, step: int) -> np.ndarray:
        while self._calls and self._calls[0] <= step:  # in order, since a fault may hand out what it has seen before
            due = self._calls.pop(0)
            self._struck[due] = self._objective.batch(due).clone()
            assert self._injector is not None
            self._injector.visit(SiteCall(Site.BATCH, due, {"batch": self._struck[due][0]}))
        batch = self._struck[step] if step in self._struck else self._objective.batch(step)
        if self._objective.is_sampled:
            why = "its model samples what it trains on, which is not kept"
            raise self._no_tokens(why, "a policy samples what it trains on, and the samples are not kept")
        tokens, weights = self._objective.what_trains(batch, step, step, torch.ones(1, dtype=torch.bool))
        if tokens.ndim != 3 or tokens.is_floating_point():
            raise self._no_tokens("its batches are no sequences of tokens", "they are no sequences of tokens")
        kept = slice(None) if weights is None else weights[0] > 0
        return tokens[0][kept].numpy()

    def _no_tokens(self, why: str, sentence: str) -> BatchesUnseen:
        return BatchesUnseen(f"objective.name={self.trial.objective.name}", why, "next_token", sentence)

    @cached_property
    def _scores(self) -> Scores:
        return Scores(self.corpus.counts, self.trial.model.context, CPU)

    @cached_property
    def agreement(self) -> float:
        """How often two tokens of the training text, drawn by chance, are the same."""
        shares = self.corpus.counts / max(1, self.corpus.counts.sum())
        return float(np.square(shares).sum())

    def goes_on(self, first: np.ndarray, second: np.ndarray) -> bool:
        """Whether a sequence, which begins with the last token of another, follows it somewhere in the training text.

        False for a text of more than `MOST_BYTES`, which is not looked through.
        """
        text = self.corpus.train
        if text.nbytes > MOST_BYTES:
            return False
        raw, wanted = _raw(self.corpus), np.concatenate([first, second[1:]]).astype(text.dtype).tobytes()
        at = raw.find(wanted)
        while at % text.itemsize and at >= 0:  # in the midst of a token
            at = raw.find(wanted, at + 1)
        return at >= 0

    def rarity(self, tokens: np.ndarray) -> float:
        """Mean surprise of a batch of tokens, nat/token; NaN of none."""
        return float(self._scores.rarity(torch.from_numpy(tokens)).mean())

    def repetition(self, tokens: np.ndarray) -> float:
        """Share of the token pairs of a batch that have stood in their sequence before; NaN of none."""
        return float(self._scores.repetition(torch.from_numpy(tokens)).mean())

    def is_like_the_text(self, tokens: np.ndarray) -> bool:
        """Whether the training text has batches as unlikely as this one, int64 [sequences, T + 1]."""
        return is_like_the_text(tokens, self.corpus)

    def text(self, tokens: np.ndarray) -> str:
        """Tokens as text: bytes and byte pairs decoded, what is no text as ids."""
        if self.corpus.tokenizer is not None:
            return tokenizers.Tokenizer.from_str(self.corpus.tokenizer).decode(
                tokens.tolist(), skip_special_tokens=False
            )
        if self.trial.data.source in ("stdlib", "text"):
            return bytes(int(token) & 0xFF for token in tokens).decode(errors="backslashreplace")
        return " ".join(map(str, tokens.tolist()))

    def token_text(self, token: int) -> str:
        """One token, as a table can show it: text in quotes, what is no text as it is."""
        text = self.text(np.array([token]))
        is_text = self.trial.data.source in ("stdlib", "text") and not text.startswith("\\x")
        return repr(text) if is_text else text


def reading_of(out: Path, trial: str, data: Path | None = None) -> BatchReader:
    """What the trial with that id has read, of the results in `out`.

    `data` is where its text lies, if that is not built in: what a results folder names is not opened. Raises
    ConfigError for a trial that there is not, for a text that is not there or another one than it was trained on, and
    for a configuration that this version cannot make.
    """
    return readings_of(out, data)(trial)


def readings_of(
    out: Path, data: Path | None = None, packs: Iterable[PackInfo] | None = None
) -> Callable[[str], BatchReader]:
    """`reading_of` for many trials of the results in `out`, whose files are read once; `packs` if they were read."""
    stored = stored_trials(read_packs(out) if packs is None else packs)

    def reading(trial: str) -> BatchReader:
        if trial not in stored:
            raise unknown_trial(out, trial, iter(stored))
        pack = stored[trial]
        return BatchReader(*_made(out, trial, config_of(pack, trial), pack.attributes["corpus"], data))

    return reading


def stored_trials(packs: Iterable[PackInfo]) -> dict[str, PackInfo]:
    """Trial -> the pack that `open_sweep` takes it from: the complete one, else the newest."""
    ranked = sorted(packs, key=lambda pack: (pack.complete, pack.attributes["created"], pack.id))
    return {trial: pack for pack in ranked for trial in pack.attributes["ids"]}


def config_of(pack: PackInfo, trial: str) -> dict[str, Any]:
    """The configuration of a trial of a pack."""
    config: dict[str, Any] = pack.attributes["trials"][pack.attributes["ids"].index(trial)]
    return config


def setups_of(out: Path, packs: Iterable[PackInfo] | None = None) -> dict[str, Setup]:
    """Trial -> what is known of its recipe, of all in the results in `out` that this version can make.

    `packs` are those of `out`, if they were read.
    """
    found: dict[str, Setup] = {}
    known: dict[str, Setup | None] = {}
    for pack in read_packs(out) if packs is None else packs:
        for name, values in zip(pack.attributes["ids"], pack.attributes["trials"], strict=True):
            # Trials differ in fault and seed alone, more often than not: each recipe is made once.
            key = json.dumps({k: v for k, v in values.items() if k not in ("fault", "seed")}, sort_keys=True)
            if key not in known:
                known[key] = _setup(values)
            if (setup := known[key]) is not None:
                found[name] = setup
    return found


def _setup(values: dict[str, Any]) -> Setup | None:
    if OWN in values:
        count = values.get("model", {}).get("parameters")
        return Setup(math.nan, None, count, "", False, (), math.nan, is_own=True) if isinstance(count, int) else None
    try:
        trial = trial_from_dict({**values, "fault": vars(NO_FAULT)}, {"none": Fault})
        return Setup.of(trial) if trial.steps <= MOST_STEPS else None
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def unknown_trial(out: Path, trial: str, known: Iterator[str]) -> ConfigError:
    """What is said of a trial that a results folder does not have."""
    some = ", ".join(name for name, _ in zip(known, range(3), strict=False))
    return ConfigError(
        f"TRIAL={trial!r:.40}: no such trial in {out}; allowed: an id, such as {some or 'there is none'}"
    )


def _made(
    out: Path, name: str, values: dict[str, Any], known: dict[str, Any], data: Path | None
) -> tuple[Trial, Corpus]:
    if OWN in values:
        why = "is a run of the user's own loop, and only its loader has the batches"
        raise BatchesUnseen(
            f"TRIAL={name}", why, "a trial of a sweep", "only the loader of the user's own loop has them"
        )
    try:
        trial = trial_from_dict(values, fault_types())
    except (KeyError, TypeError, ValueError) as error:
        raise _not_of_this_version(name, "configuration", error) from None
    source = trial.data
    if source.source not in OWN_SOURCES:
        if data is None:
            why = f"trained on text from data.path={source.path!r:.80}, which is not opened unasked"
            sentence = "their text is no part of the results; the option --data PATH says where it lies"
            raise BatchesUnseen(f"TRIAL={name}", why, "with --data PATH", sentence)
        source = dataclasses.replace(source, path=str(data))
    try:
        corpus = _corpus_of(_without_order(source), trial.model.context)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, MemoryError, OverflowError) as error:
        raise _not_of_this_version(name, "corpus", error) from None
    if corpus.fingerprint != (stored := known.get("fingerprint")):
        why = f"trained on another text (fingerprint {stored!s:.20}, here {corpus.fingerprint:.20})"
        allowed = "the text of that training, with --data PATH if it is a file"
        raise BatchesUnseen(f"TRIAL={name}", why, allowed, "the text found is not the one of that training")
    return trial, corpus


def _not_of_this_version(trial: str, what: str, error: BaseException) -> BatchesUnseen:
    """An error in making a trial's `what` again."""
    why = f"its {what} cannot be made again ({type(error).__name__}: {str(error)!r:.80})"
    return BatchesUnseen(
        f"TRIAL={trial}", why, "one of this version's", f"this version cannot make the trial's {what} again"
    )


def _without_order(data: Data) -> Data:
    """The same corpus, whatever the order of batches."""
    return dataclasses.replace(data, seed=None)
