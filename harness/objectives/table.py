"""Every objective, by the name of its module."""

from harness.basics import plugins
from harness.objectives.base import Objective

OBJECTIVES: dict[str, type[Objective]] = plugins.subclasses("objectives", Objective)
