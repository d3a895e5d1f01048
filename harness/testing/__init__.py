"""Conformance: what a plug-in's part has to keep, as assertions for its own tests; the project's tests use them, too.

A fault is held to its promises by `check_fault`, a detector by `check_detector`, and whatever else a trial can have,
such as an optimizer, a clipper, a branch, an objective or a reading, by `check_setting`.
"""

from harness.testing.detectors import check_detector
from harness.testing.faults import check_fault
from harness.testing.settings import check_setting

__all__ = ["check_detector", "check_fault", "check_setting"]
