"""Wrong input is one line that names key, value and what is allowed, with status 2; nothing is trained or written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from harness.storage.store import open_store
from tests.sweeps import command

NAMES = "names that stability-harness list shows"
FAULTS = "rank_noise, rare_tokens, realistic_sdc"
STRUCK = ("fault=weight_bit", "fault.start=2")
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")

# (overrides, how the line begins after "error: ", how it ends or what it holds)
CASES = {
    "unknown key": (["model.widht=32"], "model.widht=32: unknown key; did you mean model.width", "model.context, "),
    "no section": (["lr=1e-3"], "lr=1e-3: unknown key; did you mean optim.lr?", "optim.lr, and the other keys"),
    "another's name": (
        ["optim.learning_rate=1"],
        "optim.learning_rate=1: unknown key; did you mean optim.lr?",
        "other",
    ),
    "another's quantity": (["n_layer=2"], "n_layer=2: unknown key; did you mean model.depth?", "model.depth, and"),
    "another unit": (
        ["epochs=2"],
        "epochs=2: unknown key; did you mean train.steps (a run is as long as",
        "train.steps",
    ),
    "another section": (["optimizer.lr=1"], "optimizer.lr=1: unknown key; did you mean optim.lr?", "optim.lr,"),
    "no section, misspelt": (["stepss=3"], "stepss=3: unknown key; did you mean train.steps or ", "adafactor"),
    "at the top": (["seeds=3"], "seeds=3: unknown key; did you mean seed? ", "adafactor"),
    "unknown section": (["modell.width=32"], "modell.width=32: unknown key; did you mean model.width?", "other keys"),
    "section as a value": (["model=3"], "model=3: unknown key", "model.width"),
    "a fault's kind": (["fault.kind=weight_bit"], "fault.kind=weight_bit: unknown key", "fault.bit"),
    "wrong type": (["model.width=wide"], "model.width=wide: wrong type (str)", "allowed: an integer"),
    "fraction for an integer": (["seed=1.5"], "seed=1.5: wrong type (float)", "allowed: an integer"),
    "bool for an integer": (["seed=true"], "seed=true: wrong type (bool)", "allowed: an integer"),
    "integer for a bool": (["model.qk_norm=1"], "model.qk_norm=1: wrong type (int)", "allowed: true or false"),
    "no value": (["optim.lr="], "optim.lr=: wrong type (str)", "allowed: a number"),
    "dict": (["optim.lr={a:1}"], "optim.lr={'a': 1}: wrong type (dict)", "allowed: a number"),
    "interpolation": (["optim.lr=${seed}"], "optim.lr=${seed}: wrong type (str)", "allowed: a number"),
    "quoted number": (["optim.lr='1e-3'"], "optim.lr=1e-3: wrong type (str)", "allowed: a number"),
    "number for a path": (["data.path=3"], "data.path=3: wrong type (int)", "allowed: a word or null"),
    "not a number": (["optim.lr=nan"], "optim.lr=nan: out of range", "allowed: >= 0"),
    "an integer too large for a float": ([f"optim.lr={10**400}"], "optim.lr=1000", "allowed: a number"),
    "a seed that no int64 holds": (["seed=99999999999999999999"], "seed=99999999999999999999: out of range", "<= 92"),
    "a field of another optimizer": (
        ["optim.name=adamw,lion", "spam.threshold=10"],
        "spam.threshold=10.0: reaches no trial, because optim.name=",
        "allowed: leave it out, or another optimizer",
    ),
    "unknown study": (
        ["study=nope"],
        "study=nope: unknown study",
        "allowed: campaign, depth, detectors, detectors_test, detectors_tune, early_warning, forecast, gradient_",
    ),
    "studies": (["study=grid,quickstart"], "study=grid,quickstart: belongs to the run", "allowed: one value"),
    "unknown fault, swept": (["fault=none,bit"], "fault=bit: unknown fault", FAULTS),
    "fault as a list": (
        ["fault=[none]"],
        "fault=[none]: unknown fault; did you mean none?",
        "names that stability-harn",
    ),
    "unknown mitigation, swept": (["mitigation=none,qknorm"], "mitigation=qknorm: unknown mitigation; did you", NAMES),
    "null for a group": (["mitigation=null"], "mitigation=null: unknown mitigation", NAMES),
    "number for a group": (["mitigation=3"], "mitigation=3: unknown mitigation", NAMES),
    "glob without a match": (["mitigation=glob(x*)"], "mitigation=glob(x*): matches nothing", NAMES),
    "glob of numbers": (["model.width=glob(1*)"], "model.width=glob(1*): a glob needs names", "allowed: values"),
    "width and head size, swept": (["model.width=16,20"], "model.width=20: not divisible by", "allowed"),
    "muP over heads of several sizes": (
        ["model.head_dim=4,8", "mitigation=none,mup"],
        "model.head_dim=4,8: under model.parametrization=mup attention's scores follow the head's size",
        "allowed: model.base_head_dim=4, or one size",
    ),
    "a rising beta2 of no second moment": (
        ["optim.name=lion", "optim.beta2_exponent=0.8"],
        "optim.beta2_exponent=0.8: optim.name=lion has no such second moment",
        "allowed: null, or optim.name=adamc, ",
    ),
    "residual streams, post-LN": (
        ["mitigation=mhc+post_ln"],
        "mitigation=mhc+post_ln: model.residual_streams=4: model.placement=post works on one stream",
        "allowed: 1, or model.placement=pre",
    ),
    "odd head size": (["model.head_dim=1"], "model.head_dim=1: odd", "allowed with model.positions=rotary: an even"),
    "bit 40, swept": ([*STRUCK, "fault.bit=3,40"], "fault.bit=40: beyond fault.format=fp32", "allowed: 0 to 31"),
    "no such tensor": ([*STRUCK, "fault.tensor=block*x"], "fault.tensor=block*x: matches no", "blocks.0.attention"),
    "element beyond the tensor": (
        [*STRUCK, "fault.tensor=blocks.0.attention.query", "fault.element=256"],
        "fault.element=256: beyond fault.tensor=blocks.0.attention.query",
        "allowed: 0 to 255",
    ),
    "strike after the end": (["fault=weight_bit", "fault.start=6"], "fault.start=6: after the last", "allowed: 0 to 5"),
    "fault's default after the end": (
        ["fault=rare_tokens"],
        "fault.start=100 (the default): after the last step",
        "allowed: 0 to 5, such as fault.start=3",
    ),
    "field without a fault": (["fault.bit=3"], "fault.bit=3: reaches no trial, because fault=none", "another fault"),
    "field of another fault": (
        ["fault=rare_tokens", "fault.start=2", "fault.bit=3"],
        "fault.bit=3: reaches no trial, because fault=rare_tokens",
        "allowed: leave it out, or another fault",
    ),
    "value that the mitigation sets": (
        ["mitigation=clip_1", "optim.clip=0.5"],
        "optim.clip=0.5: reaches no trial, because mitigation=clip_1 sets it",
        "allowed: leave it out, or another mitigation",
    ),
    "a value beside the one that the mitigation sets": (
        ["mitigation=clip_1", "optim.clip=1,0.5"],
        "optim.clip=0.5: reaches no trial, because mitigation=clip_1 sets it",
        "allowed: leave it out, or another mitigation",
    ),
    "warm-up": (["schedule.warmup=9"], "schedule.warmup=9: longer than train.steps=6", "allowed: 0 to 6"),
    "no path": (["data.source=text", "data.vocabulary=256"], "data.path=null: missing for", "a file or a folder"),
    "missing folder": (
        ["data.source=text", "data.vocabulary=256", "data.path=nowhere"],
        "data.path=nowhere: no such file or folder",
        "allowed: a file or a folder, for data.source=text",
    ),
    "too little data": (
        ["data.length=1000", "model.context=500"],
        "data.length=1000: 100 tokens",
        "allowed: at least 501",
    ),
    "no pack": (["pack.size=0"], "pack.size=0: not a size", "allowed: auto, or an integer from 1 to 1000000"),
    "word for a pack": (["pack.size=big"], "pack.size=big: not a size", "allowed: auto, or an integer from 1 to"),
    "plan": (["plan=maybe"], "plan=maybe: wrong type (str)", "allowed: true or false"),
    "no workers": (["hydra.launcher.workers=0"], "hydra.launcher.workers=0: not a number of", "auto, or an integer"),
    "workers, swept": (["hydra.launcher.workers=1,2"], "hydra.launcher.workers=1,2: belongs to", "allowed: one value"),
    "unknown option of the launcher": (
        ["hydra.launcher.threads=2"],
        "hydra.launcher.threads=2: unknown key",
        "workers",
    ),
    "unknown launcher": (["hydra/launcher=cloud"], "hydra/launcher=cloud: unknown hydra/launcher", "local, slurm"),
    "stock launcher": (["hydra/launcher=basic"], "hydra/launcher=basic: trains no packs", "allowed: local, slurm"),
    "stock sweeper": (["hydra/sweeper=basic"], "hydra/sweeper=basic: plans no packs", "allowed: grid"),
    "stock mode": (["hydra.mode=RUN"], "hydra.mode=RUN: every call is a sweep", "allowed: MULTIRUN"),
    "Slurm option of the wrong type": (
        ["hydra/launcher=slurm", "hydra.launcher.time=long"],
        "hydra.launcher.time=long: Value 'long' of type 'str'",
        "allowed: int",
    ),
    "empty range": (["seed=range(0)"], "seed=range(0): an empty range", "allowed: at least one value"),
    "range that runs backwards": (["seed=range(3,1)"], "seed=range(3,1): an empty range", "allowed: at least one"),
    "interval": (["optim.lr=interval(0,1)"], "optim.lr=interval(0,1): an interval has no grid", "or a search=NAME"),
    "added key": (["+optim.lr=1"], "+optim.lr=1: keys cannot be added or removed", "allowed: key=value"),
    "forced key": (["++optim.lr=1"], "++optim.lr=1: keys cannot be added or removed", "allowed: key=value"),
    "removed key": (["~optim.lr"], "~optim.lr: keys cannot be added or removed", "allowed: key=value"),
    "removed group": (["~mitigation"], "~mitigation: keys cannot be added or removed", "allowed: key=value"),
    "open bracket": (["optim.lr=["], "optim.lr=[: a bracket is not closed", "'optim.lr=range(3)'"),
    "open quote": (['optim.lr="1'], 'optim.lr="1: a quote is not closed', "a quote before and after"),
    "no key": (
        ["=3"],
        "=3: unknown key",
        "allowed: adafactor, adagc, ademamix, block, campaign, checkpoint, cpu",
    ),
    "a word alone": (["quickstart"], "quickstart: has no =; did you mean study=quickstart? ", "allowed: key=value"),
    "a key alone": (["optim.lr"], "optim.lr: has no =", "allowed: key=value"),
    "given twice": (["seed=1", "seed=2"], "seed=1 seed=2: seed is given 2 times", "allowed: once"),
    "no such folder of studies": (
        ["--config-dir=nowhere"],
        "--config-dir=nowhere: no such folder",
        "allowed: a folder",
    ),
    "another configuration": (["--config-name=mine"], "--config-name=mine: not for sweeps", "allowed: --config-dir"),
    "pickled configuration": (["--experimental-rerun=x"], "--experimental-rerun=x: not for sweeps", "allowed"),
}


@pytest.mark.parametrize(("arguments", "start", "rest"), CASES.values(), ids=CASES)
def test_one_line(empty: Path, arguments: list[str], start: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # even where there is a Slurm, none of these may reach it
    (line,) = command.refused(empty, *command.tiny(*arguments))
    assert line.startswith(f"error: {start}")
    assert "allowed" in line
    assert rest in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["study=campaign", "fault.start=90"],
            "fault.until=80 (of study=campaign): outside of the run after the start; allowed: fault.start=90 to 99",
        ),
        (
            ["study=quickstart", "model.width=32", "model.head_dim=24"],
            "model.width=32: not divisible by model.head_dim=24; allowed: a multiple of it",
        ),
        (
            ["study=depth", "model.head_dim=24"],
            "model.width=32 (of study=depth): not divisible by model.head_dim=24; allowed: a multiple of it",
        ),
        (
            ["study=campaign", "schedule.warmup=200"],
            "schedule.warmup=200: longer than train.steps=100 (of study=campaign); allowed: 0 to 100",
        ),
    ],
)
def test_what_nobody_typed_is_told_from_what_was(empty: Path, arguments: list[str], line: str) -> None:
    """A value of the study's file says so, an axis or not; one that stands in the command line does not."""
    assert f"error: {line}" in command.refused(empty, *arguments)


