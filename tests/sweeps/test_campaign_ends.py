"""Campaigns that stop by themselves, and campaigns that are stopped."""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from scipy.stats import binomtest

from analysis.measures.outcomes import OUTCOMES, outcomes_and_notes
from analysis.reading.open_sweep import open_sweep
from harness.storage.stored import read_packs
from tests.sweeps import command
from tests.sweeps.test_campaign import FLIPS, by_site, drawn, stored, sweep
from tests.sweeps.traps import STOPPING, is_spotless, recorded

# --- a campaign that stops by itself -----------------------------------------------------------------------------

ROUND = re.compile(
    r"^widest 95% interval of a masked share: (\S+) after (\d+) faults of each description; asked for: (\S+)$", re.M
)


def rounds(out: str) -> list[tuple[str, int]]:
    """(width, faults) of each look at the intervals."""
    return [(width, int(most)) for width, most, _ in ROUND.findall(out)]


def width_now(out: Path, stratum: str) -> float:
    """The widest interval of the shares of each site and stratum, by scipy."""
    (judged, _), faults = outcomes_and_notes(open_sweep(out)), drawn(out)
    counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for trial, outcome in zip(judged.trial.values.tolist(), judged.fault_outcome.values.tolist(), strict=True):
        if trial in faults and outcome in OUTCOMES:
            key = faults[trial].fault["site"], faults[trial].fault.get(stratum)
            counts[key] = [counts[key][0] + (outcome == "masked"), counts[key][1] + 1]
    intervals = [binomtest(k, n).proportion_ci(method="wilson") for k, n in counts.values()]
    return max(interval.high - interval.low for interval in intervals)


@pytest.mark.parametrize(
    ("given", "stratum"),
    [
        (["fault.site=weight,learning_rate", "campaign.width=0.35", "campaign.round=15"], "none"),
        (["fault.tensor=*norm*", "campaign.width=0.42", "campaign.round=20"], "tensor"),
        (["fault.format=fp8_e4m3", "campaign.width=0.6", "campaign.round=16", "fault.site=gradient"], "bit"),
    ],
)
def test_it_stops_when_it_knows_enough(tmp_path: Path, given: list[str], stratum: str) -> None:
    """After the first round at which every stratum's interval is narrow enough."""
    line = [*FLIPS, "fault.samples=96", f"fault.stratify={stratum}", *given]
    words = dict(text.split("=") for text in given)
    step, wanted = int(words["campaign.round"]), float(words["campaign.width"])
    out = sweep(tmp_path / "whole", *line)
    found = rounds(out)
    assert [most for _, most in found] == [step * (i + 1) for i in range(len(found))]
    assert len(found) > 1 and found[-1][1] < 96
    assert all(float(width) > wanted for width, _ in found[:-1]) and float(found[-1][0]) <= wanted
    assert found[-1][0] == f"{width_now(tmp_path / 'whole', stratum):.3f}"
    assert {len(trials) for trials in by_site(drawn(tmp_path / "whole")).values()} == {found[-1][1]}


def test_it_goes_on_from_any_state(tmp_path: Path) -> None:
    """The same command, and one that finds other samples than whole rounds, look at the same intervals."""
    line = [*FLIPS, "fault.tensor=*norm*", "fault.stratify=tensor", "fault.samples=96", "campaign.round=20"]
    line.append("campaign.width=0.42")
    found = rounds(sweep(tmp_path / "whole", *line))
    before = command.tree(tmp_path)
    again = sweep(tmp_path / "whole", *line)
    assert rounds(again) == found and again.count("nothing to train: ") == len(found)
    assert again.count("study ") == again.count(" asked for, ") == again.count("results in ") == 1, "a line a round"
    assert command.tree(tmp_path) == before
    sweep(tmp_path / "begun", *line, "fault.samples=20", "campaign.width=null")
    assert found[0][0] == f"{width_now(tmp_path / 'begun', 'tensor'):.3f}"
    sweep(tmp_path / "begun", *line, "fault.samples=23", "campaign.width=null")
    assert rounds(sweep(tmp_path / "begun", *line)) == found
    assert not command.differing(command.results(tmp_path / "whole"), command.results(tmp_path / "begun"))


def test_it_ends_with_its_samples(tmp_path: Path) -> None:
    out = sweep(tmp_path, *FLIPS, "fault.samples=15", "campaign.round=10", "campaign.width=0.01")
    assert [most for _, most in rounds(out)] == [10]
    assert len(drawn(tmp_path)) == 15


