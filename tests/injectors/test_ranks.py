"""Faults between data-parallel ranks, against means that are taken by hand from what each rank really handed in.

The faults of a section are trials of one pack, and each test looks at its own.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from harness.objectives.outcome import NON_FINITE
from harness.testing import engine
from harness.training.sites import Site, SiteCall
from injectors import Armed, Facts
from injectors.ranks import DroppedRank, MissedUpdate, Reduction, StaleGradient
from injectors.value import Value
from tests.injectors.faults import composer
from tests.injectors.spies import START, STEPS, differing, facts, row, trial, watch
from tests.number_formats import NUMPY

GOLDEN = 0
RANKS = 4
EVERY = range(STEPS)
SITES = (Site.WEIGHT, Site.GRADIENT, Site.REDUCED_GRADIENT)


def run_with(faults, sites=SITES, steps=EVERY, **fields):
    """Run and spy of a golden trial, and of one for each fault: that of fault n is number n + 1."""
    fields = {"ranks": RANKS, "batch": 8, **fields}
    return watch([trial(**fields), *(trial(fault, **fields) for fault in faults)], sites, steps)


def handed_in(spy, number, step):
    """What each rank of a trial handed in at a step, after the strikes."""
    return [row(spy.arrays[Site.GRADIENT, step, rank], number) for rank in range(RANKS)]


def added(parts):
    """Their mean, added in float32 one after the other."""
    total = {name: x.clone() for name, x in parts[0].items()}
    for part in parts[1:]:
        total = {name: total[name] + part[name] for name in total}
    return {name: x / len(parts) for name, x in total.items()}


def reduced(spy, number, step):
    return row(spy.arrays[Site.REDUCED_GRADIENT, step, 0], number)


def places_of_nan(tensors):
    return {name: torch.isnan(x).nonzero().tolist() for name, x in tensors.items() if torch.isnan(x).any()}


# --- one rank is corrupted ---------------------------------------------------------------------------------------


CORRUPTED = [("nan_gradient", rank) for rank in range(RANKS)] + [("rank_noise", rank) for rank in (0, 3)]


@cache
def corrupted():
    """Run and spy of a pack with each of CORRUPTED, and behind them noise in the head alone that lasts two steps."""
    presets = {name: composer().trial([f"fault={name}", "train.ranks=4"]).fault for name, _ in CORRUPTED}
    faults = [dataclasses.replace(presets[name], start=START, rank=rank) for name, rank in CORRUPTED]
    head = Value(start=START, duration=2, site=Site.GRADIENT, model="noise", value=0.1, elements=None, tensor="head")
    return run_with([*faults, head], steps=[START])


@pytest.mark.parametrize("rank", range(RANKS))
def test_nan_of_one_rank_reaches_the_mean(rank):
    """Exactly where it was, and the record says whose it was."""
    (run, spy), faulty = corrupted(), CORRUPTED.index(("nan_gradient", rank)) + 1
    parts = handed_in(spy, faulty, START)
    found = [
        {name: torch.isnan(x).nonzero().tolist() for name, x in part.items() if torch.isnan(x).any()} for part in parts
    ]
    assert [bool(where) for where in found] == [r == rank for r in range(RANKS)]
    assert places_of_nan(reduced(spy, faulty, START)) == found[rank]
    places = sorted((name, index) for name, where in found[rank].items() for index in where)
    assert len(places) == 10
    events = run.result.events[faulty]
    assert {(e.rank, e.step, e.after) for e in events} == {(rank, START, "nan")}
    assert sorted((e.tensor, list(e.index)) for e in events) == sorted(
        (n, i) for n, w in found[rank].items() for i in w
    )
    assert run.result.outcome[faulty] == NON_FINITE and run.result.nonfinite_step[faulty] == START


@pytest.mark.parametrize("rank", [0, 3])
def test_a_corrupted_rank_is_one_of_many_in_the_mean(rank):
    (run, spy), faulty = corrupted(), CORRUPTED.index(("rank_noise", rank)) + 1
    golden, struck = (handed_in(spy, number, START) for number in (GOLDEN, faulty))
    assert [bool(differing(a, b)) for a, b in zip(golden, struck, strict=True)] == [r == rank for r in range(RANKS)]
    assert differing(added(struck), reduced(spy, faulty, START)) == {}
    noise = torch.cat([(struck[rank][name] - golden[rank][name]).flatten() for name in golden[0]])
    assert abs(noise.double().std() - 0.1) < 0.01  # of 7,000 values: an eighth of the deviation's own is 1e-3
    assert {event.rank for event in run.result.events[faulty]} == {rank}


def test_noise_is_that_of_one_step_and_one_rank():
    (_, spy), faulty = corrupted(), len(CORRUPTED) + 1
    first = reduced(spy, faulty, START)["head"] - reduced(spy, GOLDEN, START)["head"]
    assert abs(first.std() - 0.1 / RANKS) < 0.01


# --- a gradient that comes late ----------------------------------------------------------------------------------


LATE = [(1, 1, 1), (3, 1, 1), (1, 3, 1), (3, None, 1), (2, 4, 3), (4, 4, 1)]
STALE = list(product(LATE, (0, 3)))


@cache
def stale():
    """Run and spy of a pack with each of STALE, and what its ranks compute."""
    run, spy = run_with(
        [
            StaleGradient(start=START, duration=duration, period=period, rank=rank, late=late)
            for (late, duration, period), rank in STALE
        ],
    )
    return run, spy, {rank: computed(spy, rank) for rank in (0, 3)}


@pytest.mark.parametrize(("late", "duration", "period"), LATE)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_stale_gradient_is_the_same_ranks_of_some_steps_ago(late, duration, period, rank):
    """A fresh one each step, as late: the gradient that the rank computed then, not what it handed in."""
    (run, spy, gradients), faulty = stale(), STALE.index(((late, duration, period), rank)) + 1
    struck = range(START, STEPS if duration is None else START + duration, period)
    for step in EVERY:
        parts = handed_in(spy, faulty, step)
        expected = row(gradients[rank][step - late if step in struck else step], faulty)
        assert differing(parts[rank], expected) == {}, step
        assert differing(added(parts), reduced(spy, faulty, step)) == {}
        if step <= START:
            others = [differing(a, b) for a, b in zip(parts, handed_in(spy, GOLDEN, step), strict=True)]
            assert [bool(x) for x in others] == [r == rank and step == START for r in range(RANKS)]
    assert [(event.step, event.rank) for event in run.result.events[faulty]] == [(step, rank) for step in struck]


def computed(spy, rank):
    """The gradients of that rank at every step from the weights that the trials then had."""
    golden = trial(ranks=RANKS, batch=8)
    pack = engine.pack_of([golden] * len(spy.pack))
    found, names = [], pack.layout.by_name
    for step in EVERY:
        if step:
            for name, x in spy.arrays[Site.WEIGHT, step, 0].items():
                if ":" not in name:
                    pack.layout.view(pack.weights, name).copy_(x)
        parts = dict(pack.ranks.parts(pack.objective.batch(step)))
        pack.learn(parts[rank])
        found.append({name: pack.layout.view(pack.gradients, name).clone() for name in names})
    return found


# --- a rank that is lost -----------------------------------------------------------------------------------------


DROPPED = list(product((0, 2), (False, True)))


@cache
def dropped():
    """Run and spy of a pack with each of DROPPED."""
    faults = [DroppedRank(start=START, duration=2, rank=rank, rescale=rescale) for rank, rescale in DROPPED]
    return run_with(faults, steps=[START, START + 1, START + 2])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("rescale", [False, True])
def test_the_mean_without_a_rank(rank, rescale):
    (run, spy), faulty = dropped(), DROPPED.index((rank, rescale)) + 1
    left = [part for r, part in enumerate(handed_in(spy, GOLDEN, START)) if r != rank]
    count = len(left) if rescale else RANKS
    found = reduced(spy, faulty, START)
    for name, x in found.items():
        expected = torch.stack([part[name].double() for part in left]).sum(0) / count
        torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-8)  # a few roundings of 6e-8
    after = handed_in(spy, faulty, START + 1)
    assert not any(x.any() for x in after[rank].values()), "it goes on"
    assert all(x.any() for x in handed_in(spy, faulty, START + 2)[rank].values()), "and comes back"
    assert [(event.step, event.rank) for event in run.result.events[faulty]] == [(START, rank), (START + 1, rank)]


# --- another sum -------------------------------------------------------------------------------------------------


def by_hand(parts, order, format):
    """The mean of each tensor, with numpy: every sum of two is rounded to the format."""

    def add(a, b):
        return (a + b).astype(NUMPY[format]).astype(np.float32)

    found = {}
    for name in parts[0]:
        a, b, c, d = (part[name].numpy() for part in parts)
        total = {
            "sequential": lambda a=a, b=b, c=c, d=d: add(add(add(a, b), c), d),
            "reversed": lambda a=a, b=b, c=c, d=d: add(add(add(d, c), b), a),
            "pairwise": lambda a=a, b=b, c=c, d=d: add(add(a, b), add(c, d)),
        }[order]()
        found[name] = torch.from_numpy(total / np.float32(4))
    return found


ORDERS, WIDTHS = ("sequential", "reversed", "pairwise"), ("fp32", "bf16", "fp16", "fp8_e5m2")
SUMS = list(product(ORDERS, WIDTHS))


@cache
def sums(own):
    """Run and spy of a pack with each of SUMS, whose own order is another."""
    faults = [Reduction(start=START, duration=2, order=order, format=format) for order, format in SUMS]
    return run_with(faults, steps=[START, START + 1, START + 2], reduction=own)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("format", WIDTHS)
@pytest.mark.parametrize("own", ["sequential", "reversed"])
def test_the_ranks_are_added_otherwise(order, format, own):
    """Bit for bit, whatever the order of everybody else's sum; a fault that asks for that one says it did nothing."""
    (run, spy), faulty = sums(own), SUMS.index((order, format)) + 1
    for step in (START, START + 1):
        parts = handed_in(spy, faulty, step)
        assert differing(by_hand(parts, order, format), reduced(spy, faulty, step)) == {}
    after = handed_in(spy, faulty, START + 2)
    assert differing(by_hand(after, own, "fp32"), reduced(spy, faulty, START + 2)) == {}
    same = order == own and format == "fp32"
    assert [event.changed for event in run.result.events[faulty]] == [not same] * 2
    assert (differing(reduced(spy, GOLDEN, START), reduced(spy, faulty, START)) == {}) == same
    assert not same or np.array_equal(*run.signals["grad_norm"][[GOLDEN, faulty]])


