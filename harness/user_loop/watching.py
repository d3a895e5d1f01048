"""Steps of a loop that asks for no batches and is only watched: where each ends is told by its losses and updates."""

from __future__ import annotations

from collections.abc import Callable


class Watching:
    """Calls `end` when a step is over, which has a loss and an update, in whichever order the loop has them.

    Where losses are told before their backward pass, a step ends with its update; elsewhere with the loss that is told
    after it. Where neither is known to be the last, as where several optimizers step, it ends as the next one begins.
    """

    def __init__(self, optimizers: int, has_learned: bool, end: Callable[[], None]):
        """`has_learned` says whether a backward pass was made before the first loss was told."""
        self._is_single, self._tells_first, self._end = optimizers == 1, not has_learned, end
        self._losses, self._is_updated = 0, False

    @property
    def is_complete(self) -> bool:
        """Whether the step at hand has all that makes one."""
        return self._is_updated and self._losses > 0

    def tells(self) -> None:
        """A loss is about to be told."""
        if self._tells_first:
            self._end_complete()

    def told(self) -> None:
        """A loss was told."""
        self._losses += 1
        if not self._tells_first:
            self._end_complete()

    def learns(self) -> None:
        """A backward pass begins."""
        self._end_complete()

    def updated(self, backwards: int) -> None:
        """An optimizer has stepped, after so many backward passes of this step."""
        self._is_updated = True
        if self._is_single and (self._tells_first or self._losses >= backwards):
            self._end_complete()

    def _end_complete(self) -> None:
        if self.is_complete:
            self._losses, self._is_updated = 0, False
            self._end()
