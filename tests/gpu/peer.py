"""One plain GPT at a time, as fast as torch makes it: eager, compiled, and as CUDA graphs.

The model is that of tests/plain_gpt.py. Its rotary positions are in real arithmetic here, because torch's compiler has
no code for complex numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config import Trial
from tests.gpu.bench import Bench, as_usual
from tests.plain_gpt import PlainGPT

BATCHES = 16  # that are on the device beforehand: a plain loop's loader must not count
Step = Callable[[], Tensor]


class RealRotary(nn.Module):
    """As tests.plain_gpt.Rotary, with sines and cosines."""

    def __init__(self, context: int, head_dim: int):
        super().__init__()
        rates = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * rates
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Peer:
    """A plain GPT of a trial's shape in training: `step()` is one of them, and gives its loss on the device.

    `kind`: eager; compiled: `torch.compile`; replayed: `torch.compile(mode="reduce-overhead")`, which has CUDA graphs
    of forward and backward; captured: compiled, and the whole step one CUDA graph.
    """

    def __init__(self, bench: Bench, trial: Trial, kind: str):
        model, train, vocabulary = trial.model, trial.train, trial.data.vocabulary
        self.bench, self.dtype = bench, {"bf16": torch.bfloat16}.get(train.precision)
        self.model = PlainGPT(vocabulary, model.width, model.depth, model.head_dim, model.context)
        self.model.rotary = RealRotary(model.context, model.head_dim)
        if model.tied_head:
            self.model.head.weight = self.model.embedding.weight
        for parameter in self.model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.model.to(bench.device)
        shape, generator = (BATCHES, train.batch, model.context + 1), torch.Generator().manual_seed(trial.seed)
        self.batches = torch.randint(vocabulary, shape, generator=generator).to(bench.device)
        self.number, self.optimizer = 0, self._optimizer(trial, kind == "captured" and bench.is_cuda)
        with as_usual():
            self.step = self._step(kind)

    def _optimizer(self, trial: Trial, capturable: bool) -> torch.optim.Optimizer:
        optim, parameters = trial.optim, list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        settings: dict[str, Any] = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
        return torch.optim.AdamW(groups, **settings, fused=True, capturable=capturable)

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.bench.device.type, self.dtype, enabled=self.dtype is not None):
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _step(self, kind: str) -> Step:
        loss_of: Callable[[Tensor], Tensor] = self.loss
        if kind != "eager":
            mode = "reduce-overhead" if kind == "replayed" and not self.bench.is_dry else None
            backend = "eager" if self.bench.is_dry else "inductor"
            loss_of = torch.compile(self.loss, mode=mode, backend=backend, dynamic=False, fullgraph=True)

        def learn(tokens: Tensor) -> Tensor:
            loss = loss_of(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            return loss.detach()

        def step() -> Tensor:
            self.number += 1
            if kind == "replayed":
                torch.compiler.cudagraph_mark_step_begin()
            self.optimizer.zero_grad()
            return learn(self.batches[self.number % BATCHES])

        return self._captured(learn) if kind == "captured" else step

    def _captured(self, learn: Callable[[Tensor], Tensor]) -> Step:
        tokens = self.batches[0].clone()

        def once() -> Tensor:
            self.optimizer.zero_grad()
            return learn(tokens)

        for _ in range(3):  # compiles, takes memory, and makes the optimizer's state
            loss = once()
        replay: Callable[[], Any] = once
        if self.bench.is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                once()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad()
            with torch.cuda.graph(self.graph):
                loss = learn(tokens)
            replay = self.graph.replay

        def step() -> Tensor:
            self.number += 1
            tokens.copy_(self.batches[self.number % BATCHES])
            again = replay()  # a graph gives nothing, and leaves the loss where it was
            return loss if again is None else again

        return step

    def step_seconds(self, seconds: float) -> float:
        """Of one step, from as many as take about so many seconds, after some that do not count."""
        with as_usual():
            for _ in range(5):
                self.step()
            started, count = self.bench.now(), 0
            while True:
                for _ in range(self.bench.pick(20, 1)):
                    self.step()
                    count += 1
                self.bench.wait()
                if self.bench.is_dry or time.perf_counter() - started >= seconds:
                    return (self.bench.now() - started) / count
