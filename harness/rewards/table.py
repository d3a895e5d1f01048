"""Every reward, by the name of its module."""

from harness.basics import plugins
from harness.rewards.base import Reward

REWARDS: dict[str, type[Reward]] = plugins.subclasses("rewards", Reward)
