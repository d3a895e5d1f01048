"""A pack is planned, armed, trained and recovers with nothing installed but torch and numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import importlib.metadata, sys

class Refuse:
    names = {
        *("yaml", "safetensors", "tokenizers", "platformdirs", "google_crc32c", "xarray", "zarr", "hydra", "omegaconf"),
        *("pandas", "scipy", "rich", "pebble", "tqdm", "filelock", "dask", "optuna", "submitit", "jinja2", "pytest"),
    }

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not to be loaded")

sys.meta_path.insert(0, Refuse())
import torch
from harness.config import Data, Model, Train, Trial, sections
from harness.config.trial import Playbook
from harness.data.corpus import load_corpus
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from injectors import facts_of
from injectors.value import Value
from sweeps.planning.planner import make_plan
from sweeps.running.processes import ranks

parts = {
    "model": Model(width=16, head_dim=8, context=8),
    "train": Train(steps=6, batch=2, validate_tokens=16, validate_between=16),
    "detect": sections()["detect"]("finite"),
    "playbook": Playbook("own", '[{"detector": "any", "action": "re_execute", "limit": 1, "cool_down": 0}]'),
}
fault = Value(start=3, site="gradient", tensor="head", element=0, model="set", value=float("nan"))
trials = [Trial.of(parts, seed=1), Trial.of(parts, seed=1, fault=fault)]
corpus = load_corpus(trials[0].data, 8)
plan = make_plan(trials, (), None, "cpu", 1)
fault_schedule = FaultSchedule([None, fault.arm(facts_of(trials[1], corpus.train, corpus.counts))])
pack = Pack(trials, corpus, torch.device("cpu"), fault_schedule.first)
result = train(pack, fault_schedule, 3, lambda first, arrays: None)
assert len(plan.packs) == 1 and len(result.events[1]) == 1 and result.incidents[1], result
print(*result.outcome)
"""


def test_torch_and_numpy_are_enough() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["trained", "trained"]
