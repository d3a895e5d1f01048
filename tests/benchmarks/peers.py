"""What a user would train the same GPTs with: a plain PyTorch loop, the same compiled, and JAX, as fast as each goes.

Every peer trains `PlainGPT` or the same in JAX, with fused AdamW and clipping, on batches drawn as nanoGPT draws them.
Each stays in processes of its own that are warm, so that peers and ours can be measured in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

CONTEXT, BATCH, HEAD_DIM, VOCABULARY = 64, 8, 16, 256
WARM = 5  # steps before any is timed
ROWS = 8  # GPTs that JAX trains at once in a process, as many as a pack of ours has


@dataclass(frozen=True)
class Kind:
    """A way to train: `is_alone`: one process that has all cores; else one for each core. `rows`: GPTs of each.
    `has_our_kernels`: it calls `harness.cpu_kernels()` first, as anyone's loop may."""

    label: str
    is_alone: bool
    rows: int = 1
    is_compiled: bool = False
    is_jax: bool = False
    has_our_kernels: bool = False


KINDS: dict[str, Kind] = {
    "plain": Kind("plain loop, one process on all cores", is_alone=True),
    "plain_each": Kind("plain loop, a process for each core", is_alone=False),
    "compiled_each": Kind("torch.compile, a process for each core", is_alone=False, is_compiled=True),
    "jax_each": Kind(f"JAX vmap + jit of {ROWS}, a process for each core", is_alone=False, rows=ROWS, is_jax=True),
}
WITH_OUR_KERNELS = {
    f"{name}_our_kernels": replace(kind, label=f"{kind.label}, with cpu_kernels()", has_our_kernels=True)
    for name, kind in KINDS.items()
    if not kind.is_jax
}
"""Where torch's own kernels are not the CPU's best. JAX has products of its own."""
KINDS |= WITH_OUR_KERNELS


def usual_kinds() -> list[str]:
    """Those with our kernels only where these differ from torch's."""
    from harness.basics.cpu_kernels import AVX512, cpu_kernels

    return [name for name, kind in KINDS.items() if cpu_kernels().name == AVX512 or not kind.has_our_kernels]


@dataclass(frozen=True)
class Size:
    """The shape of what is trained."""

    width: int
    depth: int
    context: int = CONTEXT
    batch: int = BATCH


class Peer:
    """A peer that is warm; `steps_a_second` measures it. Its processes wait in between, and cost nothing."""

    def __init__(self, kind: str, size: Size):
        self.kind = KINDS[kind]
        cores = sorted(os.sched_getaffinity(0))
        self._processes, self._pipes = [], []
        context = multiprocessing.get_context("spawn")
        for core in [None] if self.kind.is_alone else cores:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, kind, size, core), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(here)
        for pipe in self._pipes:
            pipe.recv()  # it is warm

    def steps_a_second(self, seconds: float) -> float:
        """Trial-steps per second of all its processes together, each of which trains for about so long."""
        for pipe in self._pipes:
            pipe.send(seconds)
        return sum(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        """End its processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, kind: str, size: Size, core: int | None) -> None:
    """Warm up, then train for as long as each message says, and send trial-steps per second."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    one = KINDS[kind]
    if one.has_our_kernels:
        from harness import cpu_kernels

        cpu_kernels()
    step = maker(kind)(size, core is not None)
    for _ in range(WARM):
        step()
    pipe.send(True)
    while (seconds := pipe.recv()) is not None:
        begin, steps = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds:
            step()
            steps += 1
        pipe.send(one.rows * steps / spent)


Step = Callable[[], float]


def maker(kind: str) -> Callable[[Size, bool], Step]:
    """What makes the step of a kind, of a shape; the flag: with one thread. A step returns a loss, so it is over."""
    if KINDS[kind].is_jax:
        return jax_step
    return compiled_step if KINDS[kind].is_compiled else plain_step


def draws(size: Size, rows: int = 1) -> Callable[[], Any]:
    """Batches [rows * batch, context + 1] of the built-in corpus, as nanoGPT draws them."""
    import torch

    from harness.config import Data
    from harness.data.corpus import load_corpus

    tokens = torch.from_numpy(load_corpus(Data(), size.context).train.copy()).long()
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        starts = torch.randint(len(tokens) - size.context, (rows * size.batch,), generator=generator)
        return torch.stack([tokens[i : i + size.context + 1] for i in starts])

    return draw


def plain_step(size: Size, has_one_thread: bool, is_compiled: bool = False) -> Step:
    """A step of the plain loop."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from tests.gpu.peer import RealRotary
    from tests.plain_gpt import PlainGPT

    if has_one_thread:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PlainGPT(VOCABULARY, size.width, size.depth, HEAD_DIM, size.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = draws(size)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    forward = loss_of
    if is_compiled:
        model.rotary = RealRotary(size.context, HEAD_DIM)  # the compiler has no code for complex numbers
        forward = torch.compile(loss_of)

    def step() -> float:
        loss = forward(draw())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def compiled_step(size: Size, has_one_thread: bool) -> Step:
    """The same, its forward and backward pass compiled by `torch.compile`."""
    return plain_step(size, has_one_thread, is_compiled=True)


def jax_step(size: Size, has_one_thread: bool) -> Step:
    """A step of `ROWS` GPTs at once, in one call that JAX has compiled."""
    import jax
    import numpy as np
    import torch

    from tests.jax_gpt import stacked_weights, training
    from tests.plain_gpt import PlainGPT

    models = []
    for seed in range(ROWS):
        torch.manual_seed(seed)
        models.append(PlainGPT(VOCABULARY, size.width, size.depth, HEAD_DIM, size.context))
    weights = stacked_weights(models)
    begin, update = training(HEAD_DIM, lr=1e-3, clip=1.0)
    state, draw = jax.vmap(begin)(weights), draws(size, ROWS)
    compiled = jax.jit(jax.vmap(update), donate_argnums=(0, 1))

    def step() -> float:
        nonlocal weights, state
        tokens = draw().view(ROWS, size.batch, -1).numpy().astype(np.int32)
        weights, state, loss = compiled(weights, state, tokens)
        return float(loss[0])

    return step
