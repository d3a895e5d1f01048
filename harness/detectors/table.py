"""Every detector, by the name of its module."""

from harness.basics import plugins
from harness.detectors import base
from harness.detectors.base import Detector

DETECTORS: dict[str, type[Detector]] = {
    name: cls for name, cls in plugins.subclasses("detectors", Detector).items() if cls.__module__ != base.__name__
}
