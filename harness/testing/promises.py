"""What the promises of faults, detectors and settings share: each is a method whose name begins with `it_`."""

from __future__ import annotations


class Promises:
    """The promises of one kind of part."""

    def __init__(self, whose: str = ""):
        """`whose` names the part in an error."""
        self._whose = whose

    @classmethod
    def names(cls) -> list[str]:
        """The promises by name, in the order of the file."""
        return [name for name in vars(cls) if name.startswith("it_")]

    def check(self, promise: str, *case: str) -> None:
        """Hold the part, or one case of it, to one promise.

        Raises:
            AssertionError: It does not keep it; a note names both.
        """
        try:
            getattr(self, promise)(*case)
        except AssertionError as error:
            error.add_note(f"{case[0] if case else self._whose}: {promise.replace('_', ' ')}")
            raise

    def check_all(self, *case: str) -> None:
        """Hold it to each of them.

        Raises:
            AssertionError: As `check`.
        """
        for promise in self.names():
            self.check(promise, *case)
