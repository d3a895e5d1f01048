"""A value fault in a real pack: at every site it changes what it addresses, and nothing else.

Seen by spies (tests/injectors/spies.py), because a record could be wrong together with the strike. The faults of a
section are trials of one pack, and each test looks at its own.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from harness.config import Model
from harness.config.limits import KEPT_EVENTS
from harness.model.outline import tap_shapes
from harness.testing import engine
from harness.training.sites import Site
from injectors.value import Value
from tests.injectors.spies import START, STEPS, differing, row, trial, watch, watch_each, words
from tests.plain_gpt import PlainGPT, copy_weights, tensors

GOLDEN, FAULTY, SPY = 0, 1, -1
FLAT = (Site.WEIGHT, Site.GRADIENT, Site.REDUCED_GRADIENT, Site.CLIPPED_GRADIENT, Site.MOMENT_1, Site.MOMENT_2)
PLACES = {
    "embedding": 83,
    "blocks.0.attention.key_norm": 7,
    "blocks.1.attention.key": 255,
    "blocks.1.feedforward.up": 37,
    "head": 0,
}
TAPS = list(tap_shapes(Model(width=16, head_dim=8, context=8), 2, 64))
NO_CLIP = {"clip": None, "ranks": 1}


def flipped(x: torch.Tensor, bit: int) -> torch.Tensor:
    return torch.from_numpy((words(x) ^ np.uint32(1 << bit)).view(np.float32))


def shape_at(name: str) -> tuple[int, ...]:
    return tap_shapes(Model(width=16, head_dim=8, context=8), 2, 64)[name]


# --- one element, at every site ----------------------------------------------------------------------------------


ELEMENTS = {
    (site, name): Value(
        start=START, site=site, tensor=name, element=PLACES[name], bit=21, rank=int(site == Site.GRADIENT)
    )
    for site, name in product(FLAT, PLACES)
}
MANY = {
    site: Value(start=START, site=site, tensor="blocks.*", elements=30, model="set", value=0.7)
    for site in (Site.WEIGHT, Site.GRADIENT, Site.MOMENT_2, Site.UPDATE)
}
WHOLE = {"a whole layer": Value(start=START, tensor="blocks.0.*", elements=None, model="zero")}
UPDATED = {
    bit: Value(start=START, site=Site.UPDATE, tensor="blocks.1.feedforward.up", element=37, bit=bit)
    for bit in (31, 25, 20)
}
RATES = {
    "a bit": Value(start=START, site=Site.LEARNING_RATE, bit=24),
    "zero": Value(start=START, site=Site.LEARNING_RATE, model="zero"),
}
FLAT_FAULTS = {**ELEMENTS, **MANY, **WHOLE, **UPDATED, **RATES}


@cache
def flat():
    """Run and spy of a pack with each of FLAT_FAULTS."""
    return watch_each(list(FLAT_FAULTS.values()), [*FLAT, Site.BEFORE_UPDATE, Site.UPDATE])


def number_of(fault, faults):
    """Of its trial: golden ones stand before and behind it."""
    return 2 * list(faults).index(fault) + 1


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("site", FLAT)
def test_one_bit_of_one_element(site, name):
    rank, element = int(site == Site.GRADIENT), PLACES[name]
    (run, spy), faulty = flat(), number_of((site, name), FLAT_FAULTS)
    seen = spy.arrays[site, START, rank]
    golden, struck = row(seen, GOLDEN), row(seen, faulty)
    assert differing(golden, struck) == {name: [element]}
    before, after = (words(x[name]).ravel()[element] for x in (golden, struck))
    assert before ^ after == 1 << 21
    for neighbour in (faulty - 1, faulty + 1):
        assert differing(golden, row(seen, neighbour)) == differing(golden, row(seen, SPY)) == {}, "neighbours"
    if site == Site.GRADIENT:
        other = spy.arrays[site, START, 0]
        assert differing(row(other, GOLDEN), row(other, faulty)) == {}, "the other rank"
    (event,) = run.result.events[faulty]
    assert (event.site, event.tensor, event.step, event.rank, event.bit, event.mask) == (
        site,
        name,
        START,
        rank,
        21,
        "200000",
    )
    assert event.index == np.unravel_index(element, golden[name].shape)
    assert (event.bits_before, event.bits_after) == (f"{before:08x}", f"{after:08x}")
    assert [float(event.before), float(event.after)] == [x[name].view(-1)[element].item() for x in (golden, struck)]
    own = slice(faulty - 1, faulty + 2)
    assert event.changed and run.result.strikes[own] == [0, 1, 0] == run.result.changes[own]


@pytest.mark.parametrize("bit", UPDATED)
def test_an_update_is_changed_on_its_way_to_the_weight(bit):
    """The update that a trial sees is what its weight goes through, in float32."""
    name, element = "blocks.1.feedforward.up", 37
    (run, spy), faulty = flat(), number_of(bit, FLAT_FAULTS)
    before, after = spy.arrays[Site.BEFORE_UPDATE, START, 0], spy.arrays[Site.UPDATE, START, 0]
    assert differing(row(before, GOLDEN), row(before, faulty)) == {}
    assert differing(row(after, GOLDEN), row(after, faulty)) == {name: [element]}, "weights, and both moments"
    origin, golden, struck = (
        x[name][r].view(-1)[element : element + 1] for x, r in ((before, GOLDEN), (after, GOLDEN), (after, faulty))
    )
    assert torch.equal(struck, origin + flipped(golden - origin, bit))
    (event,) = run.result.events[faulty]
    assert event.before == repr((golden - origin).item())
    assert event.bits_after == f"{words(flipped(golden - origin, bit))[0]:08x}"


def test_the_learning_rate_of_one_step():
    run, _ = flat()
    golden, struck = run.signals["learning_rate"][[GOLDEN, number_of("a bit", FLAT_FAULTS)]]
    assert np.flatnonzero(golden != struck).tolist() == [START]
    assert struck[START] == flipped(torch.tensor([golden[START]], dtype=torch.float32), 24).item()


def test_without_a_learning_rate_weights_stay_and_moments_do_not():
    (_, spy), faulty = flat(), number_of("zero", FLAT_FAULTS)
    before, after = (row(spy.arrays[site, START, 0], faulty) for site in (Site.BEFORE_UPDATE, Site.UPDATE))
    changed = differing(before, after)
    assert changed and all(name.startswith("moment_") for name in changed)
    golden = row(spy.arrays[Site.UPDATE, START, 0], GOLDEN)
    assert all(torch.equal(after[name], golden[name]) for name in after if name.startswith("moment_"))


# --- activations -------------------------------------------------------------------------------------------------


AT_TAPS = {
    (site, name, rank): Value(
        start=START, site=site, tensor=name, element=math.prod(shape_at(name)) - 1, bit=22, rank=rank
    )
    for site, ranks in {Site.ACTIVATION: (0, 1), Site.ACTIVATION_GRADIENT: (1,)}.items()
    for name, rank in product(TAPS, ranks)
}


@cache
def at_taps():
    """A run of a pack with each of AT_TAPS, and what stood at the taps: of activations, and of their gradients."""
    run, spy = watch_each(list(AT_TAPS.values()), [Site.ACTIVATION, Site.ACTIVATION_GRADIENT])
    return run, *(spy.at_taps(site, START) for site in (Site.ACTIVATION, Site.ACTIVATION_GRADIENT))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TAPS)
def test_one_bit_of_one_activation(name, rank):
    """Of one rank's part of the batch; nothing that is computed before it changes."""
    element, faulty = math.prod(shape_at(name)) - 1, number_of((Site.ACTIVATION, name, rank), AT_TAPS)
    run, seen, _ = at_taps()
    assert list(seen) == TAPS
    golden, struck = ({tap: x[rank, r] for tap, x in seen.items()} for r in (GOLDEN, faulty))
    changed = differing(golden, struck)
    assert next(iter(changed)) == name and changed[name] == [element]
    before, after = (words(x[name]).ravel()[element] for x in (golden, struck))
    assert before ^ after == 1 << 22
    (event,) = run.result.events[faulty]
    assert (event.bits_before, event.bits_after, event.rank) == (f"{before:08x}", f"{after:08x}", rank)
    assert event.index == np.unravel_index(element, shape_at(name))
    for x in seen.values():
        assert torch.equal(x[1 - rank, GOLDEN], x[1 - rank, faulty]), "the other rank"
        assert all(torch.equal(x[:, GOLDEN], x[:, r]) for r in (faulty - 1, faulty + 1, SPY)), "neighbours"


