"""The rounds of a search: ask for points, train their trials as any sweep does, tell what came of them."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import optuna
from optuna.trial import TrialState
from rich.console import Console

from analysis.reading.levels import overrides
from analysis.reading.open_sweep import open_with_events
from harness.basics.printing import count
from harness.basics.terminal import Terminal
from harness.config import ConfigError, Problems, Trial
from harness.model.precision import pick_device
from harness.storage.results_folder import ResultsPath
from harness.storage.store import open_store
from harness.storage.stored import complete_trials
from harness.training.pack_sizes import rows_at_once
from sweeps.compose.grid import Composer
from sweeps.compose.overrides import Axis
from sweeps.compose.settings import RunSettings
from sweeps.planning.campaign import campaign_of
from sweeps.running.launch import run_sweep
from sweeps.running.ledger import are_claimed
from sweeps.running.local import Executor
from sweeps.search.edge import MaxStableRate
from sweeps.search.goal import Goal, rows_of, told
from sweeps.search.pareto import Pareto
from sweeps.search.studies import REASON, Studies
from sweeps.search.worst_fault import WorstFault

GOALS: dict[str, type[Goal]] = {goal.kind: goal for goal in (MaxStableRate, WorstFault, Pareto)}
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 60.0  # with a process that trains what is wanted here, before looking whether it still does


@dataclass(frozen=True)
class SearchPoint:
    """What was asked for, of which study, and the trials that it takes."""

    study: optuna.Study
    asked: optuna.Trial
    trials: Sequence[Trial]


def run_search(axes: Sequence[Axis], composer: Composer, run: RunSettings, executor: Executor, console: Console) -> int:
    """Search until nothing is left to ask. Returns the exit status, as `run_sweep` does.

    Raises ConfigError before anything is written if something about the search is wrong.
    """
    goal = GOALS[run.search.kind](axes, run.search)
    corners = composer.trials(list(goal.space.corners()))
    problems = Problems()
    for trial in corners:
        with problems.collect():
            if campaign_of(trial):
                reason = "a search draws its own faults; allowed: null"
                raise ConfigError(f"fault.samples={vars(trial.fault)['samples']}: {reason}")
    with problems.collect():
        goal.check(corners)
    problems.check()
    # All that a sweep refuses, before anything is written.
    quiet = Terminal(file=io.StringIO())
    run_sweep(corners, replace(run, plan=True), executor, quiet, is_rehearsal=not run.plan)
    search = Search(goal, composer, corners, run, executor, console)
    with search.studies.open():
        return search.ask_and_train()


@dataclass
class Search:
    """A search in one folder, by this process and perhaps by others."""

    goal: Goal
    composer: Composer
    corners: Sequence[Trial]
    run: RunSettings
    executor: Executor
    console: Console
    studies: Studies = field(init=False)
    _notices: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        notices = self.composer.notices(self.corners, self.run.idle)  # it may refuse, before anything is written
        self.studies = Studies(None if self.run.plan else open_store(self.run.out, self.run.study))
        where = [] if self.run.plan else [f"study {self.run.study} -> {self.run.out}"]
        space = self.goal.space
        about = f"search={self.goal.kind} of {', '.join(space.searched)} in {count(len(space.cells), 'cell')}"
        self._notices = [*where, about, *notices]

    def ask_and_train(self) -> int:
        """All rounds. Returns the exit status."""
        if first := self.goal.first(self.corners):
            if (status := self._train(first, "before the search")) is not None:
                return status
            if not self.run.plan:
                self.goal.check_first(first, open_with_events(self.run.out)[0])
        with self.studies.turn:
            studies = self._studies()
        rounds = 0
        while True:
            with self.studies.turn:
                points = [point for number, study in enumerate(studies) for point in self._ask(number, study)]
            trials = [trial for point in points for trial in point.trials]
            if self.run.plan:
                return self._train(trials, "") or 0
            if not points:
                if not any(study.get_trials(deepcopy=False, states=[TrialState.RUNNING]) for study in studies):
                    break
                time.sleep(POLL_SECONDS)  # another process has the last points
                continue
            rounds += 1
            status = self._train(trials, f"round {rounds}, {count(len(points), 'point')}")
            self._tell(points)
            if status is not None:
                return status
        asked = sum(len(told(study)) for study in studies)
        lines = [f"search={self.goal.kind}: {count(asked, 'point')} in {count(len(studies), 'cell')}"]
        for study, name in zip(studies, self.goal.space.names, strict=True):
            lines.append(f"  {overrides(name)}: {self.goal.summary(study)}")
        lines.append(f"results in {self.run.out}")
        self.console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
        return 0

    def _studies(self) -> list[optuna.Study]:
        goal, space, recipe = self.goal, self.goal.space, repr(sorted(self.composer.recipe().items()))
        about = {"kind": goal.kind, "objectives": list(goal.objectives), "searched": list(space.searched)}
        studies = []
        for cell, name in zip(space.cells, space.names, strict=True):
            # Another recipe, or another space, is another search.
            what = [goal.kind, *cell, *space.repeats, *map(repr, space.distributions.items()), recipe]
            digest = hashlib.sha256(repr(what).encode()).hexdigest()[:12]
            of_cell = about | {"cell": name, "trials": len(space.repeats)}
            studies.append(self.studies.study(f"{goal.kind} {name} {digest}", goal.directions, of_cell))
        return studies

    def _batch(self) -> int:
        """Points of each cell at a time: bisection goes one by one, others fill the packs of all workers."""
        if self.run.search.batch is not None:
            return self.run.search.batch
        if isinstance(self.goal, MaxStableRate):
            return 1
        first = self.corners[0]
        device = pick_device(self.run.device, first.train.precision)
        rows = rows_at_once(first.model, first.train.sequences, device) * self.executor.workers
        each = len(self.goal.space.repeats) * len(self.goal.space.cells)
        return max(1, rows // each)

    def _ask(self, number: int, study: optuna.Study) -> list[SearchPoint]:
        """The next points of a cell; what cannot be composed is told as failed."""
        self.studies.take_over(study)
        points: list[SearchPoint] = []
        for asked in self.goal.ask(self.studies, study, self._batch()):
            try:
                jobs = self.goal.space.jobs(self.goal.space.cells[number], asked.params)
                trials = {trial.id: trial for trial in map(self.composer.trial, jobs)}
            except ConfigError as error:
                asked.set_user_attr(REASON, str(error))
                study.tell(asked, state=TrialState.FAIL)
                continue
            points.append(SearchPoint(study, asked, list(trials.values())))
        return points

    def _train(self, trials: Sequence[Trial], name: str) -> int | None:
        """The exit status with which to stop; None once all trials, and their golden twins, are complete, or planned.

        `name` is the round's.
        """
        unique = list({trial.id: trial for trial in trials}.values())
        wanted = {trial.id for trial in unique} | {trial.golden.id for trial in unique}
        while True:
            status = run_sweep(unique, self.run, self.executor, self.console, self._notices, name)
            self._notices = ()
            if status:
                return status
            if self.run.plan or wanted <= complete_trials(self.run.out):
                return None
            if not self.run.wait:
                return 0
            # Another process trains some of these: until it is done with them, or for a while.
            end, folder = time.monotonic() + PATIENCE_SECONDS, ResultsPath.open(self.run.out)
            while time.monotonic() < end and wanted - complete_trials(self.run.out) and are_claimed(folder, wanted):
                time.sleep(POLL_SECONDS)

    def _tell(self, points: Iterable[SearchPoint]) -> None:
        """Judge the points whose trials are complete. Others stay open, for the next command."""
        sweep, events = open_with_events(self.run.out)
        complete = set(sweep["trial"].values[sweep["complete"].values])
        for point in points:
            trials = {trial.id: trial for trial in (*point.trials, *(trial.golden for trial in point.trials))}
            if not trials.keys() <= complete:
                continue
            part = sweep.isel(trial=sorted(rows_of(list(trials.values()), sweep)))
            judged = self.goal.judge(point.trials, part, events)
            with self.studies.turn:
                point.asked.set_user_attr("ids", [trial.id for trial in point.trials])
                for key, value in judged.about.items():
                    point.asked.set_user_attr(key, value)
                state = TrialState.COMPLETE if judged.values is not None else TrialState.FAIL
                point.study.tell(point.asked, judged.values, state=state)
