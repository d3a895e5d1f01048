"""Every detector, by the name of its module."""

from harness.basics import plugins
from harness.detectors.base import Detector, Windowed

DETECTORS: dict[str, type[Detector]] = {
    name: cls for name, cls in plugins.subclasses("detectors", Detector).items() if cls is not Windowed
}
