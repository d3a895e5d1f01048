"""A plan is a screen, however many trials it has, and names what varies."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
import torch

from harness.basics.terminal import Terminal
from harness.config import Model, Optim, Trial
from sweeps.planning.packs import PackPlan, Plan
from sweeps.planning.plan_table import print_plan
from sweeps.planning.planner import make_plan
from tests.sweeps import command

SCREEN, WIDE = 30, 200  # lines, letters


def shown(plan: Plan) -> list[str]:
    file = StringIO()
    print_plan(plan, "cpu", 2, Terminal(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDE, file.getvalue()
    return lines


def test_the_study_of_mitigations(empty) -> None:
    """Its grid, less most rates and seeds, which change nothing of the shape."""
    options = ("optim.lr=1e-2,1e-1", "seed=0", "fault=none,rare_tokens")
    ended = command.call("study=mitigations", "plan=true", "out=out", *options)
    lines = ended.out.splitlines()
    assert (ended.status, ended.err) == (0, "") and len(lines) <= SCREEN
    cannot = {"accumulation_fp32", "norms_fp32", "softmax_fp32", "checkpointing", "mix_ln"}  # act there
    cannot |= {"beta2_095", "clip_1", "clip_update", "independent_decay", "screen_repetition"}
    names = {"none", *command.general_mitigations()} - cannot
    text = " ".join(line.strip() for line in lines)
    assert f"mitigation ({len(names)}): none, " in text
    assert all(re.search(rf"[ ,]{name}\b", text) for name in names)
    assert "  fault (2): none, rare_tokens" in lines
    assert {"  model.width: 32, 64", "  optim.lr: 0.01, 0.1"} <= set(lines)
    counted = re.search(r": (\d+) to train in (\d+) packs", text)
    assert counted is not None
    rows = [re.split(r"  +", line.strip()) for line in lines[lines.index(heading(lines)) + 1 : -1]]
    assert sum(int(row[4]) for row in rows) == int(counted[1]) and sum(int(row[5]) for row in rows) == int(counted[2])
    assert {row[-1] for row in rows} > {"batch_warmup", "sequence_warmup"}
    assert lines[-1].startswith("about ")


def heading(lines: list[str]) -> str:
    return next(line for line in lines if line.startswith("  width  depth"))


def test_ten_thousand_trials_of_two_hundred_sizes() -> None:
    sizes = [Model(width=16 * width, depth=depth, head_dim=8) for width in range(1, 21) for depth in range(1, 11)]
    rates = [Optim(lr=1e-3 * (1 + number)) for number in range(5)]
    packs = [
        PackPlan(
            tuple(Trial(model=model, optim=rates[n % 5], mitigation=f"m{n}", seed=n) for n in range(50)), frozenset()
        )
        for model in sizes
    ]
    lines = shown(Plan(tuple(packs), 10_000, 0, 0))
    assert "10000 to train" in lines[0]
    assert "  model.width: 20 values from 16 to 320" in lines and "  model.depth: 10 values from 1 to 10" in lines
    assert "  and 190 sizes more: 9500 trials, 190 packs" in lines


def test_hundreds_of_mitigations() -> None:
    names = [f"a_rather_long_name_of_one_{number}" for number in range(500)]
    lines = shown(make_plan([Trial(mitigation=name) for name in names], (), None, "cpu", 2))
    named = [name for name in names if any(re.search(rf"\b{name}\b", line) for line in lines)]
    assert named and any(line.endswith(f"and {500 - len(named)} more") for line in lines)


def test_one_trial() -> None:
    lines = shown(make_plan([Trial()], (), None, "cpu", 2))
    assert len(lines) == 4 and lines[1] == heading(lines) and lines[2].endswith("  none")


def test_what_some_trials_have_at_its_default() -> None:
    """A trial knows nothing of such a section, and still differs from one that sets it."""
    lines = shown(make_plan(command.trials("zclip.threshold=null,2.5"), (), None, "cpu", 2))
    assert lines[1] == "  zclip.threshold: null, 2.5"


# --- a plan for another machine ----------------------------------------------------------------------------------

GPU_ONLY = ("device=cuda", "plan=true", "model.width=8192", "model.head_dim=128", "model.depth=32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_plan_for_gpus_needs_none(empty: Path) -> None:
    """26 billion weights: 195 GiB with their gradients."""
    ended = command.call(*command.tiny(*GPU_ONLY, "seed=range(4)"))
    assert (ended.status, ended.err) == (0, "") and "4 to train in 1 pack" in ended.out
    assert "worker on cuda (rough)" in ended.out and "no room" not in ended.out
    small = command.call(*command.tiny(*GPU_ONLY, "seed=range(4)", "memory=80GB"))
    assert small.status == 0 and "4 to train in " in small.out
    (line,) = (line for line in small.out.splitlines() if line.startswith("no room: "))
    assert line.startswith("no room: model.width=8192, model.depth=32: weights and gradients of one trial take 19")
    assert "at most the 64 GiB of a worker" in line
    assert not any(empty.iterdir())


def test_a_plan_says_what_this_machine_has_no_room_for(empty: Path) -> None:
    """And a sweep is refused for it."""
    large = ("model.width=16384", "model.head_dim=128", "model.depth=64", "device=cpu")
    ended = command.call(*command.tiny(*large, "plan=true"))
    assert (ended.status, ended.err) == (0, "") and "1 to train in 1 pack" in ended.out
    (line,) = (line for line in ended.out.splitlines() if line.startswith("no room: "))
    assert line.startswith("no room: model.width=16384: a pack of 1 trial needs about ") and "of this machine" in line
    assert command.refused(empty, *command.tiny(*large)) == [line.replace("no room", "error")]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            ["memory=80GB"],
            "memory=80GB: is for a plan for another machine; allowed: plan=true, or hydra.launcher.memory",
        ),
        (["memory=much", "plan=true"], "memory=much: not a size; allowed: a number of MB, or such as 80GB or 1.5TB"),
        (["memory=-3", "plan=true"], "memory=-3: not a size; allowed: a number of MB, or such as 80GB or 1.5TB"),
        (["memory=0", "plan=true"], "memory=0: not a size; allowed: a number of MB, or such as 80GB or 1.5TB"),
    ],
)
def test_a_memory_that_is_none(empty: Path, memory: list[str], said: str) -> None:
    (line,) = command.refused(empty, *command.tiny(*memory))
    assert line.startswith(f"error: {said}")
