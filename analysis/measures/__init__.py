"""From a dataset to numbers with intervals: outcomes of faults, metrics of groups, comparisons of mitigations.

Nothing here draws.
"""
