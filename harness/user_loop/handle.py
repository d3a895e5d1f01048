"""What the user's loop holds: it hands out batches, takes the loss, and keeps what the loop carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from harness.config import ConfigError
from harness.user_loop.loop_driver import LoopDriver


class NoBatches:
    """Stands for a loader where the loop gets its batches itself: None for each pass, without end."""

    def __init__(self, steps: int):
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None


class Handle:
    """`steps` hands out batches, `observe` takes the loss.

    Steps are those of the optimizer: a step is over with the pass of the loop in which it stepped, so a step may have
    several passes, whose gradients are accumulated.
    """

    def __init__(self, driver: LoopDriver):
        self._driver, self._is_open, self._has_next = driver, True, False

    @property
    def step(self) -> int:
        """The step at hand, from 0; it goes back where the run does."""
        return self._driver.step

    @property
    def is_twin(self) -> bool:
        """Whether this is no step of the run itself, but of its twin, or of a campaign's fault."""
        return self._driver.replay is not self._driver.run_replay

    def steps(self, loader: Iterable[Any] | int) -> Iterator[Any]:
        """The batches of a loader, each followed by what is done about the step; some of them again after a rollback.

        A number stands for a loop without a loader, which is given the numbers from 0. A second call goes on with
        another loader, as in another epoch; code between the two does not run again where the run goes back: with
        `epochs` it does. With a twin its steps come last.
        """
        self._check_open("run.steps")
        yield from self._driver.passes(range(loader) if isinstance(loader, int) else loader)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs, each with one `steps(loader)` inside; some again where the run goes back.

        All code between two epochs runs again there, as it is written.
        """
        self._check_open("run.epochs")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"run.epochs: count={count!r}: no number of epochs; allowed: 1 or more")
        self._driver.open_epochs(count)
        while (number := self._driver.next_epoch()) is not None:
            yield number

    def next(self) -> bool:
        """For `while run.next():`, a loop that gets its batches itself: whether another pass comes.

        Its number of steps is that of `attach(..., steps=N)`. After the last one the run is closed.
        """
        self._check_open("run.next")
        driver = self._driver
        if not self._has_next:
            self._has_next = True
            if driver.total is None:
                raise ConfigError("steps=null: run.next does not know how long the run is; allowed: attach(steps=N)")
            driver.open_loader(NoBatches(driver.total))
        return driver.advance()

    def carry(self, **values: Any) -> Any:
        """What the loop keeps from one step to the next: a batch that was fetched before, a hidden state, a counter.

        To be called at the beginning of each pass: `hidden = run.carry(hidden=hidden)`, `x, y = run.carry(x=x, y=y)`.
        It returns what it is given; after the run went back, what it was given then. Copies are kept.
        """
        if not values:
            raise ConfigError("run.carry: nothing to carry; allowed: run.carry(NAME=value, ...)")
        given = self._driver.carry(values)
        return given[0] if len(given) == 1 else given

    def observe(self, loss: Tensor | float) -> None:
        """The loss of this pass, in nat/token or another unit; of several passes their mean counts.

        Call it before the optimizer steps if you can: an answer can then skip the update instead of undoing it.
        """
        self._driver.observe(loss)

    def _check_open(self, what: str) -> None:
        if not self._is_open:
            raise ConfigError(f"{what}: the run was detached; allowed: inside of its `with` block, before run.close()")
