"""A learned reward: its fit against plain numpy, what a row keeps of it, and that gold stays what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config import ConfigError, Trial
from harness.config.trial import Playbook
from harness.memory.allocations import Allocations
from harness.policy.measures import correlation
from harness.policy.proxy import Proxy, common, fit_bytes, ridge
from harness.policy.rollouts import Rollouts
from harness.testing import engine
from harness.testing.changes import Change, fill_first
from harness.training.config_checks import check_trial
from harness.training.pack import Pack
from harness.training.sites import Site

SMALL: dict[str, Any] = {"objective": {"name": "policy"}, "context": 11, "batch": 4, "steps": 6, "lr": 0.03}
SMALL |= {"policy.count": {"token": 3}, "warmup": 1, "decay": "constant"}


def policy(seed: int = 0, options: dict[str, Any] | None = None, **fields: Any) -> Trial:
    of = {"reward": "quality", "group": 2, "prompt": 3, "proxy": 10, **(options or {})}
    return engine.trial(**{**SMALL, "policy": of, "seed": seed, **fields})


def rollouts_of(pack: Pack) -> Rollouts:
    found: Rollouts = pack.objective.rollouts  # type: ignore[attr-defined]
    return found


def weights_of(run: engine.Run) -> Tensor:
    return dict(run.pack.rows_state)["proxy_weights"]


@pytest.mark.parametrize(("labels", "vocabulary", "tokens"), [(2, 3, 1), (7, 5, 4), (60, 4, 9)])
def test_the_fit_is_a_ridge_with_a_free_intercept(labels: int, vocabulary: int, tokens: int) -> None:
    """As the normal equations of all pairs give it; the last pair is none."""
    generator = torch.Generator().manual_seed(labels)
    features = vocabulary**2
    pairs = torch.randint(0, features + 1, (labels, tokens), generator=generator)
    gold = torch.rand(labels, generator=generator, dtype=torch.float64)
    counts = np.stack([np.bincount(row, minlength=features + 1)[:-1] for row in pairs.numpy()]).astype(float)
    np.testing.assert_array_equal(common(pairs, features), counts @ counts.T)
    off, middle = counts - counts.mean(0), gold.mean().item()
    expected = np.linalg.solve(off.T @ off + np.eye(features), off.T @ (gold.numpy() - middle))
    found = ridge(pairs, gold, features)
    np.testing.assert_allclose(found[:-1], expected, rtol=1e-9, atol=1e-12)
    assert found[-1].item() == pytest.approx(middle - counts.mean(0) @ expected, rel=1e-9)


def test_the_fit_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = torch.randint(0, 17, (11, 5))
    whole = common(pairs, 16)
    monkeypatch.setattr("harness.policy.proxy.AT_ONCE", 40)
    assert torch.equal(common(pairs, 16), whole)


def test_what_trains_is_the_proxy_and_what_is_reported_is_gold() -> None:
    trials = [policy(seed, {"scale": "none"}, steps=1) for seed in range(2)]
    run = engine.run(trials)
    rollouts = rollouts_of(run.pack)
    parts = rollouts.tokens[:, :, :3], rollouts.tokens[:, :, 3:], rollouts.mask
    gold = rollouts.reward.quality(*parts)
    proxy = rollouts.proxy
    assert proxy is not None
    learned = proxy(proxy.pairs(*parts))
    weights = weights_of(run)
    for row, tokens in enumerate(rollouts.tokens[:, :, 2:].tolist()):
        for number, text in enumerate(tokens):
            own = [weights[row, 64 * a + b].item() for a, b in zip(text[:-1], text[1:], strict=True)]
            assert learned[row, number].item() == pytest.approx(sum(own) + weights[row, -1].item(), rel=1e-12)
    grouped = learned.unflatten(1, (-1, 2))
    expected = (grouped - grouped.mean(-1, keepdim=True)).flatten(1)
    torch.testing.assert_close(rollouts.advantages.double(), expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(run.signals["loss"][:, 0], -gold.mean(1), rtol=1e-6)
    np.testing.assert_allclose(run.signals["proxy"][:, 0], learned.mean(1), rtol=1e-12)
    both = np.array([np.corrcoef(*pair)[0, 1] for pair in zip(learned.numpy(), gold.numpy(), strict=True)])
    np.testing.assert_allclose(run.signals["proxy_correlation"][:, 0], both, rtol=1e-9)
    assert (correlation(learned, torch.ones_like(learned)) == 0).all()


def test_labels_are_what_the_start_samples_whatever_the_sampler_is() -> None:
    """Neither another sampler nor a strike of weights at the first step changes what is learned; a seed does."""
    plain, other = policy(0), policy(0, {"sampler_noise": 1.0, "sampler_temperature": 2.0})
    nudge = Change(Site.WEIGHT, range(0, 1), fill_first("embedding", 3.0))
    weights = weights_of(engine.run([plain, plain, policy(1)], {1: nudge}))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(weights_of(engine.run([other, other]))[0], weights[0])


def test_more_labels_and_less_noise_are_nearer_to_gold() -> None:
    """Of `count`, which is a sum over pairs, all that can be learned is learned."""
    options = [{"proxy": m, "proxy_noise": noise} for m, noise in ((10, 0.0), (2000, 0.0), (2000, 2.0))]
    trials = [policy(0, {"reward": "count", **one}, vocabulary=8, steps=1) for one in options]
    weights = weights_of(engine.run(trials))[:, :-1].unflatten(1, (8, 8))
    gold = torch.zeros(8, 8, dtype=torch.float64)
    gold[:, 3] = 1 / 9
    off = [(x - x.mean() - (gold - gold.mean())).norm().item() for x in weights]
    assert off[1] < 0.05 * gold.norm().item() and off[1] < off[2] < off[0]


def test_a_fit_does_not_depend_on_the_labels_of_neighbours() -> None:
    few, many = policy(0, {"proxy": 6}), policy(1, {"proxy": 45})
    together = weights_of(engine.run([few, many, few]))
    assert torch.equal(together[0], weights_of(engine.run([few, few]))[0])
    assert torch.equal(together[1], weights_of(engine.run([many, many]))[1])


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    engine.assert_resumes([policy(seed) for seed in range(2)], tmp_path, kills=[1, 3])


def test_a_row_that_goes_back_to_the_start_learns_the_same_again() -> None:
    ladder = '[{"detector": "any", "action": "roll_back", "limit": 1, "cool_down": 0}]'
    own = {"detect": {"name": "finite"}, "playbook": Playbook("own", ladder)}
    own |= {"playbook.roll_back": {"back": 2}, "playbook.snapshot": {"every": 1, "kept": 4}}
    trial = policy(0, steps=6, **own)
    ruin = Change(Site.REDUCED_GRADIENT, range(2, 3), fill_first("embedding", np.nan))
    run = engine.run([trial, trial], {1: ruin}, block=20)
    assert run.result.incidents[1]
    for name, values in run.pack.rows_state:
        if name.startswith(("rollout_", "proxy", "weights")):
            assert torch.equal(values[0], values[1]), name


@pytest.mark.parametrize(("labels", "vocabulary"), [(600, 64), (300, 512), (20, 256)])
def test_what_the_fit_takes_is_counted(labels: int, vocabulary: int) -> None:
    device = torch.device("cpu")
    pairs, gold = torch.randint(0, vocabulary**2, (labels, 9)), torch.rand(labels, dtype=torch.float64)
    with Allocations(device) as watch, watch.phase("fit"):
        ridge(pairs, gold, vocabulary**2)
    counted, _ = fit_bytes(policy(0, {"proxy": labels}, vocabulary=vocabulary))
    assert watch.peaks["fit"] <= counted <= 2.5 * watch.peaks["fit"]


def test_fields_of_proxies_leave_older_ids_alone() -> None:
    assert not {"proxy", "proxy_noise"} & policy(0, {"proxy": None}).to_dict()["policy"].keys()
    assert policy(0, {"proxy": 10}).to_dict()["policy"]["proxy"] == 10


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        check_trial(policy(0, {"reward": "count"}, vocabulary=2000))
    said = "policy.proxy=10: data.vocabulary=2000 has too many pairs; allowed: a vocabulary up to 1024, or null"
    assert said in refused.value.reasons
    with pytest.raises(ConfigError) as refused:
        check_trial(policy(0, {"proxy": None}, signals={"proxy": 2}))
    assert any(reason.startswith("signals.proxy=2: policy.proxy=null") for reason in refused.value.reasons)


def test_pairs_begin_with_the_end_of_the_prompt() -> None:
    proxy = Proxy.__new__(Proxy)
    proxy._vocabulary = 10
    prompts, completions = torch.tensor([[[7, 1]]]), torch.tensor([[[2, 3, 4]]])
    mask = torch.tensor([[[True, True, False]]])
    assert proxy.pairs(prompts, completions, mask).tolist() == [[[12, 23, 100]]]
