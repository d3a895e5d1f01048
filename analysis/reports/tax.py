"""What the command `tax` says of a results folder, in lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.again.step_costs import RecipeCost, recipe_costs
from analysis.again.sweep_folder import SweepFolder
from analysis.arithmetic.costs import checkpoint_interval, checkpoint_share, money
from analysis.measures.paired import Estimate
from analysis.measures.statistics import median_interval
from analysis.measures.tax import TaxedArm, break_even, taxed_arms
from analysis.reading.levels import word
from analysis.reading.selection import with_company
from analysis.reports.printed import table_lines
from harness.basics.printing import say
from harness.config import ConfigError

TIMED = (
    "time: a step of it over one without, {rounds} rounds by turns here, trained by itself from half time on; memory "
    "as planned for a GPU; state: what a checkpoint holds. "
)
UNTIMED = "No step was timed. "
SAID = (
    "Each at its own best rate. {timed}steps: those to the higher of both final losses, over seeds; total: {of}. "
    "failed: runs not trained, those with faults too. cost: expected to completion where a failed run is begun again, "
    "with and without it: + costs, - pays. even: the share of runs that it has to save. In brackets 95% intervals; "
    "that of cost is wider."
)
HOUR = 3600


@dataclass(frozen=True)
class CostInputs:
    """What a real run costs. None: of the steps and seconds as they were trained and measured here.

    `per_hour`: the price of a device and hour. `seconds`: of a step. `lost_steps`: in an incident. `between_failures`:
    hours. `write`: seconds of a checkpoint.
    """

    per_hour: float | None = None
    devices: float = 1.0
    seconds: float | None = None
    steps: float | None = None
    lost_steps: float | None = None
    between_failures: float | None = None
    write: float | None = None

    def check(self) -> None:
        """Raises ConfigError for a number that is not positive."""
        for name, value in vars(self).items():
            if value is not None and not 0 < value < np.inf:
                raise ConfigError(f"--{name.replace('_', '-')}={value}: out of range; allowed: a number above 0")


def told_tax(
    out: Path,
    axis: str = "mitigation",
    against: str = "none",
    rounds: int = 10,
    inputs: CostInputs = CostInputs(),
    device: str = "auto",
    data: Path | None = None,
    wheres: Sequence[str] = (),
) -> list[str]:
    """A table for each width, and what its numbers mean. With 0 `rounds` nothing is timed. Raises ConfigError."""
    inputs.check()
    if rounds < 0 or rounds == 1:
        raise ConfigError(f"--rounds={rounds}: out of range; allowed: 0, for no times, or 2 and more")
    folder = SweepFolder.open(out)
    try:
        arms = taxed_arms(with_company(folder.sweep, wheres), axis, against)
    except ConfigError as error:
        raise ConfigError(*(f"out={out}: {reason}" for reason in error.reasons)) from None
    if not arms:
        raise ConfigError(
            f"out={out}: no level of {axis} has finished trials beside {against}; allowed: a sweep of both"
        )
    readings, lines = folder.readings(data), []
    for place, group in groupby(arms, lambda arm: arm.place):
        rows, costs = [], None
        for arm in group:
            if rounds:
                say(f"{rounds} rounds of {axis}={arm.level} and {against}, {_place(place)}")
                own, base = readings(arm.trial), readings(arm.without)
                costs = recipe_costs(own, base, rounds, device)
            steps = inputs.steps or int(folder.sweep["steps"].sel(trial=arm.trial))
            rows.append(_row(arm, axis, costs, steps, inputs))
        lines += [f"{_place(place)}, against {axis}={against}", *table_lines(pd.DataFrame(rows)), ""]
        lines += _of_a_run(costs[1] if costs else None, steps, inputs)
    return [*lines, _said(rounds)]


def _said(rounds: int) -> str:
    if rounds:
        return SAID.format(timed=TIMED.format(rounds=rounds), of="both")
    return SAID.format(timed=UNTIMED, of="the same, without time")


def _place(place: dict[str, object]) -> str:
    return ", ".join(f"{name}={word(value)}" for name, value in place.items()) or "all trials"


def _row(
    arm: TaxedArm, axis: str, costs: tuple[RecipeCost, RecipeCost] | None, steps: float, inputs: CostInputs
) -> dict[str, object]:
    """Of an arm, and what a step of it and of the recipe without it cost."""
    ratios = costs[0].seconds / costs[1].seconds if costs else np.array([])
    total = arm.total(ratios)
    row: dict[str, object] = {axis: arm.level, "rate": word(arm.rate)}
    if costs:
        row["time"] = _share(Estimate(*median_interval(ratios)))
    row |= {"steps": _share(arm.steps), "total": _share(total)}
    if costs:
        own, base = costs
        row |= {"memory": f"{own.memory / base.memory - 1:+.1%}", "state": f"{own.state / base.state - 1:+.1%}"}
    row |= {"failed": _failed(arm.failed), "without": _failed(arm.failed_without)}
    row |= {"cost": _share(arm.expected(total)), "even": f"{break_even(total.value):.1%}"}
    more = max(0.0, total.value - 1)
    if inputs.lost_steps:
        row["incidents"] = f"{more * steps / inputs.lost_steps:.3g}"
    seconds = inputs.seconds or (float(np.median(costs[1].seconds)) if costs else None)
    if inputs.per_hour and seconds:
        row["price"] = f"{(total.value - 1) * money(steps, seconds, inputs.devices, inputs.per_hour):+,.2f}"
    return row


def _share(estimate: Estimate) -> str:
    value, low, high = (100 * (x - 1) for x in (estimate.value, estimate.low, estimate.high))
    if value != value:
        return "-"
    return f"{value:+.1f}%" + (f" [{low:+.1f}, {high:+.1f}]" if low == low and high == high else "")


def _failed(share: Estimate) -> str:
    return f"{share.value:.1%} of {share.seeds}"


def _of_a_run(base: RecipeCost | None, steps: float, inputs: CostInputs) -> list[str]:
    """What a run without any of it costs, and how often it should be saved."""
    lines = []
    seconds = inputs.seconds or (float(np.median(base.seconds)) if base else None)
    if inputs.per_hour and seconds:
        price = money(steps, seconds, inputs.devices, inputs.per_hour)
        lines.append(f"A run without: {steps:g} steps of {seconds:.3g} s on {inputs.devices:g} devices, {price:,.2f}.")
    if inputs.lost_steps:
        lines.append(f"incidents: of {inputs.lost_steps:g} lost steps, that it has to save a run of {steps:g} steps.")
    write = inputs.write or (base.write if base else None)
    if inputs.between_failures and write:
        between = inputs.between_failures * HOUR
        every = checkpoint_interval(write, between)
        size = f" of {base.state / 1e6:.3g} MB" if base else ""
        lines.append(
            f"A checkpoint{size} takes {write:.3g} s: with a failure in {inputs.between_failures:g} hours one is due "
            f"every {every:.3g} s, for {checkpoint_share(write, between, every):.2%} of the time with what is lost."
        )
    return [*lines, ""] if lines else []
