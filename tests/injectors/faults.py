"""Every fault that the project has, found by itself, ready for a small trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.config import Fault, Trial
from harness.training.sites import Event, Injector, Visit
from injectors.value import SITES
from sweeps.compose.arguments import config_loader
from sweeps.compose.grid import Composer
from tests.harness import engine

START, STEPS = 4, 8
SHAPE = {"ranks": 2, "warmup": 6, "qk_norm": True, "clip": 1.0, "loss_scaling": "static", "loss_scale": 1024.0}
"""Two ranks, a warm-up and a loss scale, so that every kind of fault has something to strike."""
NEEDED = {"schedule_offset": ["fault.offset=-2"]}
SPECIAL = {"none", "replay"}  # `replay` does what another fault did: it is tested for each of them


@cache
def composer() -> Composer:
    return Composer(config_loader(), "grid")


@cache
def fault(case: str) -> Fault:
    """The fault of a case: `name`, or `value at site`."""
    name, _, site = case.partition(" at ")
    given = [f"fault={name}", f"fault.start={START}", "train.ranks=2", "train.batch=4", "schedule.warmup=6"]
    given += ["train.loss_scaling=static"]
    given += [f"fault.site={site}", "fault.bit=27"] if site else []
    return composer().trial([*given, *NEEDED.get(name, [])]).fault


def cases() -> list[str]:
    """All options of `fault`, and a bit flip at every site."""
    options = sorted(set(config_loader().get_group_options("fault")) - SPECIAL)
    return [*options, *(f"value at {site}" for site in SITES)]


@dataclass
class Named:
    """An injector that says which fault it is of if it fails among many."""

    fault: Fault
    inner: Injector

    @classmethod
    def of(cls, trial: Trial) -> Named | None:
        """The trial's fault, armed."""
        with said(trial.fault):
            inner = engine.injector_of(trial)
        return None if inner is None else cls(trial.fault, inner)

    def visit(self, visit: Visit) -> list[Event]:
        with said(self.fault):
            return self.inner.visit(visit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def said(fault: Fault) -> Iterator[None]:
    """What is raised in here says of which fault it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"of {fault}")
        raise


def train_told(trials: Sequence[Trial], **options: Any) -> Any:
    """The run of these trials in one pack; an injector that fails says of which fault it is."""
    injectors = {number: Named.of(each) for number, each in enumerate(trials)}
    return engine.run(trials, injectors, **options)
