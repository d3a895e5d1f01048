"""Detectors on known incidents: what counts as seen, as chance, as a false alarm; and what leads a spike."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.figures.registry import Needs, Results, figures
from analysis.measures import conditions, detectors, known_faults
from analysis.measures.conditions import MIXED, TEST, TUNE, registration
from analysis.measures.detectors import alarmed, measured
from analysis.measures.known_faults import DAMAGING, HARMLESS, LARGE, LOST, KnownFaults
from analysis.measures.lead import lead_table, leads
from analysis.measures.leaderboard import (
    _scaled,
    _thresholds,
    by_group,
    episodes,
    false_alarms,
    first_seen,
    leaderboard,
    moved,
    scored,
    tradeoff,
)
from analysis.measures.module_flips import flips, sizes_of
from analysis.measures.outcomes import outcomes_and_notes
from analysis.reading.open_sweep import open_sweep
from analysis.reports.leaderboard import told_board
from tests.analysis.judging import START, STEPS, Campaign
from tests.sweeps import command

NAMES = ["combined", "skip_step", "finite"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Harmless and fatal faults of several families, and the twins of a clean envelope."""
    out = tmp_path_factory.mktemp("incidents") / "out"
    base = command.tiny("train.steps=60", "optim.lr=3e-3", "fault.start=40", "seed=range(2)")
    for faults in (
        ["fault=none,learning_rate_jump,rare_tokens"],
        ["fault=last_bit", "fault.start=10", "seed=range(8)"],
        ["fault=weight_bit", "fault.bit=3,30"],
        ["fault=bit_flip", "fault.site=activation", "fault.tensor=logits", "fault.elements=10,200", "fault.bits=4"],
    ):
        keys = {text.partition("=")[0] for text in faults}
        ended = command.call(f"out={out}", *(text for text in base if text.partition("=")[0] not in keys), *faults)
        assert ended.status == 0, ended.err
    return out


def of(trial: list[int], twin: list[int], begin: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"trial": trial, "twin": twin, "begin": begin})


def test_what_the_twin_has_as_well_or_what_was_before_is_not_seen() -> None:
    is_alarm = np.zeros((4, 10), bool)
    is_alarm[0, [2, 5]] = True  # the twin
    is_alarm[1, [2, 5, 7]] = True
    is_alarm[2, [2, 5]] = True
    is_alarm[3, [1, 3]] = True
    found = first_seen(is_alarm, of([1, 2, 3, 3], [0, 0, 0, 0], [4, 4, 4, 1]))
    assert found[0] == 7 and np.isnan(found[1]) and np.isnan(found[2]) and found[3] == 1


def test_alarms_that_follow_each_other_are_one_episode() -> None:
    is_alarm = np.zeros((2, 30), bool)
    is_alarm[0, [3, 4, 8, 20]] = True  # 8 is four quiet steps after 4... and 20 eleven after that
    is_alarm[1, [0, 29]] = True
    assert episodes(is_alarm) == 4


def test_false_alarms_count_the_steps_that_were_taken() -> None:
    is_alarm, is_taken = np.zeros((4, 100), bool), np.ones((4, 100), bool)
    is_alarm[0, :5] = is_alarm[1, 90] = True
    is_taken[1, 80:] = False
    found = false_alarms(is_alarm, is_taken)
    assert found["clean_steps"] == 380 and found["false_alarms"] == pytest.approx(1000 * 5 / 380)
    assert found["episodes"] == pytest.approx(1000 / 380) and found["alarmed_runs"] == 0.25
    assert found["false_low"] < found["false_alarms"] < found["false_high"] < found["false_high_runs"], (
        "one run has all"
    )


def test_detectors_that_are_joined_sound_where_any_of_them_does(out: Path) -> None:
    sweep = open_sweep(out).load()
    incidents, limit = KnownFaults.of(sweep), {"combined": {"limit": 3.0}}
    table, seen = leaderboard(sweep, incidents, ["combined", "finite", "combined+finite"], limit)
    rows = table.set_index("detector")
    first = seen["combined"].fillna(np.inf).combine(seen["finite"].fillna(np.inf), min)
    assert np.array_equal(first, seen["combined+finite"].fillna(np.inf)) and rows["recall"]["combined+finite"] > 0
    assert rows["recall"]["combined+finite"] >= max(rows["recall"]["combined"], rows["recall"]["finite"])
    moved = tradeoff(sweep, incidents, ["combined+finite", "combined"], (1.0, 3.0)).set_index(["detector", "factor"])
    assert moved["recall"]["combined+finite", 3.0] >= moved["recall"]["combined", 3.0]
    lines = told_board(out, ["combined+finite"], limit)
    assert any(line.split()[:1] == ["combined+finite"] for line in lines)
    assert main(["leaderboard", str(out), "combined+nonsense"]) == 2


