"""Replays of recorded faults: from a file, from a folder of results, and in the command; checked, and refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from harness.config import ConfigError
from harness.faults.facts import facts_of
from harness.storage.stored import read_packs
from harness.testing import engine
from harness.testing.faults import train_told
from injectors.replay import Replay, ReplayError, record_of
from tests.injectors.faults import fault as named
from tests.injectors.spies import trial
from tests.sweeps import command

FAULTS = ("weight_bit", "activation_bit", "update_bit", "stuck_bit", "rare_tokens", "fp8_gradients", "realistic_sdc")
GIVEN = ("fault.start=3", "seed=5", "train.ranks=2", "fault.elements=3")
CASES = ["weight_bit", "activation_bit", "rank_noise", "stuck_bit", "rare_tokens", "missed_update", "value at update"]


# --- a record, made by hand of what a run left -------------------------------------------------------------------


@cache
def recorded_run(case):
    """A faulty trial, its run with its golden twin, and the record of it as it is written."""
    faulty = trial(named(case))
    run = engine.run([faulty, faulty.golden])
    return faulty, run, json.dumps(record_in(run, 0))


def record_in(run, planned):
    """The record of one trial of a run."""
    events = [event.to_dict() for event in run.result.events[planned]]
    return record_of(run.pack.planned[planned].to_dict(), events, run.corpus.fingerprint)


def recorded(case):
    """A faulty trial, its run, and the record of it."""
    faulty, run, record = recorded_run(case)
    return faulty, run, json.loads(record)


def replay(record) -> Replay:
    return Replay(record=record if isinstance(record, str) else json.dumps(record)).resolved()


def again(faulty, record):
    return engine.run([dataclasses.replace(faulty, fault=replay(record)), faulty.golden])


@pytest.fixture(scope="module")
def from_files(tmp_path_factory):
    """A run of all CASES in one pack, and one of what files say of them in trials of another seed, the last first."""
    folder = tmp_path_factory.mktemp("records")
    faulty = [trial(named(case), init=3, order=4) for case in CASES]
    run, elsewhere = train_told([*faulty, faulty[0].golden]), []
    for planned in reversed(range(len(CASES))):
        (folder / f"{planned}.json").write_text(json.dumps(record_in(run, planned)))
        fault = replay(str(folder / f"{planned}.json"))
        elsewhere.append(dataclasses.replace(faulty[planned], seed=99, fault=fault))
    return run, train_told([*elsewhere, faulty[0].golden])


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_enough(case, from_files):
    """The seed of what the fault draws is in it, so the trial need not have it."""
    run, found = from_files
    planned = CASES.index(case)
    now = len(CASES) - 1 - planned
    assert engine.same_bits(run[planned], found[now]) == []
    assert found.result.events[now] == run.result.events[planned] != []


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("weight_bit", "bits_before", "3f800000"),
        ("weight_bit", "before", "1.0"),
        ("weight_bit", "after", "-1.0"),
        ("weight_bit", "bits_after", "00000000"),
        ("weight_bit", "index", [0, 0]),
        ("weight_bit", "bit", 3),
        ("weight_bit", "step", 5),
        ("weight_bit", "mask", None),
        ("weight_bit", "was_zero", True),
        ("nan_gradient", "rank", 1),
        ("rare_tokens", "before", "0" * 64),
        ("fp8_gradients", "after", "0" * 64),
        ("learning_rate_jump", "after", "0.5"),
    ],
)
def test_a_record_that_does_not_fit_stops_the_run(case, name, value):
    """And says what was found, and what was recorded."""
    faulty, _, record = recorded(case)
    event = record["events"][0]
    found = event[name]
    event[name] = value
    with pytest.raises(ReplayError) as caught:
        again(faulty, record)
    now, then = (tuple(x) if isinstance(x, list) else x for x in (found, value))
    assert str(caught.value) == f"{event['site']} {event['tensor']} at step 4: {name} {now}, recorded {then}"


def test_a_later_strike_is_checked_too():
    faulty, _, record = recorded("learning_rate_jump")
    record["events"][2]["after"] = "0.5"
    with pytest.raises(ReplayError, match=r"^learning_rate learning_rate at step 6: after .*, recorded 0.5$"):
        again(faulty, record)


def test_another_trial_has_other_values():
    faulty, _, record = recorded("weight_bit")
    with pytest.raises(ReplayError, match=r"before .*, recorded .*bits_before .*, recorded "):
        again(dataclasses.replace(faulty, seed=8), record)


# --- what is refused before anything is trained ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"width": 32}, r"^model.width=32: but fault.record is from a trial with 16; allowed: 16$"),
        ({"depth": 1}, r"^model.depth=1: .* allowed: 2$"),
        ({"feedforward": 8}, r"^model.feedforward=8: .* allowed: null$"),
        ({"qk_norm": False}, r"^model.qk_norm=false: but .* with true; allowed: true$"),
        ({"batch": 8}, r"^train.batch=8: .* allowed: 4$"),
        ({"ranks": 4}, r"^train.ranks=4: .* allowed: 2$"),
        ({"precision": "fp64"}, r"^train.precision=fp64: .* allowed: fp32$"),
    ],
)
def test_a_record_of_another_shape(fields, words):
    _, _, record = recorded("weight_bit")
    own, here = replay(record), trial(**fields)
    own.check(facts_of(trial()))
    with pytest.raises(ConfigError, match=words) as caught:
        own.check(facts_of(here))
    assert len(caught.value.reasons) == 1


def test_a_record_of_another_corpus():
    _, run, record = recorded("weight_bit")
    replay(record).check_corpus(run.corpus.fingerprint)
    with pytest.raises(ConfigError, match=rf"fingerprint {run.corpus.fingerprint}, here 123\); allowed: a record from"):
        replay(record).check_corpus("123")


def test_what_the_record_says_is_not_said_again():
    _, _, record = recorded("weight_bit")
    for name, value in (("start", 2), ("duration", 3), ("period", 2), ("seed", 8)):
        with pytest.raises(
            ConfigError, match=rf"^fault.{name}={value}: but fault.record has .*; allowed: leave it out"
        ):
            Replay(record=json.dumps(record), **{name: value}).resolved()
    same = Replay(record=json.dumps(record), start=4, seed=7).resolved()
    assert same == same.resolved() == replay(record)


BROKEN = {
    "no JSON": ("{", "no record (Expecting property name"),
    "a list": ("[1]", "no record (expected an object with fault, seed, corpus, shape, events)"),
    "a number": ("3", "no record (expected an object"),
    "null": ("null", "no record (expected an object"),
    "bytes": (b"\xff\xfe\x00", "no record ('utf-8' codec"),
    "empty": ("", "no record (Expecting value"),
    "one part alone": ('{"fault": 3}', "no record (it lacks seed, corpus, shape, events)"),
    "nested": ("[" * 100_000, "no record (it is nested too deeply)"),
    "objects, nested": ('{"fault":' * 100_000, "no record (it is nested too deeply)"),
}
EVENT = {"site": "weight", "tensor": "head", "index": [0, 0], "bit": 1, "step": 4, "before": "0.0", "after": "1.0"}
EVENT |= {"bits_before": "00", "bits_after": "01", "changed": True}
TAMPERED = {
    "wrong types": ({"seed": "x", "shape": []}, "of the wrong type: seed, shape"),
    "no fault": ({"fault": {"kind": "none"}}, "fault.kind=none: no kind of fault; allowed: "),
    "an unknown fault": ({"fault": {"kind": "gremlin"}}, "fault.kind=gremlin: no kind of fault; allowed: "),
    "no kind": ({"fault": {}}, "fault.kind=null: no kind of fault"),
    "an unknown field": ({"fault": {"kind": "value", "colour": "red"}}, "colour"),
    "a value out of range": ({"fault": {"kind": "value", "bit": 99}}, "fault.bit=99: out of range; allowed: >= -64"),
    "a value of the wrong type": ({"fault": {"kind": "value", "start": "soon"}}, "fault.start=soon: wrong type"),
    "an event without a place": ({"events": [{"site": "weight"}]}, "event 0: tensor, index, bit, step, before, after"),
    "an event that is none": ({"events": [3]}, "event 0: no object"),
    "an event with an unknown part": ({"events": [EVENT | {"colour": 3}]}, "event 0: colour missing, unknown or"),
    "an event of a wrong type": ({"events": [EVENT | {"index": "00"}]}, "event 0: index missing, unknown or"),
    "a kind that is a list": ({"fault": {"kind": ["value"]}}, "fault.kind=['value']: no kind of fault"),
    "a name that is none": ({"fault": {"kind": "value", "name": [1]}}, "fault.name=[1]: no field of this kind"),
    "a seed beyond int64": ({"seed": 2**64}, "seed=18446744073709551616: out of range"),
    "a negative seed": ({"seed": -1}, "seed=-1: out of range"),
    "a replay of no record": ({"fault": {"kind": "replay", "record": "{}"}}, "it lacks fault, seed, corpus, shape"),
    "a replay of a file": ({"fault": {"kind": "replay", "record": "/dev/zero"}}, "no record (Expecting value"),
    "an integer beyond int64": ({"fault": {"kind": "value", "start": 10**30}}, "fault.start=1000000000000000000000"),
}


@pytest.mark.parametrize(("content", "words"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_record(tmp_path, content, words):
    file = tmp_path / "record.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        replay(str(file))
    (reason,) = caught.value.reasons
    assert reason.startswith("fault.record=") and words in reason and "\n" not in reason
    assert reason.endswith(
        "allowed: a file that holds a record, or FOLDER:TRIAL, a trial with a fault in a folder of results"
    )


@pytest.mark.parametrize(("change", "words"), TAMPERED.values(), ids=TAMPERED)
def test_a_record_that_was_tampered_with(change, words):
    _, _, record = recorded("weight_bit")
    with pytest.raises(ConfigError) as caught:
        replay({**record, **change})
    (reason,) = caught.value.reasons
    assert reason.startswith("fault.record={") and words in reason and "\n" not in reason


@pytest.mark.parametrize("path", ["", "nowhere", "nowhere.json", "x" * 5000, "a\0b", "/dev/zero", "~nobody-here/x:1"])
def test_no_such_file(path):
    with pytest.raises(ConfigError, match="^fault.record=") as caught:
        replay(path)
    (reason,) = caught.value.reasons
    assert len(reason) < 500


def test_a_file_that_gives_no_record_however_long_one_reads(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "huge", "wb") as huge:
        huge.truncate(1 << 40)
    for name, words in (("fifo", "no such file"), ("huge", "no record (it has more than 16 MiB)")):
        with pytest.raises(ConfigError, match=re.escape(words)):
            replay(str(tmp_path / name))


def test_a_record_in_the_users_own_folder(tmp_path, monkeypatch):
    """A shell leaves the ~ of fault.record=~/record.json alone."""
    _, _, record = recorded("weight_bit")
    (tmp_path / "record.json").write_text(json.dumps(record))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert replay("~/record.json") == replay(record)


def test_a_replay_is_replayed():
    """The record of a trial that was a replay itself."""
    faulty, _, record = recorded("weight_bit")
    run = again(faulty, record)
    once_more = again(faulty, record_in(run, 0))
    assert once_more.result.events[0] == run.result.events[0] != []


# --- from results of a real sweep --------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def unchanged_process() -> Iterator[None]:
    """A sweep in this process sets Hydra's variable."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    yield
    os.environ.pop("HYDRA_FULL_ERROR", None)
    if before is not None:
        os.environ["HYDRA_FULL_ERROR"] = before


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one trial for each of FAULTS, and of their golden twin."""
    out = tmp_path_factory.mktemp("campaign") / "out"
    ended = command.call(*command.tiny(f"fault={','.join(FAULTS)}", *GIVEN, f"out={out}"))
    assert ended.status == 0, ended.err
    return out


def faulty_ids(results: xr.Dataset) -> dict[str, str]:
    """fault -> id of its trial."""
    pairs = zip(results.fault.values.tolist(), results.trial.values.tolist(), strict=True)
    return {fault: trial_id for fault, trial_id in pairs if fault != "none"}


def events_of(out: Path) -> dict[str, list]:
    """id -> events, as they are stored."""
    return {
        trial_id: events
        for pack in read_packs(out)
        for trial_id, events in zip(pack.attributes["ids"], pack.attributes["faults"], strict=True)
    }


def replaying(record: Path | str, *others: str) -> list[str]:
    given = [text for text in GIVEN if not text.startswith("fault.")]
    return command.tiny("fault=replay", f"fault.record={record}", *given, *others)


@pytest.fixture(scope="module")
def replays(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[command.Ended, Path]:
    """Every fault again, by a process that is given paths relative to where it runs: every other one as a file."""
    folder = tmp_path_factory.mktemp("replays")
    records = []
    for number, (fault, trial_id) in enumerate(sorted(faulty_ids(command.results(campaign)).items())):
        records.append(f"{os.path.relpath(campaign, folder)}:{trial_id}")
        if number % 2:
            (folder / f"{fault}.json").write_text(Replay(record=f"{campaign}:{trial_id}").resolved().record)
            records[-1] = f"{fault}.json"
    ended = command.end(command.fork(*replaying(",".join(records), "out=out"), cwd=folder))
    return ended, folder / "out"


def done_again(campaign: Path, out: Path) -> dict[str, str]:
    """fault -> id of its replay, once each has been found to be the same, bit for bit and with the same record."""
    first, again, stored, recorded = (
        command.results(campaign),
        command.results(out),
        events_of(out),
        events_of(campaign),
    )
    assert set(again.fault.values.tolist()) == {"none", "replay"} and len(again.trial) == len(FAULTS) + 1
    found = {}
    for fault, trial_id in faulty_ids(first).items():
        events = recorded[trial_id]
        (found[fault],) = [other for other, own in stored.items() if own == events and events]
        for name in ("loss", "grad_norm", "param_norm", "activation_rms"):
            values = [data[name].sel(trial=i).values for data, i in ((first, trial_id), (again, found[fault]))]
            assert values[0].tobytes() == values[1].tobytes() and values[0].dtype == np.float32, (fault, name)
    return found


def test_the_command_replays_every_fault_of_a_folder_of_results(campaign, replays):
    """And every one of a file."""
    ended, out = replays
    assert set(faulty_ids(command.results(campaign))) == set(FAULTS)
    assert ended.status == 0, ended.err
    assert set(done_again(campaign, out)) == set(FAULTS)


def test_what_was_replayed_is_replayed_in_its_turn(campaign, replays, tmp_path):
    known = done_again(campaign, replays[1])
    records = ",".join(f"{replays[1]}:{known[fault]}" for fault in FAULTS)
    ended = command.call(*replaying(records, f"out={tmp_path}/third"))
    assert ended.status == 0, ended.err
    assert set(done_again(campaign, tmp_path / "third")) == set(FAULTS)


def test_the_command_says_where_a_replay_went_wrong(campaign, tmp_path):
    """The pack fails, with what was found and what was recorded in its trace."""
    trial_id = faulty_ids(command.results(campaign))["weight_bit"]
    record = json.loads(Replay(record=f"{campaign}:{trial_id}").resolved().record)
    tampered = copy.deepcopy(record)
    tampered["events"][0]["bits_before"] = "deadbeef"
    (tmp_path / "record.json").write_text(json.dumps(tampered))
    ended = command.call(*replaying(str(tmp_path / "record.json"), f"out={tmp_path}/out"))
    assert ended.status == 1
    found = f"bits_before {record['events'][0]['bits_before']}, recorded deadbeef"
    (trace,) = (tmp_path / "out" / "errors").glob("*.txt")
    assert "ReplayError" in trace.read_text() and found in trace.read_text() and found in ended.out + ended.err


def test_the_command_refuses_each_in_one_line(campaign, tmp_path):
    golden = next(i for i in command.results(campaign).trial.values.tolist() if not events_of(campaign)[i])
    trial_id = faulty_ids(command.results(campaign))["weight_bit"]
    (tmp_path / "broken.json").write_text('{"fault": {}}')
    cases = {
        "nowhere.json": "fault.record=nowhere.json: no such file; allowed: a file that holds a record, or FOLDER:TRIAL",
        f"{tmp_path}/broken.json": "broken.json: no record (it lacks seed, corpus, shape, events); allowed: ",
        f"{campaign}:0123456789abcdef": "no finished trial of that id there; allowed: ",
        f"{campaign}:": "no finished trial of that id there; allowed: ",
        f"{campaign}:{golden}": "that trial has no fault; allowed: ",
        str(campaign): "no such file; allowed: ",
        f"{tmp_path}:{trial_id}": "holds no results; allowed: ",
    }
    good = f"{campaign}:{trial_id}"
    width = "model.width=32: but fault.record is from a trial with 16; allowed: 16"
    late = "fault.start=3: after the last step of train.steps=3; allowed: 0 to 2"
    for records, others, expected in (
        (",".join(cases), (), cases.values()),
        (good, ("model.width=32", "train.steps=3"), (late, width)),
        (good, ("data.length=3000",), ("fault.record: from another corpus (fingerprint ",)),
        (good, ("fault.start=4",), ("fault.start=4: but fault.record has 3; allowed: leave it out",)),
    ):
        lines = command.refused(tmp_path, *replaying(records, *others, f"out={tmp_path}/out"))
        for line, words in zip(lines, expected, strict=True):
            assert line.startswith("error: ") and words in line, line
