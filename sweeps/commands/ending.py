"""How every command ends: what is wrong is a line each on standard error, and a status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from harness.basics.printing import say, warn_in_one_line
from harness.config import ConfigError
from harness.storage.results_folder import FolderLost

MOST_REASONS = 20


def ended(act: Callable[[], int | None]) -> int | None:
    """The exit status of `act`: its own, 2 for wrong input, 1 where the results folder is lost, 130 after Ctrl-C."""
    warn_in_one_line()
    try:
        status = act()
        sys.stdout.flush()
        return status
    except ConfigError as error:
        say(*(f"error: {reason}" for reason in error.reasons[:MOST_REASONS]), file=sys.stderr)
        if len(error.reasons) > MOST_REASONS:
            say(f"error: and {len(error.reasons) - MOST_REASONS} more like these", file=sys.stderr)
        return 2
    except FolderLost as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
