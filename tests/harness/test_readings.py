"""What readings say, against the same worked out in numpy; when they say it; and that they change no bit."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import Trial, sections
from harness.model.parameters import Layout
from harness.readings.base import Groups
from harness.readings.table import READ_BY, READINGS
from harness.storage.store import SIGNALS
from harness.testing import engine
from harness.training.readings import cadences, reading_signals, refused
from harness.training.sites import Site
from injectors.value import Value

ALL = dict.fromkeys(READINGS, 1)
OF_PLAIN = [signal for signal, name in READ_BY.items() if not READINGS[name].missing(engine.trial())]
STEPS, BETA1, BETA2, EPS = 3, 0.9, 0.95, 1e-3
SHAPE = {"steps": STEPS, "warmup": 0, "decay": "constant", "beta1": BETA1, "beta2": BETA2, "eps": EPS, "batch": 4}


class Seen:
    """A run of two trials, and what passed at taps in its last step, [calls, R, ...] by name."""

    def __init__(self, **fields: Any):
        self.trials = [engine.trial(seed=seed, **{**SHAPE, "signals": ALL, **fields}) for seed in range(2)]
        self.calls: dict[tuple[int, str], list[torch.Tensor]] = {}
        self.batches: list[np.ndarray] = []
        self.run = engine.run(self.trials, prepare=self._listen)
        self.pack, self.depth = self.run.pack, self.trials[0].model.depth

    def _listen(self, pack) -> None:
        def keep(name: str, x: torch.Tensor) -> None:
            step = pack.row_steps.steps[0]
            self.calls.setdefault((step, name), []).append(x.detach().double().clone())

        pack.model.taps.attach("*", keep)
        made = pack.objective.batch

        def batch(steps):
            self.batches.append(made(steps).numpy().copy())
            return torch.from_numpy(self.batches[-1].copy())

        pack.objective.batch = batch

    def at(self, tap: str) -> np.ndarray:
        """[calls, R, ...] in the last step."""
        return torch.stack(self.calls[STEPS - 1, tap]).numpy()

    @property
    def second_share(self) -> float:
        """Of a mean that the second moment has."""
        return 1.0 if self.trials[0].optim.beta2_exponent else 1 - BETA2**STEPS

    def read(self, signal: str) -> np.ndarray:
        return self.run.signals[signal][:, STEPS - 1]

    def tensors(self, flats: list[torch.Tensor]) -> dict[str, np.ndarray]:
        layout: Layout = self.pack.layout
        flat = torch.stack(flats).double()
        return {scaled.name: layout.view(flat, scaled.name).numpy() for scaled in layout.tensors}

    def weights(self, step: int) -> dict[str, np.ndarray]:
        """After a step."""
        return self.tensors([self.run.weights[step][trial] for trial in range(2)])

    def moment(self, name: str) -> dict[str, np.ndarray]:
        return self.tensors(list(self.pack.optimizer.slot(name)))


@pytest.fixture(scope="module", params=["one pass", "ranks and micro-batches", "fused", "rising beta2"])
def seen(request: pytest.FixtureRequest) -> Seen:
    ways = {"ranks and micro-batches": {"ranks": 2, "micro_batches": 2}, "fused": {"attention": "fused"}}
    ways["rising beta2"] = {"beta2_exponent": 0.8}
    return Seen(**ways.get(request.param, {}))


def test_attention_entropy(seen: Seen) -> None:
    for layer in range(seen.depth):
        scores = seen.at(f"blocks.{layer}.attention.scores")[:, :, 0]  # the first sequence of each pass
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1).mean((0, 2, 3))
        assert seen.read("attention_entropy")[:, layer] == pytest.approx(entropy, rel=1e-5)


def test_attention_to_the_first_token(seen: Seen) -> None:
    for layer in range(seen.depth):
        scores = seen.at(f"blocks.{layer}.attention.scores")[:, :, 0]
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        first = (shares / shares.sum(-1, keepdims=True))[..., 1:, 0].mean(-1)  # [calls, R, heads]
        assert seen.read("first_token_share")[:, layer] == pytest.approx(first.mean((0, 2)), rel=1e-5)
        assert seen.read("sink_heads")[:, layer] == pytest.approx((first > 0.3).mean((0, 2)))


def test_massive_activations(seen: Seen) -> None:
    for layer in range(seen.depth):
        sizes = np.abs(seen.at(f"blocks.{layer}.residual"))
        of_calls = sizes.reshape(*sizes.shape[:2], -1)
        middle = np.sort(of_calls, -1)[..., (of_calls.shape[-1] - 1) // 2]
        expected = (of_calls.max(-1) / middle).max(0)
        assert seen.read("massive_activation")[:, layer] == pytest.approx(expected, rel=1e-5)


def test_log_z(seen: Seen) -> None:
    expected = np.log(np.exp(seen.at("logits")).sum(-1)).mean((0, 2))
    assert seen.read("output_log_z") == pytest.approx(expected, rel=1e-5)


def test_kurtosis(seen: Seen) -> None:
    for layer in range(seen.depth):
        x = np.moveaxis(seen.at(f"blocks.{layer}.residual"), 1, 0).reshape(2, -1)
        z = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
        assert seen.read("activation_kurtosis")[:, layer] == pytest.approx((z**4).mean(1) - 3, rel=1e-4, abs=1e-5)


def test_residual_gain_of_each_rank(seen: Seen) -> None:
    ranks, taps = (
        seen.trials[0].train.ranks,
        ["embedding", *(f"blocks.{layer}.residual" for layer in range(seen.depth))],
    )
    of_ranks = [np.split(seen.at(tap), ranks) for tap in taps]
    sizes = np.array([[np.sqrt((x**2).mean((0, 2, 3))) for x in of_tap] for of_tap in of_ranks])  # [taps, ranks, R]
    expected = np.log(sizes[1:] / sizes[:-1]).transpose(2, 0, 1)
    assert seen.read("residual_gain").shape == (2, seen.depth, ranks)
    assert seen.read("residual_gain") == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_norms_of_groups_are_those_of_the_whole(seen: Seen) -> None:
    parts = [seen.read("layer_grad_norm"), *(seen.read(f"{of}_grad_norm")[:, None] for of in ("embedding", "head"))]
    assert np.sqrt((np.concatenate(parts, 1) ** 2).sum(1)) == pytest.approx(seen.read("grad_norm"), rel=1e-6)


def test_update_ratios(seen: Seen) -> None:
    before, after = seen.weights(STEPS - 2), seen.weights(STEPS - 1)

    def ratio(names: list[str]) -> np.ndarray:
        change = sum(((after[name] - before[name]) ** 2).reshape(2, -1).sum(1) for name in names)
        return np.sqrt(change / sum((before[name] ** 2).reshape(2, -1).sum(1) for name in names))

    for layer in range(seen.depth):
        names = [name for name in before if name.startswith(f"blocks.{layer}.")]
        assert seen.read("layer_update_ratio")[:, layer] == pytest.approx(ratio(names), rel=1e-5)
    assert seen.read("embedding_update_ratio") == pytest.approx(ratio(["embedding"]), rel=1e-5)
    assert seen.read("head_update_ratio") == pytest.approx(ratio(["head", "final_norm"]), rel=1e-5)


def test_rank_of_the_change_of_query_key_products(seen: Seen) -> None:
    before, after = seen.weights(STEPS - 2), seen.weights(STEPS - 1)
    for layer in range(seen.depth):
        query, key = (f"blocks.{layer}.attention.{name}" for name in ("query", "key"))
        expected = []
        for r in range(2):
            of_heads = []
            for head in range(2):
                rows = slice(8 * head, 8 * head + 8)
                q, k, dq, dk = (
                    x[r, rows]
                    for x in (before[query], before[key], after[query] - before[query], after[key] - before[key])
                )
                s = np.linalg.svd(dq.T @ k + q.T @ dk, compute_uv=False) ** 2
                p = s[s > 0] / s.sum()
                of_heads.append(np.exp(-(p * np.log(p)).sum()))
            expected.append(np.mean(of_heads))
        assert seen.read("qk_rank")[:, layer] == pytest.approx(expected, rel=1e-4)


def test_share_of_elements_at_the_floor(seen: Seen) -> None:
    moments = seen.moment("moment_2")
    roots = np.concatenate([np.sqrt(x.reshape(2, -1) / seen.second_share) for x in moments.values()], 1)
    expected = (roots < EPS).mean(1)
    assert seen.read("epsilon_share") == pytest.approx(expected, abs=1e-3) and 0.02 < expected.min() < 0.98


def test_share_of_zero_gradients(seen: Seen) -> None:
    """Each layer's by itself; tokens that the batch lacks leave rows of zeros in the embedding."""
    gradients = seen.tensors([seen.pack.gradients[row] for row in range(2)])
    for layer in range(seen.depth):
        own = [x.reshape(2, -1) for name, x in gradients.items() if name.startswith(f"blocks.{layer}.")]
        assert seen.read("layer_zero_gradients")[:, layer] == pytest.approx((np.concatenate(own, 1) == 0).mean(1))
    expected = (gradients["embedding"].reshape(2, -1) == 0).mean(1)
    assert seen.read("embedding_zero_gradients") == pytest.approx(expected)


