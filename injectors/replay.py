"""A recorded fault, injected again and checked, value by value, against its record."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

from harness.config import (
    IDENTITY,
    PER_TRIAL,
    ConfigError,
    Trial,
    anything,
    checked,
    field_types,
    shown,
    trial_from_dict,
)
from harness.config.names import OWN
from harness.faults.facts import Facts, shape_of
from harness.faults.fault import InjectableFault, fault_types
from harness.model.branches import branches_of
from harness.storage.stored import read_packs
from harness.training.sites import Event, Injector, SiteCall

WANTED = "a file that holds a record, or FOLDER:TRIAL, a trial with a fault in a folder of results"
MOST_BYTES = 2**24  # of a record; one has thousands
PARTS = {"fault": dict, "seed": int, "corpus": str, "shape": dict, "events": list}  # of a record
YOUNGER = ("was_zero", "format")  # of an event
WHEN = ("start", "duration", "period")  # what a replay takes over from the fault that it does again


class ReplayError(RuntimeError):
    """A replayed fault found another value than the record has, or left one."""


def record_of(trial: Mapping[str, Any], events: list[Mapping[str, Any]], fingerprint: str) -> dict[str, Any]:
    """The record of a fault, as plain values: from a trial's stored config, its events and its corpus' fingerprint."""
    if OWN in trial:  # a run of one's own, whose model is none of ours
        fault, seed, shape = dict(trial["fault"]), trial["fault"]["seed"], trial[OWN]["shape"]
        seed = trial["seed"] if seed is None else seed
    else:
        whole = trial_from_dict(trial, fault_types())
        fault, seed = vars(whole.fault), whole.seeds["fault"]
        shape = shape_of(whole.model, whole.train, branches_of(whole))
    return {
        "fault": fault,
        "seed": seed,
        "corpus": fingerprint,
        "shape": shape,
        "events": [dict(event) for event in events],
    }


@dataclass(frozen=True)
class Replay(InjectableFault):
    """Do again what a record says, and stop with an error if a value before or after a strike is another one."""

    kind: str = "replay"
    record: str = anything(PER_TRIAL, "", WANTED)
    settles: ClassVar[tuple[str, ...]] = ("seed", *WHEN)

    def resolved(self) -> Replay:
        record = self._read()
        recorded = {"seed": record["seed"]} | {name: getattr(_fault_of(record), name) for name in WHEN}
        reasons = [
            f"fault.{name}={shown(given)}: but fault.record has {shown(value)}; allowed: leave it out"
            for name, value in recorded.items()
            if (given := getattr(self, name)) not in (value, getattr(Replay, name))
        ]
        if reasons:
            raise ConfigError(*reasons)
        return dataclasses.replace(self, record=json.dumps(record, sort_keys=True), **recorded)

    def _read(self) -> dict[str, Any]:
        """Raises ConfigError for what is no record."""
        text = self.record
        try:
            if not text.startswith("{"):
                file = Path(os.path.expanduser(text))
                if not file.is_file():
                    return self._from_results()
                if file.stat().st_size > MOST_BYTES:
                    raise ValueError(f"it has more than {MOST_BYTES // 2**20} MiB")
                text = file.read_text()
            record: dict[str, Any] = json.loads(text)
            _check_record(record)
        except ConfigError:
            raise
        except RecursionError:
            raise self._wrong("no record (it is nested too deeply)") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise self._wrong(f"no record ({reason})") from None
        return record

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(f"fault.record={shown(self.record)}: {why}; allowed: {WANTED}")

    def _from_results(self) -> dict[str, Any]:
        """The record of a trial in a results folder, FOLDER:ID. Raises ConfigError where there is none to read."""
        folder, _, wanted = self.record.rpartition(":")
        if not folder:
            raise self._wrong("no such file")
        try:
            packs = list(read_packs(Path(os.path.expanduser(folder))))
        except ConfigError as error:
            reasons = [reason.partition(": ")[2] for reason in error.reasons]  # which begin with out=FOLDER
            raise ConfigError(f"fault.record={shown(self.record)}: {'; '.join(reasons)}") from None
        finished = (pack.attributes for pack in packs if pack.complete)
        attributes = next((each for each in finished if wanted in each["ids"]), None)
        if attributes is None:
            raise self._wrong("no finished trial of that id there")
        row = attributes["ids"].index(wanted)
        try:
            trial, events = attributes["trials"][row], attributes["faults"][row]
            has_fault = trial["fault"]["kind"] != "none"
            record = record_of(trial, events, attributes["corpus"]["fingerprint"]) if has_fault else {}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            why = f"what is stored of that trial cannot be read ({type(error).__name__}: {error})"
            raise self._wrong(why) from None
        if not has_fault:
            raise self._wrong("that trial has no fault")
        return record

    def asks(self) -> tuple[str, ...]:
        return _fault_of(json.loads(self.record)).asks() if self.record.startswith("{") else ()

    def check(self, facts: Facts) -> None:
        super().check(facts)
        _fault_of(json.loads(self.record)).check(facts)

    def refused(self, facts: Facts) -> Iterator[str]:
        for key, value in json.loads(self.record)["shape"].items():
            if (here := facts.shape.get(key)) != value:
                why = f"but fault.record is from a trial with {shown(value)}"
                yield f"{key}={shown(here)}: {why}; allowed: {shown(value)}"

    def check_corpus(self, fingerprint: str) -> None:
        recorded = json.loads(self.record)["corpus"]
        if recorded != fingerprint:
            why = f"from another corpus (fingerprint {recorded}, here {fingerprint})"
            raise ConfigError(f"fault.record: {why}; allowed: a record from this corpus")

    def arm(self, facts: Facts) -> Replayed:
        record = json.loads(self.record)
        inner = _fault_of(record).arm(dataclasses.replace(facts, seed=record["seed"]))
        return Replayed(inner, [Event.from_dict(event) for event in record["events"]])


def _check_record(record: Any) -> None:
    """Raises ValueError, which says what is wrong, for values that are no record."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with {', '.join(PARTS)}")
    if missing := [part for part in PARTS if part not in record]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if wrong := [part for part, kind in PARTS.items() if not isinstance(record[part], kind)]:
        raise ValueError(f"of the wrong type: {', '.join(wrong)}")
    try:
        checked("seed", Trial, "seed", record["seed"])
        fault = _fault_of(record)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    for number, event in enumerate(record["events"]):
        if reason := _wrong_event(event):
            raise ValueError(f"event {number}: {reason}")
    if isinstance(fault, Replay):
        _check_record(json.loads(fault.record))


