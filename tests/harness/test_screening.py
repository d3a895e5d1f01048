"""Batch screening: scores against a count by hand, what dropping a sequence means, and what is recorded of it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch

from harness.config import Screen
from harness.config.limits import KEPT_EVENTS
from harness.data.corpus import load_corpus
from harness.data.screening import CRITERIA, Scores
from harness.objectives.loss import cross_entropy
from harness.objectives.outcome import NON_FINITE, TRAINED, judge
from harness.storage.stored import read_packs
from harness.testing import engine
from harness.testing.changes import Change, fill_first
from harness.training.sites import Site
from injectors.batch import RandomTokens, RareTokens, Repetition
from tests.harness.features import THRESHOLDS
from tests.sweeps.command import call, tiny

CPU = torch.device("cpu")


# --- scores ---------------------------------------------------------------------------------------------------------


def by_hand(tokens: list[int], counts: list[int]) -> dict[str, float]:
    total, length = sum(counts) + len(counts), len(tokens)
    seen, repeated = set(), 0
    for pair in zip(tokens, tokens[1:], strict=False):
        repeated += pair in seen
        seen.add(pair)
    shares = [count / length for count in Counter(tokens).values()]
    return {
        "rarity": sum(-math.log((counts[token] + 1) / total) for token in tokens) / length,
        "repetition": repeated / (length - 1),
        "entropy": -sum(share * math.log(share) for share in shares),
    }


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 2), (3, 10), (64, 65), (300, 33), (65536, 20)])
def test_scores_are_those_counted_by_hand(vocabulary, length):
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 50, vocabulary)
    tokens = torch.from_numpy(draw.integers(0, vocabulary, (3, 5, length)))
    tokens[0, 0] = tokens[0, 0, 0]  # one token over and over
    tokens[0, 1] = tokens[0, 1, torch.arange(length) % 2]  # two in turn
    tokens[0, 2] = vocabulary - 1 - torch.arange(length) % vocabulary  # none twice, as far as that goes
    scores = Scores(counts, length - 1, CPU)
    for name, (score, _) in CRITERIA.items():
        found = score(scores, tokens)
        assert found.dtype == torch.float64 and found.shape == (3, 5)
        expected = [[by_hand(sequence, counts.tolist())[name] for sequence in row] for row in tokens.tolist()]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_scores_at_their_ends():
    scores, same, different = Scores(np.array([7, 1, 0, 0]), 3, CPU), torch.full((4,), 2), torch.arange(4)
    assert scores.entropy(same) == 0 and scores.entropy(different) == pytest.approx(math.log(4), rel=1e-15)
    assert scores.repetition(same) == pytest.approx(2 / 3) and scores.repetition(different) == 0
    assert scores.rarity(same) == pytest.approx(math.log(12)), "one in twelve: a token that never occurs counts as one"
    assert scores.rarity(torch.zeros(4, dtype=torch.int64)) == pytest.approx(-math.log(8 / 12))


def test_every_threshold_has_its_criterion():
    assert tuple(CRITERIA) == tuple(field.name for field in dataclasses.fields(Screen))


# --- what is dropped ------------------------------------------------------------------------------------------------


def expected_kept(pack, step):
    """[R, B], by hand."""
    counts = engine.corpus_of(pack.planned[0]).counts.tolist()
    kept = np.ones((len(pack), pack.planned[0].train.batch), dtype=bool)
    for row, trial in enumerate(pack.planned):
        for number, tokens in enumerate(pack.objective.batch(step)[row].tolist()):
            found = by_hand(tokens, counts)
            for name, limit in dataclasses.asdict(trial.screen).items():
                if limit is not None:
                    kept[row, number] &= found[name] >= limit if name == "entropy" else found[name] <= limit
    return kept


@pytest.mark.parametrize("names", [["rarity"], ["repetition"], ["entropy"], [*THRESHOLDS]])
def test_what_is_beyond_a_threshold_is_dropped(names):
    """By each trial's own thresholds; the first sequence that is kept stands in for those that are not."""
    trials = [
        engine.trial(seed=r, batch=6, **{name: THRESHOLDS[name] * (1 + 0.1 * r) for name in names}) for r in range(3)
    ]
    pack, shares = engine.pack_of(trials), []
    for step in range(8):
        whole, kept = pack.objective.batch(step), torch.from_numpy(expected_kept(pack, step))
        batch, weights = pack.what_trains(pack.objective.batch(step), step)
        assert torch.equal(pack.objective.screening.dropped, (~kept).sum(1)) and torch.equal(
            pack.objective.screening.trains, kept.any(1)
        )
        for row in range(3):
            count, own = int(kept[row].sum()), kept[row]
            assert torch.equal(weights[row], torch.where(own, 6 / max(1, count), 0.0).float())
            assert torch.equal(batch[row][own], whole[row][own])
            if count:
                assert (batch[row][~own] == whole[row][own][0]).all()
        shares.append(kept.double().mean())
    assert 0.3 < np.mean(shares) < 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("fields", [{}, {"z_loss": 0.3}, {"loss_scaling": "static", "loss_scale": 256.0}])
