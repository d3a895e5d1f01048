"""Draws from hashes: the same everywhere, all different, and fair."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice, permutations

import pytest
from scipy.stats import binom

from harness.config import ConfigError
from injectors.draws import distinct, shuffled, stream


def assert_uniform(drawn: list, values: int) -> None:
    """Each of so many values lies in its exact binomial interval of 99.9% for all of them together (Bonferroni)."""
    counts = Counter(drawn)
    assert len(counts) == values
    low, high = binom.interval(1 - 0.001 / values, len(drawn), 1 / values)
    assert low <= min(counts.values()) and max(counts.values()) <= high


# --- stream ------------------------------------------------------------------------------------------------------


def test_the_stream_of_a_key_is_what_it_always_was():
    """If this fails, stored seeds no longer mean the faults that they drew."""
    assert list(islice(stream(0), 3)) == [
        311195031918712201969326211500009392862,
        271739917941638205287212126638436160697,
        99034244791197721104464276333396102754,
    ]
    assert list(islice(stream(7, "bit", -1), 2)) == [
        250381750568568516807517218974606678784,
        227495239936102427960104531827845976640,
    ]


def test_the_stream_is_blake2b_of_key_and_counter():
    for number, word in enumerate(islice(stream(7, "bit"), 300)):
        digest = hashlib.blake2b(
            b"int:7\0str:bit", digest_size=16, salt=bytes([number % 256, number // 256] + [0] * 14)
        )
        assert word == int(digest.digest()[::-1].hex(), 16)


def test_streams_of_different_keys_have_nothing_in_common():
    keys = [
        (),
        (0,),
        (1,),
        ("0",),
        ("",),
        (0, 0),
        (0, "0"),
        ("0", 0),
        (10,),
        (1, 0),
        ("1", "0"),
        ("10",),
        (-1,),
        (2**70,),
    ]
    words = [word for key in keys for word in islice(stream(*key), 100)]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("bit", [0, 1, 63, 64, 127])
def test_each_bit_of_the_stream_is_fair(bit):
    assert_uniform([word >> bit & 1 for word in islice(stream("fair", bit), 20_000)], 2)


def test_the_stream_is_uniform_modulo_anything():
    for modulus in (3, 10, 256, 1000):
        assert_uniform([word % modulus for word in islice(stream("modulo"), 100_000)], modulus)


# --- shuffled and distinct ---------------------------------------------------------------------------------------


def test_the_draws_of_a_key_are_what_they_always_were():
    """If this fails, stored seeds no longer mean the faults that they drew."""
    assert distinct(10, 10, 0) == [2, 4, 1, 7, 8, 9, 0, 3, 5, 6]
    assert distinct(32, 5, 3, "bits") == [6, 7, 8, 21, 19]
    assert distinct(10**12, 3, 42, "element") == [732351962685, 84352937832, 520846348345]
    assert distinct(2**100, 2, 42, "element") == [455233147156335370068449988157, 49877626389604524502139565360]


def test_draws_are_a_fisher_yates_shuffle():
    for total in (1, 2, 7, 100, 1001):
        order, words = list(range(total)), stream("cards", total)
        for i in range(total):
            j = i + next(words) % (total - i)
            order[i], order[j] = order[j], order[i]
        assert list(shuffled(total, "cards", total)) == order


@pytest.mark.parametrize("total", [1, 2, 3, 10, 257, 5000])
def test_draws_are_different_and_fewer_are_the_beginning_of_more(total):
    everything = distinct(total, total, total)
    assert sorted(everything) == list(range(total))
    for count in {0, 1, total // 2, total // 2 + 1, total - 1, total}:
        assert distinct(total, count, total) == everything[:count]


def test_few_of_very_many():
    drawn = distinct(2**100, 1000, 0)
    assert len(set(drawn)) == 1000
    assert all(0 <= number < 2**100 for number in drawn)


def test_every_order_is_equally_likely():
    orders = [tuple(distinct(4, 4, seed)) for seed in range(24_000)]
    assert set(orders) == set(permutations(range(4)))
    assert_uniform(orders, 24)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_every_set_is_equally_likely(count):
    """On both sides of half of them."""
    sets = [frozenset(distinct(8, count, "sets", seed)) for seed in range(30_000)]
    assert_uniform(sets, {2: 28, 4: 70, 7: 8}[count])


@pytest.mark.parametrize("place", [0, 1, 49])
def test_each_place_is_uniform(place):
    assert_uniform([distinct(100, place + 1, "places", seed)[place] // 10 for seed in range(5000)], 10)


# --- edges -------------------------------------------------------------------------------------------------------


def test_none_of_none():
    assert distinct(0, 0, 1) == [] == list(shuffled(0, 1))
    assert distinct(5, 0, 1) == []


@pytest.mark.parametrize(("total", "count"), [(0, 1), (5, 6), (5, -1), (10**12, 10**12 + 1)])
def test_more_than_there_are_is_refused(total, count):
    with pytest.raises(ConfigError, match=rf"^{count} different draws: there are only {total}; allowed: 0 to {total}$"):
        distinct(total, count, 0)
