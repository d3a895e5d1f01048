"""Faults in a training loop of one's own, of any model of torch: `python examples/fault/user_loop.py`."""

from __future__ import annotations

import torch
from swapped_shards import SwappedShards

from injectors import Armed, Facts, formats_of, shapes_of
from injectors.value import Value

STEPS = 30
FAULTS = (
    Value(site="gradient", start=10, tensor="*.weight", bit=30),  # one bit of one element, drawn with the seed
    Value(site="weight", start=15, tensor="2.bias", elements=None, model="scale", value=4.0),
    SwappedShards(start=20, tensor="0.weight"),
)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = dict(model.named_parameters())
    facts = Facts(STEPS, shapes_of(weights), formats={"weight": formats_of(weights)}, seed=1)
    armed = [Armed(fault, facts) for fault in FAULTS]
    for step in range(STEPS):
        events = [event for each in armed for event in each.strike("weight", step, model.named_parameters())]
        x = torch.randn(64, 8)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        events += [event for each in armed for event in each.strike("gradient", step, gradients)]
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4g}")
        for event in events:
            print(f"  {event.site} {event.tensor} {event.index}: {event.before[:12]} -> {event.after[:12]}")


if __name__ == "__main__":
    main()
