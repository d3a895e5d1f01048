"""Incidents of real runs: their batches made again, their cause from evidence alone, their post-mortem, cross tests."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import xarray as xr

import analysis
from analysis.__main__ import main
from analysis.again.batches import BatchReader, reading_of, readings_of, setups_of
from analysis.again.crossing import DATA, OWN, STATE, crossed
from analysis.again.sweep_folder import SweepFolder
from analysis.measures.anomalies import TrialSignals
from analysis.measures.causes import CAUSES, UNKNOWN, cause_of
from analysis.measures.confusion import confusion, diagnosed, true_cause
from analysis.measures.evidence import evidence_of, offending, provenance_of
from analysis.measures.incidents import of_one, runs, worst
from analysis.reports import postmortem, words
from analysis.reports.follow_ups import SUGGESTED
from analysis.reports.postmortem import write_postmortem
from harness.basics.printing import printable
from harness.config import ConfigError
from harness.storage import stored
from harness.storage.stored import read_packs
from injectors import fault_types
from injectors.fault import digest
from sweeps.compose.hydra_calls import FOLDER
from tests.analysis.test_report import dump_dom
from tests.sweeps import command

START = 100
BATCH_FAULTS = ("rare_tokens", "repetition", "duplicated_batch")
OTHERS = ("learning_rate_jump", "nan_gradient", "rank_noise", "weight_bit", "update_bit", "stale_moment")
SIZES = (
    "train.steps=150",
    "train.batch=8",
    "model.width=32",
    "model.head_dim=16",
    "model.depth=2",
    "optim.lr=1e-2",
    "telemetry.block=32",
)
TEXT = ("data.source=stdlib", "data.vocabulary=256", "model.context=32")
RUN = command.tiny(
    *SIZES, *TEXT, f"fault={','.join(('none', *BATCH_FAULTS, *OTHERS))}", f"fault.start={START}", "seed=0,1"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("struck") / "out"
    ended = command.call(f"out={folder}", *RUN, "mitigation=none,no_clip")
    assert ended.status == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def sweep(out: Path) -> xr.Dataset:
    return analysis.open_sweep(out).load()


@pytest.fixture(scope="module")
def told(out: Path, sweep: xr.Dataset) -> dict[str, TrialSignals]:
    return {run.trial: run for run in runs(sweep, setups_of(out))}


def trial_of(sweep: xr.Dataset, fault: str, seed: int = 0, mitigation: str = "none") -> str:
    is_it = (sweep["fault"] == fault) & (sweep["seed"] == seed) & (sweep["mitigation"] == mitigation)
    (name,) = sweep["trial"].values[is_it.values]
    return str(name)


# --- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", BATCH_FAULTS)
def test_batches_are_those_that_were_trained_on_whatever_the_order(out: Path, sweep: xr.Dataset, fault: str) -> None:
    events = analysis.fault_events(out)
    trial = trial_of(sweep, fault)
    struck = events[events["trial"] == trial].set_index("step")["after"]
    assert len(struck)
    reading = reading_of(out, trial)
    for step in (*struck.index[::-1], *struck.index):
        assert digest(torch.as_tensor(reading.batch(int(step)))) == struck[step]
    clean = reading.clean.batch(START)
    assert not np.array_equal(clean, reading.batch(START))
    assert np.array_equal(reading.batch(START - 1), reading.clean.batch(START - 1))


def test_text_of_a_file_is_not_opened_unasked(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(4000)))
    data = ["data.source=text", f"data.path={text}", "data.vocabulary=256"]
    ended = command.call(f"out={tmp_path / 'out'}", *command.tiny("fault=rare_tokens", "fault.start=2", *data))
    assert ended.status == 0, ended.err
    sweep = analysis.open_sweep(tmp_path / "out")
    trial = str(sweep["trial"].values[0])
    with pytest.raises(ConfigError, match=r"data.path=.* not opened unasked; allowed: with --data PATH"):
        reading_of(tmp_path / "out", trial)
    assert reading_of(tmp_path / "out", trial, text).batch(0).shape == (2, 17)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "one more\n")
    with pytest.raises(ConfigError, match="trained on another text"):
        reading_of(tmp_path / "out", trial, other)


# --- causes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [name for name in (*BATCH_FAULTS[:2], *OTHERS) if name != "update_bit"])
@pytest.mark.parametrize("seed", [0, 1])
def test_causes_are_told(out: Path, sweep: xr.Dataset, told: dict[str, TrialSignals], fault: str, seed: int) -> None:
    trial = trial_of(sweep, fault, seed)
    incident = worst(of_one(told[trial], None, is_asked=True))
    assert incident is not None
    found = diagnosed(told[trial], incident, reading_of(out, trial))
    here = sweep.sel(trial=trial)
    kind = str(here["fault_kind"].values) if "fault_kind" in here.coords else ""
    assert found.finding.cause == true_cause(fault, kind, str(here["struck_site"].values)), found.finding.reason
    assert START <= found.evidence.begin <= START + 2


def test_what_is_told_comes_from_the_evidence_alone(out: Path, sweep: xr.Dataset) -> None:
    """With all that the dataset and the configuration say of faults taken away, it is the same."""
    blind = sweep.drop_vars([name for name in sweep.coords if str(name).startswith(("fault", "struck"))])
    setups, readings, compared = setups_of(out), readings_of(out), 0
    for fault in OTHERS:
        trial = trial_of(sweep, fault)
        (seeing,), (run,) = runs(sweep, setups, [trial]), runs(blind, setups, [trial])
        reading = readings(trial)
        nameless = BatchReader(reading.trial.golden, reading.corpus)
        pairs = [
            (worst(of_one(each, None, is_asked=True)), each, source)
            for each, source in ((seeing, reading), (run, nameless))
        ]
        said = [diagnosed(each, incident, source).finding for incident, each, source in pairs if incident]
        if said:
            assert len(said) == 2 and said[0] == said[1]
            compared += 1
    assert compared >= 4


def test_golden_runs_pass_every_check(sweep: xr.Dataset, told: dict[str, TrialSignals]) -> None:
    golden = sweep["trial"].values[(sweep["fault"] == "none").values]
    assert len(golden) == 4
    for trial in golden:
        broken = {name: steps.sum() for name, steps in told[trial].anomalies.items() if name.endswith("check")}
        assert set(broken.values()) == {0}
        assert np.abs(told[trial].moment_check[1:]).min() > 0, "the check was not made"


def test_checks_are_sharp(told: dict[str, TrialSignals], sweep: xr.Dataset) -> None:
    """A second moment that shrinks faster than it can forget, and weights that grow by more than their update."""
    run = told[trial_of(sweep, "none")]
    for name, change in (("second_moment_norm", 0.7), ("param_norm", 1.2)):
        signals = {key: values.copy() for key, values in run.signals.items()}
        signals[name][100] *= change
        assert dataclasses.replace(run, signals=signals).anomalies[f"{name} check"][100]


def test_every_fault_has_a_cause_or_is_a_wrapper() -> None:
    kinds = set(fault_types()) - {"none", "value", "realistic", "bit_flip", "replay"}
    named = {kind for kind in kinds if true_cause(kind, kind, "") in CAUSES}
    assert {"rare_tokens", "random_tokens", "repetition", "stale_gradient", "dropped_rank", "reduction"} <= named
    assert {true_cause("x", "value", site) for site in ("weight", "moment_2", "gradient")} < set(CAUSES)
    assert true_cause("x", "mine", "") is None


def test_no_rule_without_evidence(told: dict[str, TrialSignals], sweep: xr.Dataset) -> None:
    """Of an ordinary step nothing is told but that nothing is known."""
    run = told[trial_of(sweep, "rare_tokens")]
    incident = worst(of_one(run, None, is_asked=True))
    assert incident is not None
    calm = dataclasses.replace(
        evidence_of(run, incident, None), begin=50, odd=(), loss_rise=0.0, norm_ratio=1.0, pace=0.0
    )
    assert cause_of(calm).cause == UNKNOWN


def test_batches_are_scored_as_screening_scores_them(out: Path, sweep: xr.Dataset) -> None:
    """Over all tokens of a batch, and over none."""
    reading = reading_of(out, trial_of(sweep, "none"))
    tokens, counts = reading.batch(0), reading.corpus.counts + 1.0
    assert reading.rarity(tokens) == pytest.approx(-np.log(counts / counts.sum())[tokens].mean(), rel=1e-12)
    different = sum(len(set(pairwise(row))) for row in tokens.tolist())
    assert reading.repetition(tokens) == pytest.approx(1 - different / tokens[:, 1:].size, rel=1e-12)
    assert np.isnan([reading.rarity(tokens[:0]), reading.repetition(tokens[:0])]).all()


def test_the_batches_to_blame_are_those_of_the_onset(told: dict[str, TrialSignals], sweep: xr.Dataset) -> None:
    run = told[trial_of(sweep, "rare_tokens")]
    incident = worst(of_one(run, None, is_asked=True))
    assert incident is not None
    found = evidence_of(run, incident, None)
    known = {bad: offending(dataclasses.replace(found, bad_batches=bad), incident) for bad in ((), (100, 101), (101,))}
    assert known == {(): [100], (100, 101): [100, 101], (101,): [100]}


def test_suggestions_are_mitigations() -> None:
    ours = {file.stem for file in (Path(FOLDER) / "mitigation").glob("*.yaml")}
    assert set(SUGGESTED) == set(CAUSES) and {name for names in SUGGESTED.values() for name in names} <= ours


def test_the_confusion_matrix_counts_each_visible_fault(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = confusion(out)
    right, total, low, high = found.right()
    sure = found.trials[found.trials["is_sure"]]
    assert found.right(is_sure=True)[:2] == ((sure["true"] == sure["inferred"]).sum(), len(sure)) != (right, total)
    assert int(found.matrix.to_numpy().sum()) == total == len(found.trials) >= 20
    assert int(np.trace(found.matrix.reindex(columns=found.matrix.index).to_numpy())) == right
    assert 0 < low < right / total <= high <= 1 and right / total >= 0.75
    assert found.types["count"].sum() == (found.trials["type"] > 0).sum()
    assert main(["causes", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"Right: {right} of {total} = " in said and f"with a sure sign: {found.right(True)[0]} of " in said
    assert (out / "figures" / "causes.png").read_bytes().startswith(b"\x89PNG")


def test_faults_without_a_cause_are_left_out_and_counted(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total = len(confusion(out).trials)
    known = {"rare_tokens": "rare tokens"}
    monkeypatch.setattr(sys.modules[confusion.__module__], "true_cause", lambda name, kind, site: known.get(name))
    found = confusion(out)
    assert set(found.trials["fault"]) == {"rare_tokens"} and found.left_out == total - len(found.trials) > 0
    assert main(["causes", str(out)]) == 0
    assert f"Left out, because no cause is defined for them: {found.left_out} faults." in capsys.readouterr().out
    known.clear()
    with pytest.raises(ConfigError, match=r"no cause is defined for its faults \(.*rare_tokens.*\); allowed: "):
        confusion(out)


# --- the page ----------------------------------------------------------------------------------------------------


def test_what_is_unknown_is_not_told_as_not_finite() -> None:
    assert [words.rounded(value) for value in (None, np.nan, np.inf, "nan", 2.0)] == [
        "not known",
        "not known",
        "not finite",
        "not finite",
        "2",
    ]
    assert (words.nat(np.nan), words.signed(-np.inf)) == ("not known", "not finite")
    assert [words.in_nat(words.nat(value)) for value in (np.nan, np.inf, 2.0)] == [
        "not known",
        "not finite",
        "2.000 nat",
    ]


def test_a_page_tells_of_the_pack_that_the_trial_was_taken_from(
    out: Path, sweep: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was interrupted names the trial as well. Metadata are read once, however many pages there are."""
    packs = list(read_packs(out))
    begun = [dataclasses.replace(p, attributes=p.attributes | {"complete": False, "created": "1999"}) for p in packs]
    known = SweepFolder(out, sweep, [*begun, *packs])
    trial = trial_of(sweep, "rare_tokens")
    assert postmortem._head(known, trial)["date"].startswith("20")
    counted = mock.Mock(wraps=stored.read_pack)
    monkeypatch.setattr(stored, "read_pack", counted)
    assert len(postmortem.write_worst(out, 2)) == 2 and counted.call_count == len(packs)


