"""Checks of bits where something happens to a run: graphs with strikes between, forks, kills, rollbacks, overflows."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.config import Trial
from harness.config.ladder import canonical
from harness.config.trial import Playbook
from harness.model.determinism import make_deterministic
from harness.model.precision import Precision
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.training.pack import Pack
from harness.training.sites import Site
from injectors.value import Value
from tests.gpu.bench import Bench, NotMeasured, count_unlike, differing, relative
from tests.gpu.engine import Trained, pack_of, run, small, train_pack, trial_of

# --- 5: graphs --------------------------------------------------------------------------------------------------------


@dataclass
class Disarmed:
    """An injector that is never due."""

    calls: tuple = ((Site.WEIGHT, 10**6), (Site.REDUCED_GRADIENT, 10**6))
    taps: tuple = ()
    permanent: bool = False
    memory: dict[str, Any] = field(default_factory=dict)

    def recall(self, memory: Mapping[str, Any]) -> None:
        pass

    def visit(self, site_call: Any) -> list[Any]:
        raise RuntimeError("a disarmed injector was called")


def poison(pack: Pack) -> None:
    pack.weights[1].fill_(torch.nan)


def attach(pack: Pack) -> None:
    pack.model.taps.attach("*", lambda name, x: None)


def check_5(bench: Bench) -> None:
    """Each scene with healthy steps and validation as graphs and as eager ones; where it changes nothing, also against
    a plain run.
    """
    steps = bench.pick(40, 6)
    validated = {"validate_every": bench.pick(5, 2), "validate_between": 2048, "validate_tokens": 2048}
    fields = small(bench, steps=steps, clip=1.0, **validated)
    trials = [trial_of(seed=seed, **fields) for seed in range(bench.pick(8, 5))]
    sites = ("weight", "gradient", "activation", "update")
    struck = list(trials)
    for number, site in enumerate(sites[: len(trials) - 1]):
        tensor = "blocks.0.feedforward.up" if site == "activation" else "head"
        fault = Value(start=steps // 2 + number % 2, duration=2, site=site, tensor=tensor, element=3, bit=20)
        struck[number] = replace(trials[number], fault=fault)
    plain = _both(bench, trials, lambda pack: None)[0]
    scenes: dict[str, tuple[list[Trial], Callable[[Pack], None], dict[int, Any]]] = {
        "struck steps": (struck, lambda pack: None, {}),
        "NaN row": (trials, poison, {}),
        "disarmed injector": (trials, lambda pack: None, {0: Disarmed(), 1: Disarmed()}),
        "attached tap": (trials, attach, {}),
    }
    for name, (members, prepare, injectors) in scenes.items():
        graph, eager = _both(bench, members, prepare, injectors)
        total = sum(differing(graph.left_by(number), eager.left_by(number)) for number in range(len(members)))
        same = {"struck steps": [], "NaN row": [0, 2]}.get(name, range(len(members)))
        bench.tell(name, total + sum(differing(graph.left_by(number), plain.left_by(number)) for number in same))
        if graph.pack.device.type == "cuda" and not (graph.pieces and (graph.steps or name == "attached tap")):
            raise RuntimeError("no step or no validation was replayed, so equal bits say little")
        if name == "struck steps" and not all(graph.result.events[number] for number in range(len(members) - 1)[:4]):
            raise RuntimeError("a fault has not struck, so equal bits say little")


def _both(
    bench: Bench, trials: list[Trial], prepare: Callable[[Pack], None], injectors: Mapping[int, Any] | None = None
) -> tuple[Trained, Trained]:
    """The same pack with its healthy steps as graphs and eager."""
    found = []
    for graphs in (True, False):
        pack = pack_of(trials, bench.device)
        prepare(pack)
        injectors = dict(injectors or {})
        found.append(train_pack(pack, injectors, graphs=graphs, block=trials[0].steps))
    return found[0], found[1]


# --- 6: forks, kills, rollbacks ---------------------------------------------------------------------------------------


def check_6(bench: Bench) -> None:
    killed_first = killed(bench)  # starts a process, which has to come before this one touches the device
    steps = bench.pick(60, 8)
    golden = trial_of(seed=0, **small(bench, steps=steps, clip=1.0))
    fault = Value(start=steps // 2, tensor="blocks.0.feedforward.up", element=5, bit=22)
    later = replace(fault, start=steps // 2 + 2)
    trials = [golden, trial_of(seed=1, **small(bench, steps=steps, clip=1.0))]
    trials += [replace(golden, fault=fault), replace(golden, fault=later)]
    forked, full = run(bench, trials, forks=True), run(bench, trials)
    pairs = ((forked.left_by(number), full.left_by(number)) for number in range(len(trials)))
    bench.tell("fork", count_unlike(bench, "fork", pairs))
    bench.tell("kill and resume", killed_first())
    bench.tell("rollback", rolled_back(bench, steps))


def rolled_back(bench: Bench, steps: int) -> int:
    """A trial whose gradient is NaN at one step goes back to a snapshot, and ends as one that was never struck."""
    ladder = canonical([{"detector": "finite", "action": "roll_back", "limit": 3, "cool_down": 4}])
    fields = small(bench, steps=steps, clip=1.0, detect={"name": "finite"}, playbook=Playbook("own", ladder))
    fields["playbook.snapshot"] = {"every": 2, "kept": 4}
    fault = Value(start=steps // 2, site="reduced_gradient", tensor="head", element=3, model="set", value=float("nan"))
    golden = [trial_of(seed=seed, **fields) for seed in range(3)]
    struck = [*golden, replace(golden[1], fault=fault)]
    found, plain = run(bench, struck), run(bench, golden)
    if not found.result.incidents[3] or found.pack.row_steps.number <= steps:
        raise RuntimeError("nothing was rolled back, so equal bits say little")
    return sum(
        differing(_course(found, number), _course(plain, twin)) for number, twin in ((0, 0), (1, 1), (2, 2), (3, 1))
    )


def _course(trained: Trained, number: int) -> dict[str, Tensor]:
    """What counts of a trial that was struck and went back: losses, norms and weights, and not what alarms were."""
    return {name: trained.left_by(number)[name] for name in ("loss", "grad_norm", "param_norm", "weights")}


def resumable(bench: Bench) -> list[Trial]:
    fields = small(bench, steps=bench.pick(60, 12), clip=1.0)
    return [trial_of(seed=seed, **fields) for seed in range(bench.pick(8, 2))]


def killed(bench: Bench) -> Callable[[], int]:
    """Train a pack in another process, kill that at once when it has saved a checkpoint half-way; go on from there.

    Returns what has it trained on here, and counts the numbers that differ from a run in peace.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise NotMeasured("needs safetensors, which make gpu-wheels fetches") from None
    folder = bench.place.with_suffix(".checkpoints")
    half = resumable(bench)[0].steps // 2
    other = get_context("fork").Process(target=_until_killed, args=(bench, folder, half))
    other.start()
    other.join(120)
    if other.exitcode != -signal.SIGKILL:
        if other.is_alive():
            other.kill()
        raise RuntimeError(f"the process that was to be killed ended with {other.exitcode}")

    def go_on() -> int:
        trials = resumable(bench)
        saved = Checkpoints(ResultsPath.at(folder)).newest()
        if saved is None or not 0 < saved.step <= half:
            raise RuntimeError("the process that was killed has left no checkpoint")
        found = train_pack(pack_of(trials, bench.device), block=trials[0].steps, saved=saved)
        whole = train_pack(pack_of(trials, bench.device), block=trials[0].steps)
        return sum(differing(found.left_by(number), whole.left_by(number)) for number in range(len(trials)))

    return go_on


