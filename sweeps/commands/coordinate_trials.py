"""What a coordinate check trains: its own small models, or what a recipe, a mitigation and keys say.

Both are short runs of equal length at one rate, without warm-up or decay, on synthetic text. What else the check sets
is in `RUN` and `OPTIM`; a key of the command line has the last word over that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.basics.memory import main_memory
from harness.basics.printing import label
from harness.config import ConfigError, Data, Model, Optim, Problems, Schedule, Train, Trial, shown
from harness.optim.optimizers import OPTIMIZERS
from sweeps.commands.coordinate_keys import check_key
from sweeps.compose.grid import Composer
from sweeps.compose.hydra_calls import config_loader
from sweeps.compose.overrides import Axis, axis_of
from sweeps.compose.places import NONE, PLAIN, check_folder
from sweeps.planning.planner import check_weights

WIDTHS, DEPTHS, STEPS, SEEDS = (64, 128, 256, 512, 1024), (2, 4, 8, 16), 4, 3
RATES = {"adam": 1e-2, "sgd": 0.3, "relative": 0.05, "lars": 5.0}  # by optimizer, or by the rule of its updates' size
BASE_WIDTH, BASE_DEPTH, HEAD_DIM, CONTEXT, BATCH, VOCABULARY, TOKENS = 64, 2, 32, 16, 4, 256, 200_000
PARAMETRIZATIONS = {"standard": "standard", "mup": "muP", "completep": "CompleteP"}
COMPARED = {"width": ("standard", "mup"), "depth": ("standard", "mup", "completep")}
RUN: dict[str, Any] = {
    "model.width": BASE_WIDTH,
    "model.depth": BASE_DEPTH,
    "model.head_dim": HEAD_DIM,
    "model.context": CONTEXT,
    "model.base_width": BASE_WIDTH,
    "model.base_depth": BASE_DEPTH,
    "schedule.warmup": 0,
    "schedule.decay": "constant",
    "train.batch": BATCH,
    "train.validate_tokens": 1,
    "train.validate_between": 1,
    "data.source": "zipf",
    "data.length": TOKENS,
}
"""Of every check: sizes, and a rate that stays as it is."""
# A limit of the gradient's norm, which grows with the width, would be another rate at each.
OPTIM: dict[str, Any] = {"optim.beta2": 0.999, "optim.weight_decay": 0.0, "optim.clip": None}
"""Of a check without recipe=NAME, which has values of its own."""
TOLD = ("optim.name", "optim.lr", *OPTIM, *RUN, "model.parametrization", "model.zero_head", "model.init")
UNTOLD = ("train.validate_tokens", "train.validate_between", "data.length")
MOST_CASES = 8


@dataclass(frozen=True)
class Case:
    """One configuration at every size: a row of panels. `trials` are by size, one a seed."""

    name: str
    trials: Mapping[int, Sequence[Trial]]

    @property
    def largest(self) -> Trial:
        """A trial of the largest size."""
        return self.trials[max(self.trials)][0]


def rate_of(optimizer: str) -> float:
    """The rate of a check that is given none."""
    rule, _, _ = OPTIMIZERS[optimizer].rule.partition("_")
    return RATES.get(optimizer, RATES[rule])


def own_case(
    parametrization: str, against: str, sizes: Sequence[int], steps: int, rate: float | None, seeds: int, optimizer: str
) -> Case:
    """The check's own models in one parametrisation, at these widths or depths; ConfigError if they take too much."""
    firsts = {size: _own(parametrization, {against: size}, steps, rate, optimizer) for size in sizes}
    check_memory(firsts[max(sizes)], seeds)
    trials = {size: [replace(first, seed=seed) for seed in range(seeds)] for size, first in firsts.items()}
    return Case(parametrization, trials)


def check_memory(largest: Trial, seeds: int) -> None:
    """Raises ConfigError where the weights of so many trials do not fit."""
    check_weights([largest], main_memory() / seeds)


