"""Triton programs: passes over flat [R, P] arrays, and norms of [R, N, D]; and the operators of torch that launch them.

It knows arrays, rows, tokens and columns, and neither models nor trials. Without Triton, and on a CPU, the same is
done in torch's own operations, where the programs would be used: `use.py` says which of the two it is.
"""
