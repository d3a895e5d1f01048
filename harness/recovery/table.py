"""Every action, by the name of its module."""

from harness.basics import plugins
from harness.recovery.base import Action

ACTIONS: dict[str, type[Action]] = plugins.subclasses("actions", Action)
