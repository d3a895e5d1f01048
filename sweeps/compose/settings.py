"""What belongs to the run and not to a trial: where results go, on what, in how large packs."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.basics.cpu_kernels import AUTO, CHOICES
from harness.basics.memory import bytes_of
from harness.config import STRUCTURAL, ConfigError, Problems, anything, checked, choice, number
from harness.config.fields import shown
from harness.config.limits import MOST_STEPS
from harness.config.names import SEARCHES
from injectors.value import MOST_FAULTS

LARGEST_PACK = 10**6  # trials; more than any machine trains at a time
MOST_ENVELOPES = 10**4  # runs
MOST_POINTS, MOST_AT_A_TIME = 10**5, 10**4  # of a cell; Optuna's samplers get slow long before
CLOSEST = 1.001  # ratio of two rates that still differ in the four digits to which a search rounds them


# No key of the run can be swept, so none has another scope.
_anything, _choice, _number = (partial(kind, STRUCTURAL) for kind in (anything, choice, number))


@dataclass(frozen=True)
class Settings:
    """The run's own fields, as `key=value` on the command line; they cannot be swept."""

    out: str | None = _anything(None, "folder of the results; null: results/<study>")
    size: str | None = _anything(None, "a size that the study has, such as paper; null: as the study stands")
    device: str = _choice("auto", "where to train; auto: the accelerator if there is one", "auto", "cpu", "cuda")
    ranks: str = _choice(
        "simulated",
        "data-parallel ranks (train.ranks): one after the other on one device, or a process each",
        "simulated",
        "processes",
    )
    plan: bool = _anything(False, "print the plan and train nothing")
    memory: str | None = _anything(
        None, "of each worker of the machine for which plan=true plans, such as 80GB; null: this one's"
    )
    wait: bool = _anything(True, "wait for submitted jobs; false: return at once")
    keep: str = _choice(
        "nothing",
        "what is kept beside what was measured: each trial's last weights; state: these, and what extend goes on from",
        "nothing",
        "weights",
        "state",
    )
    idle: str = _choice(
        "warn",
        "of a mitigation, or a part of a recipe, that cannot act in its trials: a line, or no sweep",
        "warn",
        "refuse",
    )


@dataclass(frozen=True)
class PackSettings:
    """`pack.*`: how trials are put together."""

    size: str = _anything("auto", "trials in a pack; auto: from shape, device and memory")


