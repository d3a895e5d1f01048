"""The promises that every fault keeps, as assertions: for those of this project and for a plug-in's own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import NO_FAULT, Fault, Trial
from harness.loop.loop import train
from harness.testing import engine
from harness.testing.promises import Promises
from harness.training.pack import Pack
from harness.training.sites import Event, FaultSchedule, Injector, Site, SiteCall

START, STEPS = 4, 8
SHAPE = {"ranks": 2, "warmup": 6, "qk_norm": True, "clip": 1.0, "loss_scaling": "static", "loss_scale": 1024.0}
"""Two ranks, a warm-up and a loss scale, so that every kind of fault has something to strike."""
SEEDS = (1, 7, 2)  # of neighbours
STARTS = (2, 4, 5)  # of forks
DOOMED: Mapping[str, Any] = {"lr": 1e30, "warmup": 0, "clip": None}
RUINS = (float("nan"), float("inf"), float("-inf"), 3e38)  # weights of trials that are struck in ruins


def check_fault(fault: Fault, **fields: Any) -> None:
    """Hold a fault to every promise of this page, in packs of small trials on the CPU; some seconds.

    Args:
        fault: One of a plug-in, with its fields; where it starts and how long it lasts is chosen here.
        **fields: Of the trials that it strikes, by short names as `engine.trial` takes them: `optimizer="lion"`.

    Raises:
        AssertionError: It breaks a promise; the text names it.
        ConfigError: The trials cannot have the fault; `fields` may give it what it needs.
    """
    promises = FaultPromises([fault.name], lambda case: dataclasses.replace(fault, start=START), fields)
    promises.check_all(fault.name)


class FaultPromises(Promises):
    """The promises, each a method that takes a case: the name of a fault.

    All faults are trials of one pack, which is trained once for each promise, when the first of them is asked for.
    """

    def __init__(self, cases: Sequence[str], fault_of: Callable[[str], Fault], fields: Mapping[str, Any] | None = None):
        """`fault_of` gives the fault of a case, which starts at step START; `fields` are those of its trial."""
        super().__init__()
        self._cases, self._fault_of, self._fields = list(cases), fault_of, {**SHAPE, "batch": 4, **(fields or {})}
        self._number = {case: number for number, case in enumerate(self._cases)}
        self._kept: dict[Any, Any] = {}

    # --- control equals nothing ---------------------------------------------------------------------------------

    def it_changes_no_bit_before_it_is_due(self, case: str) -> None:
        """An armed fault that starts after the run leaves a golden run."""
        armed, own = self._everyone(start=STEPS), self._number[case]
        golden = self.healthy(7, 7)[0]
        assert [engine.same_bits(armed[number], golden) for number in (own, len(self._cases))] == [[], []]
        assert armed.result.events[own] == [] and armed.result.strikes[own] == 0

    def it_lasts_to_the_end_at_most(self, case: str) -> None:
        """One that lasts past the end of the run is one that lasts to it."""
        short, long, permanent = (self._everyone(duration=duration) for duration in (STEPS - START, 999, None))
        own, golden = self._number[case], self.healthy(7, 7)[0]
        for other in (long, permanent):
            assert engine.same_bits(short[own], other[own]) == []
            assert short.result.strikes[own] == other.result.strikes[own]
            assert engine.same_bits(other[len(self._cases)], golden) == []

    def it_keeps_its_period(self, case: str) -> None:
        """It strikes at its steps and at no other."""
        found = self._everyone(duration=4, period=2)
        steps = {event.step for event in found.result.events[self._number[case]]}
        assert steps <= {START, START + 2} and START in steps

    # --- twins and isolation ------------------------------------------------------------------------------------

    def it_leaves_its_twin_and_its_neighbours_alone(self, case: str) -> None:
        """Equal to its twin up to the strike, with a record of each; its neighbours are equal throughout."""
        for forks in (False, True):
            found, own, plain = self.between_neighbours(forks), 2 * self._number[case] + 1, self.healthy(*SEEDS)
            twin, result = 2 * SEEDS.index(7), found.result
            assert {event.step for event in result.events[own]} <= set(range(START, STEPS)), "a record of every strike"
            assert result.events[own] and result.events[own][0].step == START and result.events[own][0].changed
            before, later = slice(START), slice(START, None)
            assert engine.same_bits(signals(found, own, before), signals(found, twin, before)) == []
            masked = result.masked_step[own]
            if masked is None:
                assert engine.same_bits(signals(found, own, later), signals(found, twin, later))
            else:
                after = slice(masked + 1, None)
                assert engine.same_bits(signals(found, own, after), signals(found, twin, after)) == []
            for neighbour in (own - 1, own + 1):
                assert engine.same_bits(found[neighbour], plain[neighbour // 2 % 3]) == []
            same = engine.same_bits(engine.left(found, own), engine.left(self.between_neighbours(), own))
            assert same == [], "with other neighbours too"

    def it_goes_on_from_a_checkpoint_bit_for_bit(self, case: str) -> None:
        """Killed before the strike, between two, and after them."""
        whole, resumed = self._killed()
        for number in (self._number[case], len(self._cases), len(self._cases) + 1):
            left, right = (
                {n: own[number] for n, own in vars(each.result).items() if n != "ends"} for each in (whole, resumed)
            )
            assert left == right
            assert engine.same_bits(whole[number], resumed[number]) == []
            states = [_state(each.pack, number) for each in (whole, resumed)]
            assert engine.same_bits(*states) == []

    def it_strikes_what_is_not_finite(self, case: str) -> None:
        """Without detection nothing freezes, and an injector has to take what it finds."""
        found, first = self._struck_in_ruins(), 4 * self._number[case]
        assert min(found.result.strikes[first : first + 4]) > 0
        plain = self.healthy(7, 7, detection=False, until=4)
        assert engine.same_bits(found[4 * len(self._cases)], plain[0]) == []

    # --- fork equals full run -----------------------------------------------------------------------------------

    def it_forks_as_a_whole_run(self, case: str) -> None:
        """From its twin's row, at any step, also when rows have gone before."""
        forked, full = (self._three_starts(forks) for forks in (True, False))
        assert len(forked.result.outcome) - 1 not in forked.weights[1], "rows have gone"
        own = range(3 * self._number[case], 3 * self._number[case] + 3)
        begins = [[each.pack.twins.begins[number] for number in own] for each in (forked, full)]
        assert begins[0] != begins[1], "some rows came later"
        is_early = any(begin is not None and begin < start for begin, start in zip(begins[0], STARTS, strict=True))
        reads_back = is_early and full.result.events[own[0]][0].site == Site.BATCH
        for number in (*own, 3 * len(self._cases)):
            assert engine.same_bits(signals(forked, number), signals(full, number)) == []
            same = forked.weights[-1].get(number), full.weights[-1].get(number)
            if same[0] is not None and same[1] is not None:
                assert torch.equal(engine.bits(same[0]), engine.bits(same[1]))
            for name in ("outcome", "nonfinite_step", "events", "strikes", "changes"):
                assert getattr(forked.result, name)[number] == getattr(full.result, name)[number], name
            if not reads_back:  # one that looks at an earlier batch has a row of its own from then on
                assert forked.result.masked_step[number] == full.result.masked_step[number]

    # --- what did nothing says so -------------------------------------------------------------------------------

    def it_never_strikes_a_trial_that_has_frozen(self, case: str) -> None:
        """In a pack that shrinks, and in one that keeps its rows."""
        for block in (1, STEPS):
            found, own = self._frozen(block), self._number[case]
            assert (own in found.weights[-1]) == (block == STEPS)
            frozen = found.result.nonfinite_step[own]
            assert frozen is not None and frozen < START
            assert found.result.events[own] == [] and found.result.strikes[own] == found.result.changes[own] == 0

    # --- after a rollback ---------------------------------------------------------------------------------------

    def it_strikes_again_after_a_rollback_if_it_is_permanent_or_in_the_data(self, case: str) -> None:
        """A transient one does not, and its trial is the golden one."""
        for permanent in (False, True):
            losses, fault_schedule, before = self._rolled_back(None if permanent else 2)
            own, first = self._number[case], before[self._number[case]]
            struck, again, golden = losses[1][own], losses[2][own], losses[2][-1]
            if permanent or fault_schedule.is_of_data(own):
                assert fault_schedule.strikes[own] == 2 * len(first) or len(first) == 64
                assert np.array_equal(struck, again, equal_nan=True)
            else:
                assert fault_schedule.events[own] == first, "nothing struck"
                assert np.array_equal(again, golden)
            assert np.array_equal(losses[1][-1], golden), "the golden twin does the same again"

    # --- what is trained ----------------------------------------------------------------------------------------

    def trial(self, fault: Fault = NO_FAULT, **fields: Any) -> Trial:
        """A small trial with the fault."""
        return engine.trial(**{**self._fields, "steps": STEPS, "fault": fault, "seed": 7, **fields})

    def healthy(self, *seeds: int, **options: Any) -> engine.Run:
        """Golden trials of these seeds, trained together: the same for every fault."""
        return self._once(("healthy", seeds, *options.items()), (self.trial(seed=s) for s in seeds), **options)

    def between_neighbours(self, forks: bool = False) -> engine.Run:
        """Each case between two golden trials, whose seeds take turns: trial 2 n + 1 is case n."""

        def trials() -> Iterator[Trial]:
            for number, case in enumerate(self._cases):
                yield self.trial(seed=SEEDS[number % 3])
                yield self.trial(self._fault_of(case))
            yield self.trial(seed=SEEDS[len(self._cases) % 3])

        return self._once(("between", forks), trials(), forks=forks)

    def _once(self, key: Any, trials: Iterable[Trial], block: int = STEPS, **options: Any) -> engine.Run:
        """The run of this key; `trials` are made the first time alone."""
        if key not in self._kept:
            self._kept[key] = train_told(list(trials), block=block, **options)
        found: engine.Run = self._kept[key]
        return found

    def _faulty(self, case: str, **changes: Any) -> Trial:
        return self.trial(dataclasses.replace(self._fault_of(case), **changes))

    def _everyone(self, **changes: Any) -> engine.Run:
        """One trial for each case, its fault with these changes, and behind them their golden twin."""
        trials = (self._faulty(case, **changes) for case in self._cases)
        return self._once(("everyone", *changes.items()), chain(trials, [self.trial()]))

    def _killed(self) -> tuple[engine.Run, engine.Run]:
        """The run of a pack that is never killed, and of one that is."""
        if "killed" not in self._kept:
            faulty = [self._faulty(case, duration=3) for case in self._cases]
            trials = [*faulty, faulty[0].golden, self.trial(seed=1)]
            with TemporaryDirectory() as folder:
                resumed = engine.resumed(trials, Path(folder), [START, START + 1, START + 3], arm=Named.of)
            self._kept["killed"] = train_told(trials, block=1), resumed
        found: tuple[engine.Run, engine.Run] = self._kept["killed"]
        return found

    def _struck_in_ruins(self) -> engine.Run:
        """Each case in as many trials as there are RUINS, case n from 4 n on, and the golden trial behind them."""

        def ruin(pack: Pack) -> None:
            for row in range(4 * len(self._cases)):
                pack.weights[row] = RUINS[row % 4]

        trials = chain((self._faulty(case, start=2) for case in self._cases for _ in RUINS), [self.trial()])
        return self._once("ruins", trials, prepare=ruin, detection=False, until=4)

    def _three_starts(self, forks: bool) -> engine.Run:
        """Three strikes of each case at different steps share one prefix; rows come in the middle of a block.

        Behind them and the golden trial are some that freeze at once: the forked pack shrinks before the last strikes.
        """

        def trials() -> Iterator[Trial]:
            yield from (self._faulty(case, start=start) for case in self._cases for start in STARTS)
            yield self.trial()
            yield from (self.trial(seed=seed, **DOOMED) for seed in range(max(4, len(self._cases) // 2)))

        return self._once(("starts", forks), trials(), block=3, forks=forks)

    def _frozen(self, block: int) -> engine.Run:
        """Trials that freeze before their fault, one for each case, and behind them golden ones."""
        doomed = (self.trial(self._fault_of(case), **DOOMED) for case in self._cases)
        return self._once(("frozen", block), chain(doomed, [self.trial(seed=seed) for seed in (1, 2)]), block=block)

    def _rolled_back(self, duration: int | None) -> tuple[list[np.ndarray], FaultSchedule, list[list[Event]]]:
        """Losses of the steps before the strikes, of those from there on, and of the same again after a rollback.

        With them come the fault schedule at the end, and each trial's events before the rollback; the golden trial is
        the last.
        """
        if ("back", duration) not in self._kept:
            self._kept["back", duration] = _there_and_back([self._faulty(c, duration=duration) for c in self._cases])
        found: tuple[list[np.ndarray], FaultSchedule, list[list[Event]]] = self._kept["back", duration]
        return found


def _there_and_back(faulty: Sequence[Trial]) -> tuple[list[np.ndarray], FaultSchedule, list[list[Event]]]:
    trials = [*faulty, faulty[0].golden]
    fault_schedule, pack = FaultSchedule([Named.of(each) for each in trials]), engine.pack_of(trials)
    losses: list[np.ndarray] = []

    def go(steps: range) -> None:
        train(pack, fault_schedule, 100, lambda first, arrays: losses.append(arrays["loss"]), until=steps.stop)

    go(range(START))
    before = copy.deepcopy(pack.whole_state())
    go(range(START, STEPS))
    first = [list(events) for events in fault_schedule.events]
    pack.restore(before)
    for number in range(len(trials)):
        fault_schedule.roll_back(number, STEPS)
    go(range(START, STEPS))
    return losses, fault_schedule, first


def signals(found: engine.Run, planned: int, steps: slice = slice(None)) -> dict[str, Tensor]:
    """Those of one trial, by name."""
    return {name: x[steps] for name, x in engine.left(found, planned).items() if name in found.signals}


def _state(pack: Pack, planned: int) -> dict[str, Tensor]:
    """Whatever a pack goes on from in the row of that trial, if it has one."""
    return {
        name: values[row] for row, each in enumerate(pack.rows) if each == planned for name, values in pack.rows_state
    }


@dataclass
class Named:
    """An injector that says which fault it is of if it fails among many."""

    fault: Fault
    inner: Injector

    @classmethod
    def of(cls, trial: Trial) -> Named | None:
        """The trial's fault, armed."""
        with said(trial.fault):
            inner = engine.injector_of(trial)
        return None if inner is None else cls(trial.fault, inner)

    def visit(self, site_call: SiteCall) -> list[Event]:
        with said(self.fault):
            return self.inner.visit(site_call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def said(fault: Fault) -> Iterator[None]:
    """What is raised in here says of which fault it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"of {fault}")
        raise


def train_told(trials: Sequence[Trial], **options: Any) -> engine.Run:
    """The run of these trials in one pack; an injector that fails says of which fault it is."""
    injectors = {number: Named.of(each) for number, each in enumerate(trials)}
    return engine.run(trials, injectors, **options)
