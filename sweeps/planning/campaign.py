"""Campaigns: a fault that is described by patterns and ranges becomes many faults, drawn from all that it allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError, Trial
from harness.faults.facts import facts_of
from injectors.addresses import Address, Population, half_width, in_order, sample, strata, stratum_of
from injectors.value import MOST_FAULTS, Value


@dataclass(frozen=True)
class Campaign:
    """A trial whose fault is a description, and all faults that it allows."""

    trial: Trial
    fault: Value
    population: Population
    samples: int  # faults of it that are to be trained

    @property
    def seed(self) -> int:
        """That of its draws."""
        return self.fault.campaign_seed(self.trial.seeds["fault"])

    def trials(self, most: int) -> list[Trial]:
        """The trials, each with its own fault; at most the first `most` of them."""
        seed = self.seed
        order = islice(in_order(self.population, seed, self.fault.weight, self.fault.stratify), min(self.samples, most))
        return [dataclasses.replace(self.trial, fault=self.fault.at(address, seed)) for address in order]

    def stratum(self, trial: Trial) -> str:
        """The stratum to which one of its trials belongs."""
        assert isinstance(trial.fault, Value) and trial.fault.element is not None
        address = Address(trial.fault.tensor, trial.fault.element, trial.fault.bit, trial.fault.start)
        return stratum_of(address, self.population, self.fault.stratify)

    def description(self) -> str:
        """The population and what a sample of it will tell, for the plan."""
        size = self.population.size
        share = f"{self.samples / size:.0%}" if self.samples / size >= 0.01 else "under 1%"
        return (
            f"campaign {self.fault.name} at {self.fault.site}: {self.samples} of {size:,} faults ({share}); "
            f"the 95% interval of a share of them will be at most {2 * half_width(self.samples):.3f} wide"
        )


def campaign_of(trial: Trial) -> Campaign | None:
    """The campaign that a trial's fault describes, if it does. Raises ConfigError if it allows too few faults."""
    fault = trial.fault
    if not isinstance(fault, Value) or fault.samples is None:
        return None
    population = fault.population(facts_of(trial))
    if fault.samples > population.size:
        raise ConfigError(
            f"fault.samples={fault.samples}: the description allows {population.size} different faults; "
            f"allowed: 1 to {population.size}"
        )
    return Campaign(trial, fault, population, fault.samples)


def check_samples(campaigns: Sequence[Campaign]) -> None:
    """Raise ConfigError for more faults than one command can plan."""
    if (total := sum(campaign.samples for campaign in campaigns)) > MOST_FAULTS:
        raise ConfigError(
            f"fault.samples={max(campaign.samples for campaign in campaigns)}: {total:,} faults of {len(campaigns)} "
            f"descriptions; allowed: {MOST_FAULTS:,} in all, and as many again by a command with another fault.seed"
        )


def envelope(campaigns: Sequence[Campaign], last_bit: Value, twins: int) -> Iterator[Trial]:
    """For each recipe of the campaigns `twins` golden trials, or a few more, with the last bit of one weight changed.

    It changes at the earliest step of the recipe's campaigns, so they have at least as long to drift apart.
    """
    starts: dict[tuple[Any, ...], dict[Trial, int]] = {}
    for campaign in campaigns:
        golden = campaign.trial.golden
        recipe = (golden.structure, golden.optim, golden.schedule, golden.train, golden.mitigation)
        known = starts.setdefault(recipe, {})
        known[golden] = min(campaign.fault.start, known.get(golden, campaign.fault.start))
    for goldens in starts.values():
        each = math.ceil(twins / len(goldens))
        for golden, start in goldens.items():
            fault = dataclasses.replace(last_bit, start=start, duration=1, samples=each)
            population = fault.population(facts_of(golden))
            if each > population.size:
                reason = f"{each} golden runs with a last bit changed, of {population.size} that a recipe allows"
                raise ConfigError(f"campaign.envelope={twins}: {reason}; allowed: fewer")
            for address in sample(population, each, golden.seeds["fault"]):
                yield dataclasses.replace(golden, fault=fault.at(address, golden.seeds["fault"]))


def widest_interval(out: Path, campaigns: Sequence[Campaign], most: int) -> float:
    """The width of the widest 95% Wilson interval of a stratum's share of masked faults, over all that is judged.

    `most` is how many faults of each campaign have been asked for. A stratum of which nothing is judged yet counts 1;
    where that is so because its faults changed nothing, the upper end of the share of those that would.
    """
    from analysis.measures.outcomes import IDLE, MASKED, OUTCOMES, outcomes_and_notes
    from analysis.measures.statistics import wilson_interval
    from analysis.reading.open_sweep import open_sweep

    sweep, _ = outcomes_and_notes(open_sweep(out))
    outcomes = dict(zip(sweep["trial"].values, sweep["fault_outcome"].values, strict=True))
    counts: list[list[int]] = []
    for campaign in campaigns:
        by_stratum = {name: [0, 0, 0] for name in strata(campaign.population, campaign.fault.stratify)}
        for trial in campaign.trials(most):
            outcome = outcomes.get(trial.id)
            by_stratum[campaign.stratum(trial)][0] += outcome == MASKED
            by_stratum[campaign.stratum(trial)][1] += outcome in OUTCOMES
            by_stratum[campaign.stratum(trial)][2] += outcome == IDLE
        counts += by_stratum.values()
    masked, judged, idle = np.array(counts).T
    low, high = wilson_interval(masked, judged)
    widths = np.where(judged > 0, high - low, wilson_interval(0 * idle, idle)[1])
    return float(np.nan_to_num(widths, nan=1.0).max())
