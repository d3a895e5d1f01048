"""Sizes of a study: what stands in place of its own values, and who has the last word; and the studies of papers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.config import Trial
from sweeps.compose.arguments import checked_overrides
from sweeps.compose.folders import read
from sweeps.compose.hydra_calls import FOLDER
from sweeps.compose.places import stems
from tests.sweeps import command

PAPERS = {
    "gradient_spikes": ("train.steps=60", "fault.start=30", "mitigation=none,spam", "fault=last_bit,random_tokens"),
    "large_batch": ("mitigation=none,lamb", "optim.lr=1e-2", "train.batch=4,8"),
    "loss_scaling": ("mitigation=none,fp16_static", "optim.lr=1e-2", "model.width=16"),
    "mixed_placement": ("model.depth=4", "mitigation=none,mix_ln", "optim.lr=1e-2"),
    "placement_over_depth": ("model.depth=2,4", "mitigation=none,deepnorm", "optim.lr=1e-2"),
    "sequence_warmup": ("train.steps=60", "mitigation=none,sequence_warmup", "optim.lr=1e-2", "train.batch=4"),
    "skip_dose": ("train.steps=60", "fault.start=30", "fault=last_bit,weight_bit", "playbook.skip_batches.count=1,2"),
    "spike_no_more": ("mitigation=none,spike_no_more", "optim.lr=1e-2", "model.width=16"),
    "transfer": ("model.width=32", "optim.lr=1e-2"),
    "warmup_placement": ("model.depth=2", "schedule.warmup=0,2", "optim.lr=1e-2"),
}
"""Those with a size `paper`, and what makes them small."""
SIZED = """
model: {depth: 1}
train: {steps: 100}
schedule: {warmup: 10}
hydra:
  sweeper:
    params: {model.width: '16,32', optim.lr: 1e-2}
    sizes:
      paper: {model.width: '64,128', model.depth: 12, train.steps: 1000, optim.clip: null}
      other: {model.depth: 3}
"""


def sized(folder: Path, content: str = SIZED, *words: str) -> list[Trial]:
    """The trials of a study of the user's own with these words."""
    command.write_yaml(folder, "study/sized.yaml", content.strip())
    given = checked_overrides(["study=sized", *words], command.loader(folder), folder)
    rest = [word for word in given if not word.startswith(("study=", "size="))]
    return command.trials(*rest, study="sized", folder=folder)


def test_a_size_stands_in_place_of_the_studys_own_values(tmp_path: Path) -> None:
    """Axes and others; what is not named stays, and follows the length of the run as ever."""
    plain = sized(tmp_path)
    assert [(trial.model.width, trial.model.depth, trial.schedule.warmup) for trial in plain] == [
        (16, 1, 10),
        (32, 1, 10),
    ]
    paper = sized(tmp_path, SIZED, "size=paper")
    assert [(trial.model.width, trial.model.depth) for trial in paper] == [(64, 12), (128, 12)]
    assert {(trial.steps, trial.schedule.warmup, trial.optim.clip, trial.optim.lr) for trial in paper} == {
        (1000, 100, None, 1e-2)
    }


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    (trial,) = sized(tmp_path, SIZED, "size=paper", "model.width=8", "train.steps=50", "model.head_dim=8")
    assert (trial.model.width, trial.model.depth, trial.steps) == (8, 12, 50)


def test_a_study_has_the_sizes_of_the_one_that_it_builds_on(tmp_path: Path) -> None:
    """And its own word for a key stands before that one's."""
    command.write_yaml(tmp_path, "study/base.yaml", SIZED.strip())
    built = "defaults: [base, _self_]\nhydra: {sweeper: {sizes: {paper: {model.depth: 2}}}}"
    found = sized(tmp_path, built, "size=paper")
    assert {(trial.model.depth, trial.steps) for trial in found} == {(2, 1000)}
    assert {trial.model.depth for trial in sized(tmp_path, built, "size=other")} == {3}


