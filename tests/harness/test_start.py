"""Trials that start from stored weights (`model.start`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis import open_sweep
from harness.config import ConfigError, Trial
from harness.model.start import check_start
from harness.objectives.outcome import TRAINED, judge
from harness.testing import engine
from injectors.value import Value
from tests.sweeps import command

TINY = command.tiny("train.steps=4", "out=out")
BEGIN = "initial_validation_loss"


def shapes_of(trial: Trial) -> dict[str, tuple[int, ...]]:
    return {scaled.name: scaled.shape for scaled in engine.pack_of([trial, trial]).layout.tensors}


def save(path: Path, trial: Trial) -> str:
    """The weights that a trial draws, as a file."""
    pack = engine.pack_of([trial, trial])
    save_file({name: pack.layout.view(pack.weights, name)[0].contiguous() for name in shapes_of(trial)}, path)
    return str(path)


@pytest.mark.parametrize("fields", [{}, {"precision": "fp64"}, {"sigma_reparam": True}, {"tied_head": True}])
def test_a_trial_that_starts_from_what_another_draws_trains_as_that_one(tmp_path: Path, fields: dict) -> None:
    """Bit for bit, its neighbours' draws untouched; also struck, and forked from its twin."""
    drawn = engine.trial(init=7, **fields)
    stored = engine.trial(init=1, start=save(tmp_path / "w.safetensors", drawn), **fields)
    other, flip = engine.trial(init=2, **fields), Value(start=3, site="weight", tensor="blocks.0.*", bit=20)
    struck = [engine.trial(init=i, fault=flip, start=s, **fields) for i, s in ((7, None), (1, stored.model.start))]
    run = engine.run([other, stored, drawn, struck[1], struck[0]], forks=True)
    assert engine.same_bits(run[1], run[2]) == engine.same_bits(run[3], run[4]) == []
    assert engine.same_bits(run[0], engine.run([other, drawn])[0]) == []
    assert not torch.equal(run[1]["loss"], run[3]["loss"])


def test_trials_that_name_none_keep_their_ids() -> None:
    assert "start" not in Trial().to_dict()["model"] and Trial().id == "a30c1764d2fbc436"
    assert engine.trial(start="a").id != engine.trial(start="b").id


def test_it_survives_kills(tmp_path: Path) -> None:
    start = save(tmp_path / "w.safetensors", engine.trial(init=7))
    engine.assert_resumes([engine.trial(start=start), engine.trial()], tmp_path, kills=[3, 5])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b"x" * 9), "cannot be read"),
        (lambda path: save_file(load_file(path) | {"more": torch.ones(1)}, path), r"more is \(1,\) there and none"),
        (
            lambda path: save_file(load_file(path) | {"head": torch.ones(2)}, path),
            r"head is \(2,\) there and \(64, 16\)",
        ),
    ],
)
def test_other_files_are_refused_before_anything_is_read(tmp_path: Path, change, reason: str) -> None:
    trial = engine.trial()
    change(path := Path(save(tmp_path / "w.safetensors", trial)))
    with pytest.raises(ConfigError, match=rf"model.start=.*w.safetensors: .*{reason}.*; allowed: a safetensors file"):
        check_start(str(path), shapes_of(trial))


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors", engine.trial())
    save_file(load_file(path) | {"head": torch.full((64, 16), torch.nan)}, path)
    with pytest.raises(ConfigError, match="head holds values that are not finite"):
        engine.pack_of([engine.trial(start=path)] * 2)