SECTIONS = ("Symptoms", "Evidence", "Classification", "Recovery action", "Outcome", "Cost", "Follow-ups")


def test_the_page_has_all_that_an_operator_writes(out: Path, sweep: xr.Dataset) -> None:
    trial = trial_of(sweep, "rare_tokens")
    made = write_postmortem(out, trial, cost_per_hour=3600.0, currency="EUR")
    page, text = made.html.read_text(encoding="utf-8"), made.markdown.read_text(encoding="utf-8")
    for name in SECTIONS:
        assert f"<h2>{name}</h2>" in page and f"\n## {name}\n" in text
    assert re.search(r"<th>date</th><td>20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC</td>", page)
    assert "Batches: steps 100 to 102." in page and "Root cause: rare tokens." in page
    assert page.count("data:image/png;base64,") == 3 and "<script" not in page
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page), "the page needs something beside it"
    assert not re.search(r"\b(TODO|nan|inf nat)\b|\| None", text)
    for line in re.findall(r"\]\(([^)]+\.png)\)", text):
        assert (made.markdown.parent / line).read_bytes().startswith(b"\x89PNG")
    poison = reading_of(out, trial)
    shown = poison.text(poison.batch(START)[0])
    assert len(shown) > 32 and printable(shown.split("\n")[0])[:16] in html.unescape(page)
    seconds = float(re.search(r"seconds of this trial</td><td>([\d.e-]+)<", page)[1])  # type: ignore[index]
    money = float(re.search(r"money</td><td>([\d.e-]+) EUR<", page)[1])  # type: ignore[index]
    assert money == pytest.approx(seconds, rel=0.02) and money > 0


