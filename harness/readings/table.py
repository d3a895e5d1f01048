"""Every reading, by the name of its module, and what they show."""

from collections.abc import Mapping

from harness.basics import plugins
from harness.readings.base import KINDS, Reading, ReadingSignal, StepReading

READINGS: dict[str, type[Reading]] = {
    name: cls for name, cls in plugins.subclasses("readings", Reading).items() if cls not in KINDS
}
SHOWN: Mapping[str, ReadingSignal] = {name: shown for cls in READINGS.values() for name, shown in cls.signals.items()}
"""All that they show, by the name of the signal."""
READ_BY: Mapping[str, str] = {signal: name for name, cls in READINGS.items() for signal in cls.signals}
"""The reading of each signal."""
OF_STEPS = frozenset(signal for cls in READINGS.values() if issubclass(cls, StepReading) for signal in cls.signals)
"""What is known when a step is over."""
