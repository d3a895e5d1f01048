"""Triton programs, and the operators of torch that launch them: passes over flat [R, P] arrays, norms, and attention.

It knows arrays, rows, columns, tokens and heads, and neither models nor trials. Without Triton, and on a CPU, the same
is done in torch's own operations, where the programs would be used: `use.py` says which of the two it is.
"""