@pytest.mark.parametrize("fault", ["rare_tokens", "weight_bit"])
def test_a_browser_shows_the_page(out: Path, sweep: xr.Dataset, chromium: str, tmp_path: Path, fault: str) -> None:
    measure = """<script>
    addEventListener("load", () => {
      const images = [...document.images].map(i => i.complete ? i.naturalWidth : 0);
      const wide = document.documentElement.scrollWidth > innerWidth;
      document.title = JSON.stringify({images, wide, parts: document.querySelectorAll("h2").length});
    });
    </script></body>"""
    made = write_postmortem(out, trial_of(sweep, fault))
    page = tmp_path / "page.html"
    page.write_text(made.html.read_text(encoding="utf-8").replace("</body>", measure), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", dump_dom(chromium, page, tmp_path / "profile"))
    assert title, "no page"
    found = json.loads(html.unescape(title[1]))
    assert len(found["images"]) == 3 and all(width > 400 for width in found["images"])
    assert not found["wide"] and found["parts"] == len(SECTIONS) + 1


def test_follow_ups_are_the_same_incident_under_other_mitigations(out: Path, sweep: xr.Dataset) -> None:
    trial, other = trial_of(sweep, "rank_noise"), trial_of(sweep, "rank_noise", mitigation="no_clip")
    text = write_postmortem(out, trial).markdown.read_text(encoding="utf-8")
    part = text.split("## Follow-ups")[1]
    assert "mitigation=no\\_clip" in part and other in part and trial_of(sweep, "rank_noise", seed=1) not in part


def test_a_trial_without_an_incident_says_so(out: Path, sweep: xr.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    golden = trial_of(sweep, "none")
    assert main(["postmortem", str(out), golden]) == 0
    assert "no incident" in capsys.readouterr().out.splitlines()[0]
    assert "no incident" in (out / "postmortems" / f"{golden}.html").read_text(encoding="utf-8")


def test_the_report_links_to_the_worst(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(out), "--postmortems", "2"]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(postmortems/[0-9a-f]{16}\.html)"', page)
    assert len(links) >= 2 and all((out / link).is_file() for link in links)
    assert "divergent (type 3), " in capsys.readouterr().out


# --- commands ----------------------------------------------------------------------------------------------------


def test_the_table_of_incidents(out: Path, sweep: xr.Dataset) -> None:
    table = analysis.incidents(out, cost_per_hour=36.0).set_index("trial")
    row = table.loc[[trial_of(sweep, "nan_gradient")]].iloc[-1]
    assert (row["first"], row["outcome"], row["is_logged"]) == (START, "divergent", False)
    assert "finite at 100" in row["detectors"] and row["money"] == pytest.approx(row["seconds"] / 100)


def test_the_cross_test_tells_data_from_state(out: Path, sweep: xr.Dataset) -> None:
    reading = readings_of(out)
    other = reading(trial_of(sweep, "none", seed=1))
    found = crossed(reading(trial_of(sweep, "rare_tokens")), range(START, START + 3), other, START)
    assert found.verdict == DATA
    stored = sweep["loss"].sel(trial=other.trial.id, step=START).item()
    assert found.own_losses[0] == pytest.approx(stored, abs=1e-5), "not the run that was stored"
    assert crossed(reading(trial_of(sweep, "weight_bit")), [START], other, START).verdict == STATE


def test_the_cross_test_of_an_incident_near_the_end(out: Path, sweep: xr.Dataset) -> None:
    reading = readings_of(out)
    found = crossed(reading(trial_of(sweep, "rare_tokens")), [START], reading(trial_of(sweep, "none", seed=1)), 149)
    assert (found.step, len(found.own_losses), found.verdict) == (149, OWN, DATA)


def test_the_command_crosses(out: Path, sweep: xr.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    trial, other = trial_of(sweep, "rare_tokens"), trial_of(sweep, "none", seed=1)
    assert main(["cross", str(out), trial, "--from", other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Batches of steps 100 to 102 of {trial}") and lines[-1].startswith("Verdict: data")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["postmortem", "OUT", "nothing"], "error: TRIAL='nothing': no such trial in "),
        (["postmortem", "/nowhere", "x"], "error: out=/nowhere: does not exist; allowed: "),
        (["postmortem", "OUT", "x", "cost.per_hour=dear"], "error: cost.per_hour=dear: not a price; allowed: "),
        (["postmortem", "OUT", "x", "cost.hour=1"], "error: cost.hour=1: unknown key; allowed: cost.per_hour=NUMBER"),
        (["incidents", "OUT", "cost.per_hour=-1"], "error: cost.per_hour=-1: not a price; allowed: "),
        (["cross", "OUT", "GOLDEN", "--from", "nothing"], "error: TRIAL='nothing': no such trial in "),
        (["cross", "OUT", "GOLDEN", "--from", "GOLDEN"], "error: TRIAL=GOLDEN: has no incident; allowed: "),
        (["report", "OUT", "--postmortems", "-1"], "error: --postmortems=-1: not a number of trials; allowed: 0 or"),
        (["causes", "/nowhere"], "error: out=/nowhere: does not exist; allowed: "),
    ],
)
def test_bad_input_is_one_line(
    out: Path, sweep: xr.Dataset, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = trial_of(sweep, "none")
    words = [{"OUT": str(out), "GOLDEN": golden}.get(word, word) for word in arguments]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(line.replace("GOLDEN", golden)), captured.err


def test_a_damaged_configuration_is_one_line(out: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such trial"):
        reading_of(out, json.dumps("x"))


def test_provenance_is_used_where_the_dataset_has_it(sweep: xr.Dataset, told: dict[str, TrialSignals]) -> None:
    trial = trial_of(sweep, "nan_gradient")
    count = sweep.sizes["trial"]
    fields = {"cause": "overflow", "format": "fp16", "operation": "exp", "tensor": "logits", "blamed": ""}
    filled = {name: text for name, text in fields.items() if text}
    bare = sweep.drop_vars([str(name) for name in sweep.coords if str(name).startswith("provenance_")])
    known = bare.assign_coords({f"provenance_{name}": ("trial", np.full(count, text)) for name, text in fields.items()})
    assert provenance_of(bare, trial) == {} and provenance_of(known, trial) == filled
    incident = worst(of_one(told[trial], None, is_asked=True))
    assert incident is not None
    found = diagnosed(told[trial], incident, None, provenance_of(known, trial)).finding
    assert found.cause == "number format" and "exp at logits" in found.reason


def test_a_fault_that_did_nothing_is_not_the_cause(tmp_path: Path) -> None:
    """The rate is far too high, and a bit is stuck at what it was."""
    wild = ["train.steps=40", "optim.lr=1e4", "optim.clip=null", "schedule.warmup=0", "fault.start=0"]
    idle = ["fault=weight_bit", "fault.model=stuck_at_0", "fault.bit=30"]
    assert command.call(f"out={tmp_path / 'out'}", *command.tiny(*SIZES[1:5], *wild, *idle)).status == 0
    sweep = analysis.open_sweep(tmp_path / "out")
    (trial,) = sweep["trial"].values[(sweep["fault"] != "none").values & (sweep["changes"] == 0).values]
    text = write_postmortem(tmp_path / "out", str(trial)).markdown.read_text()
    assert "It is idle: none of them changed anything: each wrote what was there" in text
    assert "Its cause by definition" not in text
