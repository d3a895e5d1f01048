"""Passes over flat [R, P] arrays and heads of attention as Triton programs, and operators of torch that launch them.

It knows arrays, rows, columns and heads, and neither models nor trials. Without Triton, and on a CPU, the same is done
in torch's own operations, where the programs would be used: `use.py` says which of the two it is.
"""
