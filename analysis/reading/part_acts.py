"""How often parts of a recipe acted that act now and then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.reading.open_sweep import kept_trials
from harness.storage.stored import read_packs


def part_acts(out: Path | str) -> pd.DataFrame:
    """How often each part of the recipes in `out` acted, one row a finished trial and part that acts now and then.

    Args:
        out: A results folder.

    Returns:
        Columns: `trial` (its id), `part` (the key that switches it on, such as `optim.clip`), `steps` (at how many
        steps it changed something) and `idle` (why it could not act, "" if it could). A part that could not act and is
        not counted has NaN steps.

    Raises:
        ConfigError: As `open_sweep`.
    """
    rows = []
    for trial in kept_trials(list(read_packs(Path(out)))):
        if (known := trial.acting) is not None:
            for part in dict.fromkeys([*known.acts, *known.idle]):
                rows.append((trial.of("ids"), part, known.acts.get(part, np.nan), known.idle.get(part, "")))
    return pd.DataFrame(rows, columns=["trial", "part", "steps", "idle"])
