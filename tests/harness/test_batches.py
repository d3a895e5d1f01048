"""Batches: what a trial reads follows from the corpus, its seed and the step, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.data.batches import Batches
from harness.data.corpus import Corpus

CPU = torch.device("cpu")
BATCH, CONTEXT = 4, 7
SEEDS = [0, 1, 2, 12345, 2**63 - 1]


def counting(train: int = 60_000, validation: int = 5_000, vocabulary: int = 65536) -> Corpus:
    """Each token is its own position, so that a window shows where it starts; validation counts down."""
    tokens = np.arange(max(train, validation)).astype(np.uint16)
    return Corpus(tokens[:train], tokens[:validation][::-1], vocabulary, "", {})


def build(seeds: Sequence[int] = SEEDS, corpus: Corpus | None = None, batch: int = BATCH) -> Batches:
    return Batches(corpus or counting(), seeds, batch, CONTEXT, CPU)


def starts(batches: Batches, steps: int) -> np.ndarray:
    """[S, R, B]"""
    return torch.stack([batches(step)[..., 0] for step in range(steps)]).numpy()


def oracle(seed: int, step: int, row: int, positions: int) -> int:
    """Where a window starts, in Python's integers."""

    def splitmix64(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = splitmix64((seed + 1) % 2**64)
    return (splitmix64((splitmix64((key + step * golden) % 2**64) + (row + 1) * golden) % 2**64) >> 1) % positions


def test_batches_are_windows_of_the_training_part():
    windows = build()(3)
    assert windows.shape == (len(SEEDS), BATCH, CONTEXT + 1) and windows.dtype == torch.int64
    assert windows.is_contiguous()
    assert torch.equal(windows, windows[..., :1] + torch.arange(CONTEXT + 1))
    assert windows.max() < 60_000


@pytest.mark.parametrize("step", [0, 1, 63, 64, 10**6, 2**40])
def test_starts_are_those_of_the_written_hash(step):
    seeds = [*SEEDS, 2**64 - 1]
    expected = [[oracle(seed, step, row, 60_000 - CONTEXT) for row in range(BATCH)] for seed in seeds]
    assert build(seeds)(step)[..., 0].tolist() == expected


def test_a_batch_does_not_depend_on_the_calls_before():
    fresh = {step: build()(step) for step in (0, 63, 64, 200)}
    batches = build()
    for step in (64, 0, 200, 0, 63, 63, 64):
        batches.validation(batches.held_out(1 + step % 100))
        assert torch.equal(batches(step), fresh[step])


def test_changing_a_batch_in_place_changes_no_later_one():
    batches = build()
    starts = batches.held_out(100)
    expected = batches(5).clone(), batches.validation(starts).clone()
    batches(5).zero_(), batches.validation(starts).zero_()
    assert torch.equal(batches(5), expected[0]) and torch.equal(batches.validation(starts), expected[1])


def test_a_trial_does_not_depend_on_its_pack():
    pack = build(SEEDS)
    for position, seed in enumerate(SEEDS):
        alone, last = build([seed]), build([99, 98, seed])
        for step in (0, 70):
            assert torch.equal(pack(step)[position], alone(step)[0])
            assert torch.equal(pack(step)[position], last(step)[2])


def test_equal_seeds_read_the_same():
    windows = build([7, 8, 7])(4)
    assert torch.equal(windows[0], windows[2]) and not torch.equal(windows[0], windows[1])


def test_a_smaller_batch_is_the_first_rows_of_a_larger_one():
    assert torch.equal(build(batch=2)(9), build(batch=6)(9)[:, :2])


def test_seeds_steps_and_rows_all_differ():
    found = starts(build(range(20)), 100)
    # 8,000 starts drawn from 59,993: 7,490 distinct ones are expected, give or take 21.
    assert abs(len(np.unique(found)) - 7490) < 5 * 21
    batches = found.reshape(-1, BATCH)
    assert len(np.unique(batches, axis=0)) == len(batches)


def test_neighbouring_seeds_and_steps_are_unrelated():
    found = starts(build(range(64)), 64).astype(float)
    pairs = {
        "seed": (found[:, 1:], found[:, :-1]),
        "step": (found[1:], found[:-1]),
        "row": (found[..., 1:], found[..., :-1]),
        "seed against step": (found[1:, :-1], found[:-1, 1:]),
    }
    for name, (one, other) in pairs.items():
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.size), name


