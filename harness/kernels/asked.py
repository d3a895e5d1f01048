"""What a program of attention is asked for.

It is told when it runs, and compiled once for all three, so that the same arithmetic is the same instructions. Triton
would compile another one for 1, and for multiples of 16.
"""

from __future__ import annotations

ALL = 3
SHARES = 5  # of scores that are given
SCORES = 7  # alone
