"""Batches of rare tokens: really the rarest that occur, in the promised share, for this trial and these steps alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from harness.config import NO_FAULT, Data, Model, Train, Trial
from harness.corpus import load_corpus
from harness.loop import train
from harness.pack import Pack
from harness.sites import Agenda, Site
from injectors.fault import FaultContext, shapes_of
from injectors.rare_tokens import RareTokens

COUNTS = np.array([9, 0, 3, 500, 1, 3, 0, 2, 70, 3])
"""From the rarest: 4, 7, then 2, 5 and 9 alike, 0, 8, 3; tokens 1 and 6 never occur."""


def poison(fault, batch, step=0, seed=0, counts=COUNTS):
    """The event of one strike on `batch`, which it changes."""
    (event,) = fault.arm(FaultContext({}, counts, seed)).strike({"batch": batch}, step)
    return event


def blank(sequences=4, length=300):
    return torch.full((sequences, length), -1)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, {4}),
        (2, {4, 7}),
        (3, {4, 7, 2}),
        (5, {4, 7, 2, 5, 9}),
        (8, {0, 2, 3, 4, 5, 7, 8, 9}),
        (99, {0, 2, 3, 4, 5, 7, 8, 9}),
    ],
)
def test_tokens_are_the_rarest_that_occur(tokens, expected):
    batch = blank()
    poison(RareTokens(tokens=tokens), batch)
    assert set(batch.unique().tolist()) == expected


def test_all_of_them_are_drawn_alike():
    batch = blank(20, 1000)
    poison(RareTokens(tokens=5), batch)
    counts = np.bincount(batch.flatten().numpy())
    assert (abs(counts[counts > 0] - 4000) < 400).all()  # seven standard deviations of a binomial


@pytest.mark.parametrize(("share", "sequences"), [(1.0, 8), (0.5, 4), (0.26, 2), (0.25, 2), (0.01, 1)])
def test_share_of_the_sequences(share, sequences):
    batch = blank(8)
    poison(RareTokens(share=share), batch)
    replaced = (batch != -1).all(1)
    assert replaced.sum() == sequences and (batch[~replaced] == -1).all()


def test_draws_follow_from_the_seed_and_the_step():
    fault = RareTokens(tokens=8)
    drawn = {}
    for seed in (0, 1):
        for step in (0, 1, 2):
            first, again = blank(), blank()
            poison(fault, first, step, seed), poison(fault, again, step, seed)
            assert torch.equal(first, again)
            drawn[seed, step] = tuple(first.flatten().tolist())
    assert len(set(drawn.values())) == 6


def test_the_record():
    batch = torch.arange(12).view(3, 4)
    before = batch.clone()
    event = poison(RareTokens(), batch, step=9)
    digests = [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in (before, batch)]
    assert [event.before, event.after] == digests
    assert (event.site, event.tensor, event.step, event.changed) == (Site.BATCH, "batch", 9, True)
    same = torch.full((2, 4), 4)  # the batch was nothing but the rarest token already
    assert not poison(RareTokens(tokens=1), same).changed


TRIAL = {
    "model": Model(width=16, head_dim=8, context=8),
    "train": Train(steps=10, batch=4, validate_every=5, validate_batches=1),
    "data": Data("zipf", vocabulary=64, length=5000),
}


@pytest.fixture
def one_thread():
    """A pack this small does not repay two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches_seen(fault):
    """The batches of three trials at each step, [steps, 3, B, T + 1], the second one struck; and its events."""
    trials = [Trial(**TRIAL, seed=0), Trial(**TRIAL, seed=1, fault=fault), Trial(**TRIAL, seed=2)]
    corpus = load_corpus(trials[0].data, 8)
    pack = Pack(trials, corpus, torch.device("cpu"))
    injector = fault.arm(FaultContext(shapes_of(trials[1], 64), corpus.counts, 1)) if fault != NO_FAULT else None
    seen, loss = [], pack.loss

    def spy(batch):
        if torch.is_grad_enabled():  # not the validation
            seen.append(batch.clone())
        return loss(batch)

    pack.loss = spy
    result = train(pack, Agenda([None, injector, None]), 10, lambda step, signals: None)
    return torch.stack(seen), result.events, corpus


@pytest.mark.usefixtures("one_thread")
def test_only_this_trial_reads_other_batches_and_only_for_its_duration():
    fault = RareTokens(start=3, duration=4, tokens=3, share=0.5)
    struck, events, corpus = batches_seen(fault)
    clean, none, _ = batches_seen(NO_FAULT)
    changed = (struck != clean).flatten(2).any(-1)
    assert changed.nonzero().tolist() == [[step, 1] for step in (3, 4, 5, 6)]
    assert [event.step for event in events[1]] == [3, 4, 5, 6] and events[0] == events[2] == [] == none[1]
    occurring = np.flatnonzero(corpus.counts)
    limit = np.sort(corpus.counts[occurring])[2]
    assert (corpus.counts[struck[3:7, 1, :2].numpy()] <= limit).all()
    assert torch.equal(struck[3:7, 1, 2:], clean[3:7, 1, 2:])
    assert len({tuple(batch.flatten().tolist()) for batch in struck[3:7, 1, :2]}) == 4, "each step draws anew"
