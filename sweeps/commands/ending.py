"""How every command ends: what is wrong is a line each on standard error, and a status."""

from __future__ import annotations

from collections.abc import Callable

from harness.basics.output import OutputLost, checked_output
from harness.basics.printing import complain, warn_in_one_line
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost

MOST_REASONS = 20


def ended(act: Callable[[], int | None]) -> int | None:
    """The exit status of `act`.

    It is its own, 2 for wrong input or output that cannot be written, 1 where the results folder is lost, 130 after
    Ctrl-C, 141 where the reader of the output has gone.
    """
    warn_in_one_line()
    try:
        with checked_output():
            return act()
    except ConfigError as error:
        complain(*(f"error: {reason}" for reason in error.reasons[:MOST_REASONS]))
        if len(error.reasons) > MOST_REASONS:
            complain(f"error: and {len(error.reasons) - MOST_REASONS} more like these")
        return 2
    except FolderLost as error:
        complain(f"error: {error}")
        return 1
    except OutputLost as lost:
        return int(lost.code or 0)
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
