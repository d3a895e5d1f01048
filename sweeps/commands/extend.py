"""`stability-harness extend OUT --steps N`: finished trials go on, as if they had been asked for N steps.

A trial of a sweep with `keep=state` and the same one with more steps are one run up to the step before which its state
was kept. So the longer one has the stored signals of the shorter one up to there, and is trained from there on. It is a
trial of its own, beside the shorter one, and bit for bit what a sweep with `train.steps=N` would have trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from analysis.reading.open_sweep import dataset_of
from analysis.reading.selection import selected
from harness.basics.errors import PROGRAM
from harness.basics.printing import count
from harness.basics.terminal import Terminal
from harness.config import ConfigError, Problems, Trial, trial_from_dict
from harness.config.limits import MOST_STEPS
from harness.guards.playbook import goes_back
from harness.storage.checkpoint import Checkpoints
from harness.storage.kept_rows import begin_longer
from harness.storage.kept_states import KeptState, kept_states
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import STORE, PackInfo, is_complete, read_signal, read_store
from harness.training.config_checks import check_trial
from harness.training.longer import follows, longer, shared_steps
from injectors import fault_types
from sweeps.commands.retry import words_again
from sweeps.commands.sweep import explained, sweep
from sweeps.compose.arguments import check_of_run
from sweeps.planning.packs import PackPlan
from sweeps.running.job import CHECKPOINTS
from sweeps.running.ledger import Claim, claim, lock_of
from sweeps.running.locks import owned


@dataclass(frozen=True)
class Continued:
    """A pack of longer trials, the state from which it goes on, and where its stored trials are."""

    plan: PackPlan
    state: KeptState
    rows: Sequence[tuple[PackInfo, int]]  # of each recorded trial, as it was with fewer steps


@dataclass(frozen=True)
class Extension:
    """Trials of a results folder with more steps; a `Begun` of `sweeps/running/launch.py`."""

    out: Path
    steps: int
    stored: Mapping[str, tuple[PackInfo, int]]
    shorter: Sequence[Trial]
    states: Mapping[str, KeptState]  # of each of them, by its id
    notes: list[str] = field(default_factory=list)
    _begun: dict[str, Continued] = field(default_factory=dict)

    @cached_property
    def trials(self) -> Sequence[Trial]:
        return [longer(trial, self.steps) for trial in self.shorter]

    def packs(self, known: Sequence[PackPlan], settled: Set[str]) -> list[PackPlan]:
        """One for each state from which trials go on, in the order in which they were planned."""
        settled = settled | {trial.id for pack in known for trial in pack.recorded}
        wanted = {short.id: new.id for short, new in zip(self.shorter, self.trials, strict=True)}
        taken: set[str] = set()
        for state in dict.fromkeys(self.states.values()):
            short = [trial_from_dict(config, fault_types()) for config in state.pack["trials"]]
            new = [longer(trial, self.steps) for trial in short]
            recorded = {
                trial.id: longest.id
                for trial, longest in zip(short, new, strict=True)
                if trial.id in wanted and self.states[trial.id] is state and longest.id not in settled | taken
            }
            if recorded:
                taken |= set(recorded.values())
                plan = PackPlan(tuple(new), frozenset(trial.id for trial in new) - set(recorded.values()))
                self._begun[plan.id] = Continued(plan, state, [self.stored[trial] for trial in recorded])
        return [continued.plan for continued in self._begun.values()]

    def begin(self, folder: ResultsPath) -> None:
        """Have each pack as one that was stopped at its state: what is stored up to there, and a checkpoint."""
        for name, continued in self._begun.items():
            with owned(lock_of(folder, name)) as is_own:
                if is_own and not is_complete(folder.root, name):
                    _begin(folder, continued)

    def differing(self) -> list[str]:
        """The longer trials whose losses are not those of the shorter ones, as far as both are one run; in words."""
        now, found = dict(_stored(self.out)), []
        for short, new in zip(self.shorter, self.trials, strict=True):
            if new.id not in now or goes_back(short):  # what was done anew in the one need not be in the other
                continue
            (pack, row), (other, its_row) = self.stored[short.id], now[new.id]
            length = min(shared_steps(short, new) + 1, short.steps)  # a loss comes before the update of its step
            one, two = read_signal(pack, "loss", 0, length)[row], read_signal(other, "loss", 0, length)[its_row]
            is_same = (one == two) | (np.isnan(one) & np.isnan(two))
            if not is_same.all():
                found.append(f"{new.id} from {short.id} from step {int(np.argmin(is_same))} on")
        return found


def extend(out: Path, steps: int, wheres: Sequence[str], words: Sequence[str]) -> int:
    """Train the chosen trials on to `steps`. Returns the exit status: 1 also where they are not what they were.

    Killed at any moment, the same command goes on. Raises ConfigError, before anything is written.
    """
    check_of_run(words)
    more = extension(out, steps, wheres)
    arguments = words_again(out, words)
    with explained(arguments):
        status, _ = sweep(arguments, more=more)
    if differing := [] if status else more.differing():
        Terminal().print(_said_of(differing), highlight=False, soft_wrap=True)
        return 1
    return status


def extension(out: Path, steps: int, wheres: Sequence[str]) -> Extension:
    """The chosen trials of a folder with more steps. Raises ConfigError, with every reason why they cannot go on."""
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"--steps {steps}: no number of steps; allowed: 1 to {MOST_STEPS}")
    attributes, packs = read_store(out)
    known = list(packs)
    sweep = dataset_of(attributes, known)
    chosen = set(selected(sweep, wheres)["trial"].values.tolist())
    chosen |= set(sweep["golden"].values[np.isin(sweep["trial"].values, sorted(chosen))].tolist())
    stored = {trial: where for trial, where in _rows(known) if trial in chosen}
    ended = [trial for trial, (pack, row) in stored.items() if _ended(pack, row)]
    trials = [
        trial_from_dict(pack.attributes["trials"][row], fault_types())
        for trial, (pack, row) in stored.items()
        if trial not in ended
    ]
    trials = [trial for trial in trials if trial.train.steps != steps]
    notes = [f"{count(len(ended), 'trial')} not finite at the end, left as they are"] if ended else []
    if lacking := len(chosen) - len(stored):
        notes.append(f"{count(lacking, 'trial')} not finished, left as they are")
    if not trials:
        raise ConfigError(f"out={out}: no trial of fewer steps that could go on; allowed: finished, finite trials")
    return Extension(out, steps, stored, trials, _states(out, trials, steps), notes)


def _states(out: Path, trials: Iterable[Trial], steps: int) -> dict[str, KeptState]:
    """The latest state of each trial that it shares with the longer one. Raises ConfigError."""
    states, found = kept_states(ResultsPath.open(out)), {}
    shorter, unkept, fallen = [], [], []
    problems = Problems()
    for trial in trials:
        if trial.train.steps > steps:
            shorter.append(trial)
            continue
        new = longer(trial, steps)
        with problems.collect():
            check_trial(new)
            if others := follows(trial, new):
                what = f"optim.name={trial.optim.name}: {', '.join(others)} would follow the length of the run"
                raise ConfigError(f"{what}; allowed: trials with that given in steps")
        shared, its = shared_steps(trial, new), [state for state in states if trial.id in state.ids]
        if usable := next((state for state in its if state.step <= shared), None):
            found[trial.id] = usable
        elif shared < trial.steps:
            fallen.append((trial, shared))
        else:
            unkept.append(trial)
    if shorter:
        longest = max(trial.train.steps for trial in shorter)
        why = f"{count(len(shorter), 'trial')} of more, up to {longest}"
        problems.reasons[f"--steps {steps}: {why}; allowed: more steps than they have, or fewer trials by --where"] = (
            None
        )
    if fallen:
        trial, shared = fallen[0]
        decays = ",".join(sorted({trial.schedule.decay for trial, _ in fallen}))
        why = f"the learning rate of {count(len(fallen), 'trial')} had fallen since step {shared}, for a run of"
        start = f"new ones from their last weights (model.start={out}/weights/{trial.id}.safetensors, with keep=state)"
        allowed = f"trials with schedule.decay=constant, or =wsd and keep=state; or {start}"
        problems.reasons[f"schedule.decay={decays}: {why} {trial.train.steps} steps; allowed: {allowed}"] = None
    if unkept:
        why = f"no state of {count(len(unkept), 'trial')} is there to go on from"
        again = f"the sweep's command with train.steps={steps}, which trains them from their first step"
        problems.reasons[f"out={out}: {why}; allowed: trials of a sweep with keep=state, or {again}"] = None
    problems.check()
    return found


def _ended(pack: PackInfo, row: int) -> bool:
    return pack.attributes["nonfinite_step"][row] is not None


def _rows(packs: Iterable[PackInfo]) -> Iterable[tuple[str, tuple[PackInfo, int]]]:
    """Where each finished trial is."""
    for pack in packs:
        if pack.complete:
            yield from ((trial, (pack, row)) for row, trial in enumerate(pack.attributes["ids"]))


def _stored(out: Path) -> Iterable[tuple[str, tuple[PackInfo, int]]]:
    return _rows(read_store(out)[1])


def _begin(folder: ResultsPath, continued: Continued) -> None:
    """Begin a pack, unless it was begun already."""
    plan, first = continued.plan, continued.plan.trials[0]
    checkpoints = Checkpoints(folder / CHECKPOINTS / plan.id, about=plan.to_dict())
    if checkpoints.latest is not None and (folder / STORE / plan.id).exists():
        return
    saved = continued.state.read()
    claim(folder, Claim(plan.id, frozenset(trial.id for trial in plan.recorded)))
    begin_longer(folder, plan.id, plan.recorded, first.steps, continued.rows, continued.state.step)
    # What a row may still go back to stands in the state, and in the store perhaps as it was done anew since.
    recorded = saved.values["recorder"]
    values = {**saved.values, "recorder": {**recorded, "pending": sorted(first for first, _ in recorded["blocks"])}}
    checkpoints.write(saved.step, saved.tensors, values)


def _said_of(differing: Sequence[str]) -> str:
    """What to say of longer trials that are not their shorter ones."""
    which = f"{count(len(differing), 'trial')} differ from what they were with fewer steps, such as {differing[0]}"
    why = "this machine or version does not compute as the one before did"
    return f"{which}: {why}; remove them by `{PROGRAM} remove`, and train them from their first step"