def test_incidents_have_families_and_sizes(out: Path) -> None:
    incidents = KnownFaults.of(open_sweep(out).load())
    table = incidents.table.assign(is_damaging=incidents.table["size"].isin(DAMAGING))
    families = table.groupby("fault")["family"].unique().map(list).to_dict()
    assert families == {
        "weight_bit": ["weights"],
        "learning_rate_jump": ["learning rate"],
        "rare_tokens": ["data"],
        "bit_flip": ["activations"],
    }
    assert table.loc[table["fault"] == "learning_rate_jump", "is_damaging"].all()
    assert (table.loc[table["size"] == LOST, "damage"] == np.inf).all()
    assert len(incidents.clean) == 8, "goldens of the twins of the envelope count as clean runs"
    assert (table["begin"] == 40).all() and (table["spike"].dropna() >= 40).all()


def test_without_a_clean_envelope_whatever_moves_the_loss_is_large(campaign: Campaign) -> None:
    campaign.fault("moved", {range(START, STEPS): 0.5})
    campaign.fault("still", {})
    campaign.write()
    assert KnownFaults.of(open_sweep(campaign.out)).table["size"].tolist() == [LARGE, HARMLESS]


def test_a_dropped_batch_is_no_spike(campaign: Campaign) -> None:
    campaign.fault("struck", {START: -0.5, START + 4: 3})
    campaign.write()
    sweep = open_sweep(campaign.out).load()
    (row,) = KnownFaults.of(sweep).table["trial"]
    for step in range(START + 1, START + 3):
        sweep["loss"][row, step] = np.nan
    assert KnownFaults.of(sweep).table["spike"].tolist() == [START + 4]
    sweep["nonfinite_step"][row] = START + 1
    assert KnownFaults.of(sweep).table["spike"].tolist() == [START + 1]


def test_the_leaderboard(out: Path) -> None:
    sweep = open_sweep(out).load()
    incidents = KnownFaults.of(sweep)
    table, seen = leaderboard(sweep, incidents, NAMES)
    table = table.set_index("detector")
    assert list(table.index)[0] == table["recall_damaging"].idxmax() == "combined"
    assert (table["clean_steps"] == 8 * 60).all() and (table["chance"] <= 0.2).all()
    assert (table["recall_low"] <= table["recall_damaging"]).all() and (
        table["at_once"] <= table["recall_damaging"]
    ).all()
    assert table.loc["finite", "false_alarms"] == 0 and table.loc["finite", "chance"] == 0
    assert (table.loc[["combined", "skip_step", "finite"], "latency_lost"].fillna(0) == 0).all()
    groups = by_group(incidents, seen, "family")
    assert set(groups["family"]) == {"weights", "learning rate", "data", "activations"}
    for by, kind, all_of_them in (("family", "recall_damaging", "damaging"), ("size", "recall", "incidents")):
        groups = by_group(incidents, seen, by)
        found = (groups["incidents"] * groups["combined"]).sum()
        assert found == pytest.approx(table.loc["combined", kind] * table.loc["combined", all_of_them])


def test_a_fault_without_a_finished_twin_is_not_scored(out: Path) -> None:
    """Its own false alarms would count as seen."""
    sweep = open_sweep(out)
    (with_twins,), (without,) = (
        scored(part, ["finite"], {}).to_dict("records")
        for part in (sweep, sweep.isel(trial=(sweep["fault"] != "none").values))
    )
    assert with_twins["incidents"] == len(KnownFaults.of(sweep).table) and without["incidents"] == 0


def test_a_leaderboard_reads_what_it_needs_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    replayed = detectors.replay
    monkeypatch.setattr(detectors, "replay", lambda cls, *rest: asked.append(cls.__name__) or replayed(cls, *rest))
    monkeypatch.setattr(known_faults, "outcomes_and_notes", counted := mock.Mock(wraps=outcomes_and_notes))
    told_board(out, ["combined", "finite"], {})
    assert counted.call_count == 1 and len(asked) == 2 * 2, "once for the alarms, and once on eight trials for the time"


def test_thresholds_move(out: Path) -> None:
    sweep = open_sweep(out)
    table = tradeoff(sweep, KnownFaults.of(sweep), ["combined", "finite", "grad_norm_skip"], (0.1, 1.0))
    combined = table[table["detector"] == "combined"].set_index("factor")
    assert combined["recall"].between(0, 1).all()
    assert combined.loc[0.1, "false_alarms"] > combined.loc[1.0, "false_alarms"]
    assert (table["detector"] != "combined").sum() == 2, "these have no threshold that could move"


