"""Where what is slow to find out is kept between commands."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "STABILITY_HARNESS_CACHE"


def cache_folder() -> Path:
    """$STABILITY_HARNESS_CACHE, or this user's cache folder on this system."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("stability-harness")
