"""Checks of bits: against plain torch, for synchronisation, between twins, between packs, and against the CPU."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.config import Trial
from harness.training.pack import Pack
from harness.training.pack_sizes import rows_at_once
from injectors.value import Value
from tests.gpu.bench import Bench, as_usual, count_unlike, differing, relative
from tests.gpu.child import command, environment
from tests.gpu.engine import Window, corpus_of, pack_of, run, small, train_pack, trial_of
from tests.gpu.marks import CONTEXTS, PRECISIONS, SIZES
from tests.plain_gpt import PlainGPT, copy_weights, tensors, train_plain

LONG = (2, 8, 64)  # trials of a pack with a long context
ROOT = Path(__file__).resolve().parents[2]
SYNCHRONISED = "called a synchronizing"  # what torch says of an operation for which the host waits


def check_1(bench: Bench) -> None:
    """Three trials that differ in what a trial may, for 20 steps."""
    steps = bench.pick(20, 3)
    own = ({"lr": 1e-2, "clip": 0.3}, {"lr": 3e-3, "clip": None, "beta1": 0.8}, {"lr": 3e-2, "clip": 1.0, "beta2": 0.9})
    fields = small(bench, precision="fp64", steps=steps, warmup=0, decay="constant", decay_follows="rate")
    trials = [trial_of(seed=seed, **fields | each) for seed, each in enumerate(own)]
    fresh = pack_of(trials, bench.device)
    trained = run(bench, trials)
    worst = {"loss": 0.0, "gradient norm": 0.0, "weights": 0.0}
    for row, trial in enumerate(trials):
        model, optim = trial.model, trial.optim
        plain = PlainGPT(corpus_of(trial).vocabulary, model.width, model.depth, model.head_dim, model.context)
        plain = plain.double().to(bench.device)
        copy_weights(plain, fresh, row)
        settings = (optim.lr, optim.clip, (optim.beta1, optim.beta2), optim.eps, optim.weight_decay)
        with as_usual():
            batches = partial(_batch, fresh, row)
            losses, norms = train_plain(plain, batches, steps, *settings, fused=False)
        ours = trained.pack.tensors(trained.pack.weights, row)
        pairs = [("weights", ours[name], theirs) for name, theirs in tensors(plain).items()]
        pairs += [("loss", torch.from_numpy(trained.signals["loss"][row]), torch.stack(losses))]
        pairs += [("gradient norm", torch.from_numpy(trained.signals["grad_norm"][row]), torch.stack(norms))]
        for name, mine, theirs in pairs:
            found = float((mine.detach().cpu().double() - theirs.detach().cpu().double()).abs().max())
            worst[name] = max(worst[name], found) if found == found else found
    for name, value in worst.items():
        bench.tell(name, value)


def _batch(pack: Pack, row: int, step: int) -> Tensor:
    return pack.objective.batch(step)[row]


def check_2(bench: Bench) -> None:
    """Steps that are neither the first nor a block's last, with telemetry, clipping and detection."""
    warm, healthy = bench.pick((20, 100), (2, 3))
    others = {"watched by detectors": {"detect": {"name": "combined+finite"}}}
    others |= {"experts": {"block": {"channel_mixer": "moe"}, "moe": {"experts": 4, "top": 2}}}
    others |= {"experts by older weights": {"block": {"channel_mixer": "moe"}, "moe": {"lag": 4}}}
    for name, own in {**{p: {"precision": p} for p in PRECISIONS}, **others}.items():
        fields = small(bench, steps=warm + healthy + 5, clip=1.0, **own)
        trials = [trial_of(seed=seed, **fields) for seed in range(bench.pick(8, 2))]
        stopped = _synchronisation(bench, trials, warm, healthy, "error")
        if stopped:
            bench.note(
                f"{name}: {stopped[0]}; all: {', '.join(_synchronisation(bench, trials, warm, healthy, 'warn'))}"
            )
        bench.tell(name, len(stopped))