def test_constants_of_each_replay_as_by_themselves(out: Path) -> None:
    """Of every detector that the runs can be shown to, at its thresholds and away from them; alone and joined."""
    sweep = open_sweep(out).load()
    names = measured(sweep)
    assert len(names) > 8
    found = {(name, factor): is_alarm for name, factor, is_alarm in moved(sweep, [*names, "finite+loss_ratio"])}
    assert len(found) > 4 * len(names)
    for (name, factor), is_alarm in found.items():
        given = {part: _scaled(_thresholds(part), factor) for part in name.split("+")}
        np.testing.assert_array_equal(is_alarm, alarmed(sweep, name, given), err_msg=f"{name} {factor}")


def test_what_leads(out: Path) -> None:
    found = leads(open_sweep(out).load(), NAMES)
    table = lead_table(found).set_index("name")
    assert {"grad_norm", "update_rms", *NAMES} <= set(table.index) and (table["spikes"] == len(found)).all()
    assert not {"activation_kurtosis", "output_log_z"} & set(table.index), "these are read now and then"
    assert not {"learning_rate", "scheduled_rate"} & set(table.index), "these are no symptoms"
    shares = table[["leads", "with_it", "later", "never"]].sum(axis=1)
    assert np.allclose(shares, 1) and len(found) > 0


def test_flips_by_module(out: Path) -> None:
    sweep = open_sweep(out).load()
    said = np.zeros((sweep.sizes["trial"], sweep.sizes["step"]), bool)
    table = flips(sweep, {"none": said})
    assert set(table["module"]) == {"logits"} and set(table["elements"]) <= {10, 200}
    assert (table["none"] == 0).all() and (table["none_high"] > 0).all()
    assert sizes_of(out)["logits"] > sizes_of(out)["query"] > 0


@pytest.mark.parametrize("name", ["detector_tradeoff", "loss_lead", "module_flips"])
def test_figures(out: Path, name: str) -> None:
    drawing = figures(Needs.INCIDENTS)[name](Results.open(out))
    assert drawing.figure is not None and drawing.caption


def test_commands(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", str(out), "combined", "finite"]) == 0
    said = capsys.readouterr().out
    assert "combined" in said and "recall by damage" in said and "cusum" not in said
    assert "incidents, " in said and f"(conditions.yaml {registration()})" in said
    assert main(["lead", str(out)]) == 0
    assert "grad_norm" in capsys.readouterr().out


def test_conditions_are_told_apart(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those on which constants were chosen have a table of their own, the figure is of those that judge."""
    whole = conditions.kind_of
    monkeypatch.setattr(conditions, "kind_of", lambda trial: TUNE if trial["seed"] == 1 else TEST)
    picture = tmp_path / "tradeoff.png"
    assert main(["leaderboard", str(out), "finite", "spiky_loss", "--figure", str(picture)]) == 0
    said = capsys.readouterr().out
    first, second = said.index("under test conditions"), said.index("under conditions on which constants were chosen")
    assert first < said.index(f"Figure: {picture}") < second and picture.read_bytes()[:4] == b"\x89PNG"
    count = sum(int(line.split()[0]) for line in said.splitlines() if " incidents, " in line)
    assert count == len(KnownFaults.of(open_sweep(out)).table)
    assert main(["leaderboard", str(out), "finite", "--figure", "tradeoff.doc"]) == 2
    assert "tradeoff.doc: unknown kind of file; allowed: " in capsys.readouterr().err
    plain = {"recipe": "plain", "model": {"width": 32, "context": 32}, "train": {"batch": 4}}
    plain["data"] = {"source": "stdlib", "tokenizer": "bytes"}
    assert whole(plain) == TUNE and whole(plain | {"recipe": "llama"}) == MIXED
    apart = {
        "recipe": "llama",
        "model": {"width": 40, "context": 32},
        "train": {"batch": 5},
        "data": {"source": "zipf"},
    }
    assert whole(apart) == TEST and whole({"model": {"kind": "Net"}, "recipe": "own"}) == TEST
    assert whole(apart | {"train": {"batch": 4}}) == MIXED  # batch and context together


def test_a_sweep_without_incidents_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(f"out={tmp_path / 'out'}", *command.tiny("train.steps=3")).status == 0
    for name in ("leaderboard", "lead"):
        assert main([name, str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "allowed: " in line and "out=" in line