def test_the_gradient_is_that_of_what_is_kept(ranks, fields):
    """Also where a rank has nothing left, or more than another: the mean is that over sequences, not over ranks."""
    fields = {"precision": "fp64", "batch": 8, "rarity": 3.4, "steps": 1, **fields}
    trials = [engine.trial(seed=r, ranks=ranks, **fields) for r in range(2)]
    run = engine.run(trials)
    alone = engine.pack_of([engine.trial(seed=r, **{**fields, "rarity": None}) for r in range(2)])
    for row in range(2):
        whole = alone.objective.batch(0)
        kept = torch.from_numpy(expected_kept(engine.pack_of(trials), 0)[row])
        assert 0 < kept.sum() < 8
        loss = alone.learn(whole[:, kept])[row].item()
        assert run.signals["loss"][row, 0] == pytest.approx(loss, rel=1e-12)
        alone.loss_scale.unscale(alone.gradients)
        norm = alone.gradients[row].norm().item()
        assert run.signals["grad_norm"][row, 0] == pytest.approx(norm, rel=1e-12)
        assert run.signals["dropped"][row, 0] == (~kept).sum()


def test_a_weight_of_zero_hides_everything_of_a_token():
    logits = torch.randn(2, 4, 5, dtype=torch.float64)
    logits[0, 1], logits[1, 3, 2] = math.nan, math.inf
    logits.requires_grad_()
    weights = torch.tensor([[2.0, 0.0, 2.0, 0.0], [4 / 3, 4 / 3, 4 / 3, 0.0]], dtype=torch.float64)
    targets, z_loss = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]]), torch.tensor([0.0, 0.1], dtype=torch.float64)
    loss = cross_entropy(logits, targets, z_loss, weights)
    loss.sum().backward()
    for row, tokens in enumerate(([0, 2], [0, 1, 2])):
        own = logits.detach()[row : row + 1, tokens].requires_grad_()
        expected = cross_entropy(own, targets[row : row + 1, tokens], z_loss[row : row + 1])
        expected.sum().backward()
        torch.testing.assert_close(loss[row], expected[0], rtol=1e-14, atol=0)
        torch.testing.assert_close(logits.grad[row, tokens], own.grad[0], rtol=1e-14, atol=1e-16)
    assert (logits.grad[weights == 0] == 0).all()


def test_nan_of_a_sequence_that_is_dropped_does_not_come_through():
    """A token's embedding is NaN. At weight 0 its sequence would still ruin the gradients of weights, as 0 x NaN."""
    fields = {"batch": 4, "vocabulary": 256}
    clean = engine.pack_of([engine.trial(seed=r, **fields) for r in range(3)])
    seen = torch.cat([clean.objective.batch(step).flatten() for step in range(8)])
    unseen = next(token for token in range(255, 0, -1) if token not in seen)

    def ruin(pack):
        for row in range(3):
            pack.tensors(pack.weights, row)["embedding"][unseen] = math.nan

    strike = Change(Site.BATCH, range(3, 6), lambda tensors: tensors["batch"][1].fill_(unseen))
    struck = dict.fromkeys(range(3), strike)
    for limit, dropped in ((6.5, 1), (100.0, 0)):
        trials = [engine.trial(seed=r, rarity=limit, decay="constant", lr=1e-3, **fields) for r in range(3)]
        run = engine.run(trials, struck, prepare=ruin)
        assert (run.signals["dropped"][:, 3] == dropped).all()
        assert [outcome == NON_FINITE for outcome in run.result.outcome] == [dropped == 0] * 3
        assert np.isfinite(run.signals["loss"]).all() == np.isfinite(run.signals["grad_norm"]).all() == (dropped == 1)


# --- a batch of which nothing is left -------------------------------------------------------------------------------

