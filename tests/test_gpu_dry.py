"""The checks of a GPU run to their end on a CPU; what they would measure is judged right, and tables are merged."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from harness.basics import devices
from harness.loop.graphs import USUAL_BEFORE
from tests.gpu import bench, engine, speed, wheels
from tests.gpu.bench import Bench, differing
from tests.gpu.engine import pack_of, trial_of
from tests.gpu.large import operations
from tests.gpu.marks import CHECKS, FAILED, GROUPS, LIMIT, MISSED, NOT_MEASURED, PASSED, Check, Mark, Row, row_of
from tests.gpu.peer import Peer, RealRotary
from tests.gpu.results import BEGIN, END, NOTHING, Results, line_of, merge, read
from tests.harness.recording import Emulated
from tests.plain_gpt import Rotary, copy_weights

ROOT = Path(__file__).resolve().parents[1]
TINY = {"width": 16, "head_dim": 8, "depth": 2, "context": 8, "batch": 2}
TINY |= {"source": "zipf", "vocabulary": 64, "length": 20_000}
ABOUT = {"date": "2026-01-02", "device": "a made-up GPU", "torch": "2.11.0", "python": "3.12.3"}


def typed(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m tests.gpu` with one thread, or with something done before."""
    start = ["-c", f"{code}\nimport sys\nfrom tests.gpu.__main__ import main\nsys.exit(main(sys.argv[1:]))"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(start if code else ["-m", "tests.gpu"]), *words, "--wheels", os.devnull]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three dry runs."""
    out = tmp_path_factory.mktemp("gpu")
    for group in GROUPS:
        done = typed(group, "--dry", "--out", str(out))
        assert done.returncode == 0, done.stdout + done.stderr
    return out


# --- dry runs ---------------------------------------------------------------------------------------------------------


def test_every_check_runs_and_none_claims_a_figure(dry: Path) -> None:
    rows = [row for results in read(dry) for row in results.rows]
    assert sorted(row.number for row in rows) == [check.number for check in CHECKS] == list(range(1, 19))
    assert {(row.told, *row.figures, *row.notes) for row in rows} == {("not measured: dry run",)}
    for group in GROUPS:
        lines = (dry / f"{group}.md").read_text().splitlines()
        assert [line.split(" | ")[2] for line in lines[4:]] == [NOT_MEASURED] * (len(lines) - 4)
        assert "dry run on a CPU" in lines[0] and torch.__version__ in lines[0]
    assert {path.suffix for path in dry.iterdir()} == {".json", ".md"}, "nothing else is left behind"


def test_tables_are_merged_into_the_page_and_again(dry: Path, tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    shutil.copy(ROOT / "docs" / "benchmarks.md", page)
    before = page.read_text()
    for _ in range(2):
        done = typed("merge", "--out", str(dry), "--into", str(page))
        assert done.returncode == 0, done.stderr
        text = page.read_text()
        assert text.split(BEGIN)[0] == before.split(BEGIN)[0] and text.split(END)[1] == before.split(END)[1]
        inside = text.split(BEGIN)[1].split(END)[0]
        assert inside.count(NOTHING) == 1 and inside.count("dry run on a CPU") == len(GROUPS)
        assert sum(line.startswith("| ") and line[2].isdigit() for line in inside.splitlines()) == len(CHECKS)
    once = text
    assert typed("merge", "--out", str(dry), "--into", str(page)).returncode == 0 and page.read_text() == once


BROKEN = """
import dataclasses, os, signal, time
import torch
from harness.training.pack import Pack
from tests.gpu import bits, marks, runner, states

def fails(bench):
    bench.tell("fp32", 0.0)
    raise ValueError("broken | on\\npurpose")

clip, chance = Pack.clip, torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))

def noisy(pack, *arguments):
    clip(pack, *arguments)
    pack.gradients.mul_(2 * torch.rand(pack.gradients.shape, generator=chance) - 1)