# --- a shard that misses its updates -----------------------------------------------------------------------------

SHARDS = {
    "all": {},
    "one tensor": {"tensor": "blocks.1.feedforward.up"},
    "one layer": {"tensor": "blocks.*", "layer": 1},
    "the third of five slices": {"shards": 5, "shard": 2},
    "a slice of a layer": {"tensor": "*.up", "layer": 0, "shards": 3, "shard": 1},
}


@cache
def missed():
    """Run and spy of a pack in which each of SHARDS misses an update."""
    faults = [MissedUpdate(start=START, **fields) for fields in SHARDS.values()]
    return run_with(faults, [Site.BEFORE_UPDATE, Site.UPDATE], [START])


@pytest.mark.parametrize("shard", SHARDS)
def test_a_shard_stays_as_it_was_and_all_else_moves(shard):
    """Weights and both moments, bit for bit: the golden trial's before the step inside the shard, after it outside."""
    (run, spy), fields, faulty = missed(), SHARDS[shard], list(SHARDS).index(shard) + 1
    before, after = (row(spy.arrays[site, START, 0], GOLDEN) for site in (Site.BEFORE_UPDATE, Site.UPDATE))
    found = row(spy.arrays[Site.UPDATE, START, 0], faulty)
    missing = shard_by_hand(spy.pack.layout, fields)
    for name, x in found.items():
        inside = missing.get(name.rpartition(":")[2], torch.tensor(False))
        assert torch.equal(x, torch.where(inside, before[name], after[name])), name
    assert bool(differing(before, found)) == bool(fields)
    assert run.result.strikes[faulty] == run.result.changes[faulty] == 1
    assert spy.pack.optimizer.updates.tolist() == [STEPS] * len(spy.pack), "the count of steps goes on"


