"""Checks of speed: kernels of a step, AdamW, packs against plain GPTs one at a time, and what telemetry costs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from harness.config import Trial, sections
from harness.detectors.table import DETECTORS
from harness.model import attention, layers
from harness.optim import clipping
from harness.optim.optimizers import adamw
from harness.training.readings import refused
from tests.gpu.bench import Bench, median_ratio
from tests.gpu.child import peers
from tests.gpu.engine import Window, pack_of, small, step_seconds, train_pack, trial_of
from tests.gpu.marks import WIDTHS

RECORDED = 45  # steps after which every kind of step is recorded: no more of them are eager
COMPILED = ("replayed", "captured")  # peers of check 10; dry runs have them at the first width
KERNELS, ALL = ("kernel",), ("kernel", "gpu_memcpy", "gpu_memset")


def trials_of(bench: Bench, width: int, count: int, steps: int, **fields: Any) -> list[Trial]:
    """The shape of the benchmarks: depth 4, context 64, batch 8, with clipping."""
    shape = small(bench, width=width, depth=4, steps=steps, clip=1.0, **fields)
    return [trial_of(seed=seed, **shape) for seed in range(bench.pick(count, 3))]


# --- 8: kernels -------------------------------------------------------------------------------------------------------


def check_8(bench: Bench) -> None:
    """Ten steps in the middle of a block, as torch's profiler sees them on the device."""
    warm, count = bench.pick((RECORDED, 10), (2, 2))
    for graphs in (False, True):
        traced = _traced(bench, trials_of(bench, 64, 64, warm + count + 3), warm, count, graphs)
        kinds = bench.pick(KERNELS, ("cpu_op",))
        kernels = len(spans(traced, kinds)) / count
        bench.note(f"{'graph' if graphs else 'eager'}: {kernels:.0f} kernels a step")
        bench.tell("kernels a step", kernels)  # of the graph, where there is one
        if graphs or bench.is_dry:
            bench.tell("busy", busy(spans(traced, bench.pick(ALL, kinds))))
    _note_pieces(bench, warm, count)


PIECES = {
    "attention and its heads": (attention,),
    "norms": (layers,),
    "AdamW, gradient norms and scaling": (adamw, clipping),
}


def _note_pieces(bench: Bench, warm: int, count: int) -> None:
    """What a step takes where some of the fused pieces are torch's own operations, over one with all of them."""
    count *= bench.pick(5, 1)
    trials = trials_of(bench, 64, 64, warm + count + 3)
    for name, files in PIECES.items():
        if time.monotonic() + bench.pick(8, 0) > bench.until:
            bench.note(f"without {name}: no time")
            continue
        fused = step_seconds(bench, trials, warm, warm + count)
        with ExitStack() as patched:
            for file in files:
                patched.enter_context(patch.object(file, "are_used", lambda device: False))
            plain = step_seconds(bench, trials, warm, warm + count)
        bench.note(f"without {name} in Triton: {plain / fused:.2f} of the time")


def _traced(bench: Bench, trials: Sequence[Trial], warm: int, count: int, graphs: bool) -> list[Mapping[str, Any]]:
    """The events of some steps' trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities = [torch.profiler.ProfilerActivity.CUDA] if bench.is_cuda else activities
    with torch.profiler.profile(activities=activities):  # the first one takes seconds to begin
        torch.ones(8, device=bench.device).sum()
        bench.wait()
    profiler = torch.profiler.profile(activities=activities)
    window = Window(bench, warm, warm + count, begin=profiler.start, end=profiler.stop)
    train_pack(pack_of(trials, bench.device), progress=window, block=trials[0].steps, graphs=graphs)
    place = bench.place.with_suffix(".trace.json")
    profiler.export_chrome_trace(str(place))
    events = json.loads(place.read_text())["traceEvents"]
    place.unlink()
    return events


def spans(events: Sequence[Mapping[str, Any]], kinds: Collection[str]) -> list[tuple[float, float]]:
    """Begin and end of the events of these kinds, in order, in microseconds."""
    found = [event for event in events if event.get("ph") == "X" and event.get("cat") in kinds]
    if not found:
        raise RuntimeError(f"the profiler has seen nothing of {', '.join(kinds)}")
    return sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in found)


def busy(spans: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first begin to the last end in which at least one of them lasts."""
    total, end = 0.0, spans[0][0]
    for begin, stop in spans:
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total / (end - spans[0][0])


