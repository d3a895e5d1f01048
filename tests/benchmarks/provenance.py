"""What it costs to find where a first non-finite value came from, in steps of a trial; healthy steps pay nothing.

    python -m tests.benchmarks.provenance [--rounds 5]

Packs of eight trials, of which four have a gradient that breaks them at half of their steps, the last place where one
can. In one process with one thread; process time, so that what else the machine does counts for less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import torch

from harness.config import Model, Train, Trial
from harness.data.corpus import load_corpus
from harness.loop.loop import train
from harness.nonfinite.provenance import Provenance, Provenances
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from injectors import facts_of
from injectors.value import Value


def costs(width: int, depth: int, steps: int) -> tuple[float, float, int]:
    """Seconds of a step of one trial, and of finding a provenance; and how many were found."""
    settings = Train(steps=steps, validate_every=10**6, validate_tokens=1, validate_between=1)
    fault = Value(site="reduced_gradient", tensor="blocks.1.feedforward.up", element=5, model="nan", start=steps // 2)
    trials = [Trial(model=Model(width=width, depth=depth), train=settings, seed=seed) for seed in range(4)]
    trials += [Trial(model=trial.model, train=settings, seed=trial.seed, fault=fault) for trial in trials]
    corpus, spent = load_corpus(trials[0].data, trials[0].model.context), []
    fault_schedule = FaultSchedule(
        [trial.fault.arm(facts_of(trial)) if trial.fault == fault else None for trial in trials]
    )
    pack, plain = Pack(trials, corpus, torch.device("cpu")), Provenances.of

    def timed(self: Provenances, row: int, step: int) -> Provenance:
        started = time.process_time()
        try:
            return plain(self, row, step)
        finally:
            spent.append(time.process_time() - started)

    started = time.process_time()
    with mock.patch.object(Provenances, "of", timed):
        train(pack, fault_schedule, steps // 2, lambda first, signals: None)
    trained = steps * len(trials)  # frozen rows are computed to the end of a block, and a few rows stay
    return (time.process_time() - started - sum(spent)) / trained, statistics.mean(spent), len(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width, depth, steps in ((32, 2, 40), (64, 4, 12), (128, 4, 6)):
        rounds = [costs(width, depth, steps) for _ in range(options.rounds)]
        step, found = (statistics.median(each[i] for each in rounds) for i in range(2))
        print(
            f"width {width}, depth {depth}: {1000 * found:.0f} ms for a trial that is lost = {found / step:.0f} steps "
            f"of a trial, {rounds[0][2]} of them found",
            flush=True,
        )


if __name__ == "__main__":
    main()
