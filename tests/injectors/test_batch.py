"""Poisoned batches: what each kind promises, in the promised share, for this trial and these steps alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy.stats import binom

from harness.config import ConfigError
from harness.sites import Site, Visit
from injectors.batch import DuplicatedBatch, LongDocument, RandomTokens, RareTokens, Repetition
from injectors.fault import places_of
from tests.injectors.conftest import composer
from tests.injectors.spies import START, STEPS, context, strike, trial, watch

COUNTS = np.array([9, 0, 3, 500, 1, 3, 0, 2, 70, 3])
"""From the rarest: 4, 7, then 2, 5 and 9 alike, 0, 8, 3; tokens 1 and 6 never occur."""
ONE_RANK = {"ranks": 1, "batch": 4}
KINDS = (RareTokens, RandomTokens, Repetition, LongDocument, DuplicatedBatch)
GOLDEN, FAULTY, OTHER, SPY = range(4)
RARE = 1e-6  # chance that a test of draws fails by chance, were its seeds new ones


def poison(fault, batch, step=None, seed=0, counts=COUNTS):
    """The event of one strike on `batch`, which it changes."""
    (event,) = strike(fault, {"batch": batch}, seed, step, token_counts=counts)
    return event


def blank(sequences=4, length=300):
    return torch.full((sequences, length), -1)


def read(engine, fault, forks=False):
    """What four trials learned from, the second one struck: [step][trial], and the run."""
    trials = [trial(engine, **ONE_RANK), trial(engine, fault, **ONE_RANK), trial(engine, seed=3, **ONE_RANK)]
    run, spy = watch(engine, trials, [], range(STEPS), forks=forks)
    return [spy.batches[step][0] for step in range(STEPS)], run


def assert_uniform(drawn: torch.Tensor, values: list[int]) -> None:
    """Each value lies in its exact binomial interval."""
    found, counts = drawn.unique(return_counts=True)
    low, high = binom.interval(1 - RARE / len(values), drawn.numel(), 1 / len(values))
    assert found.tolist() == values and low <= counts.min() and counts.max() <= high


# --- rare tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, [4]),
        (2, [4, 7]),
        (3, [2, 4, 7]),
        (5, [2, 4, 5, 7, 9]),
        (8, [0, 2, 3, 4, 5, 7, 8, 9]),
        (99, [0, 2, 3, 4, 5, 7, 8, 9]),
    ],
)
def test_tokens_are_the_rarest_that_occur_each_as_likely(tokens, expected):
    batch = blank(20, 1000)
    poison(RareTokens(tokens=tokens), batch)
    assert_uniform(batch, expected)


# --- random tokens -----------------------------------------------------------------------------------------------


def test_random_tokens_are_any_of_the_vocabulary():
    """Those that never occur in the text too."""
    batch = blank(20, 1000)
    poison(RandomTokens(), batch)
    assert_uniform(batch, list(range(10)))


@pytest.mark.parametrize("fault", [RareTokens(tokens=8, duration=None), RandomTokens(duration=None)])
def test_draws_follow_from_the_seed_and_the_step(fault):
    drawn = {}
    for seed in (0, 1):
        for step in (100, 101, 102):
            first, again = blank(), blank()
            poison(fault, first, step, seed), poison(fault, again, step, seed)
            assert torch.equal(first, again)
            drawn[seed, step] = tuple(first.flatten().tolist())
    assert len(set(drawn.values())) == 6


# --- repetition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [None, 1, 5, 8])
def test_the_beginning_of_each_sequence_repeats_itself(engine, pattern, length):
    batches, _ = read(engine, Repetition(start=START, duration=1, pattern=pattern, length=length))
    for golden, struck in zip(batches[START][GOLDEN].tolist(), batches[START][FAULTY].tolist(), strict=True):
        repeated = 9 if length is None else length  # 8 tokens and the last target
        assert struck == [golden[i % pattern] if i < repeated else golden[i] for i in range(9)]


# --- a long document ---------------------------------------------------------------------------------------------


def in_a_row(batches: list[torch.Tensor]) -> list[int]:
    """The text that sequences spell one after the other; the last target of each is the first input of the next."""
    rows = [row for batch in batches for row in batch.tolist()]
    assert all(row[-1] == following[0] for row, following in zip(rows, rows[1:], strict=False))
    return [rows[0][0], *(token for row in rows for token in row[1:])]


def places(text: list[int], corpus: np.ndarray) -> list[int]:
    """Where `text` stands in the corpus."""
    windows = np.lib.stride_tricks.sliding_window_view(corpus, len(text))
    return np.flatnonzero((windows == text).all(1)).tolist()


@pytest.mark.parametrize(("share", "sequences"), [(1.0, 4), (0.5, 2)])
@pytest.mark.parametrize(("duration", "period"), [(1, 1), (3, 1), (4, 2), (None, 1)])
def test_sequences_and_batches_of_a_long_document_follow_each_other(engine, share, sequences, duration, period):
    fault = LongDocument(start=START, duration=duration, period=period, share=share)
    batches, run = read(engine, fault)
    steps = range(START, STEPS if duration is None else START + duration, period)
    text = in_a_row([batches[step][FAULTY][:sequences] for step in steps])
    assert len(text) == len(steps) * sequences * 8 + 1
    assert len(places(text, run.corpus.train)) == 1, "33 tokens or more of 64 kinds stand there but once"


def test_a_long_document_comes_from_anywhere(engine):
    corpus = np.arange(100)
    for size, starts in ((8, range(93)), (99, range(2)), (100, range(1))):
        found = set()
        for seed in range(600):
            batch = torch.zeros(1, size, dtype=torch.int64)
            strike(LongDocument(duration=1), {"batch": batch}, seed, tokens=corpus)
            assert batch[0].tolist() == list(range(batch[0, 0], batch[0, 0] + size))
            found.add(int(batch[0, 0]))
        assert found == set(starts)
    longer = torch.zeros(2, 101, dtype=torch.int64)
    strike(LongDocument(duration=1), {"batch": longer}, tokens=corpus)
    assert (longer.diff() % 100 == 1).all(), "a text that is too short begins again"


# --- a batch that comes again ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize(("late", "duration", "period"), [(1, 1, 1), (1, 3, 1), (4, 3, 2), (2, None, 1)])
def test_the_batch_of_an_earlier_step(engine, late, duration, period, forks):
    batches, run = read(engine, DuplicatedBatch(start=START, duration=duration, period=period, late=late), forks)
    struck = range(START, STEPS if duration is None else START + duration, period)
    for step in range(STEPS):
        expected = batches[START - late if step in struck else step][GOLDEN]
        if FAULTY in batches[step]:
            assert torch.equal(batches[step][FAULTY], expected), step
    assert [event.step for event in run.result.events[FAULTY]] == list(struck)
    assert (FAULTY in batches[0]) == (not forks or late == START), "it has a row from the step that it looks at"


# --- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "sequences"), [(1.0, 8), (0.5, 4), (0.26, 2), (0.25, 2), (0.01, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_share_of_the_sequences(kind, share, sequences):
    """The first ones. A duplicate is here of the batch that was seen a step before."""
    injector = kind(share=share).arm(context({"batch": (8, 20)}))
    batch = torch.arange(100, 260).view(8, 20)
    before = batch.clone()
    if kind is DuplicatedBatch:
        injector.visit(Visit(Site.BATCH, 99, {"batch": torch.full((8, 20), 7)}))
    injector.visit(Visit(Site.BATCH, 100, {"batch": batch}))
    assert (batch != before).any(1).tolist() == [True] * sequences + [False] * (8 - sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_only_this_trial_reads_other_batches_and_only_for_its_duration(engine, kind):
    batches, run = read(engine, kind(start=3, duration=3, share=0.5))
    clean, _ = read(engine, kind(start=STEPS))
    changed = [
        (step, number)
        for step in range(STEPS)
        for number in range(4)
        if not torch.equal(batches[step][number], clean[step][number])
    ]
    assert changed == [(step, FAULTY) for step in (3, 4, 5)]
    assert all(torch.equal(batches[step][FAULTY][2:], clean[step][FAULTY][2:]) for step in range(STEPS))
    assert [len(events) for events in run.result.events] == [0, 3, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_record(engine, kind):
    batches, run = read(engine, kind(start=START, duration=2))
    for event, step in zip(run.result.events[FAULTY], (START, START + 1), strict=True):
        both = (batches[step][GOLDEN], batches[step][FAULTY])
        assert [event.before, event.after] == [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in both]
        assert (event.site, event.tensor, event.step, event.changed, event.index) == (
            Site.BATCH,
            "batch",
            step,
            True,
            None,
        )


def test_what_was_there_already_is_no_change():
    assert not poison(RareTokens(tokens=1), torch.full((2, 4), 4)).changed
    assert not poison(Repetition(pattern=2), torch.tensor([[5, 6, 5, 6, 5]])).changed


# --- what they refuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Repetition(pattern=9), r"^fault.pattern=9: longer than model.context=8; allowed: 1 to 8$"),
        (Repetition(length=9), r"^fault.length=9: longer than model.context=8; allowed: 1 to 8$"),
        (Repetition(pattern=10, length=11), r"^fault.pattern=10: .*; fault.length=11: "),
        (DuplicatedBatch(start=3, late=4), r"^fault.late=4: before the first step; allowed: 1 to fault.start=3$"),
    ],
)
def test_what_they_refuse(engine, fault, words):
    struck = trial(engine, fault)
    with pytest.raises(ConfigError, match=words):
        fault.check(struck, places_of(struck, 64))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["fault=rare_tokens", "fault.share=0"], "^fault.share=0.0: out of range; allowed: > 0 and <= 1"),
        (["fault=rare_tokens", "fault.share=1.5"], "^fault.share=1.5: out of range; allowed: > 0 and <= 1"),
        (["fault=rare_tokens", "fault.tokens=0"], "^fault.tokens=0: out of range; allowed: >= 1"),
        (["fault=duplicated_batch", "fault.late=200"], "^fault.late=200: before the first step; .*fault.start=100"),
        (["fault=repetition", "fault.pattern=65"], "^fault.pattern=65: longer than model.context=64; allowed: 1 to 64"),
    ],
)
def test_what_a_sweep_refuses(given, words):
    with pytest.raises(ConfigError, match=words):
        composer().trial(given)