@pytest.mark.parametrize("name", TAPS)
def test_one_bit_of_the_gradient_of_one_activation(name):
    """Nothing that the backward pass has computed before it changes."""
    element, rank, faulty = math.prod(shape_at(name)) - 1, 1, number_of((Site.ACTIVATION_GRADIENT, name, 1), AT_TAPS)
    run, forward, seen = at_taps()
    assert sorted(seen) == sorted(TAPS)
    golden, struck = ({tap: seen[tap][rank, r] for tap in reversed(TAPS)} for r in (GOLDEN, faulty))
    changed = differing(golden, struck)
    assert next(iter(changed)) == name and changed[name] == [element]
    assert words(golden[name]).ravel()[element] ^ words(struck[name]).ravel()[element] == 1 << 22
    assert run.result.events[faulty][0].bits_after == f"{words(struck[name]).ravel()[element]:08x}"
    for tap in TAPS:
        assert torch.equal(seen[tap][0, GOLDEN], seen[tap][0, faulty]), "the other rank"
        assert all(torch.equal(seen[tap][:, GOLDEN], seen[tap][:, r]) for r in (faulty - 1, faulty + 1, SPY))
        assert torch.equal(forward[tap][:, GOLDEN], forward[tap][:, faulty]), "no forward pass"


WITHOUT_CLIPPING = {
    "input": Value(start=START, site=Site.ACTIVATION, tensor="blocks.0.attention.input", elements=None, model="zero"),
    **{
        part: Value(start=START, site=Site.ACTIVATION_GRADIENT, tensor=f"blocks.1.{part}", elements=None, model="zero")
        for part in ("attention.projection", "feedforward.down")
    },
}