@pytest.mark.parametrize(
    ("words", "sizes", "said"),
    [
        (("study=quickstart", "size=paper"), "{}", "size=paper: study=quickstart has no such size; allowed: no size"),
        (
            ("study=sized", "size=papper"),
            "{paper: {seed: 1}}",
            "size=papper: study=sized has no such size; allowed: paper",
        ),
        (("study=sized", "size=a,b"), "{a: {seed: 1}}", "size=a,b: belongs to the run and cannot be swept"),
        (("study=sized", "size=a"), "{a: {device: cuda}}", "device=cuda: belongs to the run, and to no size"),
        (("study=sized", "size=a"), "{a: {study: quickstart}}", "study=quickstart: belongs to the run, and to no size"),
        (("study=sized", "size=a"), "{a: {model.widht: 3}}", "model.widht=3: unknown key; did you mean model.width"),
        (("study=sized", "size=a"), "{a: {model.width: 30}}", "model.width=30: not divisible"),
        (("study=sized",), "{a: {seed: [1, 2]}}", "hydra.sweeper.sizes.a.seed: several values in brackets"),
        (("study=sized",), "{a: {_target_: os.mkdir}}", "hydra.sweeper.sizes: a._target_=os.mkdir: would be imported"),
        (("size=paper",), "{}", "size=paper: study=grid has no such size"),
    ],
)
def test_a_wrong_size_is_one_line(empty: Path, words: tuple[str, ...], sizes: str, said: str) -> None:
    content = f"# @package _global_\nhydra: {{sweeper: {{params: {{seed: 0}}, sizes: {sizes}}}}}"
    command.write_yaml(empty / "mine", "study/sized.yaml", content)
    (line,) = command.refused(empty, "--config-dir=mine", *words)
    assert line.startswith("error: ") and said in line and "allowed" in line


# --- the studies of papers ---------------------------------------------------------------------------------------


def test_every_study_with_a_published_size_is_here() -> None:
    found = {name for name in stems(FOLDER / "study") if "paper:" in (FOLDER / "study" / f"{name}.yaml").read_text()}
    assert found == PAPERS.keys()
    page = (command.REPOSITORY / "docs" / "howto" / "papers.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .*\(arXiv [\d.]+\) \|$", page, re.MULTILINE))
    assert told == {name: content.about.question for name in found for content in [read(FOLDER, "study", name)]}


@pytest.mark.parametrize("study", PAPERS)
def test_the_published_size_is_another(study: str) -> None:
    """Every trial of it can be made, and is larger; what is compared is the same."""
    given = checked_overrides([f"study={study}", "size=paper"], command.loader(), None)
    paper = command.trials(*(word for word in given if not word.startswith(("study=", "size="))), study=study)
    laptop = command.trials(study=study)
    widths = [{trial.model.width for trial in trials} for trials in (laptop, paper)]
    assert max(widths[0]) < min(widths[1]) or (study == "transfer" and max(widths[0]) <= min(widths[1]))
    assert min(trial.steps for trial in paper) >= 10_000
    assert {trial.mitigation for trial in paper} == {trial.mitigation for trial in laptop}


@pytest.mark.parametrize("study", PAPERS)
def test_each_mitigation_of_a_papers_study_acts(study: str, tmp_path: Path) -> None:
    """Trained at a size of seconds: no trial with one ends as a plain one does."""
    small = ["model.context=16", "train.validate_tokens=64", "seed=0", "hydra.launcher.workers=1", "data.source=zipf"]
    small += ["data.vocabulary=64", "data.length=20000"]
    words = [
        *small,
        *(() if any(word.startswith("train.steps=") for word in PAPERS[study]) else ("train.steps=12",)),
        *PAPERS[study],
    ]
    ended = command.call(f"study={study}", f"out={tmp_path / 'out'}", *words)
    assert ended.status == 0, ended.err
    sweep = command.open_sweep(tmp_path / "out")
    assert sweep["complete"].values.all()
    if "mitigation" in sweep.coords:
        ends = sweep["final_validation_loss"].values
        plain = sweep["mitigation"].values == "none"
        assert not set(ends[plain]) & set(ends[~plain])
