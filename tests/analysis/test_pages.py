"""What the pages of trials show, as data: it is what the store holds, bounded, and text stays text."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import open_sweep
from analysis.__main__ import main
from analysis.pages import static_page
from analysis.pages.command import NO_COMMAND, training_command
from analysis.pages.curves import curve
from analysis.pages.overview import columns_of, finals, worth
from analysis.pages.plain import json_text, plain
from analysis.pages.static_page import write_trial, write_trials
from analysis.pages.trial_page import Detail, trial_page, trial_pages
from harness.config import ConfigError, Fault, Trial
from harness.storage.store import open_store
from harness.storage.stored import read_store
from tests.analysis import synthetic
from tests.sweeps import command


def page_of(out: Path, trial: str) -> dict[str, Any]:
    attributes, packs = read_store(out)
    return trial_page(out, attributes, list(packs), trial)


def data_of(page: Path) -> dict[str, Any]:
    """What stands in the file for its scripts."""
    text = page.read_text(encoding="utf-8")
    (part,) = text.split('<script type="application/json" id="data">')[1:]
    return json.loads(part.split("</script>")[0])


# --- curves ------------------------------------------------------------------------------------------------------


def test_a_short_curve_is_the_store_to_the_last_bit() -> None:
    values = np.random.default_rng(0).normal(size=300).astype("f4")
    made = curve(values, 400)
    assert made["x"] is None and np.array_equal(np.array(made["y"], "f4"), values)


@pytest.mark.parametrize("at", [0, 1, 4_999, 50_000, 99_998, 99_999])
def test_a_thinned_curve_keeps_every_spike(at: int) -> None:
    values = np.random.default_rng(0).normal(size=100_000).astype("f4")
    values[at] = 50
    values[(at + 31_007) % 100_000] = -50
    made = curve(values, 400)
    assert len(made["y"]) <= 402 and made["of"] == 100_000
    assert {max(made["y"]), min(made["y"])} == {50, -50}
    assert np.array_equal(np.array(made["y"], "f4"), values[made["x"]]), "each is a stored value at its own step"
    assert made["x"][0] == 0 and made["x"][-1] == 99_999


def test_what_is_not_finite_is_told_and_not_drawn() -> None:
    values = np.arange(1000, dtype="f4")
    values[10], values[20:23], values[500], values[900:] = np.nan, np.inf, -np.inf, np.nan
    made = curve(values, 100, has_every_step=True)
    assert made["holes"] == [[10, 10, "NaN"], [20, 22, "Infinity"], [500, 500, "-Infinity"], [900, 999, "NaN"]]
    assert np.isfinite(made["y"]).all()
    assert curve(values, 100)["holes"] == [[20, 22, "Infinity"], [500, 500, "-Infinity"]], "NaN: not measured there"
    assert curve(np.full(9, np.nan, "f4"), 100, True) == {"x": [], "y": [], "holes": [[0, 8, "NaN"]], "of": 0}
    json_text(made)


def test_json_has_neither_tags_nor_words_that_it_does_not_know() -> None:
    hostile = {"</script><script>": ["<!--", "\u2028\ud800&", float("nan"), -np.inf, np.float32(0.5), None, True]}
    text = json_text(plain(hostile))
    assert not set("<>&") & set(text) and text.isascii()
    assert json.loads(text) == {"</script><script>": ["<!--", r"\u2028\ud800&", "NaN", "-Infinity", 0.5, None, True]}
    with pytest.raises(ValueError):
        json_text([float("nan")])


# --- the page of a trial -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trial, Trial, Trial]:
    """A golden trial, one that is struck at step 20 and comes back, and one that ends in NaN at step 30."""
    out = tmp_path_factory.mktemp("struck")
    spike = synthetic.make_trial(fault=synthetic.WeightBit(start=20, bit=3))
    lost = synthetic.make_trial(fault=synthetic.WeightBit(start=20, bit=30))

    def loss(trial: Trial) -> np.ndarray:
        values = np.linspace(3, 2, 40)
        values += np.where(np.arange(40) == 22, 4, 0) if trial.id == spike.id else 0
        values[30:] = np.nan if trial.id == lost.id else values[30:]
        return values

    trials = synthetic.with_golden([spike, lost])
    synthetic.write_pack(out, trials, loss, faults=synthetic.strike_events, signals={"grad_norm": loss})
    return out, trials[0], spike, lost


def test_a_page_has_curves_twin_strikes_and_deviation(struck) -> None:
    out, golden, spike, _ = struck
    found = page_of(out, spike.id)
    page, curves, sweep = found["page"], found["curves"], open_sweep(out)
    assert page["golden"] == golden.id and page["has_twin"]
    for trial in (spike, golden):
        stored = sweep["loss"].sel(trial=trial.id).values
        assert np.array_equal(np.array(curves[trial.id]["loss"]["y"], "f4"), stored)
    deviation = curves[spike.id]["deviation"]
    assert deviation["x"] == [*range(20, 40)] and deviation["y"][2] == pytest.approx(4, abs=1e-6)
    assert [event["step"] for event in page["events"]] == [20] and page["events"][0]["after"] == "Infinity"
    assert page["facts"]["strikes"] == 1 and page["facts"]["outcome"] == "trained"
    json_text(found)


def test_a_page_of_a_trial_that_was_lost_says_where(struck) -> None:
    out, _, _, lost = struck
    found = page_of(out, lost.id)
    assert found["page"]["facts"]["nonfinite_step"] == 30 and "final_loss" not in found["page"]["facts"]
    assert found["curves"][lost.id]["loss"]["holes"] == [[30, 39, "NaN"]]
    (incident,) = [one for one in found["page"]["incidents"] if "non-finite" in one["symptoms"]]
    assert incident["outcome"] == "divergent"


def test_a_golden_trial_has_no_twin_beside_it(struck) -> None:
    out, golden, _, _ = struck
    found = page_of(out, golden.id)
    assert found["page"]["golden"] is None and [*found["curves"]] == [golden.id]
    assert "deviation" not in found["curves"][golden.id] and found["page"]["events"] == []


def test_only_what_is_not_the_default_stands_first(struck) -> None:
    config = page_of(struck[0], struck[2].id)["page"]["config"]
    changed = {key: value for key, value, _ in config["changed"]}
    assert {
        "model.width": 32,
        "optim.lr": 0.01,
        "train.steps": 40,
        "fault.name": "weight_bit",
    }.items() <= changed.items()
    assert "optim.beta1" not in changed and ["optim.beta1", 0.9] in config["rest"]


def test_a_trial_that_is_not_finished_has_what_is_stored(tmp_path: Path) -> None:
    trials = synthetic.with_golden([synthetic.make_trial(fault=synthetic.WeightBit(start=5))])
    synthetic.write_pack(tmp_path, trials, steps_done=20, finish=False)
    found = page_of(tmp_path, trials[1].id)
    assert found["page"]["facts"]["complete"] is False and found["page"]["facts"]["steps_done_by_its_pack"] == 20
    assert len(found["curves"][trials[1].id]["loss"]["y"]) == 20 and found["page"]["incidents_missing"] == ""
    untouched = synthetic.make_trial(seed=7)
    synthetic.write_pack(tmp_path, [untouched], steps_done=0, finish=False)
    assert page_of(tmp_path, untouched.id)["curves"] == {untouched.id: {}}


def test_a_damaged_pack_takes_the_pages_of_no_other(tmp_path: Path) -> None:
    good, bad = synthetic.make_trial(), synthetic.make_trial(lr=1e-3)
    synthetic.write_pack(tmp_path, [good], pack="a" * 16)
    synthetic.write_pack(tmp_path, [bad], pack="b" * 16)
    chunk = next((tmp_path / "store.zarr" / ("b" * 16) / "grad_norm").glob("c.0.*"))
    chunk.write_bytes(b"no chunk")
    attributes, packs = read_store(tmp_path)
    pages = {}
    for part in trial_pages(tmp_path, attributes, list(packs), [bad.id, good.id], Detail()):
        pages |= part.pages
    assert "is damaged" in pages[bad.id]["damage"] and "damage" not in pages[good.id]


# --- the command -------------------------------------------------------------------------------------------------


def words_of(line: str) -> Sequence[str]:
    program, name, *words = shlex.split(line)
    assert (program, name) == ("stability-harness", "sweep")
    return [word for word in words if not word.startswith("out=")]


LINES: dict[str, list[str]] = {
    "a plain trial": [],
    "its own sizes": ["model.width=32", "optim.lr=3e-2", "seed=3", "data.seed=7"],
    "a mitigation": ["mitigation=qk_norm+z_loss", "optim.clip=null"],
    "a mitigation that sets what was given": ["mitigation=clip_1"],
    "an optimizer": ["mitigation=lion", "optim.lr=1e-3"],
    "another recipe": ["recipe=gpt2", "optim.beta2=0.99", "model.width=64", "model.depth=2"],
    "a fault": ["fault=weight_bit", "fault.bit=30", "fault.tensor=blocks.*.feedforward.down", "fault.start=100"],
    "a poisoned batch": ["fault=rare_tokens", "fault.start=20", "fault.duration=8"],
    "detectors": ["detect=skip_step+cusum", "detect.skip_step.sigma=4"],
    "a playbook": ["playbook=ladder", "fault=nan_gradient", "fault.start=5", "train.steps=400"],
    "a ladder of one's own": ["detect=finite", "playbook.ladder='[{detector: any, action: skip, limit: 3}]'"],
    "a text of one's own": ["data.source=text", "data.path='/tmp/a b, c=d'"],
}


@pytest.mark.parametrize("name", LINES)
def test_the_command_is_of_the_same_trial(name: str) -> None:
    trial = command.only(*LINES[name])
    assert command.only(*words_of(training_command(trial.to_dict()))).id == trial.id


def test_a_stranger_s_words_are_no_commands_of_a_shell() -> None:
    trial = synthetic.make_trial(mitigation="$(touch /tmp/x); `id` 'q' \"r\" \\ #").to_dict()
    line = training_command(trial)
    (mitigation,) = [word for word in shlex.split(line) if word.startswith("mitigation=")]
    assert "$(touch" in mitigation and "'$(touch" not in mitigation
    assert (
        training_command({**trial, "mitigation": "a\x1b[2J"}) == NO_COMMAND == training_command({**trial, "seed": "\n"})
    )
    assert training_command({**trial, "mitigation": "x", "detect": "nonsense", "optim": None})


# --- all trials --------------------------------------------------------------------------------------------------


def test_the_columns_are_those_of_the_sweep(realistic: Path) -> None:
    sweep = open_sweep(realistic)
    told = columns_of(sweep, **finals(sweep))
    columns = told["columns"]
    assert told["trials"] == sweep["trial"].values.tolist()
    for name in ("lr", "width", "seed"):
        assert columns[name]["is_setting"] and columns[name]["values"] == sweep[name].values.tolist()
    for name in ("mitigation", "fault", "outcome"):
        words = [columns[name]["words"][place] for place in columns[name]["values"]]
        assert words == sweep[name].values.tolist()
    losses = sweep["final_loss"].values
    lost = np.isfinite(sweep["nonfinite_step"].values)
    for value, loss, is_lost in zip(columns["final_loss"]["values"], losses, lost, strict=True):
        assert value == ("Infinity" if is_lost else loss)
    json_text(told)


def test_the_trials_that_come_first(tmp_path: Path) -> None:
    masked, moved, lost = (synthetic.make_trial(fault=synthetic.WeightBit(start=20, bit=bit)) for bit in (1, 2, 3))
    others = [synthetic.make_trial(seed=9, lr=lr) for lr in (1e-3, 1e-1)]
    golden = masked.golden

    def loss(trial: Trial) -> np.ndarray:
        return np.where((np.arange(40) > 30) & (trial.id == lost.id), np.nan, 2 + trial.optim.lr)

    trials = [*others, golden, masked, moved, lost]
    masked_step = lambda trial: 21 if trial.id == masked.id else None  # noqa: E731
    synthetic.write_pack(tmp_path, trials, loss, faults=synthetic.strike_events, masked_step=masked_step)
    sweep = open_sweep(tmp_path)
    order = sweep["trial"].values[worth(sweep, finals(sweep)["final_loss"])].tolist()
    assert order[:4] == [lost.id, moved.id, golden.id, others[1].id] and set(order) == {trial.id for trial in trials}


def test_a_file_has_room_for_some_and_says_which(realistic: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "sweep"
    shutil.copytree(realistic, out)
    whole = write_trials(out)
    assert "Every trial has its curves here." in whole.read_text() and len(data_of(whole)["pages"]) == 180
    monkeypatch.setattr(static_page, "MOST_PAGES", 12)
    some = data_of(write_trials(out))
    assert len(some["pages"]) == 12 and len(some["overview"]["trials"]) == 180
    assert (
        some["note"].startswith("12 trials of 180 have their curves here")
        and "stability-harness trial OUT" in some["note"]
    )
    lost = open_sweep(out).trial[open_sweep(out).outcome == "non-finite"].values.tolist()
    assert set(lost) <= set(some["pages"])
    monkeypatch.setattr(static_page, "MOST_BYTES", 30_000)
    assert 0 < len(json_text(data_of(write_trials(out))["pages"])) < 30_000
    left = next(trial for trial in some["overview"]["trials"] if trial not in some["pages"])
    alone = data_of(write_trial(out, left))
    assert [*alone["pages"]] == [left] and len(alone["curves"][left]["loss"]["y"]) == 120


def test_the_commands_write_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = synthetic.make_trial()
    synthetic.write_pack(tmp_path, [trial])
    assert main(["trial", str(tmp_path), trial.id]) == 0
    page = tmp_path / "trials" / f"{trial.id}.html"
    assert capsys.readouterr().out == f"Page: {page}\n" and page.stat().st_size > 10**6
    for arguments, reason in {
        ("trial", str(tmp_path), "../../x"): "TRIAL='../../x': no such trial",
        ("trial", str(tmp_path / "none"), trial.id): "does not exist",
        ("watch", str(tmp_path / "none")): "does not exist",
        ("watch", str(tmp_path), "--port", "http"): "--port=http: not a port; allowed: 1 to 65535",
        ("watch", str(tmp_path), "--port=65536"): "--port=65536: not a port",
    }.items():
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert reason in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_sweep_without_trials_has_a_page(tmp_path: Path) -> None:
    open_store(tmp_path, "test")
    assert data_of(write_trials(tmp_path))["overview"]["trials"] == []


def test_a_trial_is_only_a_hash_in_names_of_files(struck) -> None:
    with pytest.raises(ConfigError, match="no such trial"):
        write_trial(struck[0], "nope")
    assert Fault().name == "none" and not (struck[0] / "trials").exists()