STRUCK = range(3, 5)
EMPTY = {
    "adamw": {},
    "clipped": {"clip": 0.1},
    "ranks": {"ranks": 2},
    "dynamic loss scale": {"loss_scaling": "dynamic", "loss_scale": 1024.0, "loss_scale_growth": 3},
    "decay alone": {"weight_decay": 0.5, "decay_follows": "schedule"},
}


@pytest.mark.parametrize("fields", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("detection", [True, False])
def test_a_trial_with_nothing_left_stands_still_and_goes_on(fields, detection):
    """The step is one that it never took: as a run from which two batches are missing."""
    states = []

    def keep(pack):
        take = pack.objective.batch

        def batches(step):
            states.append({name: values.clone() for name, values in pack.rows_state})
            return take(step)

        pack.objective.batch = batches

    fault = RareTokens(start=STRUCK.start, duration=len(STRUCK))
    trials = [engine.trial(seed=r, batch=2, rarity=5.2, fault=fault, **fields) for r in range(2)]
    trials.append(engine.trial(seed=2, batch=2, rarity=100.0, fault=fault, **fields))
    run = engine.run(trials, prepare=keep, detection=detection)
    for row in range(2):
        for name in states[0].keys() - {"step"}:
            for step in STRUCK:
                before, after = states[step][name][row], states[step + 1][name][row]
                assert torch.equal(before, after), (name, step)
    names = {name for name in states[0] if not torch.equal(states[STRUCK.start][name][2], states[STRUCK.stop][name][2])}
    assert {"weights", "updates"} <= names, "the trial that lets them through does move"
    loss, dropped = run.signals["loss"], run.signals["dropped"]
    assert np.isnan(loss[:2, STRUCK]).all() and np.isfinite(np.delete(loss, STRUCK, axis=1)).all()
    assert (dropped[:2, STRUCK] == 2).all() and (dropped[2] == 0).all() and np.isfinite(loss[2]).all()
    assert (run.signals["update_rms"][:2, STRUCK] == 0).all()
    assert run.result.nonfinite_step == [None] * 3 and NON_FINITE not in run.result.outcome
    assert run.pack.optimizer.updates.tolist() == [6, 6, 8]


def test_the_outcome_leaves_out_what_was_not_trained():
    falling = np.linspace(5.0, 2.0, 100)
    holes = falling.copy()
    holes[[0, 7, 50, 99]] = np.nan
    assert judge(holes, None) == TRAINED and judge(np.where(np.isnan(holes), np.nan, 7 - holes), None) != TRAINED
    assert judge(np.full(10, np.nan), None) == TRAINED


def test_screening_everything_ends_where_it_began():
    run = engine.run([engine.trial(seed=r, rarity=1e-3) for r in range(2)])
    assert np.isnan(run.signals["loss"]).all() and (run.signals["dropped"] == 2).all()
    assert torch.equal(run.weights[0][0], run.weights[-1][0]) and run.result.outcome == [TRAINED] * 2
    assert [len(records) for records in run.result.dropped] == [16, 16]


# --- what is recorded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 100])
def test_records_say_what_was_dropped_and_why(block):
    fault = Repetition(start=4, duration=2)
    trials = [engine.trial(seed=r, batch=4, **THRESHOLDS, fault=fault) for r in range(2)]
    run = engine.run(trials, block=block)
    pack, counts = engine.pack_of(trials), run.corpus.counts.tolist()
    for number, trial in enumerate(trials):
        expected = []
        for step in range(8):
            batch = pack.objective.batch(step)[number]
            if step in (4, 5):
                batch = batch[:, :1].expand(4, 9)
            for sequence, tokens in enumerate(batch.tolist()):
                scores = by_hand(tokens, counts)
                for name, limit in dataclasses.asdict(trial.screen).items():
                    if scores[name] < limit if name == "entropy" else scores[name] > limit:
                        expected.append((step, sequence, name, scores[name]))
        records = run.result.dropped[number]
        assert [(r["step"], r["sequence"], r["criterion"]) for r in records] == [e[:3] for e in expected[:KEPT_EVENTS]]
        assert [r["score"] for r in records] == pytest.approx([e[3] for e in expected[:KEPT_EVENTS]], rel=1e-12)
        count = [len({e[1] for e in expected if e[0] == step}) for step in range(8)]
        assert run.signals["dropped"][number].tolist() == count and count[4] == count[5] == 4


def test_a_trial_keeps_the_first_records_alone():
    run = engine.run([engine.trial(seed=r, batch=8, steps=12, rarity=1e-3) for r in range(2)])
    for records in run.result.dropped:
        assert len(records) == KEPT_EVENTS
        assert [(r["step"], r["sequence"]) for r in records] == [(n // 8, n % 8) for n in range(KEPT_EVENTS)]


def test_a_frozen_trial_has_no_more_records():
    trials = [engine.trial(seed=r, batch=4, **THRESHOLDS) for r in range(5)]
    run = engine.run(trials, {1: Change(Site.REDUCED_GRADIENT, range(3, 4), fill_first("head", math.nan))}, block=3)
    assert run.result.nonfinite_step[1] == 3
    assert {record["step"] for record in run.result.dropped[1]} <= {0, 1, 2, 3}
    assert np.isnan(run.signals["dropped"][1, 4:]).all() and np.isfinite(run.signals["dropped"][1, :4]).all()


# --- growing sequences -----------------------------------------------------------------------------------------------


def test_a_sequence_is_scored_whole_while_sequences_grow():
    """Cut to two tokens none would have the entropy of eight, and all of its pieces go with it."""
    limits = {"batch": 4, "entropy": 1.7}
    growth = {"sequence_start": 2, "sequence_steps": 5}
    plain = engine.pack_of([engine.trial(seed=r, **limits) for r in range(2)])
    for mode in ("truncate", "reshape"):
        grown = engine.pack_of([engine.trial(seed=r, **limits, **growth, sequence_mode=mode) for r in range(2)])
        for step in range(8):
            _, expected = plain.what_trains(plain.objective.batch(step), step)
            batch, weights = grown.what_trains(grown.objective.batch(step), step)
            pieces = int(grown.planned[0].curriculum.pieces[step])
            assert batch.shape[:2] == weights.shape == (2, 4 * pieces)
            assert torch.equal(weights, expected.repeat_interleave(pieces, 1))


# --- the thresholds of the mitigations, and a real sweep ------------------------------------------------------------

CATCHES = {
    "rarity": (8.0, (RareTokens, RandomTokens)),
    "repetition": (0.9, (Repetition,)),
    "entropy": (0.5, (Repetition,)),
}


@pytest.mark.parametrize("name", CATCHES)
def test_the_thresholds_keep_clean_bytes_and_drop_poisoned_ones(name):
    """Of clean sequences of 64 bytes below 0.1%: measured 0.007%, 0.06% and 0.07% of 200,000."""
    limit, faults = CATCHES[name]
    bytes_of_text = {"source": "stdlib", "vocabulary": 256, "context": 64, "batch": 500, "steps": 20, name: limit}
    pack = engine.pack_of([engine.trial(seed=r, **bytes_of_text) for r in range(2)])
    dropped = 0
    for step in range(20):
        pack.what_trains(pack.objective.batch(step), step)
        dropped += int(pack.objective.screening.dropped.sum())
    assert dropped / (20 * 2 * 500) < 0.001
    for fault in faults:
        struck = engine.trial(**{**bytes_of_text, "batch": 100, "steps": 1, "fault": fault(start=0, duration=1)})
        run = engine.run([struck, struck.golden])
        assert run.signals["dropped"][0, 0] >= 99 and run.signals["dropped"][1, 0] <= 1


def test_a_sweep_stores_what_was_dropped(tmp_path):
    given = ["-m", f"out={tmp_path / 'out'}", "mitigation=none,screen_repetition", "fault=none,repetition"]
    ended = call(*tiny(*given, "fault.start=2", "fault.duration=2"))
    assert ended.status == 0, ended.err
    records = {}
    for pack in read_packs(tmp_path / "out"):
        for trial, dropped in zip(pack.attributes["trials"], pack.attributes["dropped"], strict=True):
            records[trial["mitigation"], trial["fault"]["name"]] = dropped
    assert records["none", "none"] == records["none", "repetition"] == records["screen_repetition", "none"] == []
    expected = [
        {"step": step, "sequence": sequence, "criterion": "repetition", "score": 15 / 16}
        for step in (2, 3)
        for sequence in (0, 1)
    ]
    assert records["screen_repetition", "repetition"] == expected


def test_the_corpus_is_counted_only_for_rarity_and_its_like():
    corpus = load_corpus(engine.trial().data, 8)
    engine.Pack(engine.different(2), corpus, CPU)
    assert "counts" not in vars(corpus)
    engine.Pack(engine.different(2, rarity=5.0), corpus, CPU)
    assert "counts" in vars(corpus)
