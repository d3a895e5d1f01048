"""Whether an interval of a mitigation's change in final loss holds what the same runs lose on other held-out text.

    python -m tests.benchmarks.intervals [--width 32] [--rate 1e-2] [--seeds 3] [NAME ...]

Every mitigation of `study=mitigations` and the recipe without one are trained as there, without faults, and compared as
`analysis.compare` does. Then the same weights read 1,600 other windows, drawn at random from the whole held-out part.
Beside it stands what the study did before: two batches for all runs, and a bootstrap over seeds alone.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.measures.paired import mean, paired
from analysis.measures.statistics import bootstrap
from harness.config import Trial
from harness.data.corpus import load_corpus
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from sweeps.compose.arguments import config_loader
from sweeps.compose.grid import Composer
from tests.sweeps.command import general_mitigations

WINDOWS, BEFORE = 1600, 8  # so many windows had two batches of the study


@dataclass(frozen=True)
class Run:
    """Final losses of the seeds of one mitigation: by segment [seeds, S], and on other windows [seeds, windows]."""

    segments: np.ndarray
    others: np.ndarray
    few: np.ndarray


def trained(trials: list[Trial], device: str) -> Run:
    """NaN for a run that was lost."""
    pack = Pack(trials, load_corpus(trials[0].data, trials[0].model.context), torch.device(device))
    result = train(pack, FaultSchedule([None] * len(trials)), 50, lambda first, signals: None)
    held = len(pack.objective.batches._validation)
    drawn = torch.from_numpy(np.random.default_rng(0).choice(held, WINDOWS, replace=False)).to(pack.device)
    few = torch.linspace(0, held - 1, BEFORE, device=pack.device).long()
    losses = [np.full((len(trials), len(starts)), np.nan) for starts in (drawn, few)]
    for starts, into in zip((drawn, few), losses, strict=True):
        into[pack.rows] = window_losses(pack, starts).cpu().numpy()
    return Run(result.ends["final_segment_loss"], *losses)


def window_losses(pack: Pack, starts: Tensor) -> Tensor:
    """Of each row and window, [R, N], one window after the other."""
    losses = []
    with torch.no_grad(), pack.model.taps.muted():
        for window in pack.objective.batches.validation(starts):
            parts = [pack.loss(window.expand(rows.stop - rows.start, 1, -1), rows=rows) for rows in pack.parts]
            losses.append(torch.cat(parts).double())
    return torch.stack(losses, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mitigations; default: all")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    loader = config_loader()
    composer = Composer(loader, "mitigations")

    def run(mitigation: str) -> Run:
        fixed = [f"model.width={options.width}", f"optim.lr={options.rate}", f"mitigation={mitigation}"]
        return trained([composer.trial([*fixed, f"seed={seed}"]) for seed in range(options.seeds)], options.device)

    base, covered, before, wrong_sign, total = run("none"), 0, 0, 0, 0
    print("change of the final loss [nat/token]: on 1,600 other windows, and the interval; and that of two batches")
    for name in options.names or general_mitigations():
        own = run(name)
        truth = float((own.others - base.others).mean())
        if not np.isfinite(truth):
            print(f"{name:22s} a run was lost")
            continue
        found = paired(*(pd.DataFrame(each.segments) for each in (own, base)), mean)
        few = (own.few - base.few).mean(axis=1)
        low, high = bootstrap(few, lambda values: values.mean(axis=-1))
        holds, held = found.change_low <= truth <= found.change_high, low <= truth <= high
        total, covered, before = total + 1, covered + holds, before + held
        wrong_sign += (low > 0 > truth) or (high < 0 < truth)
        mark = "" if holds else "  MISSED"
        print(
            f"{name:22s} {truth:+.4f}  {found.change:+.4f} ({found.change_low:+.4f} to {found.change_high:+.4f}){mark}"
            f"   before: {few.mean():+.4f} ({low:+.4f} to {high:+.4f}){'' if held else '  missed'}",
            flush=True,
        )
    print(f"held by the interval: {covered} of {total}; before: {before} of {total}, {wrong_sign} of them a wrong sign")


if __name__ == "__main__":
    main()