@no_cuda
def test_no_cuda(empty: Path) -> None:
    (line,) = command.refused(empty, *command.tiny("device=cuda"))
    assert line == "error: device=cuda: torch finds no CUDA device on this machine; allowed: auto, cpu"


def test_every_bad_value_is_reported(empty: Path) -> None:
    arguments = [
        "model.widht=3",
        "optim.lr=fast",
        "train.steps=-1",
        "mitigation=qknorm",
        "seed=1",
        "seed=2",
        "device=tpu",
    ]
    lines = command.refused(empty, *command.tiny(*arguments))
    starts = [
        "model.widht=3:",
        "optim.lr=fast:",
        "train.steps=-1:",
        "mitigation=qknorm:",
        "device=tpu:",
        "seed=1 seed=2:",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(f"error: {start}") for line, start in zip(lines, starts, strict=True))


def test_every_bad_combination_is_reported_once(empty: Path) -> None:
    arguments = ["model.width=16,20,28", "schedule.warmup=7", "seed=range(10)", "hydra.launcher.workers=0"]
    lines = command.refused(empty, *command.tiny(*arguments))
    assert sorted(line.split(":")[1].strip() for line in lines) == [
        "hydra.launcher.workers=0",
        "model.width=20",
        "model.width=28",
        "schedule.warmup=7",
    ]


