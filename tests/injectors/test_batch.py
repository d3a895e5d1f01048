"""Poisoned batches: what each kind promises, in the promised share, for this trial and these steps alone."""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import binom

from harness.training.sites import Site, SiteCall
from injectors.batch import DuplicatedBatch, LongDocument, RandomTokens, RareTokens, Repetition
from tests.injectors.spies import START, STEPS, facts, strike, trial, watch

COUNTS = np.array([9, 0, 3, 500, 1, 3, 0, 2, 70, 3])
"""From the rarest: 4, 7, then 2, 5 and 9 alike, 0, 8, 3; tokens 1 and 6 never occur."""
ONE_RANK = {"ranks": 1, "batch": 4}
KINDS = (RareTokens, RandomTokens, Repetition, LongDocument, DuplicatedBatch)
GOLDEN = 0
RARE = 1e-6  # chance that a test of draws fails by chance, were its seeds new ones


def poison(fault, batch, step=None, seed=0, counts=COUNTS):
    """The event of one strike on `batch`, which it changes."""
    (event,) = strike(fault, {"batch": batch}, seed, step, token_counts=counts)
    return event


def blank(sequences=4, length=300):
    return torch.full((sequences, length), -1)


REPEATED = {
    (pattern, length): Repetition(start=START, duration=1, pattern=pattern, length=length)
    for pattern, length in product((1, 2, 3, 8), (None, 1, 5, 8))
}
LONG = {
    (share, duration, period): LongDocument(start=START, duration=duration, period=period, share=share)
    for share, (duration, period) in product((1.0, 0.5), ((1, 1), (3, 1), (4, 2), (None, 1)))
}
DUPLICATED = {
    (late, duration, period): DuplicatedBatch(start=START, duration=duration, period=period, late=late)
    for late, duration, period in ((1, 1, 1), (1, 3, 1), (4, 3, 2), (2, None, 1))
}
HALF = {kind: kind(start=3, duration=3, share=0.5) for kind in KINDS}
RECORDED = {kind: kind(start=START, duration=2) for kind in KINDS}
FAULTS = [*REPEATED.values(), *LONG.values(), *DUPLICATED.values(), *HALF.values(), *RECORDED.values()]


@cache
def read(forks=False):
    """What a pack learned from, [step][trial], with a trial for each of FAULTS between golden ones; and the run."""
    golden = [trial(seed=(7, 3)[number % 2], **ONE_RANK) for number in range(len(FAULTS) + 1)]
    pairs = zip(golden, (trial(fault, **ONE_RANK) for fault in FAULTS), strict=False)
    trials = [*(each for pair in pairs for each in pair), golden[-1]]
    run, spy = watch(trials, [], range(STEPS), forks=forks)
    return [spy.batches[step][0] for step in range(STEPS)], run


@cache
def clean():
    """What golden trials of both seeds learn from: [step][trial]."""
    _, spy = watch([trial(seed=seed, **ONE_RANK) for seed in (7, 3)], [], range(STEPS))
    return [spy.batches[step][0] for step in range(STEPS)]


def number_of(fault):
    """Of its trial, which stands between golden ones of both seeds."""
    return 2 * FAULTS.index(fault) + 1


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


@pytest.mark.parametrize(("pattern", "length"), REPEATED)
def test_the_beginning_of_each_sequence_repeats_itself(pattern, length):
    (batches, _), faulty = read(), number_of(REPEATED[pattern, length])
    for golden, struck in zip(batches[START][GOLDEN].tolist(), batches[START][faulty].tolist(), strict=True):
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


@pytest.mark.parametrize(("share", "duration", "period"), LONG)
def test_sequences_and_batches_of_a_long_document_follow_each_other(share, duration, period):
    (batches, run), faulty = read(), number_of(LONG[share, duration, period])
    sequences = {1.0: 4, 0.5: 2}[share]
    steps = range(START, STEPS if duration is None else START + duration, period)
    text = in_a_row([batches[step][faulty][:sequences] for step in steps])
    assert len(text) == len(steps) * sequences * 8 + 1
    assert len(places(text, run.corpus.train)) == 1, "33 tokens or more of 64 kinds stand there but once"


def test_a_long_document_comes_from_anywhere():
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
@pytest.mark.parametrize(("late", "duration", "period"), DUPLICATED)
def test_the_batch_of_an_earlier_step(late, duration, period, forks):
    (batches, run), faulty = read(forks), number_of(DUPLICATED[late, duration, period])
    struck = range(START, STEPS if duration is None else START + duration, period)
    for step in range(STEPS):
        expected = batches[START - late if step in struck else step][GOLDEN]
        if faulty in batches[step]:
            assert torch.equal(batches[step][faulty], expected), step
    assert [event.step for event in run.result.events[faulty]] == list(struck)
    assert (faulty in batches[0]) == (not forks or late == START), "it has a row from the step that it looks at"


# --- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "sequences"), [(1.0, 8), (0.5, 4), (0.26, 2), (0.25, 2), (0.01, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_share_of_the_sequences(kind, share, sequences):
    """The first ones. A duplicate is here of the batch that was seen a step before."""
    injector = kind(share=share).arm(facts({"batch": (8, 20)}))
    batch = torch.arange(100, 260).view(8, 20)
    before = batch.clone()
    if kind is DuplicatedBatch:
        injector.visit(SiteCall(Site.BATCH, 99, {"batch": torch.full((8, 20), 7)}))
    injector.visit(SiteCall(Site.BATCH, 100, {"batch": batch}))
    assert (batch != before).any(1).tolist() == [True] * sequences + [False] * (8 - sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_only_this_trial_reads_other_batches_and_only_for_its_duration(kind):
    (batches, run), faulty = read(), number_of(HALF[kind])
    seeds = {number: number // 2 % 2 for number in (faulty - 1, faulty + 1)} | {faulty: 0}
    changed = [
        (step, number)
        for step, batch in enumerate(clean())
        for number, seed in seeds.items()
        if not torch.equal(batches[step][number], batch[seed])
    ]
    assert changed == [(step, faulty) for step in (3, 4, 5)]
    assert all(torch.equal(batches[step][faulty][2:], batch[0][2:]) for step, batch in enumerate(clean()))
    assert [len(events) for events in run.result.events[faulty - 1 : faulty + 2]] == [0, 3, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_record(kind):
    (batches, run), faulty = read(), number_of(RECORDED[kind])
    for event, step in zip(run.result.events[faulty], (START, START + 1), strict=True):
        both = (batches[step][GOLDEN], batches[step][faulty])
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
