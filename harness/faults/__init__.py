"""Faults as the rest of the harness sees them: what one may know of a run, and how it is checked and armed.

The faults themselves are in `injectors` and in installed packages, and are found by name (`fault_types`).
"""