def shard_by_hand(layout, fields):
    """name -> which elements, [*shape]."""
    pattern = fields.get("tensor", "*").replace("*", "")
    names = [name for name in layout.by_name if pattern in name]
    names = [name for name in names if "layer" not in fields or name.startswith(f"blocks.{fields['layer']}.")]
    sizes = [layout.by_name[name].size for name in names]
    total, shards, shard = sum(sizes), fields.get("shards", 1), fields.get("shard", 0)
    numbers = torch.arange(total)
    inside = (numbers >= total * shard // shards) & (numbers < total * (shard + 1) // shards)
    parts = inside.split(sizes)
    return {name: part.view(layout.by_name[name].shape) for name, part in zip(names, parts, strict=True)}


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 20, 26])
def test_slices_share_out_all_elements(shards):
    """Each element is in one slice, and slices differ in size by one at most."""
    shapes = {"one": (3, 4), "two": (5,), "three": (1,), "four": (2, 2, 2)}
    parts = ("", "moment_1:", "moment_2:")
    owners = {f"{part}{name}": torch.full(shape, -1.0) for part in parts for name, shape in shapes.items()}
    sizes = []
    for shard in range(shards):
        injector = MissedUpdate(start=0, shards=shards, shard=shard).arm(facts(shapes))
        kept = {name: x.clone() for name, x in owners.items()}
        own = {name: torch.full(x.shape, float(shard)) for name, x in owners.items()}
        injector.visit(SiteCall(Site.BEFORE_UPDATE, 0, own))
        injector.visit(SiteCall(Site.UPDATE, 0, owners))
        moved = {name: owners[name] != kept[name] for name in owners}
        assert all((kept[name][where] == -1).all() for name, where in moved.items()), "none twice"
        sizes.append(sum(int(moved[name].sum()) for name in shapes))
    assert all((x != -1).all() for x in owners.values()) and sum(sizes) == 26 and max(sizes) - min(sizes) <= 1


