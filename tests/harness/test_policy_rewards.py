"""What completions are worth, against plain Python; and a reward of somebody's own is one file that finds itself."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.basics import plugins
from harness.config import ConfigError, sections
from harness.config import trial as trial_module
from harness.data.corpus import Corpus
from harness.policy.measures import distinct
from harness.rewards.base import Reward, repeated
from harness.rewards.table import REWARDS
from harness.testing import engine
from harness.training.config_checks import check_trial

CPU = torch.device("cpu")


def quality(name: str, prompt: str, completion: str, length: int | None = None, **options: Any) -> float:
    """Of one completion, of whose tokens the first `length` count."""
    reward = REWARDS[name](256, CPU)
    reward.bind([SimpleNamespace(**options)])
    tokens = [torch.tensor([[list(text.encode())]]) for text in (prompt, completion)]
    mask = torch.arange(len(completion)) < (len(completion) if length is None else length)
    found = reward.quality(*tokens, mask[None, None])
    assert found.dtype == torch.float64 and found.shape == (1, 1)
    return found.item()


@pytest.mark.parametrize(
    ("completion", "length", "share"),
    [("abcd..", None, 1.0), ("abxd..", None, 0.75), ("xabcd.", None, 0.0), ("abcd..", 2, 0.5), ("ab", None, 1.0)],
)
def test_copy(completion: str, length: int | None, share: float) -> None:
    assert quality("copy", "abcd", completion, length, exact=False) == share
    assert quality("copy", "abcd", completion, length, exact=True) == float(share == 1)


def test_count() -> None:
    assert quality("count", "ab", "a b  c ", token=32) == 4 / 7
    assert quality("count", "ab", "a b  c ", 3, token=32) == 1 / 7


@pytest.mark.parametrize(
    ("completion", "length", "balanced"),
    [
        ("()(())", None, 6),
        ("()((((", None, 2),
        (")()()(", None, 0),
        ("((()))", None, 6),
        ("(())x(", None, 4),
        ("()()()", 5, 4),
    ],
)
def test_brackets(completion: str, length: int | None, balanced: int) -> None:
    options = {"opens": ord("("), "closes": ord(")")}
    assert quality("brackets", "", completion, length, exact=False, **options) == balanced / 6
    assert quality("brackets", "", completion, length, exact=True, **options) == float(balanced == 6)


def test_sum() -> None:
    assert quality("sum", "012+934=", "0946..", partial=False) == 1
    assert quality("sum", "012+934=", "0947..", partial=False) == 0
    assert quality("sum", "012+934=", "0947..", partial=True) == 0.75
    assert quality("sum", "012+934=", "0946..", 3, partial=True) == 0.75
    assert quality("sum", "\n99+99=", "198", partial=False) == 1
    reward = REWARDS["sum"](256, CPU)
    prompts = reward.prompts(torch.randint(0, 256, (2, 3, 9)))
    for text in (bytes(tokens).decode() for tokens in prompts.flatten(0, 1).tolist()):
        first, second = text[1:-1].split("+")
        assert text[0] == "\n" and text[-1] == "=" and len(first) == len(second) == 3
        assert first.isdigit() and second.isdigit()


def fluent(text: bytes, prompt: bytes, completion: bytes, length: int) -> float:
    """The reward `quality` in plain Python."""
    counts = Counter(pairwise(text))
    before = Counter(text[:-1])
    log_p = {(a, b): math.log((counts[a, b] + 1) / (before[a] + 128)) for a in range(128) for b in range(128)}
    pairs = list(pairwise(prompt[-1:] + completion[:length]))
    fluency = 1 - sum(log_p[pair] for pair in pairs) / len(pairs) / min(log_p.values())
    own = pairs[1:]
    repetition = sum(pair in own[:place] for place, pair in enumerate(own)) / max(1, len(own))
    return (1 + fluency - repetition) / 2


def test_quality() -> None:
    """Under bigrams of the text, less what is repeated; only tokens that count do."""
    text = b"the cat sat on the mat and the hat that the rat had sat on"
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    corpus = Corpus(tokens, tokens, 128, "", {})
    assert corpus.pair_counts.sum() == len(text) - 1
    reward = REWARDS["quality"](128, CPU)
    reward.read(corpus)
    for prompt, completion, length in (
        *((b"a", b"the cat ", 8), (b"t", b"he the the", 10), (b"x", b"zzzzzz", 6)),
        *((b"x", b"zqzyxw", 6), (b"t", b"hat and q", 7), (b"t", b"hat", 1)),
    ):
        prompts, completions = (torch.tensor([[list(part)]]) for part in (prompt, completion))
        mask = (torch.arange(len(completion)) < length)[None, None]
        found = reward.quality(prompts, completions, mask)
        assert found.dtype == torch.float64 and found.shape == (1, 1)
        assert found.item() == pytest.approx(fluent(text, prompt, completion, length), rel=1e-12)
        assert 0 <= found.item() <= 1


def test_variety() -> None:
    """Completions that are new in their group, and pairs of tokens that a completion has had."""
    tokens = torch.tensor([[[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [7, 7, 7, 7], [0, 0, 0, 1]]])
    assert distinct(tokens, 3).tolist() == [(2 + 3) / 6]
    everything = torch.ones_like(tokens, dtype=torch.bool)
    assert repeated(tokens, everything)[0].tolist() == pytest.approx([0, 0, 0, 0, 2 / 3, 1 / 3])
    first_two = everything & (torch.arange(4) < 2)
    assert not repeated(tokens, first_two).any()


def policy(**fields: Any) -> dict[str, Any]:
    return {"context": 11, "batch": 4, "objective": {"name": "policy"}} | fields


def sharp(sharpness: float, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """What sharpness makes of rewards at the start, and of those of a later rollout."""
    trial = engine.trial(**policy(policy={"group": 2, "sharpness": sharpness}))
    pack = engine.pack_of([trial, trial])
    rollouts, everywhere = pack.objective.rollouts, torch.ones(2, dtype=torch.bool)  # type: ignore[attr-defined]
    first = rollouts._sharpened(rewards, everywhere)
    pack.model.stand_at(1)
    return first, rollouts._sharpened(rewards * 0.5, everywhere)


def test_sharpness_is_shape_and_not_scale() -> None:
    """A sigmoid about the start's median, of unit spread there; what comes later is measured by the start."""
    rewards = torch.tensor([[0.1, 0.2, 0.4, 0.9], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for sharpness in (0.5, 4.0, 100.0):
        first, later = sharp(sharpness, rewards)
        plain = torch.sigmoid(sharpness * (rewards[0] - 0.4))
        torch.testing.assert_close(first[0], plain / plain.std(), rtol=1e-12, atol=0)
        torch.testing.assert_close(
            later[0], torch.sigmoid(sharpness * (rewards[0] / 2 - 0.4)) / plain.std(), rtol=1e-12, atol=0
        )
        assert (first[1] == 0.5).all()  # there is no spread to divide by


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (policy(policy={"group": 3}), "policy.group=3: does not divide train.batch=4; allowed: a divisor of it"),
        (policy(policy={"group": 2, "prompt": 12}), "policy.prompt=12: model.context=11 has no room for a completion"),
        (policy(policy={"group": 1, "baseline": "leave_one_out"}), "policy.baseline=leave_one_out: policy.group=1 has"),
        (policy(policy={"group": 2, "end": 64}), "policy.end=64: beyond the vocabulary; allowed: 0 to 63, or null"),
        (policy(policy={"group": 2, "beta_schedule": "rising"}), "policy.beta_schedule=rising: policy.beta=null"),
        (policy(policy={"group": 2}, rarity=3.0), "screen.rarity=3.0: objective=policy samples what trains"),
        (policy(policy={"group": 2}, sequence_start=4), "schedule.sequence_start=4: objective=policy samples what"),
        (
            policy(policy={"group": 2}, sigma_reparam=True),
            "model.sigma_reparam=true: the reference of objective=policy",
        ),
        (
            policy(policy={"group": 2, "reward": "sum", "prompt": 3}),
            "policy.reward=sum: prompts have 3 tokens; allowed",
        ),
        (
            policy(policy={"group": 2, "reward": "count"}, **{"policy.count": {"token": 64}}),
            "policy.count.token=64: beyond the vocabulary; allowed: 0 to 63",
        ),
        (
            policy(policy={"group": 2, "reward": "quality"}, vocabulary=4096),
            "policy.reward=quality: data.vocabulary=4096 has too many pairs; allowed: up to 2048",
        ),
        (
            policy(policy={"group": 2, "reward": "brackets", "prompt": 3}, **{"policy.brackets": {"exact": True}}),
            "policy.brackets.exact=true: completions have 9 tokens, an odd number",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_trial(engine.trial(**fields))
    assert any(reason.startswith(said) for reason in refused.value.reasons), refused.value.reasons


MULTIPLES = """
from dataclasses import dataclass

from harness.config import PER_TRIAL, number
from harness.rewards.base import Reward, share


@dataclass(frozen=True)
class Options:
    of: int = number(PER_TRIAL, 2, "of what", low=1)


class Multiples(Reward):
    help = "share of the completion whose ids are multiples of a number"

    def quality(self, prompts_RxBxP, completions_RxBxT, mask_RxBxT):
        return share((completions_RxBxT % self.column("of") == 0) & mask_RxBxT, completions_RxBxT.shape[-1])
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A package with that reward, as if it were installed; afterwards nothing knows it."""
    (tmp_path / "multiples.py").write_text(MULTIPLES)
    entry = EntryPoint("multiples", "multiples", "stability_harness.rewards")
    cached = (plugins.modules, sections, trial_module._defaults, trial_module._usual_structures)
    for function in cached:
        function.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    monkeypatch.setitem(REWARDS, "multiples", plugins.subclasses("rewards", Reward)["multiples"])
    yield
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()
    sys.modules.pop("multiples", None)


@pytest.mark.usefixtures("installed")
def test_a_reward_of_the_users_is_one_file() -> None:
    """Found by itself, with a section of its own, of which each trial may have other values."""
    own = policy(policy={"group": 2, "reward": "multiples"}, **{"policy.multiples": ({"of": 1}, {"of": 63})}, steps=2)
    quality = engine.run(engine.different(2, **{**engine.SMALL, **own})).signals["quality"]
    assert (quality[0] == 1).all() and (quality[1] < 0.5).all()