@cache
def without_clipping():
    """Run and spy of a pack with each of WITHOUT_CLIPPING."""
    sites = [Site.ACTIVATION, Site.ACTIVATION_GRADIENT, Site.REDUCED_GRADIENT]
    return watch_each(list(WITHOUT_CLIPPING.values()), sites, **NO_CLIP)


def test_what_a_norm_is_fed_is_not_the_residual_stream():
    """With zeros before attention its norm gives zeros, so the stream behind it is the embedding as it was."""
    (_, spy), faulty = without_clipping(), number_of("input", WITHOUT_CLIPPING)
    seen = spy.at_taps(Site.ACTIVATION, START)
    golden, struck = ({tap: x[0, r] for tap, x in seen.items()} for r in (GOLDEN, faulty))
    for name in ("input", "query", "key", "value", "projection"):
        assert golden[f"blocks.0.attention.{name}"].any() and not struck[f"blocks.0.attention.{name}"].any()
    assert torch.equal(struck["embedding"], golden["embedding"])
    assert torch.equal(struck["blocks.0.feedforward.input"], struck["embedding"])
    assert not torch.equal(golden["blocks.0.feedforward.input"], golden["embedding"])


@pytest.mark.parametrize("part", ["attention.projection", "feedforward.down"])
def test_a_gradient_is_struck_in_one_branch_alone(part):
    """A block's part whose gradient is zeroed learns nothing, and the residual stream passes its own on."""
    name, start = f"blocks.1.{part}", part.partition(".")[0]
    (_, spy), faulty = without_clipping(), number_of(part, WITHOUT_CLIPPING)
    seen = spy.at_taps(Site.ACTIVATION_GRADIENT, START)
    golden, struck = ({tap: x[0, r] for tap, x in seen.items()} for r in (GOLDEN, faulty))
    assert not struck[name].any() and not struck[f"blocks.1.{start}.input"].any() and golden[name].any()
    assert not row(spy.arrays[Site.REDUCED_GRADIENT, START, 0], faulty)[name].any()
    assert torch.equal(struck["blocks.1.residual"], golden["blocks.1.residual"])
    if start == "feedforward":  # what came to the stream behind it is what leaves it in front
        assert torch.equal(struck["blocks.1.attention.projection"], golden["blocks.1.residual"])
    else:
        through = golden["blocks.1.attention.projection"]
        assert torch.equal(struck["blocks.0.residual"], through)