def _synchronisation(bench: Bench, trials: Sequence[Trial], warm: int, healthy: int, mode: str) -> list[str]:
    """Where the host waits for the device in healthy steps; with mode `error` the first place alone."""

    def watch(mode: str) -> None:
        if bench.is_cuda:
            torch.cuda.set_sync_debug_mode(mode)

    pack = pack_of(trials, bench.device)
    window = Window(bench, warm, warm + healthy, begin=lambda: watch(mode))
    within = window.__call__

    def progress(done: int, frozen: int) -> None:
        if done == window.last:
            watch("default")  # before the clock is read, which waits
        within(done, frozen)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            train_pack(pack, progress=progress, block=trials[0].steps)
        except RuntimeError as error:
            if SYNCHRONISED not in str(error):
                raise
            return [_place_of(error)]
        finally:
            watch("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in told if SYNCHRONISED in str(w.message)]
    return list(dict.fromkeys(places))


def _place_of(error: BaseException) -> str:
    """The last line of the harness on the way to an error."""
    place, trace = "unknown place", error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if ROOT in file.parents and "tests" not in file.relative_to(ROOT).parts:
            place = f"{file.relative_to(ROOT)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def check_3(bench: Bench) -> None:
    """The same trial in the first, middle and last rows of three parts, one of them with a fault near the end."""
    steps = bench.pick(200, 6)
    for context in CONTEXTS:
        for precision in PRECISIONS:
            fields = small(bench, context=context, precision=precision, steps=steps, clip=1.0)
            golden = trial_of(seed=0, **fields)
            part = rows_at_once(golden.model, golden.train.sequences, bench.device)
            rows = bench.pick(2 * part + 1, 17)
            bench.check_time(20)
            trials = [trial_of(seed=seed, **fields) for seed in range(rows)]
            places = sorted({0, rows // 4, rows // 2, 3 * rows // 4, rows - 1})
            strike = steps - 2
            for place in places:
                trials[place] = golden
            trials[places[1]] = replace(golden, fault=Value(start=strike, tensor="head", element=1, bit=20))
            trained = run(bench, trials, block=steps)
            before, struck = slice(0, strike), places[1]
            total = differing(trained.left_by(struck, before), trained.left_by(0, before))
            for place in set(places) - {0, struck}:
                total += differing(trained.left_by(place), trained.left_by(0))
            if not differing(trained.left_by(struck), trained.left_by(0)):
                raise RuntimeError("the fault changed nothing, so equal bits say little")
            bench.tell(f"context {context} {precision}", total)
    bench.note(f"parts of the last: {[part.stop - part.start for part in trained.pack.parts]}")


def digest_pack(bench: Bench) -> list[Trial]:
    fields = small(bench, steps=bench.pick(50, 4), clip=1.0)
    return [trial_of(seed=seed, lr=3e-3 * (1 + seed % 3), **fields) for seed in range(bench.pick(64, 3))]


def left_by_all(bench: Bench) -> dict[str, Tensor]:
    """What every trial of one pack leaves."""
    trained = run(bench, digest_pack(bench))
    return {f"{number} {name}": x for number in trained.weights for name, x in trained.left_by(number).items()}


def check_4(bench: Bench) -> None:
    """Two interpreters of their own, and one trial in packs of every size that sweeps have."""
    places = [bench.place.with_suffix(f".{number}.pt") for number in range(2)]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command(bench, "pack", place), **options) for place in places]
    for process in started:
        _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a process ended with {process.returncode}: {errors.strip()[-500:]}")
    one, other = (torch.load(place, weights_only=True) for place in places)
    bench.tell("two processes", differing(one, other))
    first = None
    for size in SIZES:
        bench.check_time(10)
        left = _last_of(bench, size, steps=bench.pick(50, 2))
        first = first or left
        bench.tell(f"R = {size}", count_unlike(bench, f"R = {size}", [(left, first)]))
    for precision in PRECISIONS:
        bench.check_time(10)
        long = {"context": 512, "precision": precision, "steps": bench.pick(10, 2)}
        few, *others = (_last_of(bench, size, **long) for size in LONG)
        name = f"context 512 {precision}"
        bench.tell(name, count_unlike(bench, name, ((few, left) for left in others)))


def _last_of(bench: Bench, size: int, **fields: Any) -> dict[str, Tensor]:
    """What a trial leaves that is the last of so many."""
    fields = small(bench, clip=1.0, **fields)
    return run(bench, [trial_of(seed=seed, **fields) for seed in range(size)][::-1]).left_by(size - 1)


def check_7(bench: Bench) -> None:
    """Four trials, from the same weights."""
    fields = small(bench, depth=4, steps=bench.pick(50, 3), clip=1.0)
    trials = [trial_of(seed=seed, **fields) for seed in range(4)]
    gradients, losses = [], []
    for device in (torch.device("cpu"), bench.device):
        pack = pack_of(trials, device)
        pack.begin(0)
        pack.learn(pack.what_trains(pack.batch(0), 0)[0])
        gradients.append(pack.gradients.clone())
        trained = train_pack(pack_of(trials, device))
        losses.append(torch.from_numpy(trained.signals["loss"][:, -1]))
    cpu, gpu = gradients
    bench.tell("gradient of step 1", max(relative(gpu[row], cpu[row]) for row in range(len(trials))))
    bench.tell("loss after 50 steps", float((losses[1] / losses[0] - 1).abs().max()))
