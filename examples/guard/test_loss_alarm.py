"""The guard keeps the promises of every setting: pytest examples/guard, where it is installed."""

from harness.testing import check_setting


def test_it_keeps_the_promises_of_settings() -> None:
    check_setting(bears_ruin=True, loss_alarm={"nats": 1.5})
