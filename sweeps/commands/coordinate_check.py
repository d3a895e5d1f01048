"""The coordinate check: do the first steps of training change activations equally at every width, or every depth?

    stability-harness coordinate-check OUT.png [--widths 64,128,256,512,1024 | --depths 2,4,8,16]
        [--optimizer adamw] [--steps 4] [--rate 0.01] [--seeds 3]

Trains GPTs in each parametrisation at one learning rate, and draws by how much activations on a fixed batch moved away
from their values at initialisation, against the width (Yang et al. 2022, arXiv 2203.03466) or the depth (Dey et al.
2025, arXiv 2505.01618). muP keeps that flat over the width, CompleteP over both. Their first step moves the head alone,
because the head starts at zero and passes no gradient on. Where an optimizer's step is relative to the weights the head
starts at random, and what it gives at random shrinks with the width.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.ticker import LogLocator
from torch import Tensor

from analysis.figures.drawing import PICTURES
from harness.basics.errors import Parser
from harness.basics.memory import main_memory
from harness.config import ConfigError, Data, Model, Optim, Schedule, Train, Trial, checked
from harness.config.fields import shown
from harness.config.limits import DEEPEST, MOST_STEPS, WIDEST
from harness.data.corpus import Corpus, load_corpus
from harness.optim.optimizers import OPTIMIZERS
from harness.training.loop import train
from harness.training.pack import Pack
from harness.training.sites import Agenda
from sweeps.commands.ending import ended
from sweeps.compose.settings import LARGEST_PACK
from sweeps.planning.planner import check_weights

WIDTHS, DEPTHS, STEPS, SEEDS = (64, 128, 256, 512, 1024), (2, 4, 8, 16), 4, 3
RATES = {"adam": 1e-2, "sgd": 0.3, "relative": 0.05, "lars": 5.0}  # by optimizer, or by the rule of its updates' size
BASE_WIDTH, BASE_DEPTH, HEAD_DIM, CONTEXT, BATCH, VOCABULARY = 64, 2, 32, 16, 4, 256
_NUMBER = re.compile(r"[0-9]{1,18}")
PARAMETRIZATIONS = {"standard": "standard", "mup": "muP", "completep": "CompleteP"}
COMPARED = {"width": ("standard", "mup"), "depth": ("standard", "mup", "completep")}
ACTIVATIONS = {
    "embedding": "embedding",
    "attention.scores": "attention logits",
    "attention.projection": "attention output",
    "feedforward.down": "feed-forward output",
    "residual": "residual stream",
    "logits": "output logits",
}
"""What is looked at, by the tap's name; those inside a block in the last one."""


def measure(
    against: str,
    sizes: Sequence[int],
    steps: int = STEPS,
    rate: float | None = None,
    seeds: int = SEEDS,
    optimizer: str = "adamw",
    parametrizations: Sequence[str] | None = None,
) -> pd.DataFrame:
    """A row for each parametrisation, width, depth, seed, activation and step t = 1, 2, ...: `change` and `size`.

    `against` is "width" or "depth", which takes each of the `sizes`; `rate` None takes that of RATES. `change` is the
    root mean square of what t steps have added to the activation on a fixed batch, `size` that of the activation.
    """
    corpus = load_corpus(Data(source="zipf", vocabulary=VOCABULARY, length=200_000), CONTEXT)
    rows = [
        row
        for parametrization in parametrizations or COMPARED[against]
        for size in sizes
        for row in _measure_pack(_trials(parametrization, {against: size}, steps, rate, seeds, optimizer), corpus)
    ]
    return pd.DataFrame(rows)


def slopes(table: pd.DataFrame, against: str, of: str = "change") -> pd.Series:
    """Exponent k of change ~ size^k by parametrisation, activation and step, fitted to the mean over the seeds.

    `against` is "width" or "depth"; `of` "size" fits the activations themselves. What did not move has no exponent.
    """
    means = table[table["change"] > 0].groupby(["parametrization", "activation", "step", against])[of].mean()
    grouped = means.groupby(["parametrization", "activation", "step"])
    return grouped.apply(lambda m: np.polyfit(np.log(m.index.get_level_values(against)), np.log(m.to_numpy()), 1)[0])


