"""A loop as nanoGPT has it, struck, repaired, and compared with its golden twin: `python plain_loop.py OUT`."""

import argparse
import inspect
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

from harness import attach

STEPS, CONTEXT, BATCH, WIDTH = 120, 32, 8, 48
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def forward(self, ids, targets):
        x = self.blocks(self.tokens(ids) + self.places.weight)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
fault = {"name": "weight_bit", "start": 62, "tensor": "blocks.*.qkv.weight", "bit": 30}
with attach(model, optimizer, fault=fault, recover="repair", twin=True, out=sys.argv[1]) as run:
    for _ in run.steps(range(STEPS)):
        starts = torch.randint(len(TEXT) - CONTEXT, (BATCH,))
        ids = torch.stack([TEXT[i : i + CONTEXT + 1] for i in starts.tolist()])
        for group in optimizer.param_groups:  # a schedule that counts by `run.step` goes back with the run
            group["lr"] = 3e-3 * min(1, (run.step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * run.step / STEPS))
        loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.observe(loss)
print(run.events[0].before, "became", run.events[0].after, "in", run.events[0].tensor)
print(f"{len(run.incidents)} incident, repaired; farthest from the golden twin: {abs(run.deviation).max():g}")