def plain_gradients(pack, row_number, batch, change):
    """Gradients of a plain GPT with the weights of that row, whose first feed-forward is changed by `change(x)`."""
    shape = {"vocabulary": 64, "width": 16, "depth": 2, "head_dim": 8, "context": 8, "qk_norm": True}
    model = PlainGPT(**shape).double()
    copy_weights(model, pack, row_number)
    model.blocks[0].up.register_forward_hook(lambda module, given, found: change(found))
    logits = model(batch[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    for weight in model.parameters():
        weight.data = weight.grad
    return {name: gradient.detach() for name, gradient in tensors(model).items()}


def test_the_gradient_passes_straight_through_a_struck_activation():
    """Three times the activation goes on, and the gradient comes back as if nothing had been multiplied."""
    name = "blocks.0.feedforward.up"
    fault = Value(start=0, site=Site.ACTIVATION, tensor=name, elements=None, model="scale", value=3)
    fields = {**NO_CLIP, "precision": "fp64"}
    fresh = engine.pack_of([trial(**fields)])
    _, spy = watch([trial(**fields), trial(fault, **fields)], [Site.REDUCED_GRADIENT], [0])
    batch = spy.batches[0][0][FAULTY]
    changes = {GOLDEN: lambda x: x, FAULTY: lambda x: x + 2 * x.detach()}
    for number, change in changes.items():
        found = row(spy.arrays[Site.REDUCED_GRADIENT, 0, 0], number)
        for tensor, gradient in plain_gradients(fresh, 0, batch, change).items():
            torch.testing.assert_close(found[tensor], gradient, rtol=1e-9, atol=1e-13)  # float64 rounds at 1e-16
    naive = plain_gradients(fresh, 0, batch, lambda x: 3 * x)[name]
    assert (naive - row(spy.arrays[Site.REDUCED_GRADIENT, 0, 0], FAULTY)[name]).abs().max() > 1e-3, "they can differ"


# --- many elements, and many strikes -----------------------------------------------------------------------------


@pytest.mark.parametrize("site", MANY)
def test_the_recorded_elements_are_those_that_changed(site):
    (run, spy), faulty = flat(), number_of(site, FLAT_FAULTS)
    seen = spy.arrays[site, START, 0]
    changed = differing(row(seen, GOLDEN), row(seen, faulty))
    addresses = {(name, element) for name, where in changed.items() for element in where}
    events = run.result.events[faulty]
    recorded = [(e.tensor, int(np.ravel_multi_index(e.index, seen[e.tensor][0].shape))) for e in events if e.index]
    assert len(addresses) == 30 == len(recorded) and set(recorded) == addresses
    assert all(name.startswith("blocks.") for name, _ in addresses) and len(changed) > 3


def test_a_whole_tensor_is_recorded_by_its_digest():
    (run, spy), faulty = flat(), number_of("a whole layer", FLAT_FAULTS)
    golden, struck = (row(spy.arrays[Site.WEIGHT, START, 0], r) for r in (GOLDEN, faulty))
    inside = [name for name in golden if name.startswith("blocks.0.")]
    assert list(differing(golden, struck)) == inside and not any(struck[name].any() for name in inside)
    events = run.result.events[faulty]
    assert [event.tensor for event in events] == inside
    for event in events:
        digests = [hashlib.sha256(x[event.tensor].numpy().tobytes()).hexdigest() for x in (golden, struck)]
        assert [event.before, event.after] == digests and event.changed and event.index is None


def test_strikes_are_counted_on_when_events_are_no_longer_kept():
    every = Value(start=1, duration=None, elements=None, model="scale", value=1.001)
    idle = Value(start=1, duration=None, elements=None, model="stuck_at_0", bit=30)  # no weight is 2 or more
    run, spy = watch([trial(), trial(every), trial(idle)], [Site.WEIGHT])
    expected = (STEPS - 1) * len(spy.pack.layout.by_name)
    assert run.result.strikes[1:3] == [expected, expected] and expected > KEPT_EVENTS
    assert run.result.changes[1:3] == [expected, 0]
    for events in run.result.events[1:3]:
        assert len(events) == KEPT_EVENTS and all(len(event.before) == len(event.after) == 64 for event in events)
    assert engine.same_bits(run[0], run[2]) == [], "it wrote what was there"


HELD = (Site.WEIGHT, Site.REDUCED_GRADIENT, Site.MOMENT_1, Site.ACTIVATION)
TIMES = ((None, 1), (5, 2), (1, 1))
AGAIN = {
    (site, *times): Value(start=2, duration=times[0], period=times[1], site=site, elements=2, model="set", value=0.4375)
    for site, times in product(HELD, TIMES)
}
STUCK = {
    "a stuck bit": Value(start=2, duration=None, tensor="blocks.*", elements=3, model="stuck_at_1", field="mantissa")
}


@cache
def again():
    """Run and spy, at all steps, of a pack with each of AGAIN and STUCK."""
    return watch_each([*AGAIN.values(), *STUCK.values()], HELD, range(STEPS))


@pytest.mark.parametrize("site", HELD)
@pytest.mark.parametrize(("duration", "period"), TIMES)
def test_the_same_place_again_and_again(site, duration, period):
    (run, spy), faulty = again(), number_of((site, duration, period), AGAIN)
    places = {(event.tensor, event.index) for event in run.result.events[faulty]}
    assert len(places) == 2
    end = STEPS if duration is None else 2 + duration
    for step in range(STEPS):
        if site == Site.ACTIVATION:
            found = {name: torch.cat(spy.read[site, step, name])[faulty] for name, _ in places}
        else:
            found = row(spy.arrays[site, step, 0], faulty)
        held = {found[name][index].item() == 0.4375 for name, index in places}
        assert held == {step in range(2, end, period)}, step


def test_a_stuck_bit_is_the_same_bit_at_every_step():
    (run, spy), faulty = again(), number_of("a stuck bit", {**AGAIN, **STUCK})
    events = run.result.events[faulty]
    assert len({(e.tensor, e.index, e.bit) for e in events}) == 3 and len(events) == 3 * (STEPS - 2)
    for e in events:
        value = spy.arrays[Site.WEIGHT, e.step, 0][e.tensor][faulty][e.index].reshape(1)
        assert words(value)[0] >> e.bit & 1 == 1
        unstruck = spy.arrays[Site.WEIGHT, 0, 0][e.tensor][faulty][e.index].reshape(1)
        assert e.step == 2 or words(unstruck)[0] != words(value)[0], "the weight goes on learning around the bit"