def _until_killed(bench: Bench, folder: Path, half: int) -> None:
    make_deterministic(bench.device)
    folder.mkdir(exist_ok=True)
    trials = resumable(bench)

    def progress(done: int, frozen: int) -> None:
        if done == half + 2:  # two steps beyond what was saved
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    saving = Checkpoints(ResultsPath.at(folder), every=half)
    train_pack(pack_of(trials, bench.device), block=trials[0].steps, checkpoints=saving, progress=progress)


# --- 15: half precision -----------------------------------------------------------------------------------------------


def check_15(bench: Bench) -> None:
    """Overflow as docs/internals/model.md has it, then bf16 and its emulation on the same device."""
    steps = 40
    fields = small(bench, precision="fp16", steps=steps, lr=1e-3)
    largest = {"loss_scale": 2.0**30}  # overflows in the first gradients
    trials = [
        trial_of(seed=0, **fields),
        trial_of(seed=0, **fields, loss_scaling="static", **largest),
        trial_of(seed=0, **fields, loss_scaling="dynamic", **largest),
        trial_of(seed=0, **fields, loss_scaling="dynamic", fault=_too_large(steps)),
        trial_of(seed=0, **fields, fault=_too_large(steps)),
    ]
    real, emulated = run(bench, trials), train_pack(pack_of(trials, torch.device("cpu")))
    froze, scales, place = real.result.nonfinite_step, real.signals["loss_scale"][2], real.pack.place_of(2)
    if place is None:
        raise RuntimeError(f"the trial whose scale is dynamic has lost its row: {real.result.outcome}")
    last, updates = float(real.pack.loss_scale.scale[place]), int(real.pack.optimizer.updates[place])
    halvings = round(math.log2(scales[0] / last))
    said = {
        "without scaling nothing overflows": froze[0] is None,
        "a static scale ends the run at once": froze[1] == 0,
        "a dynamic one does not": froze[2] is None and halvings > 0,
        "an overflow costs that step and half of the scale": updates == steps - halvings > steps / 2,
        "what overflows in the forward pass ends the run, scaled or not": froze[3] == froze[4] == steps // 2,
        "outcomes are those of the CPU's emulation": real.result.outcome == emulated.result.outcome,
    }
    for text, is_so in said.items():
        if not is_so:
            bench.note(f"not so: {text}")
    bench.tell("not as documented", sum(not is_so for is_so in said.values()))
    bench.tell("scales unlike the CPU's", int((scales != emulated.signals["loss_scale"][2]).sum()))
    half = [trial_of(seed=seed, **small(bench, precision="bf16", steps=steps)) for seed in range(3)]
    loss, gradients = _learned(bench, half, Precision(torch.bfloat16))
    loss_emulated, gradients_emulated = _learned(bench, half, Precision(torch.float32, "bf16"))
    _, exact = _learned(bench, half, Precision(torch.float32))
    if not (cost := (gradients - exact).norm()):
        raise RuntimeError("bf16 has cost nothing, so what differs says little")
    bench.tell("bf16 gradient", float((gradients_emulated - gradients).norm() / cost))
    bench.tell("bf16 loss", relative(loss_emulated, loss))


def _too_large(steps: int) -> Value:
    """A weight that fp16 has no number for, and float32 has."""
    return Value(start=steps // 2, tensor="blocks.0.feedforward.up", element=3, model="set", value=1e6)


def _learned(bench: Bench, trials: list[Trial], precision: Precision) -> tuple[Tensor, Tensor]:
    """Losses [R] and gradients [R, P] of the first step with these formats."""
    pack = pack_of(trials, bench.device)
    pack.model.precision = precision
    pack.begin(0)
    loss = pack.learn(pack.what_trains(pack.batch(0), 0)[0])
    return loss[: len(trials)].clone(), pack.gradients[: len(trials)].clone()
