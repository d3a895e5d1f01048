"""What a machine cannot hold, told from the plan, before anything is allocated or written."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.basics.memory import in_units, main_memory
from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage.store import SIGNALS
from harness.training.readings import numbers_read
from sweeps.planning.packs import PackPlan, Plan
from sweeps.planning.planner import weight_bytes

STORED_BYTES, HELD_BYTES = 4, 8  # of one number: float32 in the store, float64 while its block fills
PROCESS_BYTES = 2**27  # that each process with torch loaded has at least
SURE = 0.5  # of it is written; some signals are measured now and then, and those of trials that fail end early


def check_processes(processes: int) -> None:
    """Raise ConfigError for more processes, one a rank, than this machine's memory has room for."""
    needed, memory = PROCESS_BYTES * processes, main_memory()
    if processes > 1 and needed > memory:
        raise ConfigError(
            f"ranks=processes: {processes} of them take more than {in_units(needed)} of memory; "
            f"allowed: at most the {in_units(memory)} of this machine, so a smaller train.ranks, or simulated"
        )


def numbers_a_step(pack: PackPlan) -> int:
    """What is measured of a pack at each step, of all the trials that it records."""
    first = pack.trials[0]
    of_signals = sum(first.model.depth if "layer" in signal.dims else 1 for signal in SIGNALS.values())
    return len(pack.recorded) * (of_signals + numbers_read(first))


def check_disk(plan: Plan, out: Path, keep: str = "nothing") -> None:
    """Raise ConfigError where the disk of `out` has no room for the results."""
    stored = SURE * sum(STORED_BYTES * pack.trials[0].steps * numbers_a_step(pack) for pack in plan.packs)
    if keep != "nothing":  # of a state: the weights again, and two moments
        copies = 4 if keep == "state" else 1
        stored += copies * sum(len(pack.recorded) * weight_bytes(pack.trials[0]) for pack in plan.packs)
    folder = next(path for path in (out, *out.parents) if path.exists())
    total, _, free = shutil.disk_usage(folder)
    if total and stored > free:  # what a system makes up, as /proc, has no size
        raise ConfigError(
            f"out={out}: the results of {count(plan.trials, 'trial')} take more than {in_units(stored)}; "
            f"allowed: at most the {in_units(free)} free there, so fewer trials or steps, or another disk"
        )


def check_block(plan: Plan, block: int) -> None:
    """Raise ConfigError where a pack's signals of `block` steps are more than this machine's memory holds."""
    held = max((HELD_BYTES * min(block, pack.trials[0].steps) * numbers_a_step(pack) for pack in plan.packs), default=0)
    if held > (memory := main_memory()):
        raise ConfigError(
            f"telemetry.block={block}: so many steps of a pack take {in_units(held)} of memory until they are "
            f"written; allowed: at most the {in_units(memory)} of this machine, so a smaller block"
        )
