"""The study of mitigations: that it is planned as it says, and that a small one is trained, compared and reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis import open_sweep
from analysis.__main__ import main
from analysis.measures.mitigations import compare
from tests.sweeps.command import call

SMALL = ["model.width=16", "model.depth=1", "model.head_dim=8", "model.context=16", "train.steps=16", "train.batch=4"]
SMALL += ["schedule.warmup=2", "fault.start=8", "optim.lr=1e-2,1", "seed=range(2)", "train.validate_every=16"]
SMALL += ["train.validate_tokens=2048"]


def sweep(*words: str) -> str:
    ended = call("study=mitigations", *words)
    assert ended.status == 0, ended.out + ended.err
    return ended.out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, in which a small study of three mitigations was trained."""
    home, threads = tmp_path_factory.mktemp("study"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("STABILITY_HARNESS_CACHE", str(home / "cache"))
        patch.setenv("HYDRA_FULL_ERROR", "1")
        assert "trained 48 of 48 trials" in sweep("out=small", "mitigation=none,no_clip,qk_norm", *SMALL)
        yield home
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("home")
def test_the_study_trains_every_mitigation_on_the_same_trials() -> None:
    words = sweep("mitigation=none,qk_norm", "out=planned", "plan=true")
    # Two widths, four rates, three seeds, three faults and none.
    assert words.startswith(f"{2 * 2 * 4 * 3 * 4} trials asked for, 0 golden twins added")


def test_a_real_study_is_compared(home: Path) -> None:
    found = compare(open_sweep(home / "small"))
    assert found.reason == "" and list(found.table["mitigation"]) != [] and found.table["mitigation"][0] == "none"
    assert sorted(found.table["mitigation"]) == ["no_clip", "none", "qk_norm"]
    table = found.table.set_index("mitigation")
    assert set(table["final_loss_seeds"]) == {2} and (table["final_loss"] < np.log(256)).all()
    faults = {"rare_tokens", "learning_rate_jump", "rank_noise"}
    assert {name.partition(".")[2] for name in found.metrics if name.startswith("deviation.")} == faults
    for metric in found.metrics:
        assert table[metric].notna().all(), metric
        assert table.loc[["no_clip", "qk_norm"], f"{metric}_change"].notna().all(), metric
    assert (table["step_seconds"] > 0).all() and table["step_time"]["none"] == 1
    assert table["step_time_bound"]["qk_norm"] == "", "another structure has packs of its own"


def test_a_real_study_is_reported(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Largest stable learning rate at width 16: ") for line in lines)
    assert any(line.startswith("Worst deviation over the faults at width 16: ") for line in lines)
    assert "mitigation_map.png" in lines[-2]
    assert "<h2>Mitigations</h2>" in (home / "small" / "report.html").read_text(encoding="utf-8")
