"""The objective keeps the promises of every setting: pytest examples/objective, where it is installed."""

from harness.testing import check_setting


def test_it_keeps_the_promises_of_settings() -> None:
    check_setting(objective={"name": "completion"}, completion={"prompt": 0.5})
