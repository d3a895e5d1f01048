"""The commands of the README, of the first pages and of the how-to guides work as they stand there."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sweeps.claims.measured import METRICS, metric_of
from sweeps.claims.registered import MORE, OF_TRIALS, claims
from sweeps.claims.summaries import FORMS
from sweeps.commands.console import run
from tests.analysis.mitigated import Study
from tests.analysis.test_margins import SEEDS, SETS, ending, trial_of
from tests.documented import commands, words_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FIRST_HOUR = ROOT / "docs" / "start" / "first_hour.md"  # which tests/test_first_hour.py types from top to bottom
FILES = [
    ROOT / "README.md",
    *sorted({*(ROOT / "docs" / "start").glob("*.md")} - {FIRST_HOUR}),
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
]
PAGES = "\n".join(file.read_text() for file in FILES)
SWEEPS = list(dict.fromkeys(commands(PAGES, "sweep")))
REPORTS = commands(PAGES, "report") + commands(PAGES, "campaign")
QUICK = ["train.steps=8", "schedule.warmup=2", "fault.start=4", "train.validate_every=4", "model.depth=1"]
QUICK += ["model.context=16", "train.batch=2", "train.validate_tokens=16", "train.validate_between=16"]


def blocks(kind: str, page: str = "README.md") -> list[str]:
    """The blocks of code of this kind in a page."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for its, text in found if its == kind]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenized text is made once for all tests of this file; what sweeps in this process set, ends with them."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HYDRA_FULL_ERROR", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the folders that the README speaks of."""
    (tmp_path / "books").mkdir()
    for i in range(4):
        words = np.random.default_rng(i).choice(["to", "be", "or", "not", "question", "whether"], 4000)
        (tmp_path / "books" / f"{i}.txt").write_text(" ".join(words))
    (tmp_path / "shards").mkdir()
    np.random.default_rng(0).integers(0, 50257, 20_000).astype("<u2").tofile(tmp_path / "shards" / "all.bin")
    return tmp_path


