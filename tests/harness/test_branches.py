"""Branches find themselves: the example of an installed package stands in a block as attention does."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness.basics import plugins
from harness.config import NO_FAULT, ConfigError, Model, Trial, sections, trial_from_dict
from harness.config import trial as trial_module
from harness.faults.facts import facts_of
from harness.model.branches import BRANCHES, Branch, branches_of
from harness.model.outline import model_tensors
from harness.testing import engine
from harness.testing.settings import roughen
from harness.training.activation_counts import idle_parts, parts_of
from harness.training.config_checks import check_trial
from sweeps.planning.planner import activation_elements, state_bytes, trial_step_seconds
from tests.harness.test_model_parts_memory import SHAPE, kept_by_a_token_of
from tests.harness.variants import with_fields

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "branch"
NAMED = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
KEEPS = (1.0, 0.9, 0.5)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, as if its package were installed; afterwards nothing knows it."""

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return [importlib.metadata.EntryPoint(*item, group) for item in NAMED.get(group, {}).items()]

    cached = (plugins.modules, sections, trial_module._defaults, trial_module._usual_structures)
    for function in cached:
        function.cache_clear()
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, cls in plugins.subclasses("branches", Branch).items():
        monkeypatch.setitem(BRANCHES, name, cls)
    yield
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()
    sys.modules.pop("causal_mean", None)


def mixing(trial: Trial, **options: Any) -> Trial:
    """The trial with the example in the place of attention."""
    parts = {name: trial.section(name) for name in sections()}
    parts["block"] = dataclasses.replace(parts["block"], token_mixer="causal_mean")
    parts["causal_mean"] = sections()["causal_mean"](**options)
    return Trial.of(parts, fault=trial.fault, seed=trial.seed)


def different(fields: dict[str, Any] | None = None, window: int | None = None, **own: Any):
    """Three trials of one structure that differ in every per-trial field, also of the example."""
    trials = with_fields(engine.different(3, **own), fields or {})
    return [mixing(trial, keep=keep, window=window) for trial, keep in zip(trials, KEEPS, strict=True)]


def test_the_usual_block_changes_no_id_and_no_stored_configuration() -> None:
    plain = Trial()
    assert Trial.of({name: cls() for name, cls in sections().items()}).id == plain.id
    assert not {"block", "causal_mean", "attention", "feedforward"} & plain.to_dict().keys()
    other = mixing(plain)
    assert other.id != plain.id and other.structure != plain.structure
    assert other.to_dict()["block"] == {"token_mixer": "causal_mean", "channel_mixer": "feedforward"}
    again = trial_from_dict(json.loads(json.dumps(other.to_dict())), {"none": type(NO_FAULT)})
    assert again == other and again.id == other.id
    assert mixing(plain, window=3).structure != other.structure == mixing(plain, keep=0.5).structure


def test_its_tensors_and_taps_stand_where_those_of_attention_do() -> None:
    trial = mixing(engine.trial(depth=1))
    tensors, places = list(model_tensors(trial.model, 64, branches_of(trial))), facts_of(trial)
    assert [tensor.name for tensor in tensors] == [
        "embedding",
        *(f"blocks.0.causal_mean.{name}" for name in ("gate", "value", "projection")),
        *(f"blocks.0.feedforward.{name}" for name in ("up", "down")),
        "head",
        *("blocks.0.causal_mean_norm", "blocks.0.feedforward_norm", "final_norm"),
    ]
    assert dict(places.tensors) == {tensor.name: tensor.shape for tensor in tensors}
    pack, seen = engine.pack_of([trial, trial]), []
    pack.model.taps.attach("*", lambda name, x: seen.append((name, tuple(x.shape[1:]))))
    pack.loss(pack.objective.batch(0))
    assert seen == list(places.taps.items())
    assert [name.rpartition(".")[2] for name, _ in seen[1:5]] == ["input", "value", "mean", "projection"]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "post-LN, biases": {"placement": "post", "biases": True},
    "sigma-reparametrisation": {"sigma_reparam": True},
    "Fixup": {"init": "fixup", "placement": "none"},
    "muP, LayerScale, dropout": {"parametrization": "mup", "base_width": 8, "layer_scale": 0.1, "dropout": 0.1},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_a_row_in_pairs_is_the_row_in_the_pack(fields: dict[str, Any]) -> None:
    """And all of them learn; a trial that keeps less of the past is another one."""
    trials = different(fields, steps=24)
    for trial in trials:
        check_trial(trial)
    pack = engine.run(trials)
    loss = pack.signals["loss"]
    assert (loss[:, -8:].mean(1) < loss[:, :8].mean(1)).all()
    assert np.isnan(pack.signals["attention_logit_max"]).all()
    for first, second in ((0, 1), (1, 2), (2, 0)):
        pair = engine.run([trials[first], trials[second]])
        assert engine.same_bits(pair[0], pack[first]) == engine.same_bits(pair[1], pack[second]) == []
    assert not np.array_equal(engine.run([mixing(trials[2]), trials[0]]).signals["loss"][0], loss[2])


