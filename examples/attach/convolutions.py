"""A campaign over a small convolutional net: which bits of which weights matter. `python convolutions.py OUT [N]`."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from harness import attach

STEPS, BATCH = 80, 32
SAMPLES = int(sys.argv[2]) if len(sys.argv) > 2 else 200


def pictures(count):
    """Bright discs and squares at random places, in noise."""
    across = torch.arange(16) - torch.randint(5, 11, (count, 1))
    down = torch.arange(16) - torch.randint(5, 11, (count, 1))
    labels = torch.randint(0, 2, (count,))
    far = torch.where(labels[:, None, None] == 0, across[:, None, :] ** 2 + down[:, :, None] ** 2, 9)
    square = torch.maximum(across.abs()[:, None, :], down.abs()[:, :, None]) ** 2
    inside = torch.where(labels[:, None, None] == 0, far, square) <= 9
    return inside[:, None] + 0.7 * torch.randn(count, 1, 16, 16), labels


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
    nn.Flatten(), nn.Linear(64, 2),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = torch.utils.data.TensorDataset(*pictures(STEPS * BATCH))


def body(run):
    for images, labels in run.steps(torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.observe(loss)


flips = {"name": "bit_flip", "start": 40, "weight": "tensor", "stratify": "bit"}
drift = {"name": "last_bit", "start": 40, "samples": 12}  # how far runs drift apart by themselves
options = {"fault": [flips, drift], "samples": SAMPLES, "detect": "finite", "out": sys.argv[1]}
told = attach.campaign(body, model, optimizer, **options)
print(f"{told.faults} faults in {told.steps} steps: python -m analysis campaign {sys.argv[1]}")