@dataclass(frozen=True)
class TelemetrySettings:
    """`telemetry.*`: what is measured and how often it is written."""

    block: int = _number(50, "steps between writes to the store", low=1, high=MOST_STEPS)
    provenance: bool = _anything(
        True, "find out where the first non-finite value of a trial came from; costs some ten steps of such a trial"
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """`checkpoint.*`: how often the state of a pack in training is saved, so that a killed one goes on from there."""

    every: int | None = _number(None, "steps between checkpoints; null: by time alone", low=1)
    minutes: float | None = _number(5.0, "minutes between checkpoints; null: by steps alone", above=0)


@dataclass(frozen=True)
class CpuSettings:
    """`cpu.*`: what packs on a CPU run on."""

    kernels: str = _choice(
        AUTO, "matrix products on a CPU that is not Intel's: auto: AVX-512 where a check finds it faster", *CHOICES
    )
    threads: int | None = _number(
        None, "threads of each worker; null: the machine's cores by the number of workers", low=1, high=4096
    )


@dataclass(frozen=True)
class CampaignSettings:
    """`campaign.*`: what belongs to a campaign as a whole (`fault.samples`)."""

    envelope: int = _number(
        8, "golden runs of each recipe with the last bit of a weight changed", low=0, high=MOST_ENVELOPES
    )
    width: float | None = _number(
        None, "stop once the interval of each stratum's masked share is so narrow; null: never", above=0, below=1
    )
    round: int = _number(100, "faults of each description between two looks at the intervals", low=1, high=MOST_FAULTS)


@dataclass(frozen=True)
class SearchSettings:
    """`search.*`: what is searched for, instead of training a whole grid (`search=NAME`)."""

    kind: str = _choice("none", "what is searched for", "none", *SEARCHES)
    trials: int = _number(
        200, "most trials of each cell, golden twins apart; bisection ends by itself", low=1, high=MOST_POINTS
    )
    batch: int | None = _number(
        None,
        "points of each cell that are tried at a time; null: as many as keep all workers busy",
        low=1,
        high=MOST_AT_A_TIME,
    )
    sampler: str = _choice("tpe", "Optuna's sampler", "tpe", "nsga2", "random")
    seed: int = _number(0, "of the sampler", low=0)
    tolerance: float = _number(
        1.5, "max_stable_lr in an interval: the ratio of neighbouring rates that are tried", low=CLOSEST
    )
    size: str | None = _anything(
        None, "worst_fault: the fault's field that is its size; null: how much it changed the values"
    )


PLUGINS = "hydra_plugins.stability_harness"


@dataclass
class GridOptions:
    """`hydra.sweeper.*`: the axes of a study, each as on the command line."""

    _target_: str = f"{PLUGINS}.GridSweeper"
    params: dict[str, Any] = field(default_factory=dict)
    grids: dict[str, Any] = field(default_factory=dict)  # several, by name: each has axes beside those of all
    conditions: dict[str, Any] = field(default_factory=dict)  # several, by name: all grids are trained under each
    sizes: dict[str, Any] = field(default_factory=dict)  # several, by name: values in place of the study's own


@dataclass
class LocalOptions:
    """`hydra.launcher.*` of `hydra/launcher=local`."""

    _target_: str = f"{PLUGINS}.LocalLauncher"
    workers: Any = "auto"  # processes, each with its share of the cores; auto: one a core, or one a GPU on CUDA


@dataclass
class SlurmOptions:
    """`hydra.launcher.*` of `hydra/launcher=slurm`: what is asked of Slurm for each job."""

    _target_: str = f"{PLUGINS}.SlurmLauncher"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: int = 60  # minutes
    cpus: int = 1
    gpus: int | None = None  # for each node of a job; or gpus_per_task
    gpus_per_task: int | None = None
    memory: str = "4GB"
    constraint: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # any other sbatch option: +hydra.launcher.extra.nice=100
    setup: list[str] = field(default_factory=list)  # shell lines that run in the job before Python
    parallel: int = 256  # jobs that may run at the same time
    minutes_per_job: int = 10  # short packs share a job up to about so long, where they are more than `parallel`
    warning: int = 120  # seconds before the end of its time at which a job saves a checkpoint and is queued again
    requeues: int = 1000  # how often a job whose time is over goes back into the queue


LAUNCHERS = {"local": LocalOptions, "slurm": SlurmOptions}


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """All settings of one run, checked. Each is declared above, once; all that knows of it follows from there."""

    out: Path  # type: ignore[assignment]  # the folder itself
    study: str = "grid"
    pack: PackSettings = PackSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    cpu: CpuSettings = CpuSettings()
    campaign: CampaignSettings = CampaignSettings()
    search: SearchSettings = SearchSettings()

    @property
    def pack_size(self) -> int | None:
        """None: auto."""
        return None if self.pack.size == "auto" else int(self.pack.size)

    @classmethod
    def of(cls, values: Mapping[str, Any], out: Path, study: str = "grid") -> RunSettings:
        """Of checked values by key; a key that is not given has its default."""
        given: dict[str, dict[str, Any]] = {part: {} for part in ("", *PARTS)}
        for key, value in values.items():
            part, _, name = key.rpartition(".")
            given[part][name] = value
        parts = {part: kind(**given[part]) for part, kind in PARTS.items()}
        return cls(**given[""] | parts | {"out": out, "study": study})


Run = RunSettings  # the old name, in jobs that an earlier version has submitted to Slurm


PARTS: dict[str, type] = {part.name: type(part.default) for part in fields(RunSettings) if is_dataclass(part.default)}


def schema() -> dict[str, Any]:
    """Every key of the run and its default."""
    return {**vars(Settings()), **{part: vars(cls()) for part, cls in PARTS.items()}}


def keys() -> list[str]:
    """Every key of the run."""
    return [*vars(Settings()), *(f"{part}.{name}" for part, cls in PARTS.items() for name in vars(cls()))]


def check_key(key: str, value: Any) -> Any:
    """`value` as the key of the run wants it. Raises ConfigError."""
    if key == "pack.size":
        if value != "auto" and (type(value) is not int or not 1 <= value <= LARGEST_PACK):
            allowed = f"auto, or an integer from 1 to {LARGEST_PACK}"
            raise ConfigError(f"pack.size={shown(value)}: not a size; allowed: {allowed}")
        return value
    if key == "memory" and value is not None:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not bytes_of(str(value)):
            raise ConfigError(f"memory={shown(value)}: not a size; allowed: a number of MB, or such as 80GB or 1.5TB")
        return str(value)
    if key == "out" and value is not None:
        return _folder(value)
    part, _, name = key.rpartition(".")
    return checked(key, PARTS[part] if part else Settings, name, value)


def _folder(value: Any) -> str:
    """The folder of the results; `~` is the user's own, because a shell leaves that alone behind `out=`."""
    name = os.path.expanduser(given := checked("out", Settings, "out", value))
    allowed = "the path of a folder, or leave it out for results/STUDY"
    if not name:
        raise ConfigError(f"out=: empty, as where a shell's variable is not set; allowed: {allowed}")
    if "${" in name:
        raise ConfigError(f"out={shown(given)}: an interpolation; allowed: {allowed}")
    if name.startswith("~"):
        raise ConfigError(f"out={shown(given)}: no such user; allowed: {allowed}")
    try:
        os.stat(name)
    except (OSError, ValueError) as error:  # of an OSError, others are for those who open it
        if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            reason = f"no folder can have this name ({getattr(error, 'strerror', error)})"
            raise ConfigError(f"out={shown(name)}: {reason}; allowed: another one") from None
    return str(name)


def run_from(study: str, values: Mapping[str, Any]) -> RunSettings:
    """Check the run's keys. Raises ConfigError."""
    problems, checked_values = Problems(), {}
    for key in keys():
        part, _, name = key.rpartition(".")
        with problems.collect():
            checked_values[key] = check_key(key, (values[part] if part else values)[name])
    problems.check()
    if checked_values["memory"] is not None and not checked_values["plan"]:
        reason = "is for a plan for another machine; allowed: plan=true, or hydra.launcher.memory for jobs of Slurm"
        raise ConfigError(f"memory={checked_values['memory']}: {reason}")
    return RunSettings.of(checked_values, Path(checked_values["out"] or f"results/{study}").absolute(), study)