def test_from_what_a_sweep_has_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command: an axis, a coordinate of the Dataset, refused where the file has become another."""
    monkeypatch.chdir(tmp_path)
    assert command.call(*TINY, "keep=weights").status == 0
    (file,) = Path("out/weights").glob("*.safetensors")
    line = [f"model.start=null,{file}", *command.tiny("out=again", "train.steps=4")]
    assert command.call(*line).status == 0
    again = command.results(Path("again"))
    assert sorted(again.start.values.tolist()) == ["none", str(file)]
    first = dict(zip(again.start.values.tolist(), again.loss.values[:, 0], strict=True))
    assert first[str(file)] != first["none"] == command.results(Path("out")).loss.values[0, 0]
    (refused,) = command.refused(tmp_path / "again", *line, "model.qk_norm=true", "plan=true")
    assert "model.start=" in refused and "blocks.0.attention.query_norm is none there and (8,) in this model" in refused
    save_file(load_file(file) | {"head": torch.zeros(32, 16)}, file)
    (refused,) = command.refused(tmp_path / "again", *line, "seed=0,1")
    assert "model.start=" in refused and "another file of that name" in refused


def losses(out: str, name: str, **where: str) -> dict[tuple[int, int], float]:
    """Width and seed -> a loss of the trials of which that holds."""
    sweep = open_sweep(out)
    kept = np.logical_and.reduce([sweep[key].values == value for key, value in where.items()])
    part = sweep.isel(trial=np.flatnonzero(kept))
    places = zip(part["width"].values.tolist(), part["seed"].values.tolist(), strict=True)
    return dict(zip(places, part[name].values.tolist(), strict=True))


def test_from_a_folder_each_trial_goes_on_from_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages: of each width and seed the weights that the first has left, whatever the second varies beside."""
    monkeypatch.chdir(tmp_path)
    sizes = ["model.width=8,16", "seed=0,1", "train.steps=4"]
    assert (
        command.call(
            *command.tiny(*sizes, "out=first", "keep=weights", "fault=none,weight_bit", "fault.start=2")
        ).status
        == 0
    )
    line = command.tiny(*sizes, "out=second", "model.start=null,first", "optim.lr=1e-3,1e-2")
    ended = command.call(*line)
    assert ended.status == 0, ended.err
    ends, begins = losses("first", "final_validation_loss", fault="none"), losses("second", BEGIN, start="first")
    assert ends.keys() == begins.keys() and len(ends) == 4 == len(set(ends.values()))
    assert all(begins[place] == pytest.approx(loss, rel=1e-6) for place, loss in ends.items())
    assert losses("second", BEGIN, start="none") == losses("first", BEGIN, fault="none")
    assert "0 to train" in command.call(*line, "plan=true").out, "its trials are known again"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["seed=2"], "holds weights of this model with seed=0, 1, and none with seed=2"),
        (["model.width=8"], "holds no weights of this model (model.width=8, model.depth=1, ...)"),
        (["model.attention_cap=50"], "holds no weights of this model"),
        (["model.start=twice"], "holds several trials of this model with seed=0: "),
        (["model.start=second"], "holds no weights of this model"),
    ],
)
def test_a_folder_without_its_weights_is_refused(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("train.steps=2", "model.width=16")
    assert command.call(*command.tiny(*short, "seed=0,1", "keep=weights", "out=first")).status == 0
    assert command.call(*command.tiny(*short, "optim.lr=1e-3,1e-2", "keep=weights", "out=twice")).status == 0
    assert command.call(*command.tiny(*short, "out=second")).status == 0
    given = [] if any("model.start" in word for word in words) else ["model.start=first"]
    (refused,) = command.refused(tmp_path, *command.tiny("train.steps=2", "out=third", *given, *words))
    assert f"{(given or words)[0]}: {why}" in refused
    assert refused.endswith(
        "; allowed: a folder in which keep=weights has left one trial of this model and seed without a fault, or a file"
    )


def test_of_a_folder_with_one_trial_it_is_the_start_of_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.call(*command.tiny("train.steps=2", "keep=weights", "out=first")).status == 0
    assert command.call(*command.tiny("train.steps=2", "seed=5,6", "model.start=first", "out=second")).status == 0
    begins = open_sweep("second")[BEGIN].values
    assert begins[0] == begins[1] == pytest.approx(open_sweep("first")["final_validation_loss"].values[0], rel=1e-6)


def test_going_on_where_little_is_left_to_learn_is_no_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the weights of a trained run, on other batches: by the rule for new models a quarter ended badly."""
    monkeypatch.chdir(tmp_path)
    small = command.tiny("train.steps=400", "optim.lr=1e-2", "keep=weights", "out=first")
    assert command.call(*small).status == 0
    (weights,) = Path("first/weights").glob("*.safetensors")
    again = ("train.steps=100", "optim.lr=1e-4", "data.seed=range(40)", f"model.start={weights}", "out=again")
    done = command.call(*command.tiny(*again))
    assert done.status == 0, done.err
    sweep = open_sweep("again")
    losses = sweep["loss"].transpose("trial", "step").values
    assert set(sweep["outcome"].values) == {TRAINED}
    assert [judge(loss, None) for loss in losses].count(TRAINED) < 30
