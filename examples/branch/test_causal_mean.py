"""The branch keeps the promises of every setting: pytest examples/branch, where it is installed."""

from harness.testing import check_setting


def test_it_keeps_the_promises_of_settings() -> None:
    check_setting(block={"token_mixer": "causal_mean"}, causal_mean={"window": 4, "keep": 0.9})
