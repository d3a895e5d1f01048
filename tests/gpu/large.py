"""Checks of size: how large packs are, how much memory they take, one trial of 124M, and two GPUs."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np
import torch

from harness.config import Trial
from harness.model.determinism import make_deterministic
from harness.training.distributed import RankGroup
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import make_plan, pack_bytes
from sweeps.running.processes import ranks
from tests.gpu.bench import Bench, median_ratio, relative
from tests.gpu.engine import Trained, pack_of, small, step_seconds, train_pack, trial_of
from tests.gpu.marks import BATCHES, WIDTHS
from tests.gpu.peer import Peer
from tests.gpu.speed import trials_of

# --- 11: sizes of packs -----------------------------------------------------------------------------------------------


def check_11(bench: Bench) -> None:
    """Of 512 trials in packs: the planner's size, and others; and of the planner's pack, what it takes at most."""
    warm, count = bench.pick((10, 20), (2, 2))
    for width in WIDTHS:
        bench.check_time(30)
        many = trials_of(bench, width, 512, warm + count + 5)
        memory, repeats = 0.8 * _all_memory(bench), bench.pick(2 if width < max(WIDTHS) else 1, 1)
        plan = max(make_plan(many, (), None, bench.device.type, 1, memory).packs, key=lambda pack: len(pack.trials))
        chosen = len(plan.trials)
        fitting = [size for size in bench.pick((16, 32, 64, 128, 256), (2, 3)) if _takes(many[:size], bench) < memory]
        seconds = {
            size: min(step_seconds(bench, many[:size], warm, warm + count) / size for _ in range(repeats))
            for size in sorted({chosen, *fitting})
        }
        told = ", ".join(f"{size}: {1e6 * value:.0f}" for size, value in seconds.items())
        bench.note(f"width {width}, planned R {chosen}, µs a trial-step by R: {told}")
        bench.tell(f"size at width {width}", seconds[chosen] / min(seconds.values()))
        trained = partial(_trained, bench)
        trained(many[:2])  # takes what libraries take once
        peak, _ = bench.peak_memory(partial(trained, list(plan.trials)))
        bench.tell(f"memory at width {width}", _takes(list(plan.trials), bench) / peak)


def _trained(bench: Bench, trials: list[Trial]) -> Trained:
    return train_pack(pack_of(trials, bench.device))


def _takes(trials: list[Trial], bench: Bench) -> int:
    return pack_bytes(PackPlan(tuple(trials), frozenset()), bench.device.type)


def _all_memory(bench: Bench) -> float:
    return torch.cuda.get_device_properties(bench.device).total_memory if bench.is_cuda else 1e9


# --- 12: one large trial ----------------------------------------------------------------------------------------------


def check_12(bench: Bench) -> None:
    """GPT-2's smallest shape with its tied head, both on random tokens of its vocabulary, in turn."""
    warm, count, rounds = bench.pick((41, 10, 3), (2, 2, 1))
    peak = bench.product_peak()
    bench.note(f"a bf16 product of 8192: {peak / 1e12:.0f} TFLOP/s")
    for batch in BATCHES:
        bench.check_time(120)
        shape = {"width": 768, "depth": 12, "head_dim": 64, "context": 1024, "batch": batch, "tied_head": True}
        text = {"source": "zipf", "vocabulary": 50257, "length": 2_000_000}
        fields = small(bench, precision="bf16", clip=1.0, steps=warm + count + 3, **shape, **text)
        trial = trial_of(seed=0, **fields)
        ours, theirs = [], []
        torch.compiler.reset()
        peer = Peer(bench, trial, "compiled")
        for _ in range(rounds):
            ours.append(step_seconds(bench, [trial], warm, warm + count))
            theirs.append(peer.step_seconds(2.0))
        del peer
        bench.tell(f"batch {batch}", median_ratio(theirs, ours))
        seconds = statistics.median(ours)
        bench.tell(f"of peak at batch {batch}", operations(trial) / seconds / peak)
        bench.note(f"batch {batch}: {1e3 * seconds:.1f} ms a step against {1e3 * statistics.median(theirs):.1f}")


def operations(trial: Trial) -> float:
    """Of one step: 6 a weight of a matrix and token, and attention's 12 a block, feature and pair, none left out as
    masked: what is usually counted (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """
    model, tokens = trial.model, trial.train.batch * trial.model.context
    matrices = 12 * model.depth * model.width**2 + model.width * trial.data.vocabulary
    return tokens * (6 * matrices + 12 * model.depth * model.width * model.context)


# --- 14: two GPUs -----------------------------------------------------------------------------------------------------


def check_14(bench: Bench) -> None:
    """Two ranks as processes and simulated: with a GPU each, over NCCL; or both on one, by way of the CPU."""
    carrier = "nccl" if bench.is_cuda and torch.cuda.device_count() > 1 else "gloo"
    fields = small(bench, steps=bench.pick(20, 2), clip=1.0, ranks=2)
    trials = [trial_of(seed=seed, **fields) for seed in range(bench.pick(8, 2))]
    simulated = train_pack(pack_of(trials, bench.device))
    with ranks(2, bench.device, _rank, (trials,)) as group:
        if group.backend != carrier:
            raise RuntimeError(f"the ranks talk through {group.backend}")
        real = _spread(group, trials)
    bench.note("over NCCL, a GPU each" if carrier == "nccl" else "one device for both, over gloo; NCCL not measured")
    for name, signal in (("loss", "loss"), ("gradient norm", "grad_norm")):
        one, other = real.signals[signal], simulated.signals[signal]
        bench.tell(name, float(np.abs(one / other - 1).max()))
    bench.tell("weights", max(relative(real.weights[number], simulated.weights[number]) for number in real.weights))


def _spread(group: RankGroup, trials: list[Trial]) -> Trained:
    pack = pack_of(trials, group.device)
    pack.spread_over(group)
    return train_pack(pack)


def _rank(group: RankGroup, trials: Any) -> None:
    make_deterministic(group.device)
    _spread(group, trials)
