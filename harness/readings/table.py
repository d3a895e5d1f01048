"""Every reading, by the name of its module, and what they show."""

from collections.abc import Iterable, Mapping

from harness.basics import plugins
from harness.config import Trial
from harness.readings.base import KINDS, ProbeReading, Reading, ReadingSignal, StepReading, TapReading

READINGS: dict[str, type[Reading]] = {
    name: cls for name, cls in plugins.subclasses("readings", Reading).items() if cls not in KINDS
}
SHOWN: Mapping[str, ReadingSignal] = {name: shown for cls in READINGS.values() for name, shown in cls.signals.items()}
"""All that they show, by the name of the signal."""
READ_BY: Mapping[str, str] = {signal: name for name, cls in READINGS.items() for signal in cls.signals}
"""The reading of each signal."""
OF_SOME_LAYERS = frozenset(
    signal for signal, name in READ_BY.items() if getattr(READINGS[name], "of_some_layers", False)
)
"""What some layers of a model may lack, where it is NaN."""
OF_STEPS = frozenset(signal for cls in READINGS.values() if issubclass(cls, StepReading) for signal in cls.signals)
"""What is known when a step is over."""


def layers_there(trial: Trial, signals: Iterable[str]) -> dict[str, list[bool]]:
    """Of those of these signals that some layers of a trial's model lack: whether each layer has it."""
    found = {}
    for signal in OF_SOME_LAYERS.intersection(signals):
        reading = READINGS[READ_BY[signal]]
        if issubclass(reading, TapReading | ProbeReading) and SHOWN[signal].along == ("layer",):
            there = reading.layers(trial)
            if any(there) and not all(there):
                found[signal] = there
    return found