def _own(parametrization: str, size: Mapping[str, int], steps: int, rate: float | None, optimizer: str) -> Trial:
    """`size` is the width or the depth.

    The head starts at zero but for the standard parametrisation, as microsoft/mup has it in its own check: random
    logits shrink as 1/sqrt(m) beside what training adds. Over the depth the last matrix of each branch starts at zero:
    what random branches add falls with depth in CompleteP, and takes gradients along. A step that is relative to the
    weights needs weights, and does not follow the size of gradients.
    """
    is_relative = OPTIMIZERS[optimizer].rule.startswith("relative")
    model = Model(
        width=size.get("width", BASE_WIDTH),
        depth=size.get("depth", BASE_DEPTH),
        head_dim=HEAD_DIM,
        context=CONTEXT,
        parametrization=parametrization,
        base_width=BASE_WIDTH,
        base_depth=BASE_DEPTH,
        init="zero_residual" if "depth" in size and not is_relative else "standard",
        zero_head=parametrization != "standard" and not is_relative,
    )
    lr = rate_of(optimizer) if rate is None else rate
    optim = Optim(name=optimizer, lr=lr, beta2=0.999, weight_decay=0.0, clip=None)
    length = Train(steps, BATCH, validate_every=steps, validate_tokens=1, validate_between=1)
    data, schedule = Data(source="zipf", vocabulary=VOCABULARY, length=TOKENS), Schedule(warmup=0, decay="constant")
    return Trial(model, optim, schedule, length, data=data)


# --- what a command line asks for -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoordinateAxes:
    """The axes of a command line, by key; `against` the width or the depth."""

    axes: Mapping[str, Axis]
    against: str
    composer: Composer

    @classmethod
    def of(cls, words: Sequence[str], folder: Path | None) -> CoordinateAxes:
        """Checks every word. Raises ConfigError with all that is wrong with them."""
        check_folder(folder)
        loader, problems = config_loader(folder), Problems()
        axes: dict[str, Axis] = {}
        for text in words:
            with problems.collect():
                check_key(text)
                axis = axis_of(text, loader)
                if axis.interval:
                    raise ConfigError(f"{text}: an interval has no values; allowed: values with commas, or range()")
                if axis.key == "train.steps" and len(axis.values) > 1:
                    raise ConfigError(f"{text}: several lengths cannot be compared; allowed: one value")
                if axis.key in axes:
                    raise ConfigError(f"{axes[axis.key].text} {text}: {axis.key} is given twice; allowed: once")
                axes[axis.key] = axis
        problems.check()
        several = [key for key in ("model.width", "model.depth") if key in axes and len(set(axes[key].values)) > 1]
        if len(several) > 1:
            raise ConfigError(f"{axes['model.width'].text} {axes['model.depth'].text}: allowed: several of one of them")
        return cls(axes, "depth" if several == ["model.depth"] else "width", Composer(loader, "grid", frozenset(axes)))

    def cases(self) -> list[Case]:
        """Raises ConfigError for what cannot be trained, or compared."""
        sizes, others = self._sizes(), [axis for key, axis in self.axes.items() if key not in (self._key, "seed")]
        cells = list(itertools.product(*(axis.overrides for axis in others)))
        ways = [None] if {"mitigation", "model.parametrization"} & self.axes.keys() else COMPARED[self.against]
        if len(cells) * len(ways) > MOST_CASES:
            given = " ".join(axis.text for axis in others if len(axis.values) > 1)
            raise ConfigError(f"{given}: {len(cells)} combinations; allowed: at most {MOST_CASES // len(ways)}")
        varying = [axis.key for axis in others if len(axis.values) > 1]
        naming = [] if ways != [None] else [axis.key for axis in others if axis.key != "train.steps"]
        jobs: dict[str, dict[int, list[list[str]]]] = {}
        for cell, way in itertools.product(cells, ways):
            words = [text for text in cell if text.partition("=")[0] in (varying or naming)]
            name = label(" ".join([*([PARAMETRIZATIONS[way]] if way else ()), *words]))
            jobs[name] = {size: self._jobs(cell, size, way) for size in sizes}
        # All at once: a key has to reach one of them.
        self.composer.trials([job for of_case in jobs.values() for of_size in of_case.values() for job in of_size])
        return [
            Case(name, {size: _of_one_length(map(self.composer.trial, some)) for size, some in of_case.items()})
            for name, of_case in jobs.items()
        ]

    @property
    def _key(self) -> str:
        return f"model.{self.against}"

    def _sizes(self) -> list[int]:
        """Raises ConfigError for a single one."""
        if self._key not in self.axes:
            return list(WIDTHS)
        sizes = sorted({int(value) for value in self.axes[self._key].values})
        if len(sizes) < 2:
            allowed = f"two or more, such as {','.join(map(str, WIDTHS))}; or model.depth={','.join(map(str, DEPTHS))}"
            raise ConfigError(f"{self.axes[self._key].text}: one size tells of no change; allowed: {allowed}")
        return sizes

    def _jobs(self, cell: Iterable[str], size: int, way: str | None) -> list[list[str]]:
        """The overrides of a trial a seed, of one size. Raises ConfigError."""
        given = dict(text.split("=", 1) for text in cell)
        settings = {**RUN, **({} if "recipe" in given else OPTIM), "train.steps": STEPS, self._key: size}
        usual = self.composer.trial(_texts({**settings, **given}))
        is_relative = OPTIMIZERS[usual.optim.name].rule.startswith("relative")
        if "recipe" not in given:
            settings["optim.lr"] = rate_of(usual.optim.name)
        if way:
            settings["model.parametrization"] = way
            settings["model.zero_head"] = way != "standard" and not is_relative and not usual.model.tied_head
        if way and self.against == "depth" and not is_relative:
            settings["model.init"] = "zero_residual"
        settings["train.validate_every"] = usual.train.steps
        seeds = dict.fromkeys(self.axes["seed"].values if "seed" in self.axes else map(str, range(SEEDS)))
        return [_texts({**settings, **given, "seed": seed}) for seed in seeds]


