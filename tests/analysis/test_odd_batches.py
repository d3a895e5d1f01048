"""The batches of a whole run tell of an incident where no signal is sure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.again import odd_batches
from analysis.again.batches import BatchReader
from analysis.again.odd_batches import AGAIN, REPEATED, STRETCH
from analysis.measures.causes import GRADIENT, RARE, REPETITION, UNKNOWN, cause_of
from analysis.measures.evidence import evidence_of, offending
from analysis.measures.incidents import Incident, of_one
from harness.config import ConfigError, Data
from harness.data.corpus import load_corpus
from harness.testing.engine import trial
from injectors.batch import BatchFault, RandomTokens
from tests.analysis.test_causes import Text
from tests.analysis.test_incidents import BEGIN, STEPS, calm, run_of, spiked


class Loader(Text):
    """Hands out the batch of the step before once more."""

    def batch(self, step: int) -> np.ndarray:
        return super().batch(step - (step == BEGIN))


class Document(Text):
    """Hands out `share` of a batch as one stretch of text, each sequence from where the one before it ended."""

    share, every = 1.0, STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.documents: set[bytes] = set()

    def batch(self, step: int) -> np.ndarray:
        tokens = super().batch(step)
        if step % self.every == BEGIN % self.every:
            for row in range(1, int(self.share * len(tokens))):
                tokens[row, 0] = tokens[row - 1, -1]
            self.documents.update(row.tobytes() for row in tokens)
        return tokens

    def goes_on(self, first: np.ndarray, second: np.ndarray) -> bool:
        """Others may meet by chance: Zipf's law has the same token twice at one place in seventeen."""
        return {first.tobytes(), second.tobytes()} <= self.documents


class Epochs(Text):
    """Begins anew every 50 steps, in the same order."""

    def batch(self, step: int) -> np.ndarray:
        return super().batch(step % 50)


class Curriculum(Text):
    """Goes on to text of other words."""

    def batch(self, step: int) -> np.ndarray:
        return super().batch(step) + (60 if step > 2 * BEGIN + 50 else 0) & 127


def asked(reading: Any, loss: np.ndarray | None = None) -> list[Incident]:
    return of_one(run_of(calm() if loss is None else loss), None, is_asked=True, reading=reading)


@pytest.mark.parametrize("sequences", [2, 6, 16])
@pytest.mark.parametrize("kind", [RARE, REPETITION])
def test_a_poisoned_batch_of_which_no_signal_tells_is_found(kind: str, sequences: int) -> None:
    reading, run = Text(sequences, kind, 0), run_of(calm())
    (incident,) = asked(reading)
    assert (incident.first, incident.last, incident.is_sure) == (BEGIN, BEGIN, False)
    found = evidence_of(run, incident, reading)  # type: ignore[arg-type]
    assert (found.begin, offending(found, incident)) == (BEGIN, [BEGIN])
    assert cause_of(found).cause == kind
    assert all(one.first != BEGIN for one in asked(None)), "it shows in no signal"


def test_a_batch_that_comes_again_is_found() -> None:
    reading = Loader(4, "", 0)
    (incident,) = asked(reading)
    assert incident.batches == ((BEGIN, AGAIN),)
    told = cause_of(evidence_of(run_of(calm()), incident, reading))  # type: ignore[arg-type]
    assert told.cause == REPETITION and f"that of step {BEGIN - 1} again" in told.reason


@pytest.mark.parametrize(("sequences", "share", "is_seen"), [(12, 1.0, True), (24, 0.5, True), (2, 1.0, False)])
def test_a_batch_of_one_long_document_is_text_as_it_is(sequences: int, share: float, is_seen: bool) -> None:
    reading = Document(sequences, "", 0)
    reading.share = share
    found = asked(reading)
    assert [one.batches for one in found if one.batches] == ([((BEGIN, STRETCH),)] if is_seen else [])
    if is_seen:
        told = cause_of(evidence_of(run_of(calm()), found[0], reading))  # type: ignore[arg-type]
        assert told.cause == UNKNOWN and "one stretch" in told.reason
    steep = run_of(calm())
    steep["grad_norm"][BEGIN] *= 3
    (incident,) = of_one(steep, None, is_asked=True)
    assert cause_of(replace(evidence_of(steep, incident, None), is_batch_seen=True)).cause == GRADIENT
    assert cause_of(evidence_of(steep, incident, reading)).cause == (UNKNOWN if is_seen else GRADIENT)  # type: ignore[arg-type]


def test_a_loader_that_reads_in_order_has_no_odd_batches() -> None:
    reading = Document(12, "", 0)
    reading.every = 5
    assert odd_batches.odd_batches(reading, STEPS) == {}  # type: ignore[arg-type]


def test_a_sure_sign_is_not_outvoted() -> None:
    (incident,) = asked(Text(6, RARE, 0), spiked(20.0, 0.0)[::-1].copy())
    assert incident.is_sure and not incident.batches and incident.first > BEGIN


@pytest.mark.parametrize("text", [Text, Curriculum, Epochs])
def test_ordinary_text_has_none(text: type[Text]) -> None:
    """Nor has one that goes on to other text for good, or one so short that each epoch is the same."""
    assert [odd_batches.odd_batches(text(4, "", seed), STEPS) for seed in range(10)] == [{}] * 10  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [None, RandomTokens(start=60, duration=1)])
def test_small_batches_of_a_text_that_are_rare_in_it_are_ordinary(
    fault: BatchFault | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence of tables or of nothing but spaces is unlike those before; one in 30,000 is unlike the text."""
    trials = [trial(seed=seed, batch=1, context=48, steps=200, data=Data(source="stdlib")) for seed in range(30)]
    corpus = load_corpus(trials[0].data, 48)
    readings = [BatchReader(one if fault is None else replace(one, fault=fault), corpus) for one in trials]

    def natural() -> int:
        found = [odd_batches.odd_batches(reading, 200) for reading in readings]
        assert all(of_run.pop(60, None) == (fault and odd_batches.RARE) for of_run in found)
        return sum(map(len, found))

    there = natural()  # of 6,000
    monkeypatch.setattr(BatchReader, "is_like_the_text", lambda *_: False)
    assert there <= 2 and natural() > 2 * there


def test_what_cannot_be_looked_through_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are no tokens, or more than are read in a minute."""
    reading: Any = Text(4, REPETITION, 0)
    assert odd_batches.odd_batches(reading, STEPS) == {BEGIN: REPEATED}
    monkeypatch.setattr(odd_batches, "MOST_TOKENS", reading.batch(0).size * STEPS - 1)
    assert odd_batches.odd_batches(reading, STEPS) == {}

    def refuse(step: int) -> np.ndarray:
        raise ConfigError("its batches are no sequences of tokens")

    monkeypatch.undo()
    monkeypatch.setattr(reading, "batch", refuse)
    assert odd_batches.odd_batches(reading, STEPS) == {}
