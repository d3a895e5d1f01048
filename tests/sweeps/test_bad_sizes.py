"""Numbers that no machine holds, or no number format: refused in one line with the number and the limit, at once."""

from __future__ import annotations

import dataclasses
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pytest

from harness.config import ConfigError, Model, Trial, field_types
from harness.config.limits import LARGEST_SEED
from harness.optim.optimizers import OPTIMIZERS
from injectors import fault_types
from injectors.value import Value
from sweeps.compose import settings
from sweeps.compose.overrides import trial_fields
from sweeps.planning.campaign import Campaign, check_samples
from sweeps.planning.limits import check_block, check_disk, check_processes
from sweeps.planning.packs import PackPlan, Plan
from sweeps.planning.planner import make_plan, pack_bytes, pack_seconds, wall_seconds
from tests.sweeps import command

DEADLINE = 60  # seconds, for what takes a hundredth of one
NUMBERS = ["0", "-1", "1", "1000000", *(str(2**n) for n in (31, 53, 63, 64)), str(2**63 - 1), str(10**30)]
NUMBERS += ["1e9", "1e-310", "1e-46", "1e39", "1e308", "-1e39", "nan", "inf", "-inf"]
WORDS = ["''", "a" * 5000, "'a b'"]
RANKS = {kind: ["train.ranks=2"] for kind in ("stale_gradient", "dropped_rank", "reduction")}


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """What would never end fails."""

    def fail(number: int, frame: object) -> None:
        raise TimeoutError(f"not within {DEADLINE} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def is_held(value: Any) -> bool:
    """Whether the formats in which a trial is trained and stored can hold the number as it is, to rounding."""
    if isinstance(value, (str, bool, NoneType)):
        return True
    if isinstance(value, int):
        return abs(value) <= LARGEST_SEED
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.float32(value)
    return bool(np.isfinite(narrow)) and (narrow == 0) == (value == 0)


def planned(trial: Trial) -> PackPlan:
    """The plan of a trial, as `plan=true` makes it, without its corpus."""
    (pack,) = make_plan([trial], (), None, "cpu", workers=2).packs
    assert pack_bytes(pack) > 0 and math.isfinite(pack_seconds(pack, "cpu"))
    return pack


OF_THE_RUN = ("pack.size", "telemetry.block", "hydra.launcher.workers")


@pytest.fixture
def tiny_grid() -> Any:
    """`made` with tiny models, whose fields the given overrides replace."""

    def make(*overrides: str) -> Trial | None:
        keys = [text for text in command.tiny(*overrides) if not text.startswith(OF_THE_RUN)]
        try:
            (trial,) = command.grid(*keys)
        except ConfigError as error:
            assert all("\n" not in reason and "; allowed" in reason for reason in error.reasons)
            return None
        planned(trial)
        return trial

    return make


def beyond(cls: type, name: str) -> Iterator[tuple[str, str]]:
    """Values just outside of what a field's declaration allows, each with what it says is allowed."""
    metadata = next(field.metadata for field in dataclasses.fields(cls) if field.name == name)
    kind, _ = field_types(cls)[name]
    for sign, bound in re.findall(r"([<>]=?) (\S+)", metadata["allowed"]):
        number = kind(float(bound))
        step = (1 if kind is int else max(1e-3 * abs(number), 1e-3)) if "=" in sign else 0
        yield str(number + step if "<" in sign else number - step), metadata["allowed"]
    if metadata["choices"]:
        yield "nonsense", ", ".join(metadata["choices"])


def refuses(key: str, cls: type, name: str, *others: str) -> None:
    """Values just beyond the limits, in the one line that names the key, the value and the limits."""
    for value, allowed in beyond(cls, name):
        with pytest.raises(ConfigError) as refused:
            command.grid(*(text for text in command.tiny(*others, f"{key}={value}") if not text.startswith(OF_THE_RUN)))
        line = re.compile(re.escape(f"{key}={value}") + r"(\.0)?: (out of range.*|beyond 64 bits); allowed: (.*)")
        (match,) = (match for reason in refused.value.reasons if (match := line.fullmatch(reason)))
        named = set(re.split(", | or ", match[3]))
        assert "beyond" in match[2] or set(allowed.split(", ")) <= named, refused.value.reasons


@pytest.mark.parametrize("key", sorted(trial_fields()))
def test_every_field_of_a_trial(tiny_grid: Any, key: str) -> None:
    section, _, name = key.rpartition(".")
    others = [f"optim.name={section}"] if section in OPTIMIZERS else []
    for number in (*NUMBERS, *WORDS):
        trial = tiny_grid(*others, f"{key}={number}")
        assert trial is None or is_held(getattr(trial.section(section) if section else trial, name)), number
    refuses(key, *trial_fields()[key], *others)


FAULT_FIELDS = [
    (kind, name)
    for kind, cls in fault_types().items()
    for name in (field_types(cls) if kind != "none" else ())
    if name not in ("kind", "name")
]


@pytest.mark.parametrize(("kind", "name"), FAULT_FIELDS)
def test_every_field_of_a_fault(tiny_grid: Any, kind: str, name: str) -> None:
    others = [f"fault={kind}", *RANKS.get(kind, ())]
    others += ["fault.start=1"] if name != "start" else []
    for number in (*NUMBERS, *WORDS):
        trial = tiny_grid(*others, f"fault.{name}={number}")
        assert trial is None or is_held(getattr(trial.fault, name)), number
    refuses(f"fault.{name}", fault_types()[kind], name, *others)


@pytest.mark.parametrize("key", sorted(set(settings.keys()) - {"out"}))
def test_every_field_of_the_run(key: str) -> None:
    for number in NUMBERS:
        value = float(number) if not number.lstrip("-").isdigit() else int(number)
        try:
            assert is_held(settings.check_key(key, value)), number
        except ConfigError as error:
            (reason,) = error.reasons
            assert "\n" not in reason and reason.startswith(f"{key}=") and "; allowed: " in reason


# --- the fields that say how much there is to compute ------------------------------------------------------------

BIT = ("fault=weight_bit", "fault.start=2")
SET = ("fault=value", "fault.start=2", "fault.model=set")
CASES = {
    "context": (["model.context=10**9"], "model.context=10**9: wrong type"),
    "a context too long for the text": (["model.context=10000000"], "data.length=2000: 1800 tokens for training"),
    "beyond int64": ([f"train.validate_every={2**64}"], f"train.validate_every={2**64}: out of range, beyond 9007199"),
    "more text than memory": (["data.length=1e11"], "data.length=100000000000: takes about 373 GiB of memory"),
    "tokens": (
        ["train.steps=1e7", "train.batch=1e6", "model.context=1e7", "data.length=1e9"],
        "train.batch=1000000: 10000000 steps of so many sequences of 10000000 tokens are 1e+20 tokens; allowed: at",
    ),
    "elements of a mix": (["fault=realistic_sdc", "fault.start=2", "fault.elements=1e9"], "fault.elements=1000000000:"),
    "an envelope of more than there are": (
        [*BIT, "fault.samples=3", "fault.bit=null", "campaign.envelope=10000"],
        "campaign.envelope=10000: 10000 golden runs with a last bit changed, of 4144 that a recipe allows",
    ),
    "pack": (["pack.size=1000000000"], "pack.size=1000000000: not a size; allowed: auto, or an integer"),
    "rate": (["optim.lr=1e39"], "optim.lr=1e+39: out of range, beyond 3.40282e+38, the largest number"),
    "epsilon": (["optim.eps=1e-46"], "optim.eps=1e-46: out of range, below 1.4013e-45, the smallest"),
    "set": ([*SET, "fault.value=1e39"], "fault.value=1e+39: infinite in train.precision=fp32; allowed: at most"),
    "set in fp16": ([*SET, "fault.format=fp16", "fault.value=1e5"], "fault.value=100000.0: infinite in"),
    "set to what is no more than zero": (
        [*SET, "fault.format=fp16", "fault.value=1e-9"],
        "fault.value=1e-09: rounds to 0 in fault.format=fp16; allowed: 0, or a number further from it",
    ),
    "scale": (
        ["fault=value", "fault.start=2", "fault.model=scale", "fault.value=1e39"],
        "fault.value=1e+39: infinite in train.precision=fp32; allowed: at most 3.40282e+38 in size",
    ),
    "noise": (
        ["fault=value", "fault.start=2", "fault.model=noise", "fault.value=-1"],
        "fault.value=-1.0: is the standard deviation of fault.model=noise; allowed: 0 or more",
    ),
}


@pytest.mark.parametrize(("overrides", "line"), CASES.values(), ids=CASES)
def test_one_line(empty: Path, overrides: list[str], line: str) -> None:
    (found,) = command.refused(empty, *command.tiny(*overrides, "plan=true"))
    assert found.startswith(f"error: {line}") and "; allowed: " in found


def test_a_number_that_double_precision_holds_may_be_set_in_it(tiny_grid: Any) -> None:
    trial = tiny_grid(*SET, "train.precision=fp64", "fault.value=1e39")
    assert trial.fault.value == 1e39


@pytest.mark.parametrize("largest", ["model.depth=4096", "train.steps=10000000", "train.batch=1048576"])
def test_what_is_just_allowed_is_planned(tiny_grid: Any, largest: str) -> None:
    trial = tiny_grid(largest)
    assert trial is not None and planned(trial).trials == (trial,)


# --- all sizes of a trial, and of a sweep, together --------------------------------------------------------------


def test_a_model_that_no_gpu_holds() -> None:
    """Known without listing a tensor of it twice: 2^30 weights a matrix of a block."""
    small, large = Trial(), Trial(model=Model(width=2**16, head_dim=128, depth=64))
    make_plan([small], (), None, "cuda", 1, memory=2.0**36)
    with pytest.raises(
        ConfigError, match=r"^model.width=65536, model.depth=64: weights and gradients of one trial take"
    ):
        make_plan([small, large], (), None, "cuda", 1, memory=2.0**36)


def test_results_that_no_disk_holds(tiny_grid: Any, tmp_path: Path) -> None:
    trial = tiny_grid("train.steps=10000000", "model.depth=4096")
    packs = (PackPlan((trial,) * 100_000, frozenset()),)
    with pytest.raises(ConfigError, match=r"the results of 100000 trials take more than [\d,.]+ GiB; allowed: at"):
        check_disk(Plan(packs, 100_000, 0, 0), tmp_path / "not" / "yet")
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_no_memory_holds(tiny_grid: Any) -> None:
    """A block ends with the run, so a short one may have any block."""
    short, long = tiny_grid("train.steps=6"), tiny_grid("train.steps=10000000", "model.depth=4096")
    check_block(Plan((PackPlan((short,), frozenset()),), 1, 0, 0), block=10**7)
    with pytest.raises(ConfigError, match=r"^telemetry.block=10000000: so many steps of a pack take [\d,.]+ GiB"):
        check_block(Plan((PackPlan((long,) * 1000, frozenset()),), 1000, 0, 0), block=10**7)


def test_more_processes_than_memory() -> None:
    check_processes(1)
    with pytest.raises(ConfigError, match=r"^ranks=processes: 1000000 of them take more than 125,000 GiB"):
        check_processes(1_000_000)


def test_campaigns_together_have_a_limit(tiny_grid: Any) -> None:
    trial = tiny_grid(*BIT, "fault.bit=null", "fault.samples=60000")
    assert isinstance(trial.fault, Value)
    one = Campaign(trial, trial.fault, None, 60_000)  # type: ignore[arg-type]
    check_samples([one])
    with pytest.raises(ConfigError, match=r"^fault.samples=60000: 120,000 faults of 2 descriptions; allowed: 100,000"):
        check_samples([one, one])


def test_a_plan_with_more_workers_than_packs(tiny_grid: Any) -> None:
    plan = Plan((planned(tiny_grid("seed=1")),), 1, 0, 0)
    assert wall_seconds(plan, "cpu", 10**30) == wall_seconds(plan, "cpu", 1) > 0
