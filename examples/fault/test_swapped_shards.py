"""The fault keeps the promises of every fault: pytest examples/fault."""

from swapped_shards import SwappedShards

from harness.testing import check_fault


def test_it_keeps_the_promises_of_faults() -> None:
    check_fault(SwappedShards(tensor="head"))