def test_fp16_flushes_gradients_away_that_a_loss_scale_keeps() -> None:
    """In a model whose loss is made small, so that its gradients lie below the least number of fp16."""
    fields = {"steps": 2, "precision": "fp16", "signals": {"gradient_zeros": 1}, "batch": 8}
    scaled = {"loss_scaling": ("static", "static"), "loss_scale": (2.0**-18, 1024.0)}
    found = engine.run(engine.different(2, **fields, **scaled)).signals["layer_zero_gradients"][:, 0]
    assert (found[0] > 0.2).all() and (found[1] < 0.01).all()


def test_lag_of_the_second_moment(seen: Seen) -> None:
    """Of each tensor, from the gradients that the moments tell of: m' = beta1 m + (1 - beta1) g."""
    gradients = seen.tensors([seen.pack.gradients[row] for row in range(2)])
    second = seen.moment("moment_2")
    lags = {}
    for name, g in gradients.items():
        root = np.maximum(np.sqrt(second[name] / seen.second_share), EPS)
        lags[name] = np.sqrt(((g / root) ** 2).reshape(2, -1).mean(1))
    assert seen.read("moment_lag") == pytest.approx(np.max(list(lags.values()), axis=0), rel=1e-4)
    assert seen.read("embedding_moment_lag") == pytest.approx(lags["embedding"], rel=1e-4)
    assert all(lag.min() > 0 and lag.max() < 5 for lag in lags.values())