def test_starts_are_uniform():
    positions = 1000
    found = starts(build(range(50), counting(positions + CONTEXT)), 200)
    observed = np.bincount(found.ravel(), minlength=positions)
    assert len(observed) == positions
    expected = found.size / positions
    chi_square = (np.square(observed - expected) / expected).sum()
    # 999 degrees of freedom: standard deviation 45; too even would be as wrong as too uneven.
    assert abs(chi_square - (positions - 1)) < 4 * np.sqrt(2 * positions)


@pytest.mark.parametrize("extra", [1, 2, 3])
def test_a_short_corpus_is_read_from_end_to_end(extra):
    found = starts(build(corpus=counting(CONTEXT + extra, CONTEXT + extra)), 50)
    assert set(found.ravel()) == set(range(extra))


@pytest.mark.parametrize(("train", "validation"), [(CONTEXT, 100), (100, CONTEXT)])
def test_a_part_shorter_than_a_window_is_refused(train, validation):
    with pytest.raises(ValueError, match="7 (training|validation) tokens; expected: at least 8 for context=7"):
        build(corpus=counting(train, validation))


@pytest.mark.parametrize("vocabulary", [200, 256, 257, 65536])
def test_every_token_arrives_as_it_is(vocabulary):
    tokens = np.arange(vocabulary).astype(np.uint16)
    batches = build(corpus=Corpus(tokens, tokens, vocabulary, "", {}), batch=65536 // CONTEXT, seeds=[0])
    seen = torch.cat(
        [batches(step).flatten() for step in range(12)] + [batches.validation(batches.held_out(vocabulary)).flatten()]
    )
    assert torch.equal(torch.unique(seen), torch.arange(vocabulary))


def test_select_drops_and_reorders_trials():
    pack, whole = build(), build()
    pack(0)
    assert pack.select([3, 1, 1]) is None
    assert torch.equal(pack(0), whole(0)[[3, 1, 1]]) and torch.equal(pack(90), whole(90)[[3, 1, 1]])
    pack.select([0])
    assert torch.equal(pack(91), whole(91)[[0]])


def test_validation_is_the_same_for_all_trials():
    one, other = build([1]), build([2, 3, 4])
    starts = one.held_out(100 * CONTEXT)
    windows = one.validation(starts)
    assert windows.shape == (64, 2, CONTEXT + 1) and windows.dtype == torch.int64
    assert torch.equal(starts, other.held_out(100 * CONTEXT)) and torch.equal(windows, other.validation(starts))
    first = windows[..., :1]
    assert torch.equal(windows, first - torch.arange(CONTEXT + 1)), "not from the validation part"


@pytest.mark.parametrize("held", [CONTEXT + 1, 2 * CONTEXT, 2 * CONTEXT + 1, 500, 5_000, 5_003])
@pytest.mark.parametrize("tokens", [1, CONTEXT, CONTEXT + 1, 30 * CONTEXT, 64 * CONTEXT, 65 * CONTEXT, 4_000, 10**9])
def test_held_out_windows_share_no_target_and_are_spread_over_the_part(held: int, tokens: int):
    starts = build(corpus=counting(100, held)).held_out(tokens)
    flat, most = starts.flatten(), (held - 1) // CONTEXT
    segments, each = starts.shape
    assert segments == min(64, -(-tokens // CONTEXT), most)
    assert len(flat) * CONTEXT >= tokens or (each + 1) * segments > most, "as many as asked for, or as there are"
    assert flat[0] == 0 and flat[-1] <= held - CONTEXT - 1 and (np.diff(flat.numpy()) >= CONTEXT).all()
    if len(flat) > 1:
        gaps = np.diff(flat.numpy())
        assert flat[-1] == held - CONTEXT - 1 and gaps.max() - gaps.min() <= 1
        assert abs(gaps.mean() * each - (held - CONTEXT - 1) / segments) <= gaps.mean(), "segments are equally long"


def test_no_call_waits_for_the_device():
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            called.append(str(function))
            return function(*arguments, **(named or {}))

    called: list[str] = []
    batches = build()
    with Record():
        batches(0)
        batches(1)
        batches.validation(batches.held_out(100))
    waits = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "lift_fresh"}
    assert called and not [name for name in called if waits & set(name.split("."))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("vocabulary", [256, 65536])
def test_an_accelerator_makes_the_same_batches_without_waiting(vocabulary):
    corpus = counting(vocabulary, 256, vocabulary)
    here, there = (Batches(corpus, SEEDS, BATCH, CONTEXT, torch.device(name)) for name in ("cpu", "cuda"))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [there(step) for step in (0, 1, 64)] + [there.validation(there.held_out(100))]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    expected = [here(step) for step in (0, 1, 64)] + [here.validation(here.held_out(100))]
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