# --- 9: AdamW ---------------------------------------------------------------------------------------------------------


def check_9(bench: Bench) -> None:
    """Seven passes over [64, 230k]: weights, gradients and two moments are read, all but gradients written."""
    pack = pack_of(trials_of(bench, 64, 64, 10), bench.device)
    pack.gradients.normal_()
    rate, stepping = pack.learning_rate(5), pack.active.clone()
    passes = 7 * pack.weights.numel() * pack.weights.element_size()
    copy = bench.copy_bandwidth()
    bench.note(f"{list(pack.weights.shape)}; a copy: {copy / 1e9:.0f} GB/s")
    for name, measures in (("with norms", True), ("alone", False)):

        def step(measures: bool = measures) -> None:
            pack.optimizer.step(rate, stepping, measures)

        function, how = _captured(bench, step)
        share = passes / bench.seconds(function, bench.pick(50, 2)) / copy
        bench.note(f"{name}: {how}")
        bench.tell(name, share)


def _captured(bench: Bench, function: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """As a CUDA graph, so that launching does not count, if it can be one; and how it runs."""
    for _ in range(3):
        function()
    if not bench.is_cuda:
        return function, "eager"
    bench.wait()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as error:
        return function, f"eager, no graph: {' '.join(str(error).split())[:100]}"
    return graph.replay, "as a graph"


# --- 10: packs against one at a time ----------------------------------------------------------------------------------


def check_10(bench: Bench) -> None:
    """Both in turn, three rounds, each peer in a process of its own; of the two ways in which the compiled one has CUDA
    graphs the faster one counts.
    """
    warm, count, rounds = bench.pick((RECORDED, 100, 3), (2, 2, 1))
    for width in WIDTHS:
        bench.check_time(60)
        trials = trials_of(bench, width, 64, warm + count + 5)
        ours: list[float] = []
        with peers(bench, width, "eager", *(COMPILED if width == WIDTHS[0] or not bench.is_dry else ())) as others:
            theirs: dict[str, list[float]] = {kind: [] for kind in others}
            for _ in range(rounds):
                ours.append(len(trials) / step_seconds(bench, trials, warm, warm + count))
                for kind, peer in others.items():
                    theirs[kind].append(1 / peer.step_seconds(1.0))
        medians = {kind: statistics.median(values) for kind, values in theirs.items()}
        told = ", ".join(f"{kind} {value:.0f}" for kind, value in medians.items())
        bench.note(f"width {width}: {statistics.median(ours):.0f} trial-steps/s against {told}")
        fastest = max((kind for kind in COMPILED if kind in medians), key=medians.__getitem__, default="eager")
        bench.tell(f"width {width} compiled", median_ratio(ours, theirs[fastest]))
        bench.tell(f"width {width} eager", median_ratio(ours, theirs["eager"]))


# --- 13: telemetry ----------------------------------------------------------------------------------------------------


def heard_by_default() -> str:
    """Every detector that can watch a run whose signals are the default ones."""
    names = []
    for name in DETECTORS:
        if not list(refused(Trial.of({"detect": sections()["detect"](name)}))):
            names.append(name)
    return "+".join(names)


def check_13(bench: Bench) -> None:
    """Packs with all signals and every detector that these feed, and without any or a look for what is not finite."""
    warm, count, rounds = bench.pick((RECORDED, 100, 5), (2, 2, 1))
    watched = {"detect": {"name": heard_by_default()}}
    for width, size in ((64, 64), (256, 32)):
        bench.check_time(25)
        on, off, took = [], [], 0.0
        for number in range(rounds):
            if number > 1 and time.monotonic() + 1.5 * took > bench.until - bench.pick(30 if width == 64 else 0, 0):
                break
            begun = time.monotonic()
            for telemetry in (number % 2 == 0, number % 2 != 0):
                trials = trials_of(bench, width, size, warm + count + 5, **(watched if telemetry else {}))
                options = {"telemetry": telemetry, "detection": telemetry}
                (on if telemetry else off).append(step_seconds(bench, trials, warm, warm + count, **options))
            took = time.monotonic() - begun
        bench.tell(f"width {width}", median_ratio(on, off))
        spread = sorted(mine / other for mine, other in zip(on, off, strict=True))
        bench.note(f"width {width}: rounds {', '.join(f'{ratio:.3f}' for ratio in spread)}")
    bench.note(f"watched by {watched['detect']['name'].count('+') + 1} detectors")