def test_a_stratum_without_a_fault_is_not_known(tmp_path: Path) -> None:
    """Four of eight bits have had no turn after the first round. Nobody is bothered with a missing envelope."""
    given = ["fault.stratify=bit", "fault.format=fp8_e4m3", "fault.samples=20", "campaign.round=4"]
    out = sweep(tmp_path, *FLIPS, *given, "campaign.width=0.9", "campaign.envelope=0")
    assert rounds(out) == [("1.000", 4), ("0.793", 8)]


def test_faults_that_change_nothing_end_it_once_hardly_any_can_be_another(tmp_path: Path) -> None:
    """No weight is 2 or more, so the top bit of the exponent is 0 where it is to be stuck at 0: none is masked."""
    given = ["fault.model=stuck_at_0", "fault.bit=30", "fault.samples=60", "campaign.round=10", "campaign.width=0.2"]
    out = sweep(tmp_path, *FLIPS, *given, "campaign.envelope=0")
    ends = [binomtest(0, n).proportion_ci(method="wilson").high for n in (10, 20)]
    assert rounds(out) == [(f"{end:.3f}", n) for end, n in zip(ends, (10, 20), strict=True)]
    judged, _ = outcomes_and_notes(open_sweep(tmp_path))
    assert Counter(judged.fault_outcome.values.tolist()) == {"": 1, "idle": 20}


def test_faults_without_a_golden_run_to_judge_by_do_not_count(tmp_path: Path) -> None:
    """It blows up some steps after the strikes, and whatever they would have led to."""
    blown = ["optim.lr=1e4", "optim.weight_decay=0.1", "schedule.warmup=0", "fault.until=null", "fault.start=0"]
    blown += ["optim.clip=null", "optim.decay_follows=rate"]
    given = ["fault.samples=20", "campaign.round=10", "campaign.width=0.4", "campaign.envelope=0", "fault.bit=31"]
    out = sweep(tmp_path, *FLIPS, *given, *blown)
    judged, _ = outcomes_and_notes(open_sweep(tmp_path))
    assert Counter(judged.fault_outcome.values.tolist()) == {"": 1, "unjudged": 20}
    assert rounds(out) == [("1.000", 10)]


def test_one_that_does_not_wait_goes_on_where_nothing_is_left_to_wait_for(tmp_path: Path) -> None:
    given = ["fault.samples=20", "campaign.round=10", "campaign.width=0.01", "wait=false"]
    assert [most for _, most in rounds(sweep(tmp_path, *FLIPS, *given))] == [10]
    assert len(drawn(tmp_path)) == 20


# --- campaigns that are stopped ----------------------------------------------------------------------------------

TRAPPED = ("seed=0,1", "fault=rigged,bit_flip", "fault.switch=switch", "fault.samples=6", "fault.start=3", "out=out")


@pytest.fixture(scope="module")
def undisturbed(rigged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = command.end(command.fork(*command.tiny(*TRAPPED), cwd=folder, path=[rigged]))
    assert (ended.status, ended.err) == (0, "")
    return folder / "out"


@pytest.mark.parametrize(("word", "status"), [("kill", -signal.SIGKILL), ("wait", 130)], ids=["SIGKILL", "Ctrl-C"])
def test_a_stopped_campaign_goes_on(rigged: Path, undisturbed: Path, tmp_path: Path, word: str, status: int) -> None:
    """Every trial is recorded once, in a complete pack, with the bits of a campaign that was never stopped."""
    (tmp_path / "switch").write_text(f"{word} 1")
    process = command.fork(*command.tiny(*TRAPPED), cwd=tmp_path, path=[rigged])
    command.until((tmp_path / "switch.reached").exists, "the trap is reached")
    if word == "wait":
        process.send_signal(signal.SIGINT)
        command.until(lambda: process.said == STOPPING, "it says that a second signal ends it at once")
        process.send_signal(signal.SIGINT)
    assert command.end(process).status == status
    assert 0 < len(recorded(tmp_path / "out")) < len(recorded(undisturbed)) == 24
    (tmp_path / "switch").unlink()
    again = command.end(command.fork(*command.tiny(*TRAPPED), cwd=tmp_path, path=[rigged]))
    assert (again.status, again.err) == (0, "")
    assert recorded(tmp_path / "out") == recorded(undisturbed) == sorted(stored(tmp_path / "out"))
    assert not command.differing(command.results(tmp_path / "out"), command.results(undisturbed))
    assert is_spotless(tmp_path / "out") and all(pack.complete for pack in read_packs(tmp_path / "out"))
