"""What the checks have done in processes of their own.

python -m tests.gpu.child pack DEVICE true|false FILE    trains one pack, and leaves all that it left
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from harness.model.determinism import make_deterministic
from tests.gpu.bench import Bench
from tests.gpu.bits import left_by_all


def main(task: str, device: str, is_dry: str, file: str) -> None:
    if task != "pack":
        raise SystemExit(f"error: {task}: no such task")
    bench = Bench(torch.device(device), json.loads(is_dry), Path(file).with_suffix(".json"))
    if bench.is_dry:
        torch.set_num_threads(1)
    make_deterministic(bench.device)
    torch.save(left_by_all(bench), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