def _of_one_length(trials: Iterable[Trial]) -> list[Trial]:
    """The trials. Raises ConfigError for more steps than are asked for, as where batches grow."""
    kept = list(trials)
    for trial in kept:
        if trial.steps != trial.train.steps:
            growth = {f"schedule.{name}": getattr(trial.schedule, name) for name in ("batch_start", "sequence_start")}
            given = " ".join(f"{key}={value}" for key, value in growth.items() if value is not None)
            reason = f"{trial.steps} steps for as many tokens as train.steps={trial.train.steps} of others"
            raise ConfigError(f"{given}: {reason}; allowed: null, or schedule.sequence_mode=reshape")
    return kept


def _texts(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value if isinstance(value, str) else shown(value)}" for key, value in values.items()]


# --- in words -------------------------------------------------------------------------------------------------------


def told(cases: Sequence[Case], against: str, words: Sequence[str] = ()) -> list[str]:
    """What was checked: a line of what all cases have, and one for each with what it has alone."""
    described = [_described(case, against, words) for case in cases]
    common = {key: value for key, value in described[0].items() if all(other.get(key) == value for other in described)}
    sizes = ",".join(map(str, sorted(cases[0].trials)))
    seeds = ",".join(str(trial.seed) for trial in next(iter(cases[0].trials.values())))
    first = [f"{key}={value}" for key, value in common.items()]
    lines = [" ".join(["Checked:", *first, f"model.{against}={sizes}", f"seed={seeds}"])]
    for case, values in zip(cases, described, strict=True):
        own = [
            f"{key}={value}"
            for key, value in values.items()
            if key not in common and f"{key}={value}" not in case.name.split()
        ]
        if own:
            lines.append(f"{PARAMETRIZATIONS.get(case.name, case.name)}: {' '.join(own)}")
    return lines


def _described(case: Case, against: str, words: Sequence[str]) -> dict[str, str]:
    """Keys of a case and their values, as they are in its trials."""
    trial = case.largest
    names = {"recipe": trial.recipe, "mitigation": trial.mitigation}
    values = {key: name for key, name in names.items() if name not in (PLAIN, NONE)}
    keys = [text.partition("=")[0] for text in words]
    for key in dict.fromkeys((*TOLD, *keys)):
        section, _, field = key.partition(".")
        if field and key not in (*UNTOLD, f"model.{against}"):
            outer = key.rpartition(".")[0]
            values[key] = shown(getattr(trial.section(outer), key.rpartition(".")[2]))
    return values