Pack.clip = noisy
bits.check_2 = fails
bits.check_4 = lambda bench: os.kill(os.getpid(), signal.SIGKILL)
states.check_15 = lambda bench: time.sleep(60)
runner.CHECKS = [dataclasses.replace(each, seconds=1.0 if each.number == 15 else 45.0) for each in marks.CHECKS]
"""


def test_a_check_that_fails_is_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    """Errors, ends of processes and limits of time; and steps with some chance in them, which checks of bits see."""
    some = ("1", "2", "3", "4", "5", "6", "7", "15", "18")
    done = typed("bits", "--dry", "--only", *some, "--out", str(tmp_path), code=BROKEN)
    assert done.returncode == 1, done.stderr
    told, unlike = {row.number: row.told for row in read(tmp_path)[0].rows}, "failed: in a dry run: not as it should be"
    assert told.pop(2) == "failed: ValueError: broken | on purpose"
    assert told.pop(4) == "failed: its process ended with -9; see 4.log"
    assert told.pop(15).startswith("failed: in a dry run: stopped after 1 s: not as documented, ")
    assert told.pop(5) == f"{unlike}: struck steps, NaN row, disarmed injector, attached tap"
    assert told.pop(7) == f"{unlike}: loss after 50 steps", "gradients were as they should be"
    assert told.pop(18) == f"{unlike}: values"
    assert told == {number: f"{unlike}: {', '.join(CHECKS[number - 1].marks)}" for number in (1, 3, 6)}
    assert "broken \\| on purpose" in (tmp_path / "bits.md").read_text()
    assert "in fails" in (tmp_path / "2.log").read_text()


STAND_IN = """
import contextlib, inspect, types, warnings
import torch
from tests.gpu import bench, engine
from harness.training.pack import Pack

class Event:
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self): ...
    def elapsed_time(self, other):
        return 1.0

class Stream:
    def wait_stream(self, other):
        assert isinstance(other, Stream)

class Graph:
    def replay(self): ...

cuda, modes = torch.cuda, ["default"]
bench.Bench.is_cuda = property(lambda self: True)
cuda.synchronize = cuda.reset_peak_memory_stats = lambda device=None: None
cuda.set_sync_debug_mode = modes.append
cuda.Event, cuda.Stream, cuda.CUDAGraph, cuda.current_stream = Event, Stream, Graph, Stream
cuda.graph = cuda.stream = lambda where: contextlib.nullcontext()
cuda.memory_allocated, cuda.max_memory_allocated = lambda device=None: 10, lambda device=None: 30
cuda.get_device_properties = lambda device: types.SimpleNamespace(total_memory=2**30)
cuda.device_count = lambda: 1
kinds = torch.profiler.ProfilerActivity
torch.profiler.ProfilerActivity = types.SimpleNamespace(CPU=kinds.CPU, CUDA=kinds.CPU)
train, clip = engine.train, Pack.clip

def with_graphs(*arguments, graphs=True, **options):
    return train(*arguments, **options)

def waits(pack, *arguments):
    if modes[-1] == "error" and pack.planned[0].train.precision == "bf16":
        raise RuntimeError("called a synchronizing CUDA operation")
    if modes[-1] == "warn":
        warnings.warn("called a synchronizing CUDA operation")
    clip(pack, *arguments)

engine.train, Pack.clip = with_graphs, waits

import sys
from tests.gpu.__main__ import main

for group, numbers in {"bits": "2 5 16", "speed": "8 9 10 13", "large": "11 12 14"}.items():
    print("status", main([group, *sys.argv[1:], "--only", *numbers.split()]))
