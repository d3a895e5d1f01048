"""Checks of the ways in which users come: a loop of their own with the harness attached, and the command of sweeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import attach
from harness.storage.stored import read_packs, read_signal
from tests.gpu.bench import Bench, NotMeasured, differing
from tests.gpu.child import environment
from tests.plain_gpt import PlainGPT

ROOT = Path(__file__).resolve().parents[2]

# --- 16: a loop of one's own ------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """A plain GPT behind dropout, which draws from the device's random stream."""

    def __init__(self, vocabulary: int, context: int):
        super().__init__()
        self.gpt = PlainGPT(vocabulary, 32, 2, 16, context, positions="learned")  # autocast has no complex numbers
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.gpt(tokens))


@dataclass
class OwnLoop:
    """A model with all that trains it; `body` is one pass, which gives the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    extra: list[Any]
    batches: Callable[[], Iterator[Tensor]]
    body: Callable[[Tensor], Tensor]
    losses: list[Tensor] = field(default_factory=list)

    def left(self) -> dict[str, Tensor]:
        """Losses, weights, and what the optimizer keeps."""
        found = {f"weight {name}": x.detach().cpu() for name, x in self.model.state_dict().items()}
        for place, kept in enumerate(self.optimizer.state.values()):
            found |= {f"{place} {name}": x.detach().cpu() for name, x in kept.items() if isinstance(x, Tensor)}
        return found


STEPS, STRUCK, VOCABULARY, CONTEXT, BATCH = 30, 15, 64, 16, 4
PRECISIONS = ("fp32", "bf16 autocast", "fp16 scaled")


def user_loop(bench: Bench, precision: str) -> OwnLoop:
    """AdamW, fused on the device, warm-up, clipping, batches from pinned memory; in fp16 with loss scaling."""
    torch.manual_seed(0)
    device, kind = bench.device, {"bf16 autocast": torch.bfloat16, "fp16 scaled": torch.float16}.get(precision)
    model = Dropped(VOCABULARY, CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=kind == torch.float16)
    draw = torch.Generator().manual_seed(1)
    walk = torch.randint(1, 3, (STEPS * BATCH, CONTEXT + 1), generator=draw).cumsum(1) % VOCABULARY
    data = torch.utils.data.TensorDataset(walk)

    def batches() -> Iterator[Tensor]:
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, pin_memory=bench.is_cuda)
        return iter([tokens for (tokens,) in loader])

    def body(tokens: Tensor) -> Tensor:
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, kind, enabled=kind is not None):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss.detach()

    return OwnLoop(model, optimizer, [schedule, scaler], batches, body)


def _bare(bench: Bench, precision: str) -> OwnLoop:
    loop = user_loop(bench, precision)
    loop.losses = [loop.body(tokens) for tokens in loop.batches()]
    return loop


def _attached(bench: Bench, precision: str, **options: Any) -> tuple[OwnLoop, Any]:
    loop = user_loop(bench, precision)
    with attach(loop.model, loop.optimizer, extra=loop.extra, steps=STEPS, **options) as run:
        for tokens in run.steps(list(loop.batches())):
            loss = loop.body(tokens)
            run.observe(loss)
            loop.losses.append(loss)
    return loop, run


def check_16(bench: Bench) -> None:
    """Three formats; what is found of each is added up, with a line for whatever is not so."""
    total = dict.fromkeys(("disarmed", "twin", "repaired", "struck twice"), 0)
    for precision in PRECISIONS:
        bench.check_time(10)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = _own(bench, precision)
        for name, count in found.items():
            total[name] += count
        said = {" ".join(str(w.message).split())[:200] for w in told if issubclass(w.category, UserWarning)}
        for text in sorted(said):
            bench.note(f"{precision}: {text}")
    for name, count in total.items():
        bench.tell(name, count)


def _own(bench: Bench, precision: str) -> dict[str, int]:
    """How many numbers are not as they should be."""
    clean = _bare(bench, precision)
    if differing(clean.left(), _bare(bench, precision).left()):
        raise RuntimeError(f"{precision}: the loop alone has not the same bits twice, so nothing can be said")
    disarmed, _ = _attached(bench, precision)
    fault = {"name": "weight_bit", "start": STRUCK, "tensor": "gpt.head.weight", "element": 5, "bit": -2}
    struck, alone = _attached(bench, precision, detect=None, fault=fault)
    again, run = _attached(bench, precision, detect=None, fault=fault, twin=True)
    if not alone.events or not differing(struck.left(), clean.left()):
        raise RuntimeError(f"{precision}: the fault changed nothing, so equal bits say little")
    repaired, cured = _attached(bench, precision, fault=fault, recover="repair")
    if not cured.incidents:
        raise RuntimeError(f"{precision}: nothing was noticed, so nothing was repaired")
    twin = torch.from_numpy(np.array(run.twin_signals["loss"], np.float32))
    losses = torch.stack(clean.losses).cpu().float()
    return {
        "disarmed": differing(disarmed.left(), clean.left()),
        "twin": differing({"loss": twin}, {"loss": losses}),
        "repaired": differing(repaired.left(), clean.left()),
        "struck twice": differing(again.left(), struck.left()),
    }


# --- 17: the command --------------------------------------------------------------------------------------------------


def check_17(bench: Bench) -> None:
    """The same sweep by one worker, by two on one GPU, and killed by SIGKILL and typed again: what the stores hold."""
    try:
        import hydra  # noqa: F401
        import pebble  # noqa: F401
    except ImportError as error:
        raise NotMeasured(f"needs {error.name}, which make gpu-wheels fetches") from None
    folder = bench.place.with_suffix(".sweeps")
    folder.mkdir(exist_ok=True)
    _sweep(bench, folder / "one", 1)
    whole = _losses(folder / "one")
    if len(whole) < 4 or not all(np.isfinite(losses[:2]).all() for losses in whole.values()):
        raise RuntimeError("the sweep has left less than it was to train")
    bench.check_time(20)
    _sweep(bench, folder / "two", 2)
    bench.tell("two workers", _unlike(_losses(folder / "two"), whole))
    bench.check_time(20)
    _kill_one(bench, folder / "killed")
    _sweep(bench, folder / "killed", 1)
    bench.tell("killed and typed again", _unlike(_losses(folder / "killed"), whole))


def _words(bench: Bench, out: Path, workers: int) -> list[str]:
    """Two structures of four rates, each with its struck ones and their twins."""
    steps = bench.pick(60, 8)
    asked = {"model.width": "32,64", "model.depth": 2, "model.context": bench.pick(64, 16), "model.head_dim": 16}
    asked |= {"train.batch": bench.pick(8, 2), "train.steps": steps, "train.validate_every": steps // 2}
    asked |= {"train.validate_tokens": 256, "train.validate_between": 256, "schedule.warmup": 2}
    asked |= {"optim.lr": "1e-3,3e-3,1e-2,3e-2", "fault": "none,weight_bit", "fault.start": steps // 2}
    asked |= {"telemetry.block": bench.pick(10, 2), "checkpoint.every": bench.pick(20, 2)}
    asked |= {"data.source": "zipf", "data.vocabulary": 256, "data.length": 200_000}
    asked |= {"device": bench.device.type, "hydra.launcher.workers": workers, "out": out}
    return [sys.executable, "-m", "sweeps", *(f"{key}={value}" for key, value in asked.items())]


def _sweep(bench: Bench, out: Path, workers: int) -> None:
    command = _words(bench, out, workers)
    done = subprocess.run(command, cwd=out.parent, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the sweep ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-600:]}")


def _kill_one(bench: Bench, out: Path) -> None:
    """Start the sweep, and kill it and all its processes once there is a checkpoint, before it is over."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(_words(bench, out, 1), cwd=out.parent, env=environment(), **quiet)
    try:
        while process.poll() is None and not any(out.glob("checkpoints/*/*.safetensors")):
            time.sleep(0.005)
    finally:
        ended = process.poll()
        if ended is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if ended is not None:
        raise RuntimeError(f"the sweep that was to be killed had ended already, with {ended}")


def _losses(out: Path) -> dict[str, np.ndarray]:
    """Losses of every trial in a store, by id."""
    found: dict[str, np.ndarray] = {}
    for pack in read_packs(out):
        if not pack.complete:
            raise RuntimeError(f"pack {pack.id} is not complete")
        losses = read_signal(pack, "loss", 0, pack.steps)
        found |= {name: losses[row] for row, name in enumerate(pack.attributes["ids"])}
    return found


def _unlike(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> int:
    return differing(_tensors(one), _tensors(other))


def _tensors(losses: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in losses.items()}
