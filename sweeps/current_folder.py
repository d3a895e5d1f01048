"""No command imports from the folder in which it is typed, unless the project itself stands there.

`python -m` puts that folder first on the path, and `python -c`, by which `multiprocessing` starts its servers, does so
too: a `jinja2.py` among somebody's results would be run as ours. What is imported here is loaded by Python itself.
"""

import os
import sys

PROJECT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def _is_current(path: str) -> bool:
    try:
        return os.path.realpath(path) == os.path.realpath(os.curdir)
    except OSError:  # the current folder has been removed: nothing can be imported from it
        return False


def is_run_by_name(package: str) -> bool:
    """Whether `python -m` is starting this package or a module of it."""
    if sys.argv[:1] != ["-m"]:
        return False
    name = sys.orig_argv[-len(sys.argv)]  # `-m sweeps`, or `-msweeps` in one word
    name = name.partition("m")[2] if name.startswith("-") else name
    return name.split(".")[0] == package


def python_path() -> str:
    """PYTHONPATH for Python processes that are to find the project and nothing in the current folder."""
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in given if not _is_current(path)]
    return os.pathsep.join([PROJECT, *others] if _is_current(PROJECT) else others)


def leave() -> None:
    """Take the current folder off the path, for this process and those that it starts."""
    if not _is_current(PROJECT):
        sys.path[:] = [path for path in sys.path if not _is_current(path)]
    if given := python_path():
        os.environ["PYTHONPATH"] = given
    else:
        os.environ.pop("PYTHONPATH", None)
    os.environ["PYTHONSAFEPATH"] = "1"
