"""Your own model and loop
=======================

The same faults, detectors and answers for any model and loop: four lines around it.
"""

# %%
# A small model and a loop as anybody would write it.

import tempfile

import matplotlib.pyplot as plt
import torch
from torch import nn

import analysis
from harness import attach

torch.manual_seed(0)
STEPS, VOCABULARY, CONTEXT = 120, 64, 32
text = torch.randint(0, VOCABULARY, (20_000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % VOCABULARY


class Model(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 48)
        self.mix = nn.GRU(48, 48, batch_first=True)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0])


class Windows(torch.utils.data.Dataset):
    """Pieces of the text."""

    def __len__(self):
        return STEPS * 8

    def __getitem__(self, number):
        begin = (number * 37) % (len(text) - CONTEXT - 1)
        return text[begin : begin + CONTEXT + 1]


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
loader = torch.utils.data.DataLoader(Windows(), batch_size=8)

# %%
# ``fault`` strikes, the default detectors watch, and ``recover="repair"`` runs the struck step again.
# ``twin=True`` trains the same run without the fault afterwards, to compare with.

out = f"{tempfile.mkdtemp()}/mine"
fault = {"name": "weight_bit", "start": 60, "bit": 30}
with attach(model, optimizer, extra=[scheduler], fault=fault, recover="repair", out=out, twin=True) as run:
    for batch in run.steps(loader):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.observe(loss)

print("outcome:", run.outcome)
print("away from the twin by at most", abs(run.deviation).max())
for event in run.events:
    print(event)

# %%
# The folder is a results folder like any other: reports, incidents and post-mortems work on it.

sweep = analysis.open_sweep(out)
figure, panel = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for trial in sweep.trial.values:
    row = sweep.sel(trial=trial)
    panel.plot(row.step, row.loss, label=str(row.fault.values))
panel.set(xlabel="step", ylabel="training loss [nat/token]")
panel.legend()
plt.show()
print(analysis.incidents(out)[["first", "last", "symptoms", "action", "outcome"]].to_string(index=False))