def test_a_gradient_that_is_much_larger_than_before_lags() -> None:
    """Worked out for one number: after 20 gradients of 1, one of 100."""
    fields = {"steps": 22, "signals": {"moment_lag": 1}, "beta2": 0.99, "clip": None}
    strike = Value(start=20, site=Site.REDUCED_GRADIENT, tensor="*", model="scale", value=100.0, elements=None)
    plain, struck = (engine.run([engine.trial(**fields, **more)] * 2) for more in ({}, {"fault": strike}))
    usual, found = (run.signals["moment_lag"][0] for run in (plain, struck))
    assert (usual[5:] < 2.3).all() and found[20] > 2.3 and found[20] <= (1 / (1 - 0.99)) ** 0.5
    assert (found[:20] == usual[:20]).all()


def test_sizes_of_moments(seen: Seen) -> None:
    first, second = seen.moment("moment_1"), seen.moment("moment_2")

    def largest(moments: dict[str, np.ndarray], rest: float) -> np.ndarray:
        return np.max([np.abs(x).reshape(2, -1).max(1) / rest / x.shape[-1] ** 0.5 for x in moments.values()], 0)

    assert seen.read("moment_1_size") == pytest.approx(largest(first, 1 - BETA1**STEPS), rel=1e-5)
    roots = {name: np.sqrt(x) for name, x in second.items()}
    assert seen.read("moment_2_size") == pytest.approx(largest(roots, seen.second_share**0.5), rel=1e-5)


