"""The examples of docs/attach.md: programs of at most 60 lines that say what their documentation says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis import open_sweep
from analysis.__main__ import main
from harness import attach
from tests.user_loop.loops import plain, shuffled

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples" / "attach").glob("*.py"))
FIGURES = {"convolutions": "vulnerability_map", "gpt2_campaign": "vulnerability_map"}
NEEDED = {"gpt2_trainer": ["accelerate"], "gpt2_campaign": ["transformers"], "grpo": ["datasets", "trl"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_figure_is_drawn(example: Path, tmp_path: Path) -> None:
    for package in NEEDED.get(example.stem, []):
        pytest.importorskip(package)
    out = tmp_path / "out"
    few = ["12"] if example.stem in FIGURES else []
    command = [sys.executable, str(example), str(out), *few]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    sweep = open_sweep(out)
    losses, begins = sweep["loss"].values, sweep["fault_start"].values
    golden = losses[sweep["fault"].values == "none"][0]
    for loss, begin in zip(losses, begins, strict=True):
        shared = int(begin) if begin == begin else len(loss)
        assert np.array_equal(loss[:shared], golden[:shared]), "the twin is the run up to the strike"
    assert (sweep["changes"].values[sweep["fault"].values != "none"] > 0).all()
    name = FIGURES.get(example.stem, "faulty_against_golden")
    assert main(["figure", name, str(out), str(tmp_path / "figure.svg")]) == 0
    documented = (ROOT / "docs" / "attach.md").read_text()
    assert f"examples/attach/{example.name}" in documented
    if not few:
        told = [text for kind, text in re.findall(r"```(\w*)\n(.*?)```", documented, re.DOTALL) if not kind]
        assert any(is_said(block.splitlines(), done.stdout.splitlines()) for block in told), done.stdout


def is_said(documented: list[str], printed: list[str]) -> bool:
    """Whether the last lines printed are these; whole numbers as they are, others to 2%, since another CPU sums in
    another order.
    """
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
    block, end = "\n".join(documented), "\n".join(printed[-len(documented) :])
    if number.sub("#", block) != number.sub("#", end):
        return False
    pairs = zip(number.findall(block), number.findall(end), strict=True)
    return all(
        ours == theirs if theirs.isdigit() else float(ours) == pytest.approx(float(theirs), rel=0.02)
        for theirs, ours in pairs
    )


def test_the_lines_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the README and of docs/attach.md, with a model and a loop that know nothing of them."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/attach.md")]
    snippets = re.findall(r"```python\n(.*?)```", pages[1], re.DOTALL)
    for snippet in snippets:
        compile(snippet, "docs/attach.md", "exec")
    first, alone, epochs = snippets[:3]
    (campaign,) = (snippet for snippet in snippets if "attach.campaign" in snippet)
    assert first in pages[0]
    monkeypatch.chdir(tmp_path)
    loop = plain()
    loop.loader = shuffled(120)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    names = {"model": loop.model, "optimizer": loop.optimizer, "scheduler": loop.extra[0], "scaler": scaler}
    names |= {"loader": loop.loader(), "my_step": lambda model, batch: loop.body(batch)}
    exec(first, names)
    assert open_sweep("runs/a")["changes"].values.tolist() == [1]
    exec("from harness import attach\n" + campaign.replace("200", "3"), names)
    assert open_sweep("runs/flips").sizes["trial"] == 4
    exec(alone, names | {"loss": torch.tensor(1.0)})
    assert attach.detach(loop.optimizer)
    names |= {"loader": shuffled(3)(), "validate": lambda model: None}
    with attach(loop.model, loop.optimizer, loop.extra, twin=True) as run:
        exec(epochs, names | {"run": run})
    assert len(run.signals["loss"]) == 60 and not run.deviation.any()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 60


def test_attach_needs_neither_hydra_nor_what_reads_results() -> None:
    """`import harness` takes no time, and `attach` brings torch along, and nothing that is heavy beside it."""
    heavy = ("hydra", "omegaconf", "optuna", "submitit", "xarray", "pandas", "zarr", "dask", "matplotlib", "scipy")
    heavy += ("transformers", "accelerate", "tokenizers", "seaborn", "plotly", "mlflow", "wandb", "jinja2", "rich")
    program = f"""
import sys
import harness
assert "torch" not in sys.modules and "numpy" not in sys.modules
from harness import attach
assert callable(attach) and callable(attach.campaign)
print([name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