def _fault_of(record: Mapping[str, Any]) -> InjectableFault:
    """The fault that was recorded, its values checked as those of a command line are. Raises ConfigError."""
    fault, kinds = record["fault"], fault_types()
    kind = fault.get("kind")
    cls: Any = kinds.get(kind) if isinstance(kind, str) else None
    if cls is None or not issubclass(cls, InjectableFault):
        raise ConfigError(f"fault.kind={shown(kind)}: no kind of fault; allowed: {', '.join(sorted(kinds))}")
    known = field_types(cls)
    for name, value in fault.items():
        if name not in known or (name in IDENTITY and not isinstance(value, str)):
            raise ConfigError(f"fault.{shown(name)}={shown(value)}: no field of this kind; allowed: {', '.join(known)}")
    replayed: InjectableFault = cls(
        **{n: v if n in IDENTITY else checked(f"fault.{n}", cls, n, v) for n, v in fault.items()}
    )
    return replayed


def _wrong_event(event: Any) -> str:
    """Why `Event.from_dict` makes no event of it, if it does not."""
    if not isinstance(event, dict):
        return "no object"
    wrong = []
    for name, (kind, may_be_null) in field_types(Event).items():
        default = Event.__dataclass_fields__[name].default
        value = event.get(name, default)
        is_kind = isinstance(value, list if name == "index" else kind)  # JSON has no tuples
        if value is MISSING or not (is_kind or (may_be_null and value is None)):
            wrong.append(name)
    wrong += [name for name in event if name not in field_types(Event)]
    return f"{', '.join(map(shown, wrong))} missing, unknown or of the wrong type" if wrong else ""


@dataclass
class Replayed:
    """Another injector, whose events are compared with those that are expected."""

    inner: Injector
    expected: list[Event]
    _seen: int = 0

    def __post_init__(self) -> None:
        self.calls, self.taps, self.permanent = self.inner.calls, self.inner.taps, self.inner.permanent

    @property
    def memory(self) -> dict[str, Any]:
        return {**self.inner.memory, "seen": self._seen}

    def recall(self, memory: Mapping[str, Any]) -> None:
        self._seen = memory["seen"]
        self.inner.recall(memory)

    def visit(self, site_call: SiteCall) -> list[Event]:
        events = self.inner.visit(site_call)
        if site_call.is_look:
            return events
        for event, recorded in zip(events, self.expected[self._seen :], strict=False):
            pairs = [(name, now, getattr(recorded, name)) for name, now in vars(event).items()]
            differing = [
                f"{name} {now}, recorded {then}"
                for name, now, then in pairs
                if now != then and not (name in YOUNGER and then is None)  # older records do not say that
            ]
            if differing:
                raise ReplayError(f"{event.site} {event.tensor} at step {event.step}: {', '.join(differing)}")
        self._seen += len(events)
        return events
