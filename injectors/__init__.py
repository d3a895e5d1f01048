"""Injectors: one file a family of faults. A new one is a new file here; nothing else needs to know it.

They see sites, shapes, configuration and the arithmetic that they imitate, never the loop or the pack.
"""

from injectors.fault import FaultContext, InjectableFault, fault_types

__all__ = ["FaultContext", "InjectableFault", "fault_types"]