@pytest.mark.parametrize("own", [{"checkpointing": True}, {"micro_batches": 2}, {"precision": "fp64"}])
def test_it_is_trained_as_attention_is(own: dict[str, Any]) -> None:
    """Checkpointing changes no bit; micro-batches and the format no more than rounding."""
    plain, other = (engine.run(different(**fields)).signals["loss"] for fields in ({}, own))
    np.testing.assert_allclose(plain, other, rtol=0 if "checkpointing" in own else 2e-5)


def plain_mixer(x_BxTxD, weights, keep: float, window: int | None):
    """As the example's first lines have it, token by token."""
    rows = []
    for t in range(x_BxTxD.shape[1]):
        first = 0 if window is None else max(0, t - window + 1)
        values = [keep ** (t - s) * (x_BxTxD[:, s] @ weights["value"].T) for s in range(first, t + 1)]
        mean = sum(values) / sum(keep ** (t - s) for s in range(first, t + 1))
        rows.append((F.silu(x_BxTxD[:, t] @ weights["gate"].T) * mean) @ weights["projection"].T)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_its_gradient_is_that_of_a_plain_function(window: int | None) -> None:
    """In float64, where rounding is 1e-12 of what the matrices give."""
    trials = different(window=window, precision="fp64")
    pack, (branch, _), name = engine.pack_of(trials), branches_of(trials[0]), "blocks.1.causal_mean"
    roughen(pack)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(3, 2 * 8, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    y = branch(pack.model.tools(), name, x, 8)
    y.backward(dy)
    for r, keep in enumerate(KEEPS):
        weights, gradients = (pack.tensors(flat, r) for flat in (pack.weights, pack.gradients))
        own = {part: weights[f"{name}.{part}"].clone().requires_grad_() for part in ("gate", "value", "projection")}
        alone = x[r].detach().view(2, 8, 16).requires_grad_()
        plain = plain_mixer(alone, own, keep, window)
        plain.backward(dy[r].view(2, 8, 16))
        torch.testing.assert_close(y[r], plain.flatten(0, 1), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(x.grad[r], alone.grad.flatten(0, 1), rtol=1e-10, atol=1e-12)
        for part, weight in own.items():
            torch.testing.assert_close(gradients[f"{name}.{part}"], weight.grad, rtol=1e-10, atol=1e-12)


def test_the_planner_counts_it() -> None:
    """A block keeps what is counted, to 3%, but for the four widths that the backward pass makes on its way."""
    counted, kept = [], []
    for depth in (1, 3):
        other = different(**{**SHAPE, "depth": depth})
        counted.append(activation_elements(other[0].model, SHAPE["vocabulary"], branches=branches_of(other[0])))
        kept.append(kept_by_a_token_of(engine.pack_of(other)))
    plain = engine.different(3, **SHAPE)
    assert kept[1] - kept[0] == pytest.approx(counted[1] - counted[0] - 2 * 4 * SHAPE["width"], rel=0.03)
    assert activation_elements(plain[0].model, SHAPE["vocabulary"]) > 1.05 * counted[1]
    fewer = SHAPE["depth"] * SHAPE["width"] ** 2  # one matrix of four in each block
    assert state_bytes(plain[0]) - state_bytes(other[0]) == 4 * 4 * fewer  # weights, gradients and moments
    assert trial_step_seconds(other[0], "cpu") < trial_step_seconds(plain[0], "cpu")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "its own rule": ({}, {"window": 9}, "causal_mean.window=9: longer than model.context=8; allowed: 1 to 8 or null"),
    "a field of attention alone": (
        {"qk_norm": True},
        {},
        "model.qk_norm=true: reaches nothing, as attention is not in a block of block.token_mixer=causal_mean and "
        "block.channel_mixer=feedforward; allowed: false, or a block with attention",
    ),
    "logits that nobody has": (
        {"qk_clip": 100.0},
        {},
        "model.qk_clip=100.0: reaches nothing, as attention is not in a block of block.token_mixer=causal_mean and "
        "block.channel_mixer=feedforward; allowed: null, or a block with attention",
    ),
}


@pytest.mark.parametrize(("fields", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(fields: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    (trial,) = with_fields([engine.trial()], fields)
    with pytest.raises(ConfigError) as error:
        check_trial(mixing(trial, **options))
    assert error.value.reasons == (reason,)


def test_options_of_a_branch_that_is_not_there_are_refused() -> None:
    trial = mixing(engine.trial(), keep=0.5)
    trial = dataclasses.replace(trial, extras=tuple(pair for pair in trial.extras if pair[0] != "block"))
    with pytest.raises(ConfigError, match=r"^causal_mean.keep=0.5: reaches nothing, as causal_mean is not in a block"):
        check_trial(trial)


def test_a_kind_stands_in_a_block_once() -> None:
    trial, block = engine.trial(), sections()["block"]
    twice = dataclasses.replace(trial, extras=(("block", block(channel_mixer="attention")),))
    with pytest.raises(ConfigError, match="block.channel_mixer=attention: stands in block.token_mixer already"):
        check_trial(twice)
    turned = dataclasses.replace(trial, extras=(("block", block("feedforward", "attention")),))
    check_trial(turned)
    loss = engine.run([turned, turned]).signals["loss"]
    assert (loss[:, -1] < loss[:, 0]).all() and not np.array_equal(loss, engine.run([trial, trial]).signals["loss"])


def test_a_rule_of_attention_does_not_hold_without_it() -> None:
    """Nor do the parts of a recipe that a branch brings along."""
    check_trial(mixing(dataclasses.replace(engine.trial(), model=Model(width=16, head_dim=5, positions="learned"))))
    (clamped,) = with_fields([engine.trial()], {"activation": "swiglu", "swiglu_clamp": 2.0})
    assert parts_of(mixing(clamped)) == ["model.swiglu_clamp"] and idle_parts(mixing(clamped)) == {}


CALL = """
import json, sys
from sweeps.commands.console import run

for words in json.load(sys.stdin):
    try:
        status = run(words)
    except SystemExit as stop:
        status = stop.code or 0
    print("status", status, flush=True)
"""


def test_a_command_knows_it_once_its_package_is_installed(tmp_path: Path) -> None:
    """By its name in `block.token_mixer`, and its section; what it refuses is refused before anything is trained."""
    folder = tmp_path / "site" / "stability_harness_causal_mean-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stability-harness-causal-mean\nVersion: 0.1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in own.items()) for group, own in NAMED.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    plan = ["sweep", "-m", "plan=true", "block.token_mixer=causal_mean,attention", f"out={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        input=json.dumps([plan, [*plan, "causal_mean.window=65"], [*plan, "block.token_mixer=mean"]]),
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{EXAMPLE}:{folder.parent}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == [
        "status 0",
        "status 2",
        "status 2",
    ], printed
    assert "causal_mean.window=65: longer than model.context=64; allowed: 1 to 64 or null" in printed
    assert "causal_mean" in printed and not (tmp_path / "out").exists()