def test_another_sum_leaves_the_scale_of_the_loss_out():
    """Ranks hand in scaled gradients, and their mean is without the scale by the time it is replaced."""
    scale, parts = 1024.0, [torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 4.0, 1.0])]
    facts = Facts(steps=10, tensors={"w": (3,)}, ranks=2, has_loss_scale=True)
    armed = Armed(Reduction(start=2, format="fp32"), facts)
    armed.strike("loss_scale", 2, {"loss_scale": torch.tensor(scale)})
    for rank, part in enumerate(parts):
        armed.strike("gradient", 2, {"w": scale * part}, rank)
    mean = (parts[0] + parts[1]) / 2
    reduced = {"w": mean.clone()}
    (event,) = armed.strike("reduced_gradient", 2, reduced)
    assert torch.equal(reduced["w"], mean) and not event.changed


def test_clipped_by_itself_a_bad_rank_weighs_no_more_than_the_others():
    """Its gradient is struck a thousandfold: without clipping it is the mean, with it a quarter of that at most."""
    fault = Value(start=2, site=Site.GRADIENT, model="scale", value=1000.0, rank=1, elements=None, tensor="*")
    fields = {"batch": 4, "ranks": 4, "steps": 4, "fault": fault}
    trials = [engine.trial(**fields), engine.trial(**fields, rank_clip={"limit": 0.5})]
    plain, clipped = (engine.run([trial, trial]).signals["grad_norm"][0, 2] for trial in trials)
    assert plain > 50 and clipped <= 0.5
