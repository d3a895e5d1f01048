"""`keep=weights`: every trial's last weights on disk, read back by name, and as a GPT-2 of transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import analysis
from harness.basics.terminal import Terminal
from harness.config import ConfigError
from harness.training.pack import Pack
from sweeps.commands.verify import verify
from sweeps.running.job import corpus_of
from tests.sealing import seal_values
from tests.sweeps.command import call, refused, results, tree, trials

SMALL = ["model.width=16", "model.depth=1", "model.head_dim=8", "model.context=16", "train.steps=6", "train.batch=2"]
SMALL += ["data.source=zipf", "data.vocabulary=61", "data.length=20000", "train.validate_tokens=640"]
SMALL += ["train.validate_between=64", "schedule.warmup=1", "device=cpu"]
GRID = ["recipe=gpt2,plain", "seed=0,1", "fault=none,nan_gradient", "fault.start=3", "optim.lr=1e-2"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "out"
    done = call(*SMALL, *GRID, "keep=weights", f"out={out}")
    assert done.status == 0, done.err
    return out


def test_each_trial_has_weights_and_its_configuration_beside_them(kept: Path) -> None:
    found = results(kept)
    names = {f"{trial}.{kind}" for trial in found.trial.values for kind in ("safetensors", "json")}
    assert {path.name for path in (kept / "weights").iterdir()} == names
    made = {trial.id: trial for trial in trials(*SMALL[:-1], *GRID)}
    for name in found.trial.values:
        stored = json.loads((kept / "weights" / f"{name}.json").read_text())
        assert stored["trial"] == json.loads(json.dumps(made[name].to_dict()))


def test_they_are_the_weights_that_were_validated(kept: Path) -> None:
    """Put back into a fresh pack they have the loss that the store has, bit for bit."""
    found = results(kept)
    made = [trial for trial in trials(*SMALL[:-1], *GRID) if trial.recipe == "gpt2" and trial.fault.name == "none"]
    pack = Pack(made, corpus_of(made[0].data, 16), torch.device("cpu"))
    for row, trial in enumerate(made):
        loaded = analysis.load_weights(kept, found.trial.sel(trial=trial.id))
        own = pack.tensors(pack.weights, row)
        assert loaded.keys() == own.keys()
        for name, values in own.items():
            assert loaded[name].shape == values.shape and not torch.equal(loaded[name], values)
            values.copy_(loaded[name])
    pack.begin(6)
    losses = pack.validation_losses(640).mean(1)
    expected = found.final_validation_loss.sel(trial=[trial.id for trial in made])
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_trial_that_froze_has_the_weights_of_that_step(kept: Path) -> None:
    found = results(kept).set_xindex("fault")
    struck = found.sel(fault="nan_gradient")
    assert (struck.outcome == "non-finite").all() and (struck.nonfinite_step == 3).all()
    for trial, golden in zip(struck.trial.values, struck.golden.values, strict=True):
        stopped, whole = analysis.load_weights(kept, trial), analysis.load_weights(kept, golden)
        assert all(torch.isfinite(values).all() for values in stopped.values())
        assert not torch.equal(stopped["embedding"], whole["embedding"])


def test_a_trial_becomes_a_gpt2_of_transformers(kept: Path, tmp_path: Path) -> None:
    """Which has the same loss on the held-out text, also once it was written and read by transformers alone."""
    from transformers import GPT2LMHeadModel

    found = results(kept)
    made = [trial for trial in trials(*SMALL[:-1], *GRID) if trial.recipe == "gpt2" and trial.fault.name == "none"]
    pack = Pack(made, corpus_of(made[0].data, 16), torch.device("cpu"))
    windows = pack.objective.batches.validation(pack.objective.held_out(640).flatten())
    for trial in made:
        analysis.to_gpt2(kept, trial.id).save_pretrained(tmp_path / trial.id)
        theirs = GPT2LMHeadModel.from_pretrained(tmp_path / trial.id).eval()
        with torch.no_grad():
            logits = theirs(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        assert loss.item() == pytest.approx(found.final_validation_loss.sel(trial=trial.id).item(), rel=1e-5)
    (other, *_) = [name for name in found.trial.values if found.recipe.sel(trial=name) == "plain"]
    with pytest.raises(ConfigError, match="model.positions=rotary: not in a GPT-2"):
        analysis.to_gpt2(kept, other)


def test_without_it_there_are_none_and_later_it_is_too_late(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call(*SMALL, "seed=0,1", f"out={out}").status == 0 and not (out / "weights").exists()
    (trial, _) = results(out).trial.values
    with pytest.raises(ConfigError, match=rf"holds no weights of trial {trial}; allowed: .* keep=weights"):
        analysis.load_weights(out, trial)
    done = call(*SMALL, "seed=0,1,2", f"out={out}", "keep=weights")
    assert "keep=weights: 2 trials complete already without weights" in done.out and done.status == 0
    assert len(list((out / "weights").iterdir())) == 2
    assert "keep=weights" not in call(*SMALL, "seed=2", f"out={out}", "keep=weights").out


BAD = ["0" * 16, "nothing", "../plan", "", "a/b"]


@pytest.mark.parametrize("trial", BAD)
def test_what_is_no_trial_is_refused(kept: Path, trial: str) -> None:
    with pytest.raises(ConfigError, match="allowed: .* keep=weights"):
        analysis.load_weights(kept, trial)


def harmed(kept: Path, tmp_path: Path) -> tuple[Path, str]:
    out = tmp_path / "copy"
    shutil.copytree(kept, out)
    return out, next((out / "weights").glob("*.safetensors")).stem


HARMS = {
    "a bit": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "its end": lambda file: os.truncate(file, file.stat().st_size - 5),
    "all of it": lambda file: file.unlink(),
    "what it is": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: (file.unlink(), file.symlink_to("/etc/hostname")),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_damage_is_one_error_and_named_by_verify(kept: Path, tmp_path: Path, harm: str, kind: str) -> None:
    out, trial = harmed(kept, tmp_path)
    whole = call_verify(out)
    assert whole == 0
    HARMS[harm](out / "weights" / f"{trial}.{kind}")
    with pytest.raises(ConfigError, match=trial):
        analysis.load_weights(out, trial)
    assert call_verify(out) == 1


STRANGE = {
    "a field that there is not": lambda trial: trial["model"].update(wings=2),
    "a number that is none": lambda trial: trial["model"].update(depth="two"),
    "another size": lambda trial: trial["model"].update(width=8),
    "another depth": lambda trial: trial["model"].update(depth=3),
    "no heads": lambda trial: trial["model"].update(head_dim=0),
}


@pytest.mark.parametrize("change", STRANGE)
def test_a_configuration_of_other_weights_is_one_error(kept: Path, tmp_path: Path, change: str) -> None:
    found = results(kept)
    trial = found.trial.values[(found.recipe == "gpt2").values][0]
    out = Path(shutil.copytree(kept, tmp_path / "copy"))
    file = out / "weights" / f"{trial}.json"
    stored = json.loads(file.read_text())
    STRANGE[change](stored["trial"])
    seal_values(file, stored)
    with pytest.raises(ConfigError, match=f"{trial} are not those of its configuration"):
        analysis.to_gpt2(out, trial)


def call_verify(out: Path) -> int:
    return verify(out, Terminal())


def test_a_typo_is_one_line(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, "keep=weight", f"out={tmp_path / 'out'}")
    assert line.startswith("error: keep=weight: ") and "allowed: nothing, weights" in line
    (line,) = refused(tmp_path, "keep=nothing,weights", f"out={tmp_path / 'out'}")
    assert "cannot be swept" in line


def test_a_sweep_with_it_is_the_sweep_without_it(kept: Path, tmp_path: Path) -> None:
    assert call(*SMALL, *GRID, f"out={tmp_path / 'out'}").status == 0
    left, right = results(kept), results(tmp_path / "out")
    assert left.identical(right.assign_coords(pack=left.pack).assign_attrs(left.attrs))


def test_weights_that_no_disk_has_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No disk is as small as that: what is tested is the message, not the measurement.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: (10**9, 0, 100_000))
    line = [*SMALL, "seed=range(20)", f"out={tmp_path / 'out'}"]
    assert call(*line, "plan=true").out.count("no room") == 0 and call(*line, "plan=true").status == 0
    assert "out=" in call(*line, "plan=true", "keep=weights").out.partition("no room: ")[2]
    assert not tree(tmp_path)