def draw(table: pd.DataFrame, against: str, path: Path) -> None:
    """A panel for each activation, a row of panels for each parametrisation, a line for each step."""
    names = {"change": "RMS change since initialisation", "step": "steps taken"}
    moved = table[table["change"] > 0]
    shown = moved.replace({"parametrization": PARAMETRIZATIONS, "activation": ACTIVATIONS}).rename(columns=names)
    with matplotlib.rc_context({"backend": "agg"}):
        sns.set_theme(context="notebook", style="whitegrid", font_scale=0.9)
        grid = sns.relplot(
            shown,
            x=against,
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
        sizes = sorted(table[against].unique())
        for axes in grid.axes.flat:
            axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45 if max(sizes) > 99 else 0)
            lowest, highest = axes.get_ylim()
            is_narrow = highest < 5 * lowest
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if is_narrow else (1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        grid.set_titles(col_template="{col_name}", row_template="{row_name}", size=13)
        grid.set_axis_labels(against, "")
        grid.figure.supylabel(names["change"], fontsize=12, x=0.0)
        grid.savefig(path, dpi=150)
        plt.close(grid.figure)


def _trials(
    parametrization: str, size: Mapping[str, int], steps: int, rate: float | None, seeds: int, optimizer: str
) -> list[Trial]:
    """`size` is the width or the depth. The head starts at zero but for the standard parametrisation, as microsoft/mup
    has it in its own check: random logits shrink as 1/sqrt(m) beside what training adds. Over the depth the last matrix
    of each branch starts at zero: what random branches add falls with depth in CompleteP, and takes gradients along. A
    step that is relative to the weights needs weights, and does not follow the size of gradients.
    """
    rule, _, _ = OPTIMIZERS[optimizer].rule.partition("_")
    rate = RATES.get(optimizer, RATES[rule]) if rate is None else rate
    model = Model(
        width=size.get("width", BASE_WIDTH),
        depth=size.get("depth", BASE_DEPTH),
        head_dim=HEAD_DIM,
        context=CONTEXT,
        parametrization=parametrization,
        base_width=BASE_WIDTH,
        base_depth=BASE_DEPTH,
        init="zero_residual" if "depth" in size and rule != "relative" else "standard",
        zero_head=parametrization != "standard" and rule != "relative",
    )
    # A limit of the gradient's norm, which grows with the width, would be another rate at each.
    optim = Optim(name=optimizer, lr=rate, beta2=0.999, weight_decay=0.0, clip=None)
    length = Train(steps, BATCH, validate_every=steps, validate_tokens=1, validate_between=1)
    return [Trial(model, optim, Schedule(warmup=0, decay="constant"), length, seed=seed) for seed in range(seeds)]


def _measure_pack(trials: Sequence[Trial], corpus: Corpus) -> list[dict[str, object]]:
    pack, model = Pack(trials, corpus, torch.device("cpu")), trials[0].model
    initial, rows = _activations(pack), []
    of_all = {"parametrization": model.parametrization, "width": model.width, "depth": model.depth}

    def write(step: int, signals: Mapping[str, np.ndarray]) -> None:
        for name, now in _activations(pack).items():
            change, size = _root_mean_square(now - initial[name]), _root_mean_square(now)
            for row, planned in enumerate(pack.rows):
                at = {**of_all, "seed": trials[planned].seed, "activation": name, "step": step + 1}
                rows.append({**at, "change": change[row], "size": size[row]})

    train(pack, Agenda([None] * len(trials)), 1, write, telemetry=False, detection=False)
    return rows


def _activations(pack: Pack) -> dict[str, Tensor]:
    """Activations on a batch of held-out windows, [R, ...]; scores of the future, at -inf, are set to zero."""
    last_block = f"blocks.{pack.planned[0].model.depth - 1}."
    activations: dict[str, Tensor] = {}

    def read(tap: str, x: Tensor) -> None:
        name = tap.removeprefix(last_block)
        if name in ACTIVATIONS:
            activations[name] = torch.where(x == -math.inf, 0.0, x)

    detach = pack.model.taps.attach("*", read)
    with torch.no_grad():
        starts = pack.objective.held_out(BATCH * CONTEXT).flatten()
        pack.objective.window_losses(pack.model, starts, slice(0, len(pack)))
    detach()
    return activations


def _root_mean_square(x: Tensor) -> list[float]:
    return x.flatten(1).double().square().mean(1).sqrt().tolist()


def _sizes(allowed: range, named: str, text: str) -> list[int]:
    """Two or more different numbers."""
    sizes = [int(part) if _NUMBER.fullmatch(part) else 0 for part in text.split(",")]
    if len(set(sizes)) < 2 or not all(size in allowed for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: allowed: two or more {named}, separated by commas")
    return sizes


def _count(most: int, text: str) -> int:
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{shown(text)}: allowed: a whole number from 1 to {most}")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = checked("--rate", Optim, "lr", float(text))
    except ValueError:
        rate = 0.0
    if not rate:  # nothing would move
        raise argparse.ArgumentTypeError(f"{shown(text)}: allowed: a number above 0 that float32 holds")
    return rate


def _picture(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{shown(text)}: unknown kind of file; allowed: {', '.join(PICTURES)}")
    return Path(text)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(prog=program, description=(__doc__ or "").split("\n")[0])
    widths = partial(_sizes, range(HEAD_DIM, WIDEST + 1, HEAD_DIM), f"multiples of {HEAD_DIM} up to {WIDEST}")
    depths = partial(_sizes, range(1, DEEPEST + 1), f"whole numbers from 1 to {DEEPEST}")
    steps, seeds = partial(_count, MOST_STEPS), partial(_count, LARGEST_PACK)
    parser.add_argument("out", type=_picture, help=f"the figure to write ({', '.join(PICTURES)})")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--widths", type=widths, help=f"default {','.join(map(str, WIDTHS))}")
    sizes.add_argument("--depths", type=depths, help=f"depths to compare instead, such as {','.join(map(str, DEPTHS))}")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="default adamw")
    parser.add_argument("--steps", type=steps, default=STEPS, help=f"training steps, default {STEPS}")
    parser.add_argument(
        "--rate", type=_rate, help=f"learning rate, the same everywhere, default {RATES['adam']} for adamw"
    )
    parser.add_argument("--seeds", type=seeds, default=SEEDS, help=f"trials in each pack, default {SEEDS}")
    return parser


def main() -> None:
    """`python -m sweeps.commands.coordinate_check`."""
    if status := ended(lambda: check(sys.argv[1:], "python -m sweeps.commands.coordinate_check")):
        sys.exit(status)


def check(arguments: Sequence[str], program: str) -> None:
    """Measure, draw and print. Raises ConfigError for wrong input, and for what cannot be trained or drawn."""
    options = _parser(program).parse_args(arguments)
    against = "depth" if options.depths else "width"
    sizes = options.depths or options.widths or list(WIDTHS)
    for parametrization in COMPARED[against]:
        largest = _trials(parametrization, {against: max(sizes)}, options.steps, options.rate, 1, options.optimizer)
        check_weights(largest, main_memory() / options.seeds)
    table = measure(against, sizes, options.steps, options.rate, options.seeds, options.optimizer)
    if not np.isfinite(table["change"]).any():
        raise ConfigError(f"--rate={options.rate}: no run is finite after a step; allowed: a smaller rate")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw(table, against, options.out)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError(f"{options.out}: {reason}; allowed: a file in a folder that you may write to") from None
    last = slopes(table, against).xs(options.steps, level="step").unstack("parametrization")
    last = last.reindex(index=list(ACTIVATIONS), columns=list(COMPARED[against]))
    print(f"Exponent of the change after {options.steps} steps of {options.optimizer} against the {against}:")
    print(last.rename(index=ACTIVATIONS, columns=PARAMETRIZATIONS).round(2).to_string())
    print(f"Figure: {options.out}")


if __name__ == "__main__":
    main()
