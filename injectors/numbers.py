"""Numbers that a fault sets, scales by or adds: whether the formats hold them that compute and keep them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.model.formats import FORMATS, round_to


def wrong_number(model: str, value: float, format: str, precision: str) -> Iterator[str]:
    """Why what is computed with `fault.value`, or written, cannot hold it: no reason, or one.

    `model` is what is done with it, `format` that of `fault.format`, `precision` the trial's.
    """
    if model == "noise" and value < 0:
        yield f"fault.value={value}: is the standard deviation of fault.model=noise; allowed: 0 or more"
        return
    state = torch.float64 if precision == "fp64" else torch.float32  # of weights, gradients, moments
    kept, most = torch.tensor(value, dtype=torch.float64).to(state), torch.finfo(state).max
    where = f"train.precision={precision}"
    # Too large a factor for a narrow format is a fault by itself; too large a number to set is only a wrong one.
    if model == "set" and format != "fp32" and bool(torch.isfinite(kept)):
        kept, where = round_to(kept, format), f"fault.format={format}"
        most = torch.finfo(FORMATS[format].dtype).max
    if not bool(torch.isfinite(kept)):
        other = ", or fault.model=infinity" if model == "set" else ""
        yield f"fault.value={value}: infinite in {where}; allowed: at most {most:.6g} in size{other}"
    elif value != 0 and bool(kept == 0):
        yield f"fault.value={value}: rounds to 0 in {where}; allowed: 0, or a number further from it"
