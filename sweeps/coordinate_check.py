"""The coordinate check: do the first steps of training change activations equally at every width?

    python -m sweeps.coordinate_check OUT.png [--widths 64,128,256,512,1024] [--steps 4] [--rate 0.01] [--seeds 3]

Trains GPTs in the standard parametrisation and in muP at one learning rate, and draws by how much activations on a
fixed batch moved away from their values at initialisation, against the width (Yang et al. 2022, arXiv 2203.03466).
muP keeps that flat. Its first step moves the head alone, because the head starts at zero and passes no gradient on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from torch import Tensor

from harness.config import Data, Model, Optim, Schedule, Train, Trial
from harness.corpus import Corpus, load_corpus
from harness.loop import train
from harness.pack import Pack
from harness.sites import Agenda

WIDTHS, STEPS, RATE, SEEDS = (64, 128, 256, 512, 1024), 4, 1e-2, 3
BASE_WIDTH, DEPTH, HEAD_DIM, CONTEXT, BATCH, VOCABULARY = 64, 2, 32, 16, 4, 256
PARAMETRIZATIONS = {"standard": "standard", "mup": "muP"}
ACTIVATIONS = {
    "embedding": "embedding",
    f"blocks.{DEPTH - 1}.attention.scores": "attention logits",
    f"blocks.{DEPTH - 1}.attention.projection": "attention output",
    f"blocks.{DEPTH - 1}.feedforward.down": "feed-forward output",
    f"blocks.{DEPTH - 1}.residual": "residual stream",
    "logits": "output logits",
}


def measure(widths: Sequence[int], steps: int, rate: float, seeds: int) -> pd.DataFrame:
    """A row for each parametrisation, width, seed, activation and step t = 1, 2, ...: `change` and `size`.

    `change` is the root mean square of what t steps have added to the activation on a fixed batch, `size` that of the
    activation itself.
    """
    corpus = load_corpus(Data(source="zipf", vocabulary=VOCABULARY, length=200_000), CONTEXT)
    rows = [
        row
        for parametrization in PARAMETRIZATIONS
        for width in widths
        for row in _measure_pack(_trials(parametrization, width, steps, rate, seeds), corpus)
    ]
    return pd.DataFrame(rows)


def slopes(table: pd.DataFrame, of: str = "change") -> pd.Series:
    """Exponent k of change ~ width^k by parametrisation, activation and step, fitted to the mean over the seeds.

    `of` "size" fits the activations themselves. What did not move at all has no exponent.
    """
    means = table[table["change"] > 0].groupby(["parametrization", "activation", "step", "width"])[of].mean()
    grouped = means.groupby(["parametrization", "activation", "step"])
    return grouped.apply(lambda m: np.polyfit(np.log(m.index.get_level_values("width")), np.log(m.to_numpy()), 1)[0])


def draw(table: pd.DataFrame, path: Path) -> None:
    """A panel for each activation, a row of panels for each parametrisation, a line for each step."""
    names = {"width": "width", "change": "RMS change since initialisation", "step": "steps taken"}
    moved = table[table["change"] > 0]
    shown = moved.replace({"parametrization": PARAMETRIZATIONS, "activation": ACTIVATIONS}).rename(columns=names)
    with matplotlib.rc_context({"backend": "agg"}):
        sns.set_theme(context="notebook", style="whitegrid", font_scale=0.9)
        grid = sns.relplot(
            shown,
            x=names["width"],
            y=names["change"],
            hue=names["step"],
            col="activation",
            row="parametrization",
            kind="line",
            marker="o",
            errorbar=("pi", 100),
            palette="viridis",
            legend="full",
            height=2.8,
            aspect=0.95,
            facet_kws={"sharey": "col", "margin_titles": True},
        )
        grid.set(xscale="log", yscale="log")
        widths = sorted(table["width"].unique())
        for axes in grid.axes.flat:
            axes.set_xticks(widths, [str(width) for width in widths], rotation=45)
            axes.minorticks_off()
        grid.set_titles(col_template="{col_name}", row_template="{row_name}", size=13)
        grid.set_axis_labels(names["width"], "")
        grid.figure.supylabel(names["change"], fontsize=12, x=0.0)
        grid.savefig(path, dpi=150)
        plt.close(grid.figure)


def _trials(parametrization: str, width: int, steps: int, rate: float, seeds: int) -> list[Trial]:
    return [
        Trial(
            Model(width, DEPTH, HEAD_DIM, CONTEXT, parametrization=parametrization, base_width=BASE_WIDTH),
            Optim(lr=rate, weight_decay=0.0),
            Schedule(warmup=0, decay="constant"),
            Train(steps, BATCH, validate_every=steps, validate_batches=1),
            seed=seed,
        )
        for seed in range(seeds)
    ]


def _measure_pack(trials: Sequence[Trial], corpus: Corpus) -> list[dict[str, object]]:
    pack, model = Pack(trials, corpus, torch.device("cpu")), trials[0].model
    initial, rows = _activations(pack), []

    def write(step: int, signals: Mapping[str, np.ndarray]) -> None:
        for name, now in _activations(pack).items():
            change, size = _root_mean_square(now - initial[name]), _root_mean_square(now)
            for row, planned in enumerate(pack.rows):
                at = {"parametrization": model.parametrization, "width": model.width, "seed": trials[planned].seed}
                rows.append({**at, "activation": name, "step": step + 1, "change": change[row], "size": size[row]})

    train(pack, Agenda([None] * len(trials)), 1, write, telemetry=False, detection=False)
    return rows


def _activations(pack: Pack) -> dict[str, Tensor]:
    """Activations on the first validation batch, [R, ...]; scores of the future, at -inf, are set to zero."""
    found: dict[str, Tensor] = {}

    def read(name: str, x: Tensor) -> None:
        if name in ACTIVATIONS:
            found[name] = torch.where(x == -math.inf, 0.0, x)

    detach = pack.model.taps.attach("*", read)
    with torch.no_grad():
        pack.model(pack.batches.validation(0)[:, :-1].expand(len(pack), -1, -1))
    detach()
    return found


def _root_mean_square(x: Tensor) -> list[float]:
    return x.flatten(1).double().square().mean(1).sqrt().tolist()


def _widths(text: str) -> list[int]:
    widths = [int(part) for part in text.split(",")]
    if len(set(widths)) < 2 or any(width < HEAD_DIM or width % HEAD_DIM for width in widths):
        raise argparse.ArgumentTypeError(f"{text}: allowed: two or more multiples of {HEAD_DIM}, separated by commas")
    return widths


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed: a whole number from 1 on")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sweeps.coordinate_check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("out", type=Path, help="the figure to write, a .png")
    parser.add_argument("--widths", type=_widths, default=list(WIDTHS), help=f"default {','.join(map(str, WIDTHS))}")
    parser.add_argument("--steps", type=_count, default=STEPS, help=f"training steps, default {STEPS}")
    parser.add_argument("--rate", type=float, default=RATE, help=f"learning rate, the same everywhere, default {RATE}")
    parser.add_argument("--seeds", type=_count, default=SEEDS, help=f"trials in each pack, default {SEEDS}")
    options = parser.parse_args()
    table = measure(options.widths, options.steps, options.rate, options.seeds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(table, options.out)
    last = slopes(table).xs(options.steps, level="step").unstack("parametrization")
    shown = last.loc[list(ACTIVATIONS), list(PARAMETRIZATIONS)].rename(index=ACTIVATIONS, columns=PARAMETRIZATIONS)
    print(f"Exponent of the change after {options.steps} steps against the width:\n{shown.round(2).to_string()}")
    print(f"Figure: {options.out}")


if __name__ == "__main__":
    main()
