"""The proof on a GPU, and its figures: one command for each of three groups of checks, of at most nine minutes each.

    python -m tests.gpu bits|speed|large [--dry] [--out DIR]   run a group; JSON and a table into DIR (results/gpu)
    python -m tests.gpu merge [--out DIR] [--into PAGE]        put the tables into docs/benchmarks.md
    python -m tests.gpu figure [--plan]                        one figure of the mission: study=width_sensitivity

With --dry every check runs at a tiny size on a CPU, and the table says "not measured"; an error in one is status 1. It
needs torch and numpy; what else some checks and the figure need may lie in .gpu-wheels (make gpu-wheels).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.gpu import wheels
from tests.gpu.marks import CHECKS, GROUPS
from tests.gpu.results import merge, read

ROOT = Path(__file__).resolve().parents[2]
STUDY = "width_sensitivity"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "task", choices=[*GROUPS, "merge", "figure", "one"], metavar="|".join((*GROUPS, "merge", "figure"))
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu", help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="every check at a tiny size on a CPU, nothing measured")
    parser.add_argument("--only", type=int, nargs="+", choices=[check.number for check in CHECKS], metavar="NUMBER")
    parser.add_argument("--at-once", type=int, default=4, help="checks of bits that run side by side (4)")
    parser.add_argument("--fresh", action="store_true", help="an interpreter of its own for each check")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "benchmarks.md", help="page of merge")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu-wheels", help="folder of make gpu-wheels")
    parser.add_argument("--plan", action="store_true", help="of figure: say what would be trained")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.task == "merge":
        merge(read(options.out), options.into)
        print(f"{options.into}: has the tables of {options.out}")
        return 0
    wheels.put_on_path(options.wheels, wheels.NEEDED)
    if options.task == "figure":
        words = [f"study={STUDY}", *(["plan=true", "device=cuda", "memory=80GB"] if options.plan else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
        return subprocess.run([sys.executable, "-m", "sweeps", *words], cwd=ROOT, env=environment).returncode
    if wheels.lacking(["numpy"]):
        raise SystemExit("error: numpy is missing; make gpu-wheels fetches it, where there is a network")
    from tests.gpu.runner import run_group, run_one

    if options.task == "one":
        return run_one(options)
    return run_group(options)


if __name__ == "__main__":
    sys.exit(main())
