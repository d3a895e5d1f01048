"""A campaign over GPT-2 of `transformers` in a loop of one's own: `python gpt2_campaign.py OUT [N]`."""

import argparse
import inspect
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from harness import attach

STEPS, CONTEXT, BATCH = 60, 32, 4
SAMPLES = int(sys.argv[2]) if len(sys.argv) > 2 else 200
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))

torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
texts = TEXT[: len(TEXT) // CONTEXT * CONTEXT].view(-1, CONTEXT)[: STEPS * BATCH]


def body(run):
    for ids in run.steps(torch.utils.data.DataLoader(texts, batch_size=BATCH, shuffle=True)):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.observe(loss)


flips = {"name": "bit_flip", "start": 30, "weight": "tensor", "stratify": "bit"}
drift = {"name": "last_bit", "start": 30, "samples": 12}  # how far runs drift apart by themselves
options = {"fault": [flips, drift], "samples": SAMPLES, "detect": "finite", "out": sys.argv[1]}
told = attach.campaign(body, model, optimizer, [scheduler], **options)
print(f"{told.faults} faults in {told.steps} steps: python -m analysis campaign {sys.argv[1]}")
