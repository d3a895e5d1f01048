"""Drives the user's loop: which batch comes next, through its loaders and epochs, and on which replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from harness.config import ConfigError
from harness.guards.playbook import refused
from harness.user_loop.batches import END
from harness.user_loop.inputs import NotRepeated, not_repeated
from harness.user_loop.presets import in_a_loop, with_steps
from harness.user_loop.replays import TWIN, WALK, LoopReplay
from harness.user_loop.resuming import check, restore, state_of
from harness.user_loop.snapshots import Around, Snapshot, difference
from harness.user_loop.steps import AttachConfig, Steps
from harness.user_loop.watching import Watching

FIRST_LENGTH = 1000  # steps of a run that is only watched, until it is longer
EPOCHS = "for epoch in run.epochs(N), which is gone through again as the loop is written"


class Replays(Protocol):
    """Which ways through the loop there are."""

    def begin(self, driver: LoopDriver, loader: Iterable[Any]) -> None:
        """The loop begins, with this loader, and `driver.total` is known: go on the first replay."""

    def turn(self, driver: LoopDriver) -> bool:
        """A replay is over: go on the next one; False: there is none."""

    def begun(self, driver: LoopDriver) -> None:
        """A step of the replay at hand has its first batch, and nothing else."""

    def stepped(self, driver: LoopDriver) -> None:
        """A step of the replay at hand is over."""

    def refuse(self, driver: LoopDriver, reason: str) -> None:
        """The replay at hand is not what it has to be: it is of no use."""

    def lengthened(self, driver: LoopDriver) -> None:
        """The run has become longer, by another loader."""


class LoopDriver(Steps):
    """Hands out batches, and ends a step with the pass of the loop in which an optimizer stepped.

    A loop is gone through again, for a twin, a fault or a rollback, by handing out more batches. Code between two
    loaders runs again where the loop has its epochs from `run.epochs`. Elsewhere its effect on rates, extras, modes and
    random streams is noted, and put there when the loop comes by again; an effect on weights is refused.
    """

    def __init__(self, asked: AttachConfig, plan: Replays, is_measured: bool = False):
        super().__init__(asked, is_measured)
        self._plan = plan
        self.batch: Any = None
        self._is_in_pass = False
        self._goes_straight_on = False  # none of the loop's own code ran since the last step
        self._is_length_asked = asked.steps is not None
        self._gaps: list[tuple[Around | None, str]] = [(None, "")]  # before each loader: what it left, why it cannot
        self._paused: Snapshot | None = None  # after the last batch of a loader
        self._epochs: int | None = None  # how many there are, where the loop asks
        self._epoch = -1
        self._is_opened = False  # whether this epoch has its loader
        self._jump: Snapshot | None = None  # where the next epoch goes on
        self._resumed: Mapping[str, Any] | None = None  # the state with which the run goes on
        self._watching: Watching | None = None  # of a loop that asks for no batches

    # --- replays ----------------------------------------------------------------------------------------------------

    def go(self, replay: LoopReplay, start: Snapshot | None = None) -> None:
        """Go on with a replay, from a snapshot, or from where everything stands."""
        anew = start is not None and start.is_before_loader
        self.replay, self.step, self._pass = replay, self.step if start is None else start.step, 0
        self._is_again = False
        if start is not None:
            if self._epochs is not None:
                self._jump = start
            else:
                self.keeper.put_back(start)
        if anew:
            self.batches.begin_anew(is_given=self._epochs is not None)
        self._stepping.interventions, self._stepping.strikes = replay.interventions, replay.strikes

    # --- loaders and epochs --------------------------------------------------------------------------------------

    def passes(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, and of all replays that follow the run's last step."""
        self.open_loader(loader)
        while self.advance():
            yield self.batch

    def open_loader(self, loader: Iterable[Any]) -> None:
        """The loop goes through this loader from here on."""
        self._close_pass()
        if self.is_over and self._is_length_asked:
            return  # the loop has more epochs than the run
        if self.is_over:
            why = f"the run is over after {self.total} steps, and the loop goes on"
            raise ConfigError(f"run.steps: {why}; allowed: attach(..., steps=N) for all loaders, or {EPOCHS}")
        if self.run_replay.strikes.facts is None:
            done = self._resumed["step"] if self._resumed else 0
            length = done + (self._epochs or 1) * _length(loader) if self.total is None else self.total
            self.open(length)
            self._plan.begin(self, loader)
            self.batches.open(loader)
        elif self._epochs is None:
            self._open_next(loader)
        else:
            self._open_epoch(loader)
        self._is_opened = True

    def open(self, total: int) -> None:
        """The run has so many steps. Raises ConfigError for what it cannot have."""
        if not total:
            raise ConfigError("steps=0: nothing to train on; allowed: a loader that is not empty")
        self.total = total
        if reasons := list(refused(with_steps(self.asked.settings, self.total))):
            raise ConfigError(*map(in_a_loop, reasons))
        self.replay.steps = self.total
        if self.replay.session and self.replay.session.ring:
            self.batches.keeps = 0
        self.replay.strikes.begin(self.total, self.scaler is not None)
        self.go(self.replay)
        if self._resumed is not None:
            restore(self.replay, self._resumed)
            self.step = self._resumed["step"]
            self.batches.start_at(self.step)

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from where another process has left it."""
        return self._resumed is not None

    def resume(self, state: Any) -> None:
        """Go on from this state, with the first batch that is asked for."""
        if self.run_replay.strikes.facts is not None or self._epochs is not None:
            raise ConfigError(
                "run.load_state_dict: the run has begun; allowed: before run.steps, and without run.epochs"
            )
        check(state, self.replay)
        self._resumed = state

    def state(self) -> dict[str, Any]:
        """What the run goes on with, after the step at hand, whose loss was told."""
        self._close_pass()
        if self.replay is not self.run_replay or self._pass or self.run_replay.strikes.facts is None:
            why = "a twin or a fault is trained, or the step at hand is not over"
            raise ConfigError(f"run.state_dict: {why}; allowed: after run.observe in a pass with an update, in the run")
        return state_of(self.replay, self.step)

    def _open_next(self, loader: Iterable[Any]) -> None:
        """Another loader, as in another epoch of a loop that writes them itself."""
        self._note_gap()
        if not self._is_length_asked and self.replay is self.run_replay:
            self.total = self.replay.steps = self.step + _length(loader)
            self._plan.lengthened(self)
        self.loop.loader += 1
        self.batches.open(loader)

    def _note_gap(self) -> None:
        """See what the code since the last batch has changed."""
        if self._paused is None:
            self._gaps.append((None, ""))
            return
        name = difference(self._paused, self.keeper.take(self.step), only_arrays=True)
        why = f"code between two loaders changes {name}" if name else ""
        if any(isinstance(extra, ReduceLROnPlateau) for extra in self.asked.extras):
            why = why or "code between two loaders sets the learning rate by a loss (ReduceLROnPlateau)"
        self._gaps.append((self.keeper.around(), why))
        self._paused = None

    def _cross(self, position: int) -> None:
        """Where the loop comes by the beginning of a later loader once more: what stands there has its effect."""
        while self.batches.is_beyond(self.loop.loader, position, self._pass):
            self.loop.loader += 1
            effect, why = self._gaps[self.loop.loader]
            if why:
                raise NotRepeated(f"run.steps: {why}, and is not run again by itself; allowed: {EPOCHS}")
            if effect is not None:
                self.keeper.put_around(effect)
            self.batches.open_again(self.loop.loader)

    @property
    def has_epochs(self) -> bool:
        """Whether the loop has its epochs from us."""
        return self._epochs is not None

    def open_epochs(self, count: int) -> None:
        """The loop has so many epochs, each with a loader."""
        if self._resumed is not None:
            raise ConfigError("run.epochs: the run is resumed; allowed: run.steps(loader) over what is left")
        if self._epochs is not None or self.run_replay.strikes.facts is not None:
            raise ConfigError("run.epochs: was called before, or after run.steps; allowed: once, around run.steps")
        self._epochs = count

    def next_epoch(self) -> int | None:
        """The number of the next epoch; None: the loop is over."""
        self._close_pass()
        assert self._epochs is not None
        if self.is_over:
            return None
        if self._epoch >= 0 and not self._is_opened:
            raise ConfigError(f"run.epochs: epoch {self._epoch} has no run.steps(loader); allowed: one in each epoch")
        ended = self.replay.stopped or self.step >= self.replay.steps or self._epoch + 1 >= self._epochs
        if self._jump is None and self._epoch >= 0 and ended:
            self.is_over = not self._plan.turn(self)
            if self.is_over:
                return None
        self._epoch = self._epoch + 1 if self._jump is None else self._jump.loader
        self._is_opened = False
        return self._epoch

    def _open_epoch(self, loader: Iterable[Any]) -> None:
        if self._is_opened:
            raise ConfigError("run.steps: a second loader in an epoch; allowed: one run.steps(loader) in each epoch")
        start, self._jump = self._jump, None
        if start is not None and start.is_before_loader:
            self.keeper.put_back(start)
        self.loop.loader = self._epoch
        if self._epoch < len(self.batches.opened):
            self.batches.open_again(self._epoch, loader)
        else:
            self.batches.open(loader)
        if start is not None:
            self.step = start.step
            if not start.is_before_loader:  # in the midst of the epoch, whose code was gone through up to here
                self.keeper.put_back(start)

    # --- passes --------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """End the pass at hand and begin the next one, whose batch is `batch`; False: no more of this loader."""
        self._goes_straight_on = self._is_in_pass
        self._close_pass()
        while not self.is_over:
            if self._jump is not None:
                return False
            try:
                self.batch = self._next()
            except NotRepeated as error:
                if self.replay.kind != TWIN:
                    raise
                self._plan.refuse(self, str(error))
                continue
            finally:
                self._goes_straight_on = False
            if self.batch is not END:
                self._is_in_pass = True
                return True
            if self._pauses():
                return False
            self.is_over = not self._plan.turn(self)
        return False

    def _pauses(self) -> bool:
        """Whether the loop's own code comes next, after the last batch of a loader or the last step."""
        is_at_end = self.step >= self.replay.steps or bool(self.replay.stopped)
        if self._epochs is not None:
            return self.replay.kind != WALK or not is_at_end  # where a walk ends a snapshot is taken, before other code
        if self.replay is not self.run_replay or self.replay.stopped:
            return False
        if not (self._may_go_on if not self._is_length_asked else not is_at_end):
            return False
        if self.loop.keeps:
            self._paused = self.keeper.take(self.step)
        return True

    @property
    def _may_go_on(self) -> bool:
        """Whether a run whose length nobody has said may have another loader, as in another epoch."""
        return getattr(self._plan, "may_go_on", False)

    def _next(self) -> Any:
        """The batch of the next pass, after the faults that strike before it."""
        replay, step = self.replay, self.step
        if step >= replay.steps or replay.stopped:
            return END
        position = step + replay.interventions.batches(0)
        if self._epochs is None:
            self._cross(position)
        elif self.batches.is_beyond(self.loop.loader, position, self._pass):
            return END
        batch = self.batches.get(position, self._pass)
        if batch is END:
            return END
        if self._pass == 0:
            self.begin_step(self._goes_straight_on)
        return replay.strikes.batch(position, batch)

    def _close_pass(self) -> None:
        """The body of the loop was gone through, as far as it goes."""
        if self._is_in_pass:
            self._is_in_pass = False
            self.end_pass()

    def begin_pass(self) -> None:
        """A pass of a loop that hands out its batches itself; a step begins with its first one."""
        if self._pass == 0:
            self.begin_step()

    def end_pass(self) -> None:
        """The body of the loop was gone through."""
        self._pass += 1
        if self._stepping.was_asked:
            self._end_step()

    def carry(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the loop keeps from one step to the next; after going back what it was, in a step's first pass."""
        return tuple(values.values()) if self._pass else self.loop.carry(values)

    def observe(self, loss: Tensor | float) -> None:
        if self.run_replay.strikes.facts is None:
            self._watch()
        if self._watching is None:
            super().observe(loss)
            return
        if self.is_over:
            return
        self._watching.tells()
        super().observe(loss)
        self._watching.told()

    def _watch(self) -> None:
        """The loop asks for no batches: watch its losses and updates."""
        if self.asked.chosen or self.replay.session or not getattr(self._plan, "may_watch", False):
            why = "was called outside of run.steps, and fault, recover, twin and campaigns need the loop's batches"
            raise ConfigError(
                f"run.observe: {why}; allowed: `for batch in run.steps(loader):`, or detect and out alone"
            )
        self.open(self.asked.steps or FIRST_LENGTH)
        self._plan.begin(self, ())
        self._watching = Watching(len(self.places.optimizers), self._stepping.has_learned, self._end_watched)
        self._stepping.follow(self._watching)
        if self._stepping.was_asked:
            self._watching.updated(self.batches.passes)
        if not self._stepping.has_learned:
            self.begin_step()

    def _end_watched(self) -> None:
        """A step of a loop that is only watched is over."""
        if self.is_over:
            return
        self._end_step()
        if self.step >= self.replay.steps:
            self.is_over = self._is_length_asked
            self.total = self.replay.steps = self.replay.steps if self.is_over else 2 * self.replay.steps
            self._plan.lengthened(self)
        self.begin_step()

    def end_early(self) -> None:
        """The loop was left: the step at hand counts if an optimizer has stepped in it, and its loss was told."""
        if self._watching is not None and self._watching.is_complete:
            self._end_watched()
        if self._is_in_pass and self._stepping.was_asked and not self._losses:
            self._is_in_pass = False
        self._close_pass()

    def _begun(self, replay: LoopReplay, step: int) -> None:
        self._plan.begun(self)

    def _stepped(self, replay: LoopReplay, step: int) -> None:
        """Compare the step with the same one before, and let the plan see it."""
        if replay.comparison is not None and self.step == step + 1:
            what = replay.comparison.difference(replay, step, self.places, self.inputs.differing)
            if what is not None:
                self._plan.refuse(self, not_repeated(what, step))
                return
        if self._epochs is not None and self._is_again and self.batches.opened:
            self._go_back_to_epoch()
        self._plan.stepped(self)

    def _go_back_to_epoch(self) -> None:
        """A rollback to an earlier epoch: the loop goes through its code again from there."""
        if self.loop.loader != self._epoch:
            self._jump = self.keeper.take(self.step)


def _length(loader: Any) -> int:
    """How many batches a loader has. Raises ConfigError where it does not say."""
    try:
        return len(loader)
    except TypeError:
        why = f"steps=null: a loader of type {type(loader).__name__} does not say how long it is"
        raise ConfigError(f"{why}; allowed: attach(..., steps=N)") from None
