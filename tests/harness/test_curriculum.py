"""Sequences and batches that grow: sizes, cuts, what faults see, and as many tokens as without growth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from analysis import open_sweep
from harness.config import ConfigError, trial_from_dict
from harness.data.curriculum import cut, loaded
from harness.objectives.loss import cross_entropy
from harness.testing import engine
from harness.training import signals
from harness.training.config_checks import check_trial
from harness.training.pack import Pack
from harness.training.sites import Event, Site
from injectors import fault_types
from injectors.batch import RandomTokens
from injectors.value import Value
from tests.harness.features import GROWTHS
from tests.sweeps.command import call, tiny

growths = pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)

# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "context", "steps", "unit"),
    [
        (8, 64, 50, 8),
        (16, 1024, 300, 8),
        (64, 64, 10, 8),
        (8, 1024, 3, 8),
        (1, 64, 50, 1),
        (12, 64, 20, 1),
        (8, 60, 9, 1),
    ],
)
def test_lengths_are_the_papers(start, context, steps, unit):
    """Li et al. 2021: length_t = start + (end - start) min(t / T, 1), less what is over a multiple of 8."""
    found = engine.trial(context=context, steps=400, sequence_start=start, sequence_steps=steps).curriculum.lengths
    for step, length in enumerate(found.tolist()):
        exact = start + (context - start) * min(step / steps, 1)
        assert length == math.floor(exact + 1e-9) // unit * unit
    assert found[0] == start and found[-1] == context


@pytest.mark.parametrize(("start", "context"), [(1, 64), (8, 64), (9, 64), (3, 60), (7, 13), (64, 64)])
def test_pieces_have_the_largest_length_that_divides_the_context(start, context):
    fields = {"sequence_start": start, "sequence_steps": 50, "sequence_mode": "reshape"}
    sizes = engine.trial(context=context, steps=70, **fields).curriculum
    for step in range(70):
        exact = start + (context - start) * min(step, 50) // 50
        length = next(size for size in range(exact, 0, -1) if context % size == 0)
        assert (sizes.lengths[step], sizes.pieces[step]) == (length, context // length)
    assert (sizes.lengths * sizes.pieces == context).all() and sizes.steps == 70


@pytest.mark.parametrize(("start", "ranks"), [(1, 1), (3, 1), (2, 2), (3, 2), (1, 4), (12, 4)])
def test_batches_grow_in_whole_sequences_of_each_rank(start, ranks):
    fields = {"batch_start": start, "batch_steps": 20, "batch": 12, "ranks": ranks}
    found = engine.trial(steps=60, **fields).curriculum.sequences
    for step, sequences in enumerate(found.tolist()):
        exact = start + (12 - start) * min(step, 20) // 20
        assert sequences == max(ranks, exact // ranks * ranks)
    assert found[-1] == 12 and (np.diff(found) >= 0).all()


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 7, 30])
@growths
def test_as_few_steps_as_reach_the_tokens(growth, steps):
    trial = engine.trial(steps=steps, **growth)
    sizes, wanted = trial.curriculum, steps * trial.train.batch * 8
    assert trial.steps == sizes.steps >= steps
    assert sizes.tokens[-1] >= wanted and (sizes.steps == 1 or sizes.tokens[-2] < wanted)
    each = np.diff(sizes.tokens, prepend=0)
    assert np.array_equal(each, sizes.sequences * sizes.lengths * sizes.pieces)
    assert (each <= trial.train.batch * 8).all()
    assert (each[sizes.grown :] == trial.train.batch * 8).all() and (sizes.lengths[sizes.grown :] == 8).all()
    last = sizes.grown - 1
    assert last < 0 or sizes.lengths[last] < 8 or sizes.sequences[last] < trial.train.batch


def test_without_growth_all_is_as_it_was():
    trial = engine.trial(steps=7, batch=3)
    sizes, batch = trial.curriculum, torch.arange(2 * 3 * 9).view(2, 3, 9)
    assert trial.steps == sizes.steps == 7 and sizes.grown == 0
    assert sizes.tokens.tolist() == [24 * (step + 1) for step in range(7)]
    for step in range(7):
        assert torch.equal(cut(sizes, loaded(sizes, batch, step), step), batch)


def test_growth_is_structural_and_part_of_the_id():
    plain, grown = engine.trial(), engine.trial(**GROWTHS["truncated"])
    assert len({t.structure for t in (plain, grown, engine.trial(seed=3))}) == 2 and plain.id != grown.id
    again = trial_from_dict(grown.to_dict(), fault_types())
    assert (again, again.id, again.steps) == (grown, grown.id, grown.steps)


# --- cuts -----------------------------------------------------------------------------------------------------------


def numbered(trials=2, batch=4, context=8):
    """Tokens whose successor is the next number, but at the end of a sequence."""
    return torch.arange(trials * batch * (context + 1)).view(trials, batch, context + 1)


def test_a_truncated_sequence_is_the_beginning_of_a_whole_one():
    sizes = engine.trial(batch=4, **GROWTHS["truncated"]).curriculum
    for step in range(sizes.steps):
        pieces, length = cut(sizes, loaded(sizes, numbered(), step), step), int(sizes.lengths[step])
        assert torch.equal(pieces, numbered()[:, :, : length + 1])
    assert {int(length) for length in sizes.lengths} == {2, 3, 4, 5, 6, 8}


def test_pieces_hold_every_pair_of_token_and_target_once():
    sizes = engine.trial(batch=4, **GROWTHS["reshaped"]).curriculum
    whole = numbered()
    pairs = set(zip(whole[:, :, :-1].flatten().tolist(), whole[:, :, 1:].flatten().tolist(), strict=True))
    for step in range(sizes.steps):
        pieces, length = cut(sizes, whole, step), int(sizes.lengths[step])
        assert pieces.shape == (2, 4 * 8 // length, length + 1) and (pieces.diff(dim=2) == 1).all()
        found = list(zip(pieces[:, :, :-1].flatten().tolist(), pieces[:, :, 1:].flatten().tolist(), strict=True))
        assert len(found) == 64 and set(found) == pairs
        assert (pieces // 36 == torch.arange(2)[:, None, None]).all(), "each trial keeps its own"
    assert {int(length) for length in sizes.lengths} == {2, 4, 8}


def test_a_small_batch_is_the_beginning_of_a_whole_one_and_each_rank_has_its_part():
    pack = engine.pack_of(engine.different(2, **GROWTHS["batches on ranks"]))
    for step in (0, 2, 4, 6):
        batch, weights = pack.what_trains(pack.objective.batch(step), step)
        sequences = int(pack.curriculum.sequences[step])
        assert weights is None and torch.equal(batch, pack.objective.batch(step)[:, :sequences])
        parts = dict(pack.ranks.parts(batch))
        assert torch.equal(torch.cat([parts[0], parts[1]], 1), batch) and parts[0].shape == parts[1].shape


# --- the model on shorter sequences ---------------------------------------------------------------------------------

MODELS = {
    "rotary": {},
    "learned": {"positions": "learned"},
    "fused": {"attention": "fused"},
    "fused, learned, norms": {"attention": "fused", "positions": "learned", "qk_norm": True},
}


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_short_sequence_is_the_beginning_of_a_long_one(fields, length):
    """Attention is causal: all is as in a whole sequence of which the rest does not count."""
    pack = engine.pack_of(engine.different(2, precision="fp64", batch=3, **fields))
    batch = pack.objective.batch(0)
    logits = [pack.model(tokens).view(2, 3, -1, 64) for tokens in (batch[:, :, :-1], batch[:, :, :length])]
    torch.testing.assert_close(logits[1], logits[0][:, :, :length], rtol=1e-12, atol=1e-12)

    pack.gradients.fill_(math.nan)
    loss = pack.learn(batch[:, :, : length + 1])
    found = pack.gradients.clone()
    counts = (torch.arange(8) < length).double() * 8 / length
    expected = cross_entropy(
        pack.model(batch[:, :, :-1]), batch[:, :, 1:].flatten(1), pack.objective._z_loss, counts.repeat(2, 3)
    )
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for row in range(2):
        gradients = pack.tensors(found, row), pack.tensors(pack.gradients, row)
        for name in gradients[0]:
            torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-10, atol=1e-12)
        if "positions" in fields:
            assert (gradients[0]["positions"][length:] == 0).all() and (gradients[0]["positions"][:length] != 0).all()


def test_the_kind_of_attention_is_that_of_the_whole_context():
    """A short sequence would be explicit by itself."""
    shape = {"context": 512, "steps": 1, "sequence_start": 8, "sequence_steps": 10, "batch": 1, "depth": 1}
    pack = engine.pack_of([engine.trial(**shape)] * 2)
    batch, _ = pack.what_trains(pack.objective.batch(0), 0)
    assert batch.shape == (2, 1, 9) and not pack.model.explicit_attention
    assert not engine.pack_of([engine.trial(**{**shape, "sequence_start": None})] * 2).model.explicit_attention


# --- what faults see ------------------------------------------------------------------------------------------------


class Looks:
    """Keeps the shape of what it is shown at a site."""

    permanent = True

    def __init__(self, site, steps, taps=()):
        self.calls, self.taps, self.seen = [(site, step) for step in steps], taps, []

    def visit(self, site_call) -> list[Event]:
        self.seen += [tuple(x.shape) for x in site_call.tensors.values()]
        return []


def test_a_batch_is_struck_as_the_loader_gives_it():
    trials = engine.different(2, **GROWTHS["both, reshaped"])
    loader, activations = Looks(Site.BATCH, range(8)), Looks(Site.ACTIVATION, range(8), ("embedding",))
    engine.run(trials, {0: loader, 1: activations})
    assert loader.seen == [(4, 9)] * 8
    tokens = np.diff(trials[0].curriculum.tokens, prepend=0)[:8]
    assert activations.seen == [(int(count) // 2, 16) for count in tokens for _ in range(2)]


@pytest.mark.parametrize("site", [Site.ACTIVATION, Site.ACTIVATION_GRADIENT])
def test_an_element_of_an_activation_is_refused_while_it_is_smaller(site):
    growth = GROWTHS["truncated"]
    fault = {"site": site, "tensor": "blocks.*.down", "bit": 20}
    early = engine.trial(fault=Value(start=4, **fault), **growth)
    words = rf"^fault.start=4: activations are smaller at fault.site={site} while .*; allowed: 5 or later, or fault.e"
    with pytest.raises(ConfigError, match=words):
        check_trial(early)
    accepted = [
        engine.trial(fault=Value(start=5, **fault), **growth),
        engine.trial(fault=Value(start=2, elements=None, **fault), **growth),
        engine.trial(fault=Value(start=2, **{**fault, "site": Site.WEIGHT, "tensor": "head"}), **growth),
    ]
    for trial in accepted:
        check_trial(trial)
    run = engine.run([engine.trial(**growth), *accepted])
    assert all(run.result.changes[1:])


REFUSED = {
    "sequences": (
        {"sequence_start": 9},
        r"^schedule.sequence_start=9: longer than model.context=8; allowed: 1 to 8 or null",
    ),
    "batches": ({"batch_start": 3}, r"^schedule.batch_start=3: more than train.batch=2; allowed: 1 to 2 or null"),
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_growth_that_would_shrink_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        check_trial(engine.trial(**fields))


# --- what is recorded -----------------------------------------------------------------------------------------------


@growths
@pytest.mark.parametrize("block", [1, 3])
def test_tokens_and_throughput(growth, block, monkeypatch):
    """One second a block, by the clock that the recorder reads; the thousand that a validation takes are no step's."""
    clock = [0.0]

    def later(seconds, does):
        def do(*arguments):
            clock[0] += seconds
            return does(*arguments)

        return do

    monkeypatch.setattr(signals.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(signals.Recorder, "flush", later(1, signals.Recorder.flush))
    monkeypatch.setattr(Pack, "validation_losses", later(1000, Pack.validation_losses))
    run = engine.run(engine.different(2, **growth), block=block)
    sizes = run.pack.planned[0].curriculum
    assert np.array_equal(run.signals["tokens"], np.stack([sizes.tokens] * 2))
    each = np.diff(sizes.tokens, prepend=0)
    for first in range(0, sizes.steps, block):
        own = slice(first, first + block)
        assert (run.signals["tokens_per_second"][:, own] == each[own].sum()).all()
        assert (run.signals["step_seconds"][:, own] == 1 / len(each[own]) / 2).all()


def test_validation_is_whole_at_every_step():
    """It is that of the same weights in a pack whose sequences do not grow."""
    trials = engine.different(2, validate_every=1, **GROWTHS["both"])
    run = engine.run(trials)
    whole = engine.pack_of(engine.different(2, batch=4))
    for step, weights in enumerate(run.weights):
        whole.weights.copy_(torch.stack([weights[0], weights[1]]))
        assert np.array_equal(run.signals["validation_loss"][:, step], whole.validation_losses(64).mean(1).numpy())


def test_a_sweep_of_packs_of_different_lengths(tmp_path):
    """All in one dataset, padded with NaN, each with its own tokens; and a second command finds nothing left to do."""
    words = "mitigation=none,sequence_warmup,sequence_reshape,batch_warmup"
    given = ["-m", f"out={tmp_path / 'out'}", words, "schedule.warmup=2", "train.steps=12", "train.batch=4"]
    ended = call(*tiny(*given))
    assert ended.status == 0, ended.err
    ds = open_sweep(tmp_path / "out").set_index(trial="mitigation")
    lengths = {name: int(ds["loss"].sel(trial=name).notnull().sum()) for name in ds["trial"].values}
    assert lengths["none"] == lengths["sequence_reshape"] == 12
    assert min(lengths["sequence_warmup"], lengths["batch_warmup"]) > 12
    assert ds.sizes["step"] == max(lengths.values())
    for name, length in lengths.items():
        tokens = ds["tokens"].sel(trial=name).values
        assert np.isnan(tokens[length:]).all() and 12 * 4 * 16 <= tokens[length - 1] < 13 * 4 * 16
    assert ds["tokens"].attrs["units"] == "token"
    again = call(*tiny(*given))
    assert again.status == 0 and "4 complete already: 0 to train" in again.out


# --- promises that growth could break ---------------------------------------------------------------------------------


@growths
def test_a_fork_equals_a_full_run(growth):
    """Strikes while sizes grow, when they have grown, and at a step that only the longer run has."""
    fields = {"steps": 12, **growth}
    last = engine.trial(**fields).steps - 1
    faults = [
        Value(start=2, tensor="head", bit=22),
        RandomTokens(start=3, duration=2),
        Value(start=8, tensor="blocks.1.feedforward.up", bit=21, site=Site.ACTIVATION),
        Value(start=last, tensor="head", bit=25),
    ]
    trials = [engine.trial(**fields), *(engine.trial(fault=fault, **fields) for fault in faults)]
    for trial in trials:
        check_trial(trial)
    forked = engine.assert_fork_equals_full_run(trials)
    assert all(forked.result.changes[1:])
    loss = torch.from_numpy(forked.signals["loss"])
    for i, fault in enumerate(faults, 1):  # twins up to the strike, and not after it
        assert torch.equal(engine.bits(loss[i, : fault.start]), engine.bits(loss[0, : fault.start]))
        assert fault.start == last or not torch.equal(loss[i, fault.start + 1 :], loss[0, fault.start + 1 :])


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_ranks_make_no_difference_but_rounding(mode):
    growth = {"batch": 4, "batch_start": 2, "batch_steps": 1, "sequence_start": 2, "sequence_mode": mode}
    fields = {"precision": "fp64", **growth}
    one, two = (engine.run([engine.trial(seed=r, ranks=ranks, **fields) for r in range(2)]) for ranks in (1, 2))
    for name in ("loss", "grad_norm", "validation_loss", "tokens"):
        np.testing.assert_allclose(one.signals[name], two.signals[name], rtol=1e-9)