def test_hundreds_of_bad_combinations_are_cut_short(empty: Path) -> None:
    lines = command.refused(empty, *command.tiny("schedule.warmup=range(7,507)"))
    assert lines[0].startswith("error: schedule.warmup=7:")
    assert len(lines) < 30
    assert lines[-1] == f"error: and {500 - (len(lines) - 1)} more like these"


def test_a_pack_larger_than_memory(empty: Path) -> None:
    """It would be killed after minutes, without a word. A plan, which may be for another machine, says so."""
    (line,) = command.refused(empty, *command.tiny("model.width=262144", "out=out"))
    assert re.match(
        r"error: model.width=262144: a pack of 1 trial needs about [\d,]+ GiB; allowed: at most the \d+", line
    )


# --- Slurm -------------------------------------------------------------------------------------------------------


def test_no_slurm(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty))
    (line,) = command.refused(empty, *command.tiny("hydra/launcher=slurm"))
    assert line == "error: hydra/launcher=slurm: no sbatch on PATH; allowed here: local"


@pytest.mark.parametrize("option", ["time", "cpus", "parallel"])
def test_slurm_options_out_of_range(empty: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty / "sbatch").touch(mode=0o700)  # never called: the options are wrong
    monkeypatch.setenv("PATH", str(empty))
    (line,) = command.refused(empty, *command.tiny("hydra/launcher=slurm", f"hydra.launcher.{option}=0"))
    assert line == f"error: hydra.launcher.{option}=0: out of range; allowed: >= 1"


# --- as a user runs it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["-m", "model.width=16,20", "optim.lr=1e-3,1e-2"],
            "error: model.width=20: not divisible by model.head_dim=8; allowed: a multiple of it\n",
        ),
        (["out=old"], "error: out={folder}/old: holds results of study quickstart; allowed: "),
    ],
    ids=["combination", "another study"],
)
def test_from_a_shell(tmp_path: Path, arguments: list[str], line: str) -> None:
    """A grid as a shell starts it, the other forked."""
    open_store(tmp_path / "old", "quickstart")
    before = command.tree(tmp_path)
    begin = command.start if "-m" in arguments else command.fork
    ended = command.end(begin(*command.tiny(*arguments), cwd=tmp_path, PATH=str(tmp_path)))
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(line.format(folder=tmp_path))
    assert ended.err.count("\n") == 1
    assert command.tree(tmp_path) == before
