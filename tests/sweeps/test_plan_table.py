"""A plan is a screen, however many trials it has, and names what varies."""

from __future__ import annotations

import re
from io import StringIO
from types import ModuleType

from harness.config import Model, Optim, Trial
from harness.printing import Terminal
from sweeps.plan_table import print_plan
from sweeps.planner import PackPlan, Plan, make_plan

SCREEN, WIDE = 30, 200  # lines, letters


def shown(plan: Plan) -> list[str]:
    file = StringIO()
    print_plan(plan, "cpu", 2, Terminal(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDE, file.getvalue()
    return lines


def test_the_study_of_mitigations(command: ModuleType, empty) -> None:
    """Its grid, less most rates and seeds, which change nothing of the shape."""
    options = ("optim.lr=1e-2,1e-1", "seed=0", "fault=none,rare_tokens")
    ended = command.call("study=mitigations", "plan=true", "out=out", *options)
    lines = ended.out.splitlines()
    assert (ended.status, ended.err) == (0, "") and len(lines) <= SCREEN
    names = command.loader().get_group_options("mitigation")
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
