"""Half precision with a GradScaler, gradients of two passes a step, and two faults: `python half_precision.py OUT`."""

import argparse
import inspect
import sys

import torch
import torch.nn.functional as F
from torch import nn

from harness import attach

STEPS, CONTEXT, BATCH, WIDTH = 80, 32, 8, 48
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(256, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, ids):
        return self.head(self.gru(self.embedding(ids))[0])


torch.manual_seed(0)
model = Recurrent()
nn.init.normal_(model.embedding.weight, std=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=20)
texts = TEXT[: len(TEXT) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
loader = torch.utils.data.DataLoader(texts, batch_size=BATCH, shuffle=True)
faults = [
    {"name": "loss_scale_jump", "start": 25},  # overflows, which the scaler sees, and skips those steps
    {"name": "update_bit", "start": 50, "tensor": "gru.weight_hh_l0", "bit": 29},  # nobody sees it
]
with attach(model, optimizer, [scheduler, scaler], fault=faults, steps=STEPS, twin=True, out=sys.argv[1]) as run:
    for _ in range(2):  # epochs
        for number, ids in enumerate(run.steps(loader)):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            scaler.scale(loss / 2).backward()
            run.observe(loss)
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
for event in run.events:
    print(f"step {event.step}: {event.before} became {event.after} at {event.site} {event.tensor}")
print(
    f"farthest from the golden twin: {abs(run.deviation).max():.3g} nat, first at step {run.deviation.nonzero()[0][0]}"
)
