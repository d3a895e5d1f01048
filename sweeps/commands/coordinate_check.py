"""The coordinate check: do the first steps of training change activations equally at every width, or every depth?

    stability-harness coordinate-check OUT.png [--widths 64,128,256,512,1024 | --depths 2,4,8,16]
        [--optimizer adamw] [--steps 4] [--rate 0.01] [--seeds 3] [KEY=VALUE ...]

Keys are those of a trial: recipe=llama mitigation=mup optim.lr=3e-3. Without mitigation= or model.parametrization= the
parametrisations are compared, each with the head of the check; with one of them, what it says is checked as it is.

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
import textwrap
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
from harness.basics.printing import count, say
from harness.config import ConfigError, Optim, Problems, Trial, checked
from harness.config.fields import shown
from harness.config.limits import DEEPEST, MOST_STEPS, WIDEST
from harness.data.corpus import Corpus, load_corpus
from harness.loop.loop import train
from harness.optim.optimizers import OPTIMIZERS
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from sweeps.commands.coordinate_trials import (
    COMPARED,
    DEPTHS,
    HEAD_DIM,
    PARAMETRIZATIONS,
    RATES,
    SEEDS,
    STEPS,
    WIDTHS,
    Case,
    CoordinateAxes,
    check_memory,
    own_case,
    told,
)
from sweeps.commands.ending import ended
from sweeps.compose.overrides import with_homes
from sweeps.compose.places import named
from sweeps.compose.settings import LARGEST_PACK

PURPOSE = (
    "Measures whether the first steps of training change activations equally at every width or depth, as muP wants it, "
    "and draws it."
)
LINE, ROW = 150, 26  # characters in a line above the figure, and beside a row of panels
_NUMBER = re.compile(r"[0-9]{1,18}")
ACTIVATIONS = {
    "embedding": "embedding",
    "attention.scores": "attention logits",
    "attention.projection": "attention output",
    "feedforward.down": "feed-forward output",
    "moe.logits": "router logits",
    "moe.output": "output of experts",
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
    """`measured` of the check's own models, a case for each parametrisation.

    `against` is "width" or "depth", which takes each of the `sizes`; `rate` None takes that of RATES.
    """
    cases = (
        own_case(way, against, sizes, steps, rate, seeds, optimizer) for way in parametrizations or COMPARED[against]
    )
    return measured(list(cases))


def measured(cases: Sequence[Case]) -> pd.DataFrame:
    """A row for each case, width, depth, seed, activation and step t = 1, 2, ...: `change` and `size`.

    `change` is the root mean square of what t steps have added to the activation on a fixed batch, `size` that of the
    activation.
    """
    rows = []
    for case in cases:
        corpus = load_corpus(case.largest.data, case.largest.model.context)
        for trials in case.trials.values():
            rows += _measure_pack(case.name, trials, corpus)
    return pd.DataFrame(rows)


def slopes(table: pd.DataFrame, against: str, of: str = "change") -> pd.Series:
    """Exponent k of change ~ size^k by case, activation and step, fitted to the mean over the seeds.

    `against` is "width" or "depth"; `of` "size" fits the activations themselves. What did not move has no exponent, and
    a single size has NaN.
    """
    means = table[table["change"] > 0].groupby(["case", "activation", "step", against])[of].mean()
    return means.groupby(["case", "activation", "step"]).apply(partial(_exponent, against))


def _exponent(against: str, means: pd.Series) -> float:
    """The slope of a line through the logarithms; NaN for a single size, which has none."""
    if len(means) < 2:
        return math.nan
    return float(np.polyfit(np.log(means.index.get_level_values(against)), np.log(means.to_numpy()), 1)[0])


def draw(table: pd.DataFrame, against: str, path: Path, what: Sequence[str] = ()) -> None:
    """A panel for each activation, a row of panels for each case, a line for each step; above them `what` it is."""
    names = {"change": "RMS change since initialisation", "step": "steps taken"}
    moved = table[table["change"] > 0]
    shown = moved.replace({"case": PARAMETRIZATIONS, "activation": ACTIVATIONS}).rename(columns=names)
    shown["case"] = ["\n".join(textwrap.wrap(name, ROW)) for name in shown["case"]]
    with matplotlib.rc_context({"backend": "agg"}):
        sns.set_theme(context="notebook", style="whitegrid", font_scale=0.9)
        grid = sns.relplot(
            shown,
            x=against,
            y=names["change"],
            hue=names["step"],
            col="activation",
            row="case",
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
        lines = [part for line in what for part in textwrap.wrap(line, LINE)]
        grid.figure.suptitle("\n".join(lines), fontsize=10, y=1.0, va="bottom", parse_math=False)
        grid.savefig(path, dpi=150)
        plt.close(grid.figure)


def _measure_pack(case: str, trials: Sequence[Trial], corpus: Corpus) -> list[dict[str, object]]:
    pack, model = Pack(trials, corpus, torch.device("cpu")), trials[0].model
    initial, rows = _activations(pack), []
    of_all = {"case": case, "width": model.width, "depth": model.depth}

    def write(step: int, signals: Mapping[str, np.ndarray]) -> None:
        for name, now in _activations(pack).items():
            change, size = _root_mean_square(now - initial[name]), _root_mean_square(now)
            for row, planned in enumerate(pack.rows):
                at = {**of_all, "seed": trials[planned].seed, "activation": name, "step": step + 1}
                rows.append({**at, "change": change[row], "size": size[row]})

    train(pack, FaultSchedule([None] * len(trials)), 1, write, telemetry=False, detection=False)
    return rows


def _activations(pack: Pack) -> dict[str, Tensor]:
    """Activations on a batch of held-out windows, [R, ...]; scores of the future, at -inf, are set to zero."""
    first = pack.planned[0]
    last_block = f"blocks.{first.model.depth - 1}."
    activations: dict[str, Tensor] = {}

    def read(tap: str, x: Tensor) -> None:
        name = tap.removeprefix(last_block)
        if name in ACTIVATIONS:
            activations[name] = torch.where(x == -math.inf, 0.0, x)

    detach = pack.model.taps.attach("*", read)
    with torch.no_grad():
        starts = pack.objective.held_out(first.train.batch * first.model.context).flatten()
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
    return float(rate)


def _picture(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{shown(text)}: unknown kind of file; allowed: {', '.join(PICTURES)}")
    return Path(text)


def _parser(program: str) -> Parser:
    parser = Parser(prog=program, description=PURPOSE)
    widths = partial(_sizes, range(HEAD_DIM, WIDEST + 1, HEAD_DIM), f"multiples of {HEAD_DIM} up to {WIDEST}")
    depths = partial(_sizes, range(1, DEEPEST + 1), f"whole numbers from 1 to {DEEPEST}")
    steps, seeds = partial(_count, MOST_STEPS), partial(_count, LARGEST_PACK)
    figure = f"the figure to write ({', '.join(PICTURES)}); with keys it may be left out"
    keys = "recipe=NAME, mitigation=NAME and keys of a trial, as for sweep"
    parser.add_argument("words", metavar="OUT KEY=VALUE", nargs="*", help=f"{figure}; {keys}")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="of your own recipes and mitigations")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--widths", type=widths, help=f"default {','.join(map(str, WIDTHS))}")
    sizes.add_argument("--depths", type=depths, help=f"depths to compare instead, such as {','.join(map(str, DEPTHS))}")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), help="default adamw")
    parser.add_argument("--steps", type=steps, help=f"training steps, default {STEPS}")
    parser.add_argument(
        "--rate", type=_rate, help=f"learning rate, the same everywhere, default {RATES['adam']} for adamw"
    )
    parser.add_argument("--seeds", type=seeds, help=f"trials in each pack, default {SEEDS}")
    return parser


def main() -> None:
    """`python -m sweeps.commands.coordinate_check`."""
    if status := ended(lambda: check(sys.argv[1:], "python -m sweeps.commands.coordinate_check")):
        sys.exit(status)


def check(arguments: Sequence[str], program: str) -> None:
    """Measure, draw and print. Raises ConfigError for wrong input, and for what cannot be trained or drawn."""
    parser = _parser(program)
    options = parser.parse_intermixed_args(arguments)
    keys = [word for word in options.words if "=" in word and not word.startswith("out=")]
    files = [word.removeprefix("out=") for word in options.words if word not in keys]
    if not options.words:
        parser.error("the following arguments are required: out")
    out = _figure(parser, files)
    cases, against, words = _chosen(options, keys)
    table, left_out = finite_runs(measured(cases), cases, against, f"--rate={options.rate}" if options.rate else "")
    what = [*told(cases, against, words), *left_out]
    if out:
        _write(table, against, out, what)
    steps = cases[0].largest.train.steps
    last = slopes(table, against).xs(steps, level="step").unstack("case")
    last = last.reindex(columns=[case.name for case in cases])
    last = last.reindex(index=[name for name in ACTIVATIONS if name in set(table["activation"])])
    optimizers = " and ".join(dict.fromkeys(case.largest.optim.name for case in cases))
    say(f"Exponent of the change after {steps} steps of {optimizers} against the {against}:")
    say(*last.rename(index=ACTIVATIONS, columns=PARAMETRIZATIONS).round(2).to_string().split("\n"), *what)
    say(f"Figure: {out}" if out else "Figure: none, because no file was named")


def finite_runs(
    table: pd.DataFrame, cases: Sequence[Case], against: str, given: str = ""
) -> tuple[pd.DataFrame, list[str]]:
    """The rows of the runs that are finite after their last step, and a line for each case that loses runs.

    Raises ConfigError, by the rate that is `given`, where no case has a run that is finite and moves.
    """
    kept, lines, reasons = [], [], []
    for case in cases:
        steps = case.largest.train.steps
        runs = table[table["case"] == case.name].set_index([against, "seed"], drop=False)
        last = runs.loc[runs["step"] == steps, "change"].groupby(level=[0, 1])
        finite = last.max()[last.agg(lambda changes: np.isfinite(changes).all())]
        kept.append(runs[runs.index.isin(finite.index)])
        name, after = PARAMETRIZATIONS.get(case.name, case.name), "a step" if steps == 1 else f"{steps} steps"
        everyone = [(size, trial.seed) for size, trials in case.trials.items() for trial in trials]
        if not (finite > 0).any():
            reason, other = ("nothing moves in", "larger") if len(finite) else ("no run is finite after", "smaller")
            lines.append(f"{name}: {reason} {after}")
            rate = given or f"optim.lr={case.largest.optim.lr}"
            reasons.append(f"{rate}: {reason} {after}; allowed: a {other} rate")
        elif lost := [run for run in everyone if run not in finite.index]:
            sizes = ",".join(map(str, dict.fromkeys(size for size, _ in lost)))
            what = f"{len(lost)} of {count(len(everyone), 'run')} not finite after {after}, and left out"
            lines.append(f"{name}: {what} (model.{against}={sizes})")
    if len(reasons) == len(cases):
        raise ConfigError(*dict.fromkeys(reasons))
    return pd.concat(kept, ignore_index=True), lines


def _figure(parser: Parser, files: Sequence[str]) -> Path | None:
    """The file of the figure, None without one. Raises ConfigError."""
    if len(files) > 1:
        parser.error(f"unrecognized arguments: {' '.join(files[1:])}")
    try:
        return _picture(files[0]) if files else None
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument out: {error}")


def _chosen(options: argparse.Namespace, keys: Sequence[str]) -> tuple[list[Case], str, list[str]]:
    """What is compared; against the width or the depth; and the keys that say so. Raises ConfigError."""
    if not keys and options.config_dir is None:
        against = "depth" if options.depths else "width"
        sizes = options.depths or options.widths or WIDTHS
        steps, seeds, optimizer = options.steps or STEPS, options.seeds or SEEDS, options.optimizer or "adamw"
        ways = COMPARED[against]
        return [own_case(way, against, sizes, steps, options.rate, seeds, optimizer) for way in ways], against, []
    flags = {
        "--widths": ("model.width", options.widths and ",".join(map(str, options.widths))),
        "--depths": ("model.depth", options.depths and ",".join(map(str, options.depths))),
        "--optimizer": ("optim.name", options.optimizer),
        "--steps": ("train.steps", options.steps),
        "--rate": ("optim.lr", options.rate),
        "--seeds": ("seed", options.seeds and ",".join(map(str, range(options.seeds)))),
    }
    words, problems = list(keys), Problems()
    for flag, (key, value) in flags.items():
        if value is not None and (given := next((text for text in keys if text.partition("=")[0] == key), "")):
            problems.reasons[f"{given}: {flag} says the same; allowed: one of them"] = None
        words += [f"{key}={value}"] if value is not None else []
    problems.check()
    asked = CoordinateAxes.of(with_homes(words), named(options.config_dir))
    cases = asked.cases()
    for case in cases:
        check_memory(case.largest, len(case.trials[max(case.trials)]))
    return cases, asked.against, words


def _write(table: pd.DataFrame, against: str, out: Path, what: Sequence[str]) -> None:
    """Draw the figure. Raises ConfigError where it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(table, against, out, what)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError(f"{out}: {reason}; allowed: a file in a folder that you may write to") from None


if __name__ == "__main__":
    main()
