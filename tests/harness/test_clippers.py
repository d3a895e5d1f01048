"""Every clipper against torch, or against its authors' code written out in float64, over 50 steps."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.model.parameters import Layout
from harness.model.scaling import tensor_table
from harness.model.state import State
from harness.optim.clippers import CLIPPERS
from harness.optim.clippers.adagc import AdaGC
from harness.optim.clippers.adagc import Options as AdaGCOptions
from harness.optim.clippers.global_norm import GlobalNorm
from harness.optim.clippers.per_tensor import PerTensor
from harness.optim.clippers.value import ByValue
from harness.optim.clippers.zclip import Options as ZClipOptions
from harness.optim.clippers.zclip import ZClip
from harness.optim.clipping import global_norm
from harness.testing import engine
from tests.plain_gpt import plain_of, tensors

STEPS = 50
TOLERANCE = 1e-9  # float64 rounds at 1e-16; Adam divides gradients by their own size, which amplifies that
CPU = torch.device("cpu")
Gradients = Mapping[str, Tensor]  # of one trial, float64, clipped in place

# --- by hand: one trial at a time, plain numbers, from the papers and their authors' code -----------------------------


def norm_of(gradients: Gradients) -> float:
    return math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))


class TorchNorm:
    def __init__(self, limit: float | None):
        self.limit = math.inf if limit is None else limit

    def __call__(self, gradients: Gradients) -> None:
        with_gradients(gradients, lambda all_of_them: nn.utils.clip_grad_norm_(all_of_them, self.limit))


class TorchValue:
    def __init__(self, bound: float):
        self.bound = bound

    def __call__(self, gradients: Gradients) -> None:
        with_gradients(gradients, lambda all_of_them: nn.utils.clip_grad_value_(all_of_them, self.bound))


class TorchNormOfEach:
    def __init__(self, limit: float):
        self.limit = limit

    def __call__(self, gradients: Gradients) -> None:
        for name in gradients:
            TorchNorm(self.limit)({name: gradients[name]})


def with_gradients(gradients: Gradients, clip: Callable[[list[nn.Parameter]], object]) -> None:
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient
    clip(parameters)


class ZClipByHand:
    """A list of norms while warming up, then two moving averages."""

    def __init__(self, options: ZClipOptions):
        self.options, self.norms, self.spikes = options, [], 0
        self.mean = self.variance = 0.0

    def __call__(self, gradients: Gradients) -> None:
        o, norm = self.options, norm_of(gradients)
        if len(self.norms) < o.warmup:
            self.norms.append(norm)
            self.mean, self.variance = statistics.fmean(self.norms), statistics.pvariance(self.norms)
            return
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        if z > o.threshold:
            limits = {
                "reciprocal": self.mean + o.threshold * deviation / (z / o.threshold),
                "mean": self.mean,
                "threshold": self.mean + o.threshold * deviation,
            }
            for gradient in gradients.values():
                gradient.mul_(limits[o.cap] / (norm + 1e-6))
            norm, self.spikes = limits[o.cap], self.spikes + 1
        self.mean = o.alpha * self.mean + (1 - o.alpha) * norm
        self.variance = o.alpha * self.variance + (1 - o.alpha) * (norm - self.mean) ** 2


class AdaGCByHand:
    """A norm for each tensor: the least of the warm-up's, then a moving average."""

    def __init__(self, options: AdaGCOptions):
        self.options, self.steps, self.known, self.clipped = options, 0, {}, 0

    def __call__(self, gradients: Gradients) -> None:
        o = self.options
        self.steps += 1
        if self.steps <= o.warmup:
            factor = min(1.0, o.warmup_clip / (norm_of(gradients) + 1e-6))
            for name, gradient in gradients.items():
                gradient.mul_(factor)
                norm = float(gradient.norm())
                self.known[name] = min(self.known.get(name, norm), norm)
            return
        for name, gradient in gradients.items():
            norm = float(gradient.norm())
            before = self.known.get(name, norm)
            if norm > o.threshold * before:
                gradient.mul_(o.threshold * before / (norm + 1e-6))
                norm, self.clipped = o.threshold * before, self.clipped + 1
            self.known[name] = o.beta * before + (1 - o.beta) * norm


# --- the same on trials -----------------------------------------------------------------------------------------------


