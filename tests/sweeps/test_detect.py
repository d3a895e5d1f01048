"""`detect=NAME+NAME`: what a run says while it trains, and what its store gives afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from analysis.figures.registry import Results
from analysis.measures.detectors import alarms, measured
from analysis.measures.leaderboard import scored
from analysis.reading.open_sweep import open_sweep
from harness.config import ConfigError, Trial
from harness.detectors.loop_signals import new_rates
from harness.detectors.table import DETECTORS
from harness.readings.table import READ_BY
from tests.harness.experts import OF_OTHERS
from tests.sweeps import command

SHORT = {  # so that all of them have something to say in sixty steps
    "skip_step": {"window": 8, "sigma": 2.0},
    "spike_score": {"window": 20, "least": 6, "sigma": 2.0},
    "spiky_loss": {"samples": 5, "factor": 0.98},
    "grad_norm_skip": {"limit": 0.1},
    "running_mean": {"rise": 0.001},
    "loss_ratio": {"ratio": 1.005},
    "median_mad": {"window": 12, "sigma": 1.0, "persist": 2},
    "cusum": {"window": 20, "least": 6, "limit": 2.0},
    "update_norm": {"window": 8, "sigma": 0.1},
    "attention_growth": {"window": 4, "growth": 1.01},
    "combined": {"limit": 0.2},
    "kurtosis": {"window": 6, "persist": 2, "sigma": 1.0},
    "gain_peers": {"window": 6, "alpha": 1.0},
    "moment_bound": {"limit": 0.02},
    "at_step": {"step": 41},
    "moment_lag": {"limit": 1.05, "least": 5},
    "entropy_collapse": {"window": 4, "fall": 1.005},
    "qk_rank": {"window": 4, "fall": 1.05},
}
WATCHING = sorted(set(DETECTORS) - OF_OTHERS)
READ = [f"signals.{READ_BY[signal]}={every}" for signal, every in {"qk_rank": 3, "activation_kurtosis": 2}.items()]
READ += [
    "signals.attention_entropy=3",
    "signals.residual_gain=1",
    "signals.moment_size=1",
    "signals.moment_lag=2",
    "signals.at_rest=1",
    "train.batch=6",
    "train.ranks=3",
]
FAULTS = ["fault=none,rare_tokens,weight_bit", "fault.start=30", "fault.bit=30,3", "seed=0,1"]
RUN = command.tiny("train.steps=60", "optim.lr=3e-3", "schedule.decay=constant", *FAULTS, *READ)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    """Forks, masked and frozen trials, and a golden run, each watched by every detector."""
    out = tmp_path_factory.mktemp("watched") / "out"
    fields = [f"detect.{name}.{key}={value}" for name, given in SHORT.items() for key, value in given.items()]
    ended = command.call(f"out={out}", *RUN, f"detect={'+'.join(WATCHING)}", *fields)
    assert ended.status == 0, ended.err
    return open_sweep(out).load()


@pytest.mark.parametrize("name", WATCHING)
def test_stored_signals_give_the_same_alarms_bit_for_bit(watched: xr.Dataset, name: str) -> None:
    again = alarms(watched, name, **SHORT.get(name, {}))
    said = watched[f"alarm_{name}"]
    assert np.array_equal(again["alarm"].values, said.values == 1)
    assert np.array_equal(again["score"].values.astype(np.float32), watched[f"score_{name}"].values, equal_nan=True)
    assert said.sum() > 0, "this says nothing"


def test_watching_changes_no_bit(watched: xr.Dataset, tmp_path: Path) -> None:
    assert command.call(f"out={tmp_path / 'out'}", *RUN).status == 0
    keys = ["fault", "seed", "fault_bit"]
    plain, others = (
        sweep.isel(trial=sweep[keys].to_dataframe().reset_index(drop=True).sort_values(keys).index)
        for sweep in (open_sweep(tmp_path / "out").load(), watched)
    )
    for name in ("loss", "grad_norm", "update_rms", "final_segment_loss"):
        assert np.array_equal(plain[name].values, others[name].values, equal_nan=True)


def test_what_is_read_now_and_then_is_a_variable_with_gaps(watched: xr.Dataset) -> None:
    assert watched["residual_gain"].dims == ("trial", "step", "layer", "rank")
    assert watched["rank"].values.tolist() == [0, 1, 2] and watched["token_surprise_max"].attrs["units"] == "nat"
    whole = watched.isel(trial=(watched["outcome"] == "trained").values & (watched["changes"] == 0).values)
    for name, every in (("residual_gain", 1), ("attention_entropy", 3), ("activation_kurtosis", 2)):
        is_there = whole[name].notnull().all([dim for dim in whole[name].dims if dim != "step"]).values
        assert is_there.tolist() == [step % every == 0 for step in range(60)], name
    assert "epsilon_share" not in watched and not Results(watched).guard_signals[0].startswith("activation")


def test_a_replay_of_ranks_needs_ranks(watched: xr.Dataset) -> None:
    alone = watched.isel(rank=[0])
    assert "gain_peers" in measured(watched) and "gain_peers" not in measured(alone)
    with pytest.raises(ConfigError, match="detect=gain_peers: the sweep has train.ranks=1 at most; allowed: one of"):
        alarms(alone, "gain_peers")
    with pytest.raises(ConfigError, match="detect=expert_share: the sweep has no expert_share; allowed: one that has"):
        alarms(watched, "expert_share")


def test_a_trial_that_is_not_watched_keeps_its_id() -> None:
    (plain,), (none,) = command.grid(), command.grid("detect=none")
    assert plain.id == none.id == Trial().id and "detect" not in plain.to_dict()
    (watched,) = command.grid("detect=skip_step+finite", "detect.skip_step.sigma=5")
    assert watched.to_dict()["detect"] == {"name": "finite+skip_step"}
    assert watched.to_dict()["detect.skip_step"]["sigma"] == 5.0
    assert len({trial.id for trial in command.grid("detect=none,finite,skip_step+finite,finite+skip_step")}) == 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["detect=skipstep"], "detect=skipstep: unknown detect; did you mean skip_step? allowed: "),
        (["detect=finite+finite"], "detect=finite+finite: finite is given 2 times; allowed: each name once"),
        (["detect=finite+none"], "detect=finite+none: none stands alone; allowed beside others: "),
        (["detect=skip_step", "detect.skip_step.sigma=0"], "detect.skip_step.sigma=0.0: out of range; allowed: > 0"),
        (["detect.skip_step.sigma=5"], "detect.skip_step.sigma=5.0: reaches no trial, because detect=none has no such"),
        (
            ["detect=cusum", "detect.skip_step.sigma=5"],
            "detect.skip_step.sigma=5.0: reaches no trial, because detect=cu",
        ),
        (["detect=cusum", "detect.cusum.sides=down"], "detect.cusum.sides=down: "),
        (["detect.cusum=5"], "detect.cusum=5: unknown key; "),
        (
            ["detect=kurtosis", "signals.kurtosis=0"],
            "detect=kurtosis: it watches activation_kurtosis, which signals.kurtosis=0 never reads; allowed: ",
        ),
        (["detect=qk_rank"], "detect=qk_rank: it watches qk_rank, which signals.qk_rank=0 never reads; allowed: "),
        (["detect=gain_peers"], "detect=gain_peers: it compares ranks, and train.ranks=1; allowed: train.ranks >= 3"),
        (
            ["detect=expert_share"],
            "detect=expert_share: it watches expert_share, and this model has no blocks.0.moe.loads; allowed: ",
        ),
        (
            ["detect=moment_bound", "optim.name=sgd"],
            "detect=moment_bound: it watches moment_1_size, and optim.name=sgd has no such moments; allowed: ",
        ),
        (["signals.adam_floor=5", "optim.name=sgd"], "signals.adam_floor=5: optim.name=sgd has no such moments; "),
        (["signals.kurtosis=-1"], "signals.kurtosis=-1: out of range; allowed: >= 0"),
        (["signals.kurtosis=1.5"], "signals.kurtosis=1.5: wrong type (float); allowed: an integer"),
        (["signals.kurtsis=1"], "signals.kurtsis=1: unknown key; "),
    ],
)
def test_what_cannot_watch(tmp_path: Path, arguments: list[str], line: str) -> None:
    (said,) = command.refused(tmp_path, *arguments, "plan=true")
    assert said.startswith(f"error: {line}"), said


def test_scores(watched: xr.Dataset) -> None:
    table = scored(watched, ["finite", "grad_norm_skip"], {"grad_norm_skip": {"limit": 1e-9}}).set_index("detector")
    assert table.loc["finite", "false_alarms"] == 0 and table.loc["grad_norm_skip", "false_alarms"] == 1000
    broken = (watched["outcome"] == "non-finite") & (watched["changes"] > 0)
    assert table.loc["finite", "recall"] * table.loc["finite", "incidents"] == pytest.approx(int(broken.sum()))
    assert table.loc["grad_norm_skip", "recall"] == 0, "what the twin says too is not the fault's"


@pytest.mark.parametrize("mitigation", ["sgd", "restarts"])
def test_other_optimizers_and_schedules_replay_as_they_were_watched(tmp_path: Path, mitigation: str) -> None:
    """A second moment that is never measured was an alarm of each step of a replay; a rate may begin anew."""
    words = command.tiny("train.steps=80", "train.batch=4", f"mitigation={mitigation}", "seed=0,1", "idle=warn")
    assert command.call(f"out={tmp_path / 'out'}", *words, "detect=combined+update_norm").status == 0
    sweep = open_sweep(tmp_path / "out").load()
    for name in ("combined", "update_norm"):
        again = alarms(sweep, name)
        assert np.array_equal(again["alarm"].values, sweep[f"alarm_{name}"].values == 1)
        assert np.array_equal(again["score"].values.astype(np.float32), sweep[f"score_{name}"].values, equal_nan=True)
    assert alarms(sweep, "combined")["alarm"].values.sum() <= 2
    assert sweep["second_moment_norm"].isnull().all() == (mitigation == "sgd")


def test_the_rate_of_the_schedule_is_stored_beside_the_one_in_force(tmp_path: Path) -> None:
    fault = ["fault=learning_rate_jump", "fault.start=20", "fault.value=10", "fault.duration=5"]
    assert command.call(f"out={tmp_path / 'out'}", *command.tiny("train.steps=40", *fault)).status == 0
    sweep = open_sweep(tmp_path / "out").load()
    struck = sweep.isel(trial=(sweep["changes"] > 0).values.argmax())
    ratio = (struck["learning_rate"] / struck["scheduled_rate"]).values
    assert np.allclose(ratio, [10 if 20 <= step < 25 else 1 for step in range(40)], rtol=1e-6)
    before = alarms(sweep.drop_vars("scheduled_rate"), "combined")  # a store of before: the rate in force has to do
    assert before["alarm"].shape == (sweep.sizes["trial"], 40)


def test_a_rate_that_leaves_its_curve_is_new() -> None:
    """Neither a warm-up nor a cosine is, but for their ends; a step, a restart and what follows on it are."""
    steps = np.arange(100)
    smooth = np.minimum((steps + 1) / 10, 0.5 * (1 + np.cos(np.pi * steps / 100)))
    found = new_rates({"scheduled_rate": smooth[None].astype(np.float32)})
    assert found is not None and not found[0, 20:94].any()
    stairs = np.where(steps < 50, 1e-2, 1e-3)
    found = new_rates({"scheduled_rate": stairs[None].astype(np.float32)})
    assert found is not None and np.flatnonzero(found[0]).tolist() == [51]
    assert new_rates({"loss": stairs}) is None
