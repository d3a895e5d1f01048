"""Faults strike runs that are none of ours, by tensors and facts; and faults of other packages strike ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.reading.open_sweep import open_sweep
from harness.config import ConfigError
from harness.testing import engine
from harness.training.sites import AT_TAPS, Site
from injectors import Armed, Facts, facts_of, fault_types
from injectors.value import Value
from tests.injectors.faults import OF_EXPERTS, OF_POLICIES, SITES
from tests.injectors.spies import STEPS, TOKENS, differing, trial, words

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "fault"
NEEDED = {"schedule_offset": {"offset": -2}, "warmup_skipped": {"start": 2}}
RANKED = (*AT_TAPS, Site.GRADIENT)


def linear(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(16, 64)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


# --- the same strike as in a pack --------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"bits": 2, "spread": "scattered"}, {"model": "noise", "value": 0.5}])
@pytest.mark.parametrize("elements", [1, 5, None])
def test_a_linear_layer_is_struck_as_the_same_tensor_of_a_pack(fields, elements):
    """With nothing given but steps, shapes and a seed: the same elements and bits, and the same record."""
    fault = Value(start=0, site="weight", tensor="head", elements=elements, **fields)
    struck = trial(fault)
    pack = engine.pack_of([struck])
    head = pack.tensors(pack.weights, 0)["head"].clone()
    (recorded,) = engine.run([struck]).result.events
    model = torch.nn.Linear(*reversed(head.shape), bias=False)
    model.weight.data.copy_(head)
    named = {"head": model.weight}
    armed = Armed(fault, Facts(STEPS, {"head": tuple(head.shape)}, seed=struck.seeds["fault"]))
    assert armed.strike("gradient", 0, named) == [] == armed.strike("weight", 1, named)
    assert torch.equal(model.weight, head)
    events = armed.strike("weight", 0, named)
    assert events == recorded and events
    changed = differing({"head": head}, {"head": model.weight})["head"]
    assert len(changed) == (head.numel() if elements is None else elements)
    if elements is not None:
        assert changed == sorted(int(np.ravel_multi_index(event.index, head.shape)) for event in events)


def test_the_bit_of_a_whole_tensor_is_that_of_its_one_element():
    """Drawn with the seed alike, so that a description with `elements=null` keeps its bit in every version."""
    bits = []
    for elements in (1, None):
        model, found = linear(), linear()
        armed = Armed(Value(start=0, tensor="bias", elements=elements), Facts(STEPS, {"bias": (64,)}, seed=2))
        armed.strike("weight", 0, model.named_parameters())
        bits.append({int(x) for x in (words(model.bias) ^ words(found.bias)).tolist()} - {0})
    assert bits[0] == bits[1] and len(bits[0]) == 1


def test_the_facts_of_a_trial_are_those_of_its_model():
    struck = trial(Value(start=1))
    facts, pack = facts_of(struck), engine.pack_of([struck])
    assert facts.tensors == {name: tuple(x.shape) for name, x in pack.tensors(pack.weights, 0).items()}
    assert (facts.steps, facts.seed, facts.slots) == (STEPS, 7, ("moment_1", "moment_2"))
    assert [facts.rate(step) for step in (0, 5)] == [pytest.approx(facts.peak / 6), facts.peak]


# --- every kind of fault -----------------------------------------------------------------------------------------


def cases() -> list[tuple[str, str]]:
    kinds = sorted(set(fault_types()) - {"none", "replay"} - OF_EXPERTS - OF_POLICIES)  # in no run of one's own
    return [(kind, "") for kind in kinds] + [("value", site) for site in SITES]


def seen_at(site: Site, step: int, rank: int, facts: Facts) -> dict[str, torch.Tensor]:
    """What some run shows at a site: other values at each step and rank."""
    named = {name: torch.arange(float(np.prod(x))).reshape(x) + step + rank for name, x in facts.tensors.items()}
    if site in (Site.LEARNING_RATE, Site.LOSS_SCALE):
        return {site.value: torch.tensor(facts.rate(step))}
    if site == Site.BATCH:
        return {"batch": torch.arange(40).reshape(4, 10) + step}
    if site in (Site.BEFORE_UPDATE, Site.UPDATE):
        named |= {f"{slot}:{name}": x for slot in facts.slots for name, x in named.items()}
        return {name: x + (site == Site.UPDATE) for name, x in named.items()}
    return named


@pytest.mark.parametrize(("kind", "site"), cases())
def test_every_fault_strikes_a_run_that_is_no_trial(kind, site):
    shapes, text = shapes_of(linear()), {"tokens": TOKENS, "token_counts": np.bincount(TOKENS)}
    training = {"ranks": 2, "batch": 4, "context": 9, "warmup": 6, "peak": 1.0, "has_loss_scale": True}
    slots = ("moment_1", "moment_2")
    facts = Facts(STEPS, shapes, shapes, slots=slots, rate=lambda step: (step + 1) / STEPS, **training, **text)
    fields = {"start": 4, **NEEDED.get(kind, {})} | ({"site": site, "bit": 27} if site else {})
    armed = Armed(fault_types()[kind](**fields), facts)
    visits = [(site, step, rank) for step in range(STEPS) for site in Site for rank in range(1 + (site in RANKED))]
    found = [armed.strike(site, step, seen_at(site, step, rank, facts), rank) for site, step, rank in visits]
    struck = {step for (_, step, _), events in zip(visits, found, strict=True) if any(e.changed for e in events)}
    assert struck and min(struck) == fields["start"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Value(tensor="head"), "fault.tensor=head: matches no tensor of this model; allowed: a glob over weight, bias"),
        (Value(tensor="bias", element=64), "fault.element=64: beyond fault.tensor=bias, .* allowed: 0 to 63"),
        (Value(site="gradient", rank=1), "fault.rank=1: beyond processes=1; allowed: 0 to 0"),
        (Value(site="moment_1"), "fault.site=moment_1: optimizer=none keeps no such array"),
        (Value(site="loss_scale"), "fault.site=loss_scale: no loss scaler is known"),
        (Value(site="activation"), "matches no activation of this model"),
    ],
)
def test_what_a_run_cannot_have_is_refused(fault, reason):
    with pytest.raises(ConfigError, match=reason):
        Armed(fault, Facts(STEPS, shapes_of(linear())))


def test_a_site_that_does_not_exist_is_an_error():
    armed = Armed(Value(start=0), Facts(STEPS, shapes_of(linear())))
    with pytest.raises(ValueError, match="'wait' is not a valid Site"):
        armed.strike("wait", 0, linear().named_parameters())


# --- the example -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """The environment of a process for which examples/fault is installed."""
    home = tmp_path_factory.mktemp("installed")
    (groups,) = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"].items()
    about = home / "swapped_shards-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: swapped-shards\nVersion: 1.0\n")
    lines = [f"[{groups[0]}]", *(f"{name} = {module}" for name, module in groups[1].items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLE, home)))}


def test_the_example_strikes_in_a_loop_of_its_own(installed):
    command = [sys.executable, EXAMPLE / "user_loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=installed, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    struck = [(lines[i - 1].split(":")[0], line.split()[:2]) for i, line in enumerate(lines) if line.startswith("  ")]
    assert struck == [
        ("step 10", ["gradient", "0.weight"]),
        ("step 15", ["weight", "2.bias"]),
        ("step 20", ["weight", "0.weight"]),
    ]


def test_a_sweep_finds_the_example_where_it_is_installed(installed, tmp_path):
    run = "import sys; from sweeps.commands.console import main; sys.exit(main())"
    words = "fault=none,swapped_shards fault.start=3 fault.tensor=head train.steps=6 model.width=16 model.depth=1"
    small = "model.head_dim=8 model.context=16 train.batch=2 data.source=zipf data.vocabulary=32 data.length=2000"
    command = [sys.executable, "-c", run, "sweep", "-m", *words.split(), *small.split(), f"out={tmp_path / 'out'}"]
    command += ["hydra.launcher.workers=1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=installed, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    sweep = open_sweep(tmp_path / "out")
    assert sorted(sweep.fault.values) == ["none", "swapped_shards"]
    loss = sweep.loss.values
    assert np.array_equal(loss[0, :3], loss[1, :3]) and not np.array_equal(loss[0, 3:], loss[1, 3:])
