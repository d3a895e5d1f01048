"""Injectors: one file a family of faults. A new one is a new file here, or of an installed package (`examples/fault/`).

They see sites, the facts of a run (`Facts`) and the arithmetic that they imitate, never a trial, the loop or the pack.
`Armed` lets them strike in a training loop of one's own.
"""

from harness.faults.facts import Facts, facts_of, formats_of, shapes_of
from harness.faults.fault import InjectableFault, fault_types
from injectors.fault import Armed

__all__ = ["Armed", "Facts", "InjectableFault", "fault_types", "facts_of", "formats_of", "shapes_of"]
