"""Try command lines, YAML files and damaged stores for as long as you like, and say what went wrong.

    python -m tests.fuzz [--minutes 60] [--seed 0] [--kind command_lines,yaml_files,stores]

Each failure is shrunk, printed with what reproduces it, and looked for no more. Exit status 1 if there was any.
`make test` tries a few of the same, always the same ones: tests/fuzz/test_fuzz.py.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.commands import Failure
from tests.fuzz.kinds import KINDS, Kind

ROUND = 100  # examples between two looks at the clock


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default=",".join(KINDS), help=f"of {', '.join(KINDS)}; all by default")
    options = parser.parse_args()
    last = time.monotonic() + 60 * options.minutes
    tried: collections.Counter[str] = collections.Counter()
    found: dict[str, str] = {}
    number = options.seed
    while time.monotonic() < last:
        for name in options.kind.split(","):
            _round(KINDS[name], number, last, tried, found)
            print(f"{time.strftime('%H:%M:%S')} {dict(tried)}: {len(found)} failures", flush=True)
        number += 1
    return 1 if found else 0


def _round(kind: Kind, number: int, last: float, tried: collections.Counter[str], found: dict[str, str]) -> None:
    """Some examples of a kind. What fails is shrunk and told, unless it is known."""
    current: list[str] = []

    @seed(number)
    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(kind.examples)
    def examine(example: object) -> None:
        if not current and time.monotonic() > last:
            return
        tried[kind.name] += 1
        try:
            kind.check(example)
        except Failure as failure:
            sign = _sign(str(failure))
            if sign in found or (current and sign != current[0]):
                return
            current[:] = [sign]
            raise

    try:
        examine()
    except Failure as failure:
        found[current[0]] = str(failure)
        print(f"--- {kind.name}, --seed {number}\n{failure}\n", flush=True)
    except Exception as error:  # hypothesis, of a failure that does not come again
        found[current[0] if current else str(error)[:200]] = str(error)
        print(f"--- {kind.name}, --seed {number}: {type(error).__name__}: {error!s:.3000}\n", flush=True)


def _sign(text: str) -> str:
    """What equal failures have in common: what it is, and where in our own code it came from, or what was said."""
    head, _, rest = text.partition("\n")
    places = re.findall(r'File "[^"]*/((?:analysis|harness|injectors|sweeps|hydra_plugins)/[^"]+)", line (\d+)', rest)
    said = next((line for line in rest.splitlines()[1:] if line.strip()), "")
    return f"{head} {places[-1] if places else re.sub(r'/tmp/[^ ]*|[^a-z ]', '', said)}"


if __name__ == "__main__":
    sys.exit(main())
