"""Rules of causes on evidence that was made for them, where a trained run would leave it to luck."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from analysis.again.batches import Setup
from analysis.measures import evidence
from analysis.measures.causes import FORMAT, GRADIENT, RARE, REPETITION, STALE, UNKNOWN, WEIGHT, cause_of
from analysis.measures.evidence import Evidence, evidence_of
from analysis.measures.incidents import of_one, worst
from harness.data.screening import Scores
from tests.analysis.test_incidents import BEGIN, STEPS, calm, run_of, spiked

CONTEXT, VOCABULARY = 48, 128
SHARES = 1 / np.arange(1, VOCABULARY + 1) ** 1.1
SHARES /= SHARES.sum()


@dataclass
class Text:
    """Ordinary batches of `sequences`, and at the onset one that was poisoned."""

    sequences: int
    kind: str
    seed: int

    def __post_init__(self) -> None:
        self.trial = type("Steps", (), {"steps": STEPS})
        self._scores = Scores((1e6 * SHARES).astype(int), CONTEXT, torch.device("cpu"))
        self.agreement = float(np.square(SHARES).sum())

    def batch(self, step: int) -> np.ndarray:
        draw = np.random.default_rng((self.seed, step))
        tokens = draw.choice(VOCABULARY, (self.sequences, CONTEXT + 1), p=SHARES)
        if step == BEGIN and self.kind == REPETITION:
            return np.repeat(tokens[:, :1], CONTEXT + 1, axis=1)
        if step == BEGIN and self.kind == RARE:
            return draw.integers(VOCABULARY - 16, VOCABULARY, tokens.shape)
        return tokens

    def goes_on(self, first: np.ndarray, second: np.ndarray) -> bool:
        return False  # the words of each sequence are drawn by themselves

    def is_like_the_text(self, tokens: np.ndarray) -> bool:
        return False  # the poison is none of its words, and nothing else is odd

    def rarity(self, tokens: np.ndarray) -> float:
        return float(self._scores.rarity(torch.from_numpy(tokens)).mean())

    def repetition(self, tokens: np.ndarray) -> float:
        return float(self._scores.repetition(torch.from_numpy(tokens)).mean())


def seen(told: Evidence) -> Evidence:
    """The same with an ordinary batch that was looked at."""
    return replace(told, is_batch_seen=True)


UNSEEN = "the batches were not seen"
SECOND = "no such check can be made of this optimizer"


@pytest.mark.parametrize(
    ("loss", "changes", "cause", "missing"),
    [
        (2.0, {}, GRADIENT, UNSEEN),  # loss and the next ones are back: also as after odd data
        (np.nan, {}, GRADIENT, UNSEEN),
        (np.nan, {"param_norm": np.nan}, GRADIENT, "their norm was not measured then"),
        (0.0, {"grad_norm": 9.0}, GRADIENT, UNSEEN),
        (0.0, {"update_rms": 9e-3}, GRADIENT, SECOND),
    ],
)
def test_no_cause_is_told_that_rests_on_what_was_not_seen(
    loss: float, changes: dict[str, Any], cause: str, missing: str
) -> None:
    run = run_of(spiked(loss, 0.0))
    for name, value in changes.items():
        run[name][slice(None) if np.isnan(value) else BEGIN] = value
    incident = worst(of_one(run, None, is_asked=True))
    assert incident is not None
    told = replace(evidence_of(run, incident, None), is_batch_seen=missing != UNSEEN)
    finding = cause_of(told)
    assert finding.cause == UNKNOWN and f"would be {cause}, if" in finding.reason and missing in finding.reason
    whole = replace(told, is_batch_seen=True, is_weight_norm_finite=True, moment_check=1.0)
    assert cause_of(whole).cause == cause and "would be" not in cause_of(whole).reason


def test_a_loss_that_stays_high_is_no_corrupted_weight_where_the_batches_are_not_seen() -> None:
    run = run_of(spiked(0.0, 2.0))
    incident = worst(of_one(run, None))
    assert incident is not None
    told = evidence_of(run, incident, None)
    assert cause_of(told).cause == UNKNOWN and cause_of(seen(told)).cause == WEIGHT


@pytest.mark.parametrize(("moved", "cause"), [(1e9, WEIGHT), (3.0, UNKNOWN)])
def test_weights_of_the_users_own_loop_that_no_update_moved(moved: float, cause: str) -> None:
    """Its number of weights alone is known; its weights may move by themselves at any step."""
    setup = Setup(np.nan, None, 10**4, "", False, (), np.nan, is_own=True)
    run = replace(run_of(spiked(2.0, 0.0)), setup=setup)
    norm = 10 + np.arange(STEPS) % 2
    run.signals["param_norm"][:] = np.where(np.arange(STEPS) >= BEGIN, norm + moved, norm)
    incident = worst(of_one(run, None))
    assert incident is not None and "weight-norm consistency check" not in incident.signs
    assert cause_of(evidence_of(run, incident, None)).cause == cause


def found(reading: Any, known: dict[str, str] | None = None) -> Any:
    run = run_of(spiked(2.0, 0.0))
    (incident,) = of_one(run, None)
    return replace(evidence_of(run, incident, None, known), **evidence._batches(reading, BEGIN))


@pytest.mark.parametrize("sequences", [2, 6, 16])
@pytest.mark.parametrize("kind", [RARE, REPETITION])
def test_a_batch_of_few_distinct_tokens_is_rare_only_if_they_are(kind: str, sequences: int) -> None:
    """One token a sequence, repeated: by luck their mean is far from the usual, at small batches by many deviations."""
    told = [cause_of(found(Text(sequences, kind, seed))).cause for seed in range(20)]
    assert told == [kind] * 20


def test_a_second_moment_without_a_root_is_named() -> None:
    known = {"site": "moment_2", "tensor": "head", "cause": "invalid", "evidence": "unknown"}
    run = run_of(np.where(np.arange(STEPS) >= BEGIN, np.nan, calm()))
    (incident,) = of_one(run, None)
    assert cause_of(evidence_of(run, incident, None)).cause != STALE
    finding = cause_of(evidence_of(run, incident, None, known))
    assert finding.cause == STALE and "head" in finding.reason


def test_an_overflow_of_a_narrower_format_is_named_in_a_run_that_does_not_use_it() -> None:
    known = {"site": "activation", "tensor": "blocks.0.feedforward.up", "cause": "overflow", "format": "fp16"}
    run = run_of(np.where(np.arange(STEPS) >= BEGIN, np.nan, calm()))
    (incident,) = of_one(run, None)
    assert cause_of(seen(evidence_of(run, incident, None))).cause == GRADIENT
    finding = cause_of(evidence_of(run, incident, None, known))
    assert finding.cause == FORMAT and "blocks.0.feedforward.up" in finding.reason and "fp16" in finding.reason
    own = known | {"format": "fp32", "operation": "mm"}
    assert cause_of(seen(evidence_of(run, incident, None, own))).cause == GRADIENT


@pytest.mark.parametrize(("site", "cause"), [("weight", WEIGHT), ("moment_1", GRADIENT), ("moment_2", STALE)])
def test_a_moment_is_told_from_the_weights_that_it_moved(site: str, cause: str) -> None:
    """The norm of the weights is infinite afterwards, as after a weight that was struck."""
    run = run_of(np.where(np.arange(STEPS) >= BEGIN, np.nan, calm()))
    (incident,) = of_one(run, None)
    known = {"site": "update", "tensor": "head", "cause": "overflow", "blamed": "head", "blamed_site": site}
    assert cause_of(replace(evidence_of(run, incident, None, known), weight_check=np.inf)).cause == cause


@pytest.mark.parametrize(
    ("array", "cause"),
    [("weights", WEIGHT), ("moment_1", GRADIENT), ("moment_2", STALE), ("weights, moment_1", WEIGHT)],
)
def test_memory_that_changed_at_rest_is_named_though_nothing_else_shows_it(array: str, cause: str) -> None:
    steady = run_of(calm())
    assert of_one(steady, None) == []
    changed = {f"{name}_changed": np.zeros(STEPS) for name in evidence.ARRAYS}
    for name in array.split(", "):
        changed[f"{name}_changed"][BEGIN] = 1
    (incident,) = of_one(run := run_of(calm(), **changed), None)
    told = evidence_of(run, incident, None)
    assert incident.is_sure and told.begin == BEGIN and ", ".join(told.changed) == array
    assert cause_of(told).cause == cause
    now_and_then = {name: np.where(np.arange(STEPS) % 7, np.nan, 0.0) for name in changed}
    assert of_one(run_of(calm(), **now_and_then), None) == [], "where it was not read nothing has changed"


def infinite(**numbers: float) -> Evidence:
    """Of a step after which the norms of weights and update are infinite, but for these numbers an ordinary one."""
    run = run_of(np.where(np.arange(STEPS) >= BEGIN, np.nan, calm()))
    (incident,) = of_one(run, None)
    ordinary: dict[str, Any] = {"weight_check": np.inf, "update_ratio": np.inf, "norm_ratio": 1.1, "loss_rise": 0.1}
    ordinary |= {"is_loss_finite": True, "is_norm_finite": True}
    return replace(seen(evidence_of(run, incident, None)), **{"moment_check": 1.0} | ordinary | numbers)


def test_weights_that_an_update_made_infinite_are_told_from_weights_that_were_struck() -> None:
    """The pass before that update was ordinary; with a weight that was struck none is."""
    assert cause_of(infinite()).cause == GRADIENT
    for odd in ({"norm_ratio": 0.0}, {"loss_rise": 2.0}, {"update_ratio": 1.0}):
        assert cause_of(infinite(**odd)).cause == WEIGHT


def test_a_weight_is_not_blamed_for_what_a_moment_made_of_it() -> None:
    known = {"site": "weight", "blamed": "embedding", "blamed_site": "weight"}
    grown = replace(infinite(weight_check=0.0, update_ratio=1e9), provenance=known)
    assert cause_of(grown).cause == GRADIENT
    assert cause_of(replace(grown, update_ratio=1.0)).cause == WEIGHT


def adam(moment: str, factor: float, beta1: float, beta2: float, seed: int) -> np.ndarray:
    """The updates' root mean square of torch's Adam by step, of which a hundred elements of a moment are struck at
    `BEGIN`. Gradients of an element differ by e to the power of 2 from step to step."""
    torch.manual_seed(seed)
    weights = torch.zeros(2000, requires_grad=True)
    optimizer, sizes = torch.optim.Adam([weights], lr=1e-2, betas=(beta1, beta2)), []
    for step in range(BEGIN + 50):
        weights.grad = torch.randn(2000) * torch.randn(2000).mul(2).exp()
        if step == BEGIN:
            optimizer.state[weights][moment][:100] *= factor
        before = weights.detach().clone()
        optimizer.step()
        sizes.append(float((weights.detach() - before).square().mean().sqrt()))
    return np.array(sizes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.8, 0.99)])
@pytest.mark.parametrize(("moment", "factor", "cause"), [("exp_avg", 1e4, GRADIENT), ("exp_avg_sq", 0.0, STALE)])
def test_a_moment_is_told_by_how_fast_its_update_comes_back(
    moment: str, factor: float, cause: str, beta1: float, beta2: float, seed: int
) -> None:
    """Of the first it falls by beta1 a step, of the second faster; where that is not known it counts as the first."""
    sizes = adam(moment, factor, beta1, beta2, seed)
    assert sizes[BEGIN] > 4 * np.median(sizes[:BEGIN])
    setup = Setup(beta2, None, 2000, "fp32", True, (1e-2,) * len(sizes), beta1)
    ones = {name: np.ones(len(sizes)) for name in ("grad_norm", "param_norm", "second_moment_norm")}
    run = replace(run_of(calm()[: len(sizes)], update_rms=sizes, **ones), setup=setup)
    incident = max(of_one(run, None), key=lambda one: one.size)
    told = evidence_of(run, incident, None)
    assert told.begin == BEGIN and cause_of(told).cause == cause
    assert cause_of(replace(told, update_kept=np.nan)).cause == GRADIENT
    for other in (replace(setup, is_adam=False), replace(setup, beta1=0.0)):
        assert np.isnan(evidence_of(replace(run, setup=other), incident, None).update_kept)
