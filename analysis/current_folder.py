"""`python -m analysis` imports nothing from the folder in which it is typed, unless the project itself stands there.

As sweeps/current_folder.py, which cannot be found safely from here. What is imported is loaded by Python itself.
"""

import os
import sys

PROJECT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def is_run_by_name() -> bool:
    """Whether `python -m analysis` is starting."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("analysis", "-manalysis")


def leave() -> None:
    """Take the current folder off the path."""
    try:
        here = os.path.realpath(os.curdir)
    except OSError:  # it has been removed: nothing can be imported from it
        return
    if here != PROJECT:
        sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
