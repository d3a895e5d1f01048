"""What a trial is: its fields, their limits and defaults, the recipe, faults' common fields, and how long it runs.

Plain data, without torch: nothing here trains, reads files or knows how a field is used.
"""

from harness.basics.errors import ConfigError, Problems
from harness.config.data import Data
from harness.config.fields import (
    PER_TRIAL,
    STRUCTURAL,
    SWITCHED,
    anything,
    checked,
    choice,
    field_types,
    number,
    shown,
    steps_of,
)
from harness.config.limits import LARGEST_SCALE, LARGEST_SEED, LONGEST_EXPLICIT, SMALLEST_SCALE
from harness.config.model import Model
from harness.config.recipe import Optim, Schedule, Screen, Train
from harness.config.trial import CORE, IDENTITY, NO_FAULT, Fault, Trial, sections, trial_from_dict

__all__ = [
    "CORE",
    "ConfigError",
    "Data",
    "Fault",
    "IDENTITY",
    "LARGEST_SCALE",
    "LARGEST_SEED",
    "LONGEST_EXPLICIT",
    "Model",
    "NO_FAULT",
    "Optim",
    "PER_TRIAL",
    "Problems",
    "SMALLEST_SCALE",
    "STRUCTURAL",
    "SWITCHED",
    "Schedule",
    "Screen",
    "Train",
    "Trial",
    "anything",
    "checked",
    "choice",
    "field_types",
    "number",
    "sections",
    "shown",
    "steps_of",
    "trial_from_dict",
]