def test_rarity_of_tokens(seen: Seen) -> None:
    counts, batch = seen.run.corpus.counts + 1.0, seen.batches[-1]
    surprise = np.sort(-np.log(counts / counts.sum())[batch].reshape(2, -1), 1)
    assert seen.read("token_surprise_median") == pytest.approx(surprise[:, (surprise.shape[1] - 1) // 2])
    assert seen.read("token_surprise_max") == pytest.approx(surprise[:, -1])
    repeated = []
    for sequences in batch:
        pairs = [list(zip(x[:-1], x[1:], strict=True)) for x in sequences.tolist()]
        repeated.append(np.mean([1 - len(set(each)) / len(each) for each in pairs]))
    assert seen.read("repeated_bigrams") == pytest.approx(repeated)


# --- switches ----------------------------------------------------------------------------------------------------


def test_each_is_read_at_its_cadence_and_nowhere_else() -> None:
    signals = {name: 1 + number % 4 for number, name in enumerate(READINGS)}
    run = engine.run([engine.trial(seed=seed, steps=9, signals=signals) for seed in range(2)], block=4)
    for signal in OF_PLAIN:
        name = READ_BY[signal]
        was_read = ~np.isnan(run.signals[signal]).reshape(2, 9, -1).all(-1)
        expected = np.arange(9) % signals[name] == 0
        expected[8] &= signal != "qk_rank"  # the rate of the last step is 0: nothing changes
        assert (was_read == expected).all(), signal


def test_none_of_them_changes_a_bit() -> None:
    all_of_them, none = (
        engine.run([engine.trial(seed=seed, clip=0.5, signals=dict.fromkeys(READINGS, every)) for seed in range(2)])
        for every in (1, 0)
    )
    assert set(none.signals) == set(SIGNALS) and set(all_of_them.signals) == {*SIGNALS, *OF_PLAIN}
    engine.assert_same_trials(
        all_of_them, none, names=[*set(SIGNALS) - {"tokens_per_second", "step_seconds"}, "weights"]
    )


def test_a_section_at_its_defaults_is_left_out_of_the_id() -> None:
    usual = sections()["signals"]()
    assert Trial.of({"signals": usual}).id == Trial().id
    often = Trial.of({"signals": sections()["signals"](kurtosis=3)})
    assert often.id != Trial().id and often.golden.structure == often.structure != Trial().structure
    assert pickle.loads(pickle.dumps(often)) == often


def test_what_a_model_has_not_is_not_read() -> None:
    sgd = engine.trial(name="sgd")
    assert {"moment_size", "moment_lag", "adam_floor"}.isdisjoint(
        cadences(sgd)
    ) and "moment_1_size" not in reading_signals(sgd)
    assert list(refused(sgd)) == []
    assert set(engine.run([sgd, sgd]).signals) == {*SIGNALS, *reading_signals(sgd)}
    asked = engine.trial(name="sgd", signals={"adam_floor": 2})
    assert list(refused(asked)) == ["signals.adam_floor=2: optim.name=sgd has no such moments; allowed: 0"]


def test_every_column_belongs_to_one_group() -> None:
    layout = engine.pack_of([engine.trial(tied_head=False, positions="learned", qk_norm=True)] * 2).layout
    groups = Groups(layout, 2)
    spans = sorted(span for parts in groups.ranges for span in parts)
    assert spans[0][0] == 0 and spans[-1][1] == layout.size
    assert all(left[1] == right[0] for left, right in zip(spans, spans[1:], strict=False))


def test_one_piece_of_the_difference_is_there_at_a_time(monkeypatch) -> None:
    layout = engine.pack_of([engine.trial()] * 2).layout
    groups, pieces = Groups(layout, 2), []
    before, after = torch.randn(2, 3, layout.size, generator=torch.Generator().manual_seed(1))
    expected = groups.norms(after - before)
    norm = torch.linalg.vector_norm

    def watched(x: torch.Tensor, **options: Any) -> torch.Tensor:
        assert all(piece() is None for piece in pieces), "an earlier piece is still there"
        if x.dtype == torch.float32:
            pieces.append(weakref.ref(x))
        return norm(x, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", watched)
    assert torch.equal(groups.norms_of_change(before, after), expected)
    assert len(pieces) == sum(len(parts) for parts in groups.ranges) > 3


def test_values_that_are_not_finite_are_shown_as_such() -> None:
    """Behind a loss that is: nothing is raised, and nothing is made up."""
    trials = [engine.trial(seed=seed, steps=4, signals=ALL) for seed in range(2)]

    def ruin(pack) -> None:
        pack.layout.view(pack.weights, "blocks.0.attention.query")[0, 0, 0] = torch.inf

    run = engine.run(trials, prepare=ruin)
    whole = engine.run(trials)
    assert np.isnan(run.signals["qk_rank"][0, 0, 0]) and not np.isfinite(run.signals["attention_entropy"][0, 0]).all()
    for name in OF_PLAIN:
        assert np.array_equal(run.signals[name][1], whole.signals[name][1], equal_nan=True), name
