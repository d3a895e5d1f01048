"""A recorded fault, injected again and checked, value by value, against its record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config import PER_TRIAL, ConfigError, Trial, anything, trial_from_dict
from harness.sites import Event, Injector, Site, Visit
from harness.store import read_packs
from injectors.fault import FaultContext, InjectableFault, Places

WANTED = "a file that holds a record, or FOLDER:TRIAL, a trial with a fault in a folder of results"
PARTS = ("fault", "seed", "corpus", "shape", "events")


class ReplayError(RuntimeError):
    """A replayed fault found another value than the record has, or left one."""


def record_of(trial: Mapping[str, Any], events: list[Mapping[str, Any]], fingerprint: str) -> dict[str, Any]:
    """The record of a fault, as plain values: from a trial's stored config, its events and its corpus' fingerprint."""
    from injectors import fault_types

    whole = trial_from_dict(trial, fault_types())
    values = (vars(whole.fault), whole.seeds["fault"], fingerprint, shape_of(whole), [dict(event) for event in events])
    return dict(zip(PARTS, values, strict=True))


def shape_of(trial: Trial) -> dict[str, Any]:
    """What decides which addresses a trial has, and what stands there."""
    model = {f"model.{name}": value for name, value in vars(trial.model).items() if name != "seed"}
    return model | {f"train.{name}": getattr(trial.train, name) for name in ("batch", "ranks", "precision")}


@dataclass(frozen=True)
class Replay(InjectableFault):
    """Do again what a record says, and stop with an error if a value before or after a strike is another one."""

    kind: str = "replay"
    record: str = anything(PER_TRIAL, "", WANTED)

    def resolved(self) -> Replay:
        record = self._read()
        fault = record["fault"]
        return dataclasses.replace(
            self,
            record=json.dumps(record, sort_keys=True),
            seed=record["seed"],
            **{name: fault[name] for name in ("start", "duration", "period")},
        )

    def _read(self) -> dict[str, Any]:
        """Raises ConfigError for what is no record."""
        try:
            if self.record.startswith("{"):
                record = json.loads(self.record)
            elif Path(self.record).is_file():
                record = json.loads(Path(self.record).read_text())
            else:
                return self._from_results()
            if not all(part in record for part in PARTS):
                raise ValueError(f"it lacks {', '.join(part for part in PARTS if part not in record)}")
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"fault.record={self.record[:80]}: no record ({error}); allowed: {WANTED}") from None
        return record

    def _from_results(self) -> dict[str, Any]:
        folder, _, wanted = self.record.rpartition(":")
        if not folder:
            raise ConfigError(f"fault.record={self.record}: no such file; allowed: {WANTED}")
        for pack in read_packs(Path(folder)):
            if pack.complete and wanted in pack.attributes["ids"]:
                row = pack.attributes["ids"].index(wanted)
                trial, events = pack.attributes["trials"][row], pack.attributes["faults"][row]
                if trial["fault"]["kind"] == "none":
                    raise ConfigError(f"fault.record={self.record}: that trial has no fault; allowed: {WANTED}")
                return record_of(trial, events, pack.attributes["corpus"]["fingerprint"])
        raise ConfigError(f"fault.record={self.record}: no finished trial of that id there; allowed: {WANTED}")

    def check(self, trial: Trial, places: Places) -> None:
        recorded, here = json.loads(self.record)["shape"], shape_of(trial)
        reasons = [
            f"{key}={here.get(key)}: but fault.record is from a trial with {value}; allowed: {value}"
            for key, value in recorded.items()
            if here.get(key) != value
        ]
        if reasons:
            raise ConfigError(*reasons)
        self._inner().check(trial, places)

    def check_corpus(self, fingerprint: str) -> None:
        recorded = json.loads(self.record)["corpus"]
        if recorded != fingerprint:
            raise ConfigError(
                f"fault.record: from another corpus (fingerprint {recorded}, here {fingerprint}); "
                f"allowed: a record from this corpus"
            )

    def _inner(self) -> InjectableFault:
        from injectors import fault_types

        fault = json.loads(self.record)["fault"]
        cls: Any = fault_types()[fault["kind"]]
        return cls(**fault)

    def arm(self, context: FaultContext) -> Replayed:
        record = json.loads(self.record)
        inner = self._inner().arm(dataclasses.replace(context, seed=record["seed"]))
        return Replayed(inner, [Event(**_as_stored(event)) for event in record["events"]])


def _as_stored(event: Mapping[str, Any]) -> dict[str, Any]:
    return {**event, "index": None if event["index"] is None else tuple(event["index"])}


@dataclass
class Replayed:
    """Another injector, whose events are compared with those that are expected."""

    inner: Injector
    expected: list[Event]
    _seen: int = field(default=0)

    @property
    def calls(self) -> Collection[tuple[Site, int]]:
        return self.inner.calls

    @property
    def taps(self) -> Collection[str]:
        return self.inner.taps

    @property
    def permanent(self) -> bool:
        return self.inner.permanent

    def visit(self, visit: Visit) -> list[Event]:
        events = self.inner.visit(visit)
        for event in events:
            if self._seen < len(self.expected) and event != (recorded := self.expected[self._seen]):
                differing = {n: (v, getattr(recorded, n)) for n, v in vars(event).items() if v != getattr(recorded, n)}
                found = ", ".join(f"{name} {now}, recorded {then}" for name, (now, then) in differing.items())
                raise ReplayError(f"{event.site} {event.tensor} at step {event.step}: {found}")
            self._seen += 1
        return events