ZCLIPS = [
    ZClipOptions(threshold=2.5, warmup=10),
    ZClipOptions(threshold=1.0, warmup=25, alpha=0.9, cap="mean"),
    ZClipOptions(threshold=2.0, warmup=3, alpha=0.8, cap="threshold"),
    ZClipOptions(threshold=0.5, warmup=5, alpha=0.5),
]
ADAGCS = [
    AdaGCOptions(threshold=1.04, warmup=10),
    AdaGCOptions(threshold=1.5, warmup=0, beta=0.9),
    AdaGCOptions(threshold=1.01, warmup=30, warmup_clip=0.1, beta=0.98),
    AdaGCOptions(threshold=0.9, warmup=5, warmup_clip=100.0, beta=0.5),
]
KINDS = {  # clipper, fields of four trials, the same by hand
    "value": (ByValue, [{"clip_value": x} for x in (1e-3, 0.03, 1.0, 3.0)], lambda t: TorchValue(t.optim.clip_value)),
    "tensor": (
        PerTensor,
        [{"clip_tensor": x} for x in (1e-3, 0.1, 1.0, 30.0)],
        lambda t: TorchNormOfEach(t.optim.clip_tensor),
    ),
    "adagc": (AdaGC, [{"adagc": o} for o in ADAGCS], lambda t: AdaGCByHand(t.section("adagc"))),
    "zclip": (ZClip, [{"zclip": o} for o in ZCLIPS], lambda t: ZClipByHand(t.section("zclip"))),
    "norm": (GlobalNorm, [{"clip": x} for x in (1e-2, None, 1.0, 30.0)], lambda t: TorchNorm(t.optim.clip)),
}


def trials_of(fields, **others):
    return [engine.trial(seed=r, **limits, **others) for r, limits in enumerate(fields)]


def a_clipper(cls, trials, dtype=torch.float32):
    """The clipper on its own, the layout and the state that it works on; there are gaps between the tensors."""
    layout = Layout(tuple(tensor_table(trials[0].model, trials[0].data.vocabulary)))
    state = State(len(trials))
    clipper = cls(layout, state, len(trials), CPU)
    clipper.bind(trials)
    return clipper, layout, state


