"""Clipper and optimizer keep the promises of every setting: pytest examples/plugin, where it is installed."""

from harness.testing import check_setting


def test_the_clipper_keeps_the_promises_of_settings() -> None:
    check_setting(clip=None, agc={"ratio": 0.01})


def test_the_optimizer_keeps_the_promises_of_settings() -> None:
    check_setting(absorbs_scale=True, name="signsgd")