def command(line: str, home: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Type a line of the README in `home`, and have its command run in this process; its standard output."""
    with contextlib.chdir(home), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setattr(sys, "argv", sys.argv)
        try:
            status = run([*words_of(line, home), *more])
        except SystemExit as stop:
            status = stop.code
    printed = capsys.readouterr()
    assert not status, f"{line}\n{printed.out}{printed.err}"
    return printed.out


def typed(line: str, home: Path) -> str:
    """Type a line in a shell in `home`, with the installed command; its standard output."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home)}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def started(line: str, home: Path) -> str:
    """Type a line of a command that goes on until Ctrl-C; the first line that it prints."""
    code = "import sys; from sweeps.commands.console import main; sys.exit(main())"
    words = [sys.executable, "-c", code, *words_of(line, home)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=home, env=environment) as process:
        try:
            assert process.stdout is not None
            return process.stdout.readline()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(timeout=120) == 130
            finally:
                process.kill()


@pytest.mark.parametrize("line", [line for line in SWEEPS if "model.start=" not in line])
def test_every_sweep_of_the_readme_can_be_planned(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_parts(home)
    if "slurm" in line and shutil.which("sbatch") is None:
        pytest.skip("needs Slurm (make slurm)") if not os.environ.get("CI") else pytest.fail("no sbatch")
    more = [] if "plan=true" in line else ["plan=true"]
    assert "to train in" in command(line, home, capsys, *more)


def test_a_second_stage_starts_from_the_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (second,) = (line for line in SWEEPS if "model.start=" in line)
    (first,) = (line for line in SWEEPS if "keep=weights" in line and "out=results/pretrained" in line)
    quick = [word for word in QUICK if not word.startswith("fault.")]
    assert "trained 6 of 6 trials" in command(first, home, capsys, *quick)
    assert "trained 48 of 48 trials" in command(second, home, capsys, *quick)


def test_the_grid_of_the_readme_runs_and_is_reported(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report as typed in a shell; the others in this process, and a smaller grid."""
    lines = [line for line in SWEEPS if "out=results/first" in line]
    (plan,), (grid, *_) = ([line for line in lines if ("plan=true" in line) is is_plan] for is_plan in (True, False))
    assert "12 trials asked for" in command(plan, home, capsys)
    assert "trained 48 of 48 trials" in command(grid, home, capsys, *QUICK)
    report = next(line for line in REPORTS if "results/first" in line)
    assert "Report: results/first/report.html" in typed(report, home)
    campaign = next(line for line in REPORTS if line.startswith("stability-harness campaign"))
    shutil.copytree(home / "results" / "first", home / words_of(campaign, home)[1])
    assert "Page: " in command(campaign, home, capsys)
    for line in commands(PAGES, "export"):
        if "mlflow" not in line or os.environ.get("CI") or importlib.util.find_spec("mlflow"):
            assert "trials" in command(line, home, capsys)
    watch = next(line for line in commands(PAGES, "watch") if "results/first" in line)
    assert started(watch, home).startswith("Watching results/first at http://127.0.0.1:")
    for line in (*commands(PAGES, "status"), *commands(PAGES, "cancel")):
        shutil.copytree(home / "results" / "first", home / words_of(line, home)[1], dirs_exist_ok=True)
        assert command(line, home, capsys)
    shutil.copytree(home / "results" / "first", home / "results" / "second")
    for name in ("figure", "retry", "merge", "remove", "verify", "incidents"):
        for line in commands(PAGES, name):
            assert command(line, home, capsys)


def test_the_margins_of_the_guide_are_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = Study(home / "results" / "margins")
    study.write_pack([trial_of(left_out, seed) for left_out in SETS for seed in SEEDS], ending)
    (line,) = commands(PAGES, "margins")
    assert "3 parts, 8 seeds, 1 condition" in command(line, home, capsys)
    assert (home / "margins.png").exists()


def test_laws_over_sizes_are_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in SWEEPS if "out=results/scales" in line)
    quick = [word for word in QUICK if not word.startswith("fault.")]
    assert "trained 160 of 160 trials" in command(line, home, capsys, *quick)
    told = commands(PAGES, "scaling")
    for line in told:
        if "stable_rate" not in line:  # after eight steps every rate is stable, or none
            assert "qk_norm" in command(line, home, capsys)
    assert (home / "loss.png").exists() and len(told) == 3


def test_larger_models_are_forecast(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the guide: what is sealed is trained afterwards, and then scored."""
    fit, test = (line for line in SWEEPS if "out=results/sizes" in line)
    told = commands(PAGES, "forecast")
    quick = [word for word in QUICK if not word.startswith(("fault.", "model.depth"))]
    assert "trained 108 of 108 trials" in command(fit, home, capsys, *quick)
    with contextlib.chdir(home):
        exec(next(text for text in blocks("python", "docs/howto/forecasts.md") if "runs.csv" in text), {})
    for line in (line for line in told if "--score" not in line and "--turns" not in line):
        said = command(line, home, capsys)
        assert "forecaster: " in said and ("Sealed in results/near.json: " in said) == ("--seal" in line)
    assert "trained 36 of 36 trials" in command(test, home, capsys, *quick)
    (score,) = (line for line in told if "--score" in line)
    assert "skill over persistence" in command(score, home, capsys)
    assert len(list((home / "results" / "figures").glob("*.svg"))) >= 3 and len(told) == 6
    (turns,) = (line for line in told if "--turns" in line)
    assert "turn" in command(turns, home, capsys)


def test_what_measures_cost_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in SWEEPS if "out=results/tax" in line)
    often = [word for word in QUICK if "validate_every" not in word]
    assert "trained 72 of 72 trials" in command(line, home, capsys, *often, "train.validate_every=2")
    for line, said in zip(commands(PAGES, "tax"), ("total", "price", "incidents"), strict=True):
        assert said in command(line, home, capsys, "--rounds", "2")


def test_every_line_of_the_readme_is_run_here(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But `make`, `pip` and their like, which every test has behind it."""
    assert "Train:" in command("stability-harness --help", home, capsys)
    assert {line.split()[1] for line in commands(PAGES)} == {
        *("--help", "sweep", "watch", "report", "campaign", "status", "cancel", "export", "incidents"),
        *("figure", "retry", "merge", "remove", "verify", "extend", "compare", "claims", "margins", "tax", "scaling"),
        "forecast",
    }
    plain = [text for file in FILES for text in blocks("", str(file.relative_to(ROOT)))]
    others = [line for text in plain for line in text.splitlines() if line not in commands(PAGES)]
    assert {line.split()[0] for line in others if line} == {"make", "pip", "source", "uv"}


GRIDS = {
    "one seed": ["model.width=32,64", "optim.lr=1e-3,1e-2"],
    "two seeds": ["model.width=32,64", "optim.lr=1e-3,1e-2", "seed=range(2)"],
    "one of everything, two seeds": ["model.width=32", "optim.lr=1e-3", "mitigation=none", "seed=range(2)"],
    "a rate at which all are lost": ["model.width=32", "optim.lr=1e-3,1e30", "seed=range(2)"],
}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_the_six_lines_of_python_open_a_quickstart(
    home: Path, capsys: pytest.CaptureFixture[str], grid: list[str]
) -> None:
    line = "stability-harness sweep study=quickstart"
    command(line, home, capsys, *(word for word in QUICK if not word.startswith("fault")), *grid)
    code, _ = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) == 6
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    words = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, done.stderr
    assert "trial" in done.stdout


def test_the_weights_of_the_readme_are_kept(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = [line for line in SWEEPS if "keep=weights" in line and "results/pretrained" not in line]
    command(line, home, capsys, *(word for word in QUICK if not word.startswith("fault")))
    _, code = blocks("python", "docs/howto/results.md")
    monkeypatch.chdir(home)
    exec(code, space := {})
    assert space["weights"]["blocks.0.attention.query"].shape == (64, 64)
    assert type(space["model"]).__name__ == "GPT2LMHeadModel"


def test_the_trials_of_the_guide_go_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in SWEEPS if "keep=state" in line]
    command(line, home, capsys, *(word for word in QUICK if not word.startswith("fault")))
    (line,) = commands(PAGES, "extend")
    line = line.replace("--steps 400", "--steps 16")
    assert "trained 1 of 1 trial" in command(line, home, capsys, "hydra.launcher.workers=1")


def test_the_claims_of_the_guide_can_be_planned(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the claim that it writes, whose keys are those of its table."""
    planned = {line: command(line, home, capsys, "plan=true") for line in commands(PAGES, "claims run")}
    assert [re.findall(r"\d+ claims, \d+ trials in all", said) for said in planned.values()] == [
        ["2 claims, 240 trials in all"],
        ["4 claims, 544 trials in all"],
    ]
    assert {line.split()[3] for line in commands(PAGES, "claims verdict")} == {"results/claims"}
    page = (ROOT / "docs" / "howto" / "claims.md").read_text()
    (text,) = blocks("yaml", "docs/howto/claims.md")
    (home / "mine" / "claim").mkdir(parents=True)
    (home / "mine" / "claim" / "qk_norm_at_depth.yaml").write_text(text)
    line = "stability-harness claims run qk_norm_at_depth out=o plan=true --config-dir mine"
    assert "1 claim, 96 trials in all" in command(line, home, capsys)
    keys, metrics = page.split("| metric | of each seed |")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", keys, flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == {*OF_TRIALS, *MORE} - {"seeds"}
    cells = re.findall(r"^\| (`.+?`) \((.+?)\) \|", metrics, flags=re.MULTILINE)
    told = {name.split("(")[0]: unit for cell, unit in cells for name in re.findall(r"`([^`]+)`", cell)}
    units = {name: metric.unit for name, metric in METRICS.items()} | {"rate_below": metric_of("rate_below(3)").unit}
    units |= {name: "ratio" if form.is_ratio else "share" for name, form in FORMS.items()}
    assert told == units
    assert all(f"`{name}`" in page for name in METRICS)


def test_the_lines_for_a_notebook_train(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python", "docs/howto/notebook.md")
    monkeypatch.chdir(home)
    words = [*QUICK, "fault=none,weight_bit", "optim.lr=1e-3", "mitigation=none", "hydra.launcher.workers=1"]
    exec(code.replace('"seed=range(3)"', f'"seed=range(3)", *{words}'), space := {})
    assert sorted(set(space["sweep"].width.values)) == [32, 64] and len(space["sweep"].trial) == 12


def own_parts(folder: Path) -> None:
    """The files of docs/howto/own_parts.md, at the paths that stand before them."""
    page = (ROOT / "docs" / "howto" / "own_parts.md").read_text()
    found = re.findall(r"^`(mine/[\w/]+\.yaml)`[^`]*?\n\n```yaml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert [Path(path).parent.name for path, _ in found] == ["mitigation", "fault", "playbook", "study"]
    for path, text in found:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def test_the_parts_of_the_guide_are_trained_and_compared(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_parts(home)
    assert "sign_flip" in command("stability-harness list --config-dir mine", home, capsys)
    lines = [line for line in SWEEPS if "--config-dir mine" in line]
    assert len(lines) == 2
    for line in lines:
        words = [*(word for word in QUICK if "warmup" not in word), "hydra.launcher.workers=1"]
        assert "trained 24 of 24 trials" in command(line, home, capsys, *words)
    (line,) = commands(PAGES, "compare")
    said = command(line, home, capsys)
    assert "playbook.name: - and gentle" in said and "sign_flip" in said


def test_the_claims_are_counted() -> None:
    known = claims()
    found = re.search(r"`stability-harness claims` has (\d+) sentences .*?\n(\d+) are decided", README)
    assert found is not None
    assert (int(found[1]), int(found[2])) == (len(known), sum(claim.trials is None for claim in known.values()))


def test_what_the_readme_names_exists() -> None:
    generated = {
        "commands.md",
        "keys.md",
        "dataset.md",
        "figures.md",
        "errors.md",
        "index.rst",
    }  # when the site is built
    for file in FILES:
        for path in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
            assert (file.parent / path).exists() or Path(path).name in generated, (file, path)
    for path in re.findall(r"`((?:harness|injectors|sweeps|analysis|docs|tests)/[\w./]+)`", PAGES):
        assert "NAME" in path or (ROOT / path).exists(), path


def test_the_readme_is_short_and_says_what_the_quickstart_says() -> None:
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 900
    (said,), (again,) = blocks("text"), blocks("text", "docs/start/first_result.md")
    assert said == again