def stream(layout, rows, dtype, steps=STEPS):
    """Gradients whose size varies, with spikes of one tensor of one trial, and of all of them in the second half."""
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        gradients = torch.randn(rows, layout.size, generator=generator, dtype=dtype)
        gradients *= torch.exp(0.3 * torch.randn(rows, 1, generator=generator, dtype=dtype)) * 0.05
        if step > steps / 2 and step % 3 == 0:
            gradients[(step // 3) % rows] *= 100
        if step % 7 == 6:
            layout.view(gradients, "head")[(step // 7) % rows] *= 30
        yield gradients.index_fill_(1, layout.padding, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_clipper_equals_the_same_by_hand(kind, dtype):
    """50 gradients of four trials with their own settings; float32 is held to its rounding, float64 to 1e-12."""
    cls, fields, by_hand = KINDS[kind]
    trials = trials_of(fields, width=6, head_dim=6, vocabulary=61)
    clipper, layout, _ = a_clipper(cls, trials, dtype)
    hands, changed = [by_hand(trial) for trial in trials], torch.zeros(len(trials))
    everywhere = torch.ones(len(trials), dtype=torch.bool)
    for step, gradients in enumerate(stream(layout, len(trials), dtype)):
        before, expected = gradients.clone(), gradients.to(torch.float64, copy=True)
        clipper.clip(gradients, global_norm(gradients), everywhere)
        for r, hand in enumerate(hands):
            hand({scaled.name: layout.view(expected, scaled.name)[r] for scaled in layout.tensors})
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(
            gradients.double(), expected, rtol=tolerance, atol=0, msg=lambda m, s=step: f"{s} {m}"
        )
        changed += (gradients != before).any(1)
    unlimited = sum(own.get("clip", 0) is None for own in fields)
    assert (changed > 1).sum() == len(trials) - unlimited, "every limit was needed now and then"
    assert changed.min() < STEPS


def test_the_authors_of_adagc_and_pytorch_optimizer_agree_on_the_average():
    """pytorch-optimizer's AdaGC counts its warm-up one step shorter, and adds no epsilon afterwards."""
    import pytorch_optimizer  # two seconds, which no other test of this file needs

    options = AdaGCOptions(threshold=1.05, beta=0.98, warmup=9)
    trials = trials_of([{"adagc": options}] * 2, width=6, head_dim=6, vocabulary=61)
    clipper, layout, state = a_clipper(AdaGC, trials)
    parameters = [nn.Parameter(torch.zeros(scaled.shape, dtype=torch.float64)) for scaled in layout.tensors]
    theirs = pytorch_optimizer.AdaGC(parameters, lr=1e-3, weight_decay=0.0, warmup_steps=10)
    for gradients in stream(layout, 2, torch.float64):
        for parameter, scaled in zip(parameters, layout.tensors, strict=True):
            parameter.grad = layout.view(gradients, scaled.name)[1].clone()
        theirs.step()
        clipper.clip(gradients, global_norm(gradients), torch.ones(2, dtype=torch.bool))
    gammas = torch.stack([theirs.state[parameter]["gamma"].squeeze() for parameter in parameters])
    torch.testing.assert_close(dict(state)["adagc_average"][1], gammas, rtol=1e-4, atol=0)


# --- in the loop ------------------------------------------------------------------------------------------------------


def plain_run(trial, pack, row, clip):
    """The trial as a plain GPT with torch's AdamW, its gradients clipped by hand. Losses, and the model."""
    plain, adamw = plain_of(trial, pack, row)
    shadow = copy.deepcopy(plain)
    losses = []
    for step in range(trial.steps):
        tokens = pack.objective.batch(step)[row]
        loss = F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        for parameter, holder in zip(plain.parameters(), shadow.parameters(), strict=True):
            holder.data = parameter.grad  # so that gradients can be seen by the names of tensors
        clip({name: x.detach() for name, x in tensors(shadow).items()})
        adamw.step()
        losses.append(loss.item())
    return losses, plain


CHAINS = {
    "value": [{"clip_value": 0.003}, {"clip_value": 0.03}],
    "tensor": [{"clip_tensor": 0.03}, {"clip_tensor": 0.3}],
    "zclip": [{"zclip": ZCLIPS[3]}, {"zclip": ZCLIPS[2]}],
    "adagc": [{"adagc": ADAGCS[0]}, {"adagc": ADAGCS[3]}],
    "all of them": [
        {"clip_value": 0.3, "clip_tensor": 0.5, "adagc": ADAGCS[0], "zclip": ZCLIPS[3], "clip": 0.5},
        {"clip_value": 0.1, "clip_tensor": 1.0, "adagc": ADAGCS[2], "zclip": ZCLIPS[2], "clip": None},
    ],
}


@cache
def unclipped_run(**own):
    return engine.run(trials_of([{}, {}], width=6, head_dim=6, vocabulary=61, **own))


@pytest.mark.parametrize("chain", CHAINS)
def test_a_trial_equals_a_plain_gpt_that_is_clipped_by_hand(chain):
    """50 steps through the loop, in float64; several clippers act in their order."""
    own = {"steps": STEPS, "precision": "fp64", "warmup": 0, "decay": "constant", "lr": 1e-2}
    own |= {"attention": "explicit", "depth": 1}
    trials = trials_of(CHAINS[chain], width=6, head_dim=6, vocabulary=61, **own)
    fresh, run = engine.pack_of(trials), engine.run(trials, block=STEPS)
    for r, trial in enumerate(trials):
        chosen = [by_hand(trial) for cls, _, by_hand in KINDS.values() if cls.is_on(trial)]

        def clip(gradients, chosen=chosen):
            for one in chosen:
                one(gradients)

        losses, plain = plain_run(trial, fresh, r, clip)
        assert run.signals["loss"][r].tolist() == pytest.approx(losses, abs=TOLERANCE)
        found = run.pack.tensors(run.pack.weights, r)
        for name, weight in tensors(plain).items():
            torch.testing.assert_close(found[name], weight.detach(), rtol=0, atol=TOLERANCE, msg=f"{r} {name}")
    unclipped = unclipped_run(**own)
    assert all(engine.same_bits(run[r], unclipped[r]) for r in range(2)), "it was needed"


def test_they_act_in_this_order():
    assert [cls.__name__ for cls in CLIPPERS] == ["RankClip", "ByValue", "PerTensor", "AdaGC", "ZClip", "GlobalNorm"]
