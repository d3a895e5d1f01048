"""What the body of somebody's loop is given: it hands out batches, and is told the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from harness.config import ConfigError
from harness.own_loop.course import Course

PROBED = 2  # steps that are run twice to see whether a loop repeats itself
SWITCHES = (
    "torch.use_deterministic_algorithms(True), seeds of all random streams, `run.step` for whatever the loop counts by "
    "itself, and `extra` for what else it changes"
)


def not_repeated(name: str) -> str:
    """What is said of a loop two of whose ways from one state differ, first in the tensor of this name."""
    why = f"the loop does not repeat itself: its first {PROBED} steps, run twice from one state, differ in {name}"
    return f"{why}; allowed: {SWITCHES}"


class Handle:
    """`steps` hands out batches, `observe` is told the loss.

    Steps are those of the optimizer: a step is over with the pass of the loop in which it stepped, so a step may have
    several passes, whose gradients are accumulated.
    """

    def __init__(self, course: Course):
        self._course, self._is_open = course, True

    @property
    def step(self) -> int:
        """The step at hand, from 0; it goes back where the run does."""
        return self._course.step

    @property
    def is_twin(self) -> bool:
        """Whether this is no step of the run itself, but of its twin, of one of the two that are tried out, ..."""
        return self._course.leg is not self._course.run_leg

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, each followed by what is done about the step; some of them again after a rollback.

        A second call goes on with another loader, as in another epoch. With a twin its steps come last.
        """
        if not self._is_open:
            raise ConfigError("run.steps: the run was detached; allowed: inside of its `with` block")
        yield from self._course.passes(loader)

    def observe(self, loss: Tensor | float) -> None:
        """The loss of this pass, in nat/token or whatever it is measured in; of several passes their mean counts.

        Where it is told before the optimizer steps, an answer to it need not take the update back.
        """
        self._course.observe(loss)