sys.exit()
"""


def test_ways_of_a_gpu_are_walked_with_a_stand_in_for_one(tmp_path: Path) -> None:
    """What checks ask of torch.cuda, each by a function that does nothing; healthy steps that wait in bf16 alone."""
    done = typed("--dry", "--out", str(tmp_path), code=STAND_IN)
    assert [line for line in done.stdout.splitlines() if "status" in line] == ["status 1", "status 0", "status 0"]
    told = {row.number: row.told for results in read(tmp_path) for row in results.rows}
    assert told.pop(2) == "failed: in a dry run: not as it should be: bf16"
    assert set(told.values()) == {"not measured: dry run"}


def test_a_check_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """As where this process must not be forked; the rows of others stay."""
    done = typed("speed", "--dry", "--fresh", "--only", "9", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row.number, row.told) for row in read(tmp_path)[0].rows] == [(9, "not measured: dry run")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = typed("bits", "--out", str(tmp_path))
    assert done.returncode == 1 and "error: no GPU that torch can use" in done.stderr and not list(tmp_path.iterdir())


def test_the_figure_can_be_planned() -> None:
    done = typed("figure", "--plan")
    assert done.returncode == 0 and "420 trials asked for" in done.stdout and " on cuda (rough)" in done.stdout


# --- marks ------------------------------------------------------------------------------------------------------------

MARKS = [(check, name) for check in CHECKS for name, mark in check.marks.items() if mark != Mark()]


def at_the_marks(check: Check) -> dict[str, float]:
    """Figures that pass, none of them by much."""
    ends = {name: mark.most if mark.least is None else mark.least for name, mark in check.marks.items()}
    return {name: 0.0 if end is None else end for name, end in ends.items()}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.number)
def test_figures_at_their_marks_pass(check: Check) -> None:
    row = Row(check.number, at_the_marks(check))
    assert (row.verdict, row.told) == (PASSED, PASSED)
    assert Row(check.number, row.figures, error="ValueError: x").told == "failed: ValueError: x"
    assert Row(check.number, why="one GPU").told == "not measured: one GPU"
    assert row_of(json.loads(json.dumps(row.as_json()))).told == PASSED


@pytest.mark.parametrize(("check", "name"), MARKS, ids=lambda part: getattr(part, "number", part))
def test_a_figure_beyond_its_mark_is_a_miss(check: Check, name: str) -> None:
    mark, passing = check.marks[name], at_the_marks(check)
    beyond = [] if mark.most is None else [mark.most * 1.001 or 1.0]
    beyond += [] if mark.least is None else [mark.least * 0.999]
    for value in (*beyond, math.nan, math.inf if mark.most is not None else -math.inf):
        row = Row(check.number, passing | {name: value})
        assert (row.verdict, row.told) == (MISSED, f"missed: {name}"), value
        assert Row(check.number, {name: value}, why="no time").verdict == MISSED, "outweighs what is not measured"
    lacking = {other: value for other, value in passing.items() if other != name}
    assert Row(check.number, lacking, why="no time").told == "not measured: no time"
    assert Row(check.number, passing | {name: beyond[0]}, error="x").verdict == FAILED


def test_marks_are_those_of_the_issue() -> None:
    ends = {check.number: {(mark.least, mark.most) for mark in check.marks.values()} for check in CHECKS}
    assert ends == {
        1: {(None, 1e-9)},
        **dict.fromkeys((2, 3, 4, 5, 6, 16, 17), {(None, 0)}),
        7: {(None, 2e-6), (None, 1e-4)},
        8: {(None, 330), (0.95, None)},
        9: {(0.70, None)},
        10: {(least, None) for least in (8, 5, 3, 50, 25, 10)},
        11: {(None, 1.15), (0.85, 1.15)},
        12: {(0.95, None), (0.40, None)},
        13: {(None, 1.01)},
        14: {(None, 1e-6)},
        15: {(None, 0), (None, 0.3), (None, 2.0**-8), (None, None)},
        18: {(None, 0), (None, None)},
    }
    for group in GROUPS:
        at_once = 2 if group == "bits" else 1  # which run side by side
        assert sum(check.seconds for check in CHECKS if check.group == group) <= at_once * 1.2 * LIMIT <= at_once * 648


def test_measured_figures_stand_in_the_page_without_the_line_that_there_are_none(tmp_path: Path) -> None:
    """Misses and errors included, whatever stands in them."""
    rows = [Row(check.number, at_the_marks(check)) for check in CHECKS if check.group == "bits"]
    rows[1] = Row(2, {"fp32": 3.0, "bf16": 0.0}, notes=["fp32: a.py:1 | <b>"], why="30 s were left")
    rows[2] = Row(3, error="RuntimeError: a\nb")
    Results("bits", ABOUT, rows).write(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"a\n\n{BEGIN}\n\n{NOTHING}\n\n{END}\n\nb\n")
    for _ in range(2):
        merge(read(tmp_path), page)
        text = page.read_text()
        assert NOTHING not in text and text.startswith(f"a\n\n{BEGIN}\n\n`python") and text.endswith(f"{END}\n\nb\n")
    assert "2026-01-02: a made-up GPU, torch 2.11.0, Python 3.12.3" in text
    assert "| fp32: 3; bf16: 0; fp32: a.py:1 \\| &lt;b> | 0 | missed: fp32 |" in text
    assert "| not measured | 0 | failed: RuntimeError: a b |" in text
    assert f"| {PASSED} |" in line_of(rows[0])


@pytest.mark.parametrize("text", ["no markers", f"{BEGIN}\n{BEGIN}\n{END}", f"{END}\n{BEGIN}"])
def test_a_page_without_its_markers_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit, match="needs the lines"):
        merge([Results("bits", ABOUT, [])], page)
    assert page.read_text() == text
    with pytest.raises(SystemExit, match="no results"):
        read(tmp_path)


# --- what the checks measure with -------------------------------------------------------------------------------------


def test_numbers_that_differ_are_counted() -> None:
    one = {"a": torch.tensor([1.0, math.nan, 0.0]), "b": torch.tensor([1, 2])}
    same = {"a": torch.tensor([1.0, -math.nan, 0.0]), "b": torch.tensor([1, 2])}
    assert differing(one, same) == 0
    assert differing(one, same | {"a": torch.tensor([1.0, math.nan, -0.0])}) == 1
    assert differing(one, same | {"a": torch.tensor([1.0 + 2**-23, 0.0, 1.0])}) == 3
    assert differing(one, {"a": same["a"]}) == 2 and differing(one, same | {"a": torch.zeros(4)}) == 4
    assert bench.relative(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_steps_and_pieces_of_validation_that_are_replayed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(engine, "recordings", lambda device: Emulated)
    fields = {"steps": 8, "validate_every": 1, "validate_tokens": 1, "validate_between": 1}
    trials = [trial_of(seed=seed, **fields, **TINY) for seed in range(2)]
    graph, eager = (
        engine.train_pack(pack_of(trials, torch.device("cpu")), graphs=graphs, block=8) for graphs in (True, False)
    )
    assert (graph.steps, graph.pieces) == (8 - 1 - USUAL_BEFORE, 1 + 8 - USUAL_BEFORE)
    assert eager.steps == eager.pieces == 0
    assert differing(graph.left_by(0), eager.left_by(0)) == 0


def test_kernels_and_the_time_in_which_one_runs() -> None:
    def event(begin: float, seconds: float, kind: str = "kernel") -> dict[str, object]:
        return {"ph": "X", "cat": kind, "ts": begin, "dur": seconds}

    events = [event(10, 4), event(0, 4), event(2, 4), event(3, 1), event(12, 1), event(7, 1, "gpu_memcpy")]
    events += [event(0, 100, "cpu_op"), {"ph": "M", "name": "process_name"}]
    assert len(speed.spans(events, speed.KERNELS)) == 5
    assert speed.busy(speed.spans(events, speed.KERNELS)) == pytest.approx(10 / 14)
    assert speed.busy(speed.spans(events, speed.ALL)) == pytest.approx(11 / 14)
    with pytest.raises(RuntimeError, match="seen nothing of kernel"):
        speed.spans(events[5:], speed.KERNELS)


@pytest.mark.parametrize("kind", ["eager", "compiled", "replayed", "captured"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peer_is_the_trial_in_plain_torch(tmp_path: Path, kind: str, precision: str) -> None:
    """The same loss with the same weights, and it learns."""
    trials = [trial_of(seed=seed, precision=precision, lr=1e-2, **TINY) for seed in range(2)]
    pack = pack_of(trials, torch.device("cpu"))
    peer = Peer(Bench(pack.device, True, tmp_path / "figures.json"), trials[1], kind)
    copy_weights(peer.model, pack, 1)
    batch = pack.batch(0)
    pack.begin(0)
    ours = pack.learn(pack.what_trains(batch, 0)[0])[1]
    torch.testing.assert_close(peer.loss(batch[1]).detach(), ours, rtol=1e-6 if precision == "fp32" else 4e-3, atol=0)
    peer.batches = batch[1].expand(len(peer.batches), -1, -1)
    losses = [float(peer.step()) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1
    assert peer.step_seconds(0.0) > 0


def test_the_large_trial_is_gpt_2_small(tmp_path: Path) -> None:
    """124M weights of matrices; as many operations a token as nanoGPT counts, of which 6 are for each of them."""
    shape = {"width": 768, "depth": 12, "head_dim": 64, "context": 1024, "batch": 8, "tied_head": True}
    trial = trial_of(**shape, source="zipf", vocabulary=50257)
    assert operations(trial) / (8 * 1024) == pytest.approx(6 * 123.5e6 + 12 * 12 * 768 * 1024, rel=1e-3)
    peer = Peer(Bench(torch.device("cpu"), True, tmp_path / "figures.json"), trial_of(tied_head=True, **TINY), "eager")
    assert peer.model.head.weight is peer.model.embedding.weight


def test_rotary_positions_in_real_arithmetic_are_the_plain_ones() -> None:
    x = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(RealRotary(7, 6)(x), Rotary(7, 6)(x))


def test_torch_is_for_the_harness_again_after_a_peer() -> None:
    """A peer has torch as it came, whatever was set since."""
    others = {bool: lambda value: not value, tuple: lambda value: tuple(not each for each in value)}
    changed = [others[type(value)](value) for value in bench.USUAL]
    try:
        for (_, write), value in zip(bench.SETTINGS, changed, strict=True):
            write(value)
        changed = [read() for read, _ in bench.SETTINGS]
        assert all(value != usual for value, usual in zip(changed, bench.USUAL, strict=True))
        with bench.as_usual():
            assert [read() for read, _ in bench.SETTINGS] == bench.USUAL
        assert [read() for read, _ in bench.SETTINGS] == changed
    finally:
        for (_, write), value in zip(bench.SETTINGS, bench.USUAL, strict=True):
            write(value)


def test_wheels_stand_behind_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    made_up = {"made_up_package.py": "here = True\n", "numpy/__init__.py": "raise ImportError\n"}
    about = {"METADATA": "Metadata-Version: 2.1\nName: made-up-package\nVersion: 1.0\n"}
    about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    about["RECORD"] = ""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "made_up_package-1.0-py3-none-any.whl", "w") as file:
        for name, text in {**made_up, **{f"made_up_package-1.0.dist-info/{n}": x for n, x in about.items()}}.items():
            file.writestr(name, text)
    before = list(sys.path)
    wheels.put_on_path(folder, wheels.NEEDED)
    assert sys.path == before, "nothing is missing"
    assert wheels.lacking(["made_up_package", "numpy"]) == ["made_up_package"]
    wheels.put_on_path(folder, ["made_up_package"])
    assert sys.path[:-1] == before and wheels.lacking(["made_up_package"]) == []
    done = subprocess.run([sys.executable, "-c", "import numpy, made_up_package"], env={"PYTHONPATH": ""}, check=False)
    assert done.returncode, "no other process sees them unless it is told the path"


def test_files_and_functions_are_short() -> None:
    for file in (ROOT / "tests" / "gpu").glob("*.py"):
        assert file.read_text().count("\n") <= 400, file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 60, f"{file}: {node.name}"
