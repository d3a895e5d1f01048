"""The detector keeps the promises of every detector: pytest examples/detector."""

from ewma_chart import EwmaChart

from harness.testing import check_detector


def test_it_keeps_the_promises_of_detectors() -> None:
    check_detector(EwmaChart)
