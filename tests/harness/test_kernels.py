"""Triton's programs: where they are used, in Triton's interpreter, compiled without a GPU, and traced on `meta`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from harness.basics import devices
from harness.kernels import attention, heads, launch, operators, use
from harness.kernels.blocks import BLOCK, cut
from harness.kernels.launch import written
from harness.model.attention import rotate
from harness.model.parameters import Layout
from harness.model.state import State
from harness.optim.clipping import COLUMNS, global_norm, scale_tensors, scale_trials, tensor_norms
from harness.optim.optimizers.adamw import AdamW
from tests.harness.optimizing import LONG, STACKED, Rig, different

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA_KINDS = (torch.device("cuda", 0), META)


def test_in_the_interpreter():
    """Whatever tests/harness/interpreted_kernels.py, and files like it, say of values; in one process, which has to
    load Triton and torch once."""
    files = sorted(str(file) for file in Path(__file__).parent.glob("interpreted_*.py"))
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    found = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert found.returncode == 0, found.stdout + found.stderr
    assert len(files) == 6 and re.search(r"\b[23]\d\d passed in", found.stdout), found.stdout


# --- where they are used -----------------------------------------------------------------------------------------


def test_a_cpu_has_none(monkeypatch):
    """Whoever asks Triton to interpret: results on a CPU are those of torch's own operations."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not use.are_used(CPU)


def test_an_accelerator_has_them(monkeypatch):
    monkeypatch.setattr(use, "can_build", lambda: True)
    assert use.is_installed()
    assert [use.are_used(device) for device in CUDA_KINDS] == [True, True]
    assert not use.are_used(torch.device("mps"))
    monkeypatch.setattr(use, "can_build", lambda: False)
    assert [use.are_used(device) for device in CUDA_KINDS] == [False, True]


def test_its_version_is_told_where_it_is_used(monkeypatch):
    assert use.version(CPU) is None and use.version(META) == triton.__version__
    monkeypatch.setattr(use, "is_installed", lambda: False)
    assert use.version(META) is None


def test_without_triton_there_are_none(monkeypatch):
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(use, "is_installed", lambda: False)
    assert not any(use.are_used(device) for device in (CPU, *CUDA_KINDS))


def test_what_triton_builds_with(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not use.can_build.__wrapped__()
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setattr(use.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert not use.can_build.__wrapped__()
    (tmp_path / "Python.h").write_text("")
    assert use.can_build.__wrapped__()


ABSENT = """
import sys
from collections import Counter
sys.modules["triton"] = None
import torch
from harness.basics import devices
from harness.kernels import use
from harness.optim.clipping import COLUMNS, global_norm
from tests.harness.optimizing import Rig, different
devices.CPUS = ()
assert not use.are_used(torch.device("cuda")) and not use.are_used(torch.device("meta"))
rig = Rig(different("adamw"), dtype=torch.float32)
rig.train(2)
assert not rig.weights.isnan().any() and global_norm(rig.gradients).isfinite().all()
assert "harness.kernels.programs" not in sys.modules
print("trained")
"""


def test_a_process_without_triton_trains():
    found = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True)
    assert found.stdout.strip() == "trained", found.stderr


# --- how arrays are cut ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [[(0, 1)], [(0, BLOCK)], [(0, BLOCK + 1), (2 * BLOCK, 5 * BLOCK)], [(16, 40)]])
def test_blocks_cover_their_spans_once(spans):
    blocks = cut(spans, 5 * BLOCK, CPU)
    firsts = blocks.firsts.tolist()
    for number, (start, stop) in enumerate(spans):
        of_span = blocks.table[:, firsts[number] : firsts[number + 1]].T.tolist()
        assert [column for left, right, _ in of_span for column in range(left, right)] == list(range(start, stop))
        assert all(right - left <= BLOCK and group == number for left, right, group in of_span)
    assert firsts[-1] == blocks.count


def test_vectors_are_read_where_no_other_tensor_stands():
    """Which is so in all our models, and not behind a stacked matrix of an odd size."""
    spans = [[(span.start, span.stop) for span in Layout(rows).spans] for rows in (LONG, STACKED)]
    whole, odd = (cut(each, Layout(rows).size, CPU) for each, rows in zip(spans, (LONG, STACKED), strict=True))
    assert whole.is_whole and not odd.is_whole
    assert not cut([(0, 100)], 100, CPU).is_whole  # the next row stands there


def test_tables_are_made_once():
    one, other = (cut([(0, 5000)], 5008, CPU) for _ in range(2))
    assert one is other and cut([(0, 5000)], 5008, META) is not one


# --- compiled, without a GPU -------------------------------------------------------------------------------------

TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}
TYPES |= {torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def specialised(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a launch for: types, numbers that are 1, and what is a multiple of 16."""
    names = triton.jit(written(name)).arg_names
    constants = dict(options)
    signature: dict[str, str] = {}
    aligned = []
    for place, (given, value) in enumerate(zip(names, arguments, strict=False)):
        if isinstance(value, Tensor):
            signature[given] = TYPES[value.dtype]
            aligned += [place] * (value.data_ptr() % 16 == 0)
        elif value == 1:
            constants[given] = 1
        else:
            signature[given] = "i32"
            aligned += [place] * (value % 16 == 0)
    launch = {key: constants.pop(key) for key in ("num_warps", "num_stages", "enable_fp_fusion") if key in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    assert signature.keys() == set(names)
    ordered = tuple((given, signature[given]) for given in names)
    return name, ordered, tuple(sorted(constants.items())), tuple(aligned), tuple(launch.items())


def built(key: tuple[Any, ...], capability: int) -> Any:
    """The program, compiled step by step; it was accepted by the GPU's assembler, too."""
    name, signature, constants, aligned, launch = key
    program = triton.jit(written(name))
    places = {(program.arg_names.index(given),): value for given, value in constants}
    hints = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=program, signature=dict(signature), constexprs=places, attrs=hints)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch))
    assert found.asm["cubin"]
    return found


def compiled(key: tuple[Any, ...], capability: int) -> str:
    """The program in the GPU's assembly."""
    return str(built(key, capability).asm["ptx"])


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """What Triton would be asked to compile, where data on a CPU takes a GPU's ways; nothing runs."""
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(use, "are_interpreted", lambda: True)
    monkeypatch.setattr(launch, "are_interpreted", lambda: False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[tuple[Any, ...]] = []

    class Program:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda *arguments, **options: found.append(specialised(self.name, arguments, options))

    monkeypatch.setattr(launch, "program", lambda name, is_interpreted: Program(name))
    return found


def pass_over(rows: Any, count: int, dtype: torch.dtype, measure: bool = True, first: int = 0) -> None:
    """Everything that is done to arrays in a step: for `count` rows, from row `first` on."""
    rig = Rig(different("adamw", count + first), rows, dtype)
    gradients, layout = rig.gradients[first:], rig.layout
    global_norm(gradients), tensor_norms(gradients, layout)
    scale_trials(gradients, torch.full((count,), 0.5), layout)
    scale_tensors(gradients, torch.full((count, len(rows)), 0.5), layout)
    rig.step(measure=measure)


@pytest.mark.parametrize("rows", [LONG, STACKED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capability", [80, 90])
def test_programs_compile(launches, rows, dtype, capability):
    """No contraction that is not written down, no quotient or root that is not rounded to nearest, no atomics."""
    pass_over(rows, 3, dtype)
    assert {name for name, *_ in launches} == {"adamw", "powers", "add_up", "scale"}
    for key in dict.fromkeys(launches):
        assembly = compiled(key, capability)
        assert not re.search(r"\b(atom|red)\.|\.approx|\.full\.|\.ftz", assembly), key[0]
        products = re.findall(r"\bfma\.rn\.(f\d\d)", assembly)
        each = BLOCK // (32 * launch.WARPS)  # elements of a thread, for each of which there are two
        expected = {"f32": 2 * each, "f64": 1} if dtype == torch.float32 else {"f64": 2 * each + 1}
        assert {kind: products.count(kind) for kind in set(products)} == (expected if key[0] == "adamw" else {})
        wide = r"ld\.global\.v4\.b32" if dtype == torch.float32 else r"ld\.global\.v2\.b64"
        if key[0] != "add_up":
            assert bool(re.search(wide, assembly)) == (rows is LONG or _of_whole_rows(key)), key[0]


def _of_whole_rows(key: tuple[Any, ...]) -> bool:
    return ("IS_WHOLE", True) in key[2]


def test_one_program_serves_all_packs(launches):
    """Wherever a row stands, and with however many: bits could differ between two programs."""
    for rows in (LONG, STACKED):
        pass_over(rows, 5, torch.float32)
        expected = list(launches)
        for count, first in ((1, 0), (1, 3), (2, 1), (16, 0), (64, 0)):
            launches.clear()
            pass_over(rows, count, torch.float32, first=first)
            assert launches == expected
        launches.clear()


def test_a_step_is_few_launches(launches):
    for measure, expected in ((True, ["adamw", "add_up"]), (False, ["adamw"])):
        rig = Rig(different("adamw", 3), LONG, torch.float32)
        rig.step(measure=measure)
        assert [name for name, *_ in launches] == expected
        launches.clear()


# --- heads of attention ----------------------------------------------------------------------------------------------


def pass_heads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All that is done to heads [R, B, H, T, D], by rotations and without: there, back, and in between."""
    trials, batch, count, context, head_dim = shape
    qkv = torch.zeros(trials, batch * context, 3 * count * head_dim, dtype=dtype)
    angles = torch.zeros(context, head_dim // 2, 2, dtype=torch.promote_types(dtype, torch.float32))
    others = torch.zeros(trials, batch, context, count, head_dim, dtype=dtype).transpose(2, 3)
    for given in ((angles,), ()):
        q, k, v = heads.split(qkv, context, count, *given)
        heads.join([q, k, v], *given)
        heads.join([others] * 3, *given)
    heads.turn([q, k], angles)
    heads.turn([q, k], angles, back=True)


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype"),
    [
        (80, 2, torch.float32),
        (90, 64, torch.float32),
        (90, 24, torch.float64),
        (80, 2, torch.bfloat16),
        (90, 64, torch.bfloat16),
        (90, 24, torch.float16),
    ],
)
def test_programs_of_heads_compile(launches, capability, head_dim, dtype):
    """Products are rounded as they are written, and what is read is in registers as it is needed, 16 bytes at once."""
    pass_heads((2, 1, 3, 64, head_dim), dtype)
    assert {name for name, *_ in launches} == {"heads"}
    for key in dict.fromkeys(launches):
        assembly, constants = compiled(key, capability), dict(key[2])
        assert not re.search(r"\b(atom|red)\.|\.approx|\.full\.|\.ftz|\bfma\.\w*\.?[fb]|\.shared|shfl", assembly)
        each = heads.TILE // (32 * launch.WARPS)  # elements of a thread, for each of which there are two products
        products = len(re.findall(r"\bmul\.rn\.f(?:32|64)\b", assembly))
        assert products == 2 * each * constants["TURNED"]
        at_once = set(re.findall(r"\b(?:ld|st)\.global\.([\w.]+)", assembly))
        if head_dim * dtype.itemsize % 16 == 0:
            assert at_once == {"v2.b64" if dtype == torch.float64 else "v4.b32"}


def test_one_program_of_heads_serves_all_packs(launches):
    pass_heads((5, 2, 3, 65, 8), torch.bfloat16)
    expected = list(launches)
    assert len(set(expected)) == 8
    for trials in (1, 2, 16, 64):
        launches.clear()
        pass_heads((trials, 2, 3, 65, 8), torch.bfloat16)
        assert launches == expected


@pytest.mark.parametrize("tokens_first", [False, True])
def test_operators_of_heads_say_what_they_return(monkeypatch, tokens_first):
    """As torch checks it; with stand-ins for the programs, which fill what they are to fill."""

    def stand_in(name: str, grid: Any, *arrays: Any, PARTS: int, **constants: Any) -> None:
        for target in {id(array): array for array in arrays[3 : 3 + PARTS]}.values():
            target.fill_(2.0)

    monkeypatch.setattr(heads, "launch", stand_in)
    qkv, angles = torch.randn(2, 15, 36), torch.randn(5, 2, 2)
    parts = [torch.randn(2, 3, 5, 3, 4).transpose(2, 3) for _ in range(3)]
    parts = parts if tokens_first else [part.contiguous() for part in parts]
    for table in (angles, None):
        for name, given in (("split_heads", (qkv, table, 5, 3)), ("join_heads", (*parts, table))):
            operator = getattr(torch.ops.stability_harness, name).default
            torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
    for back in (True, False):
        given = ([part.contiguous() for part in parts[:2]], angles, back)
        operator = torch.ops.stability_harness.turn_heads.default
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


# --- attention -------------------------------------------------------------------------------------------------------


def pass_attention(shape: tuple[int, ...], dtype: torch.dtype, tf32: bool = False) -> None:
    """Forwards and backwards, [R, B, H, T, D]: in one go, and with scores that are stored and read."""
    q, k, v = (torch.zeros(shape, dtype=dtype) for _ in range(3))
    found = attention.attended(q, k, v, 0.25, tf32)
    attention.attended_backward(found.mixed, found, q, k, v, 0.25, tf32)
    scores = attention.scores(q, k, 0.25, tf32)
    found = attention.mixed_by(scores, v, 0.25, tf32)
    dscores, _ = attention.mixed_by_backward(found.mixed, found, scores, v, 0.25, tf32)
    attention.scores_backward(dscores, q, k, 0.25, tf32)


ATTENTION = {"store_scores": 1, "attend": 2, "attend_back_queries": 3, "attend_back_keys": 3}  # launches of each


@pytest.mark.parametrize(
    ("dtype", "capability", "head_dim"),
    [
        (torch.float32, 90, 64),
        (torch.float32, 80, 128),
        (torch.float64, 90, 16),
        (torch.float64, 80, 128),
        (torch.bfloat16, 90, 64),
    ],
)
def test_attention_compiles(launches, dtype, capability, head_dim):
    """Into registers and little shared memory; quotients are rounded, no rounding is left out, nothing is atomic.

    float32 is multiplied as it is, and exponentials are those of torch's own kernels: approximate powers of two.
    """
    pass_attention((2, 1, 2, 64, head_dim), dtype)
    assert Counter(name for name, *_ in launches) == ATTENTION
    keys = list(dict.fromkeys(launches))
    assert len(keys) == len(ATTENTION), "scores that are stored and read are those of the same programs"
    for key in keys:
        assembly = compiled(key, capability)
        assert not re.search(r"\b(atom|red)\.|div\.approx|div\.full|rcp\.approx|tf32", assembly), key[0]
        spilled = re.search(r"(\d+) bytes spill stores", assembled(assembly, capability))
        assert spilled is not None and int(spilled[1]) == 0, key[0]


def assembled(assembly: str, capability: int) -> str:
    """What the assembler says of a program."""
    name = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
    asked = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", "-", "-o", os.devnull]
    found = subprocess.run(asked, input=assembly, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stderr


def test_attention_in_tf32_compiles(launches):
    pass_attention((2, 1, 2, 64, 16), torch.float32, tf32=True)
    for key in dict.fromkeys(launches):
        assert "tf32" in compiled(key, 90), key[0]


def test_one_program_of_attention_serves_all_packs(launches):
    pass_attention((3, 2, 4, 64, 16), torch.float32)
    expected = list(launches)
    for count in (1, 2, 5, 16, 64):
        launches.clear()
        pass_attention((count, 2, 4, 64, 16), torch.float32)
        assert launches == expected


# --- on `meta`, which has no numbers -------------------------------------------------------------------------------


class Traced(TorchDispatchMode):
    """What is called, none of it with a tensor of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = [x for x in [*args, *(kwargs or {}).values(), found] if isinstance(x, Tensor)]
        assert all(x.device == META for x in given), function
        self.called.append(str(function))
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_triton", [True, False])
def test_a_step_asks_nothing_of_the_host(monkeypatch, dtype, has_triton):
    """It copies nothing and looks at nothing, and its calls do not grow with R; with Triton and without."""
    monkeypatch.setattr(use, "is_installed", lambda: has_triton)

    def traced(count: int) -> list[str]:
        layout, state, trials = Layout(LONG), State(count), different("adamw", count)
        arrays = [state.add(name, torch.zeros(count, layout.size, dtype=dtype, device=META)) for name in ("w", "g")]
        optimizer = AdamW(layout, *arrays, state)
        optimizer.bind(trials)
        gradients = arrays[1].used
        rate, active = gradients.new_zeros(count), torch.ones(count, dtype=torch.bool, device=META)

        def step() -> tuple[Tensor, ...]:
            norm, tensors = global_norm(gradients), tensor_norms(gradients, layout)
            scale_trials(gradients, norm, layout)
            scale_tensors(gradients, tensors, layout)
            norms = optimizer.step(rate, active)
            assert norms is not None and norms.second_moment is not None
            return tensors, norm, norms.weights, norms.second_moment, norms.update

        step()  # which makes the tables
        with Traced() as calls:
            tensors, *others = step()
        assert tensors.shape == (count, len(LONG)) and all(x.shape == (count,) for x in others)
        assert all(x.dtype == torch.float64 for x in (tensors, *others))
        return calls.called

    called = traced(2)
    assert called == traced(64)
    assert any("stability_harness" in name for name in called) == has_triton
    assert not any("fused_adamw" in name for name in called)


def test_operators_say_what_they_change(monkeypatch):
    """As torch checks it, with a stand-in for each program that changes what that one does."""
    changed = {"adamw": (0, 2, 3), "powers": (1,), "add_up": (1,), "scale": (0,)}

    def stand_in(name: str, grid: Any, *arguments: Any, **constants: Any) -> None:
        for place in changed[name]:
            arguments[place].fill_(2.0)

    monkeypatch.setattr(operators, "launch", stand_in)
    blocks = cut([(0, 2000)], 2000, CPU, [0])
    arrays, few = [torch.randn(3, 2000) for _ in range(4)], torch.ones(3, dtype=torch.float64)
    numbers = (few > 0, few.float(), *[few] * 5, few[:, None], torch.ones(1, 2, dtype=torch.float64))
    given: dict[str, tuple[Any, ...]] = {
        "adamw": (*arrays, *numbers, blocks.table, True, True),
        "powers": (arrays[0], blocks.table, True, 3),
        "add_up": (torch.randn(3, 5, 7), torch.tensor([0, 4, 7], dtype=torch.int32)),
        "scale": (arrays[0], few.float()[:, None], blocks.table, True),
    }
    for name, arguments in given.items():
        operator = getattr(torch.ops.stability_harness, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


# --- without Triton --------------------------------------------------------------------------------------------------


def test_a_norm_in_float64_copies_little(monkeypatch):
    """torch casts all that it is given before it takes a norm in another type."""
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(use, "is_installed", lambda: False)
    gradients = torch.randn(3, 300_000, generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(record_shapes=True) as profiled:
        norm = global_norm(gradients)
    copied = [event.input_shapes[0] for event in profiled.events() if event.name == "aten::_to_copy"]
    assert copied and max(rows * columns for rows, columns in filter(None, copied)) <= 3 * COLUMNS
    torch.testing.assert_close(norm, gradients.double().norm(dim=1), rtol=1e-13, atol=0)


def test_float64_does_not_ask_torchs_kernel(monkeypatch):
    """On CUDA that reads a rate in float32. To rounding the step is that of a CPU."""
    rig = Rig(different("adamw", 4))
    rig.train(3)
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(use, "is_installed", lambda: False)
    monkeypatch.delattr(torch, "_fused_adamw_")
    other = Rig(different("adamw", 4))
    other.train(3)
    torch.testing.assert_close(other.weights, rig.weights, rtol=1e-12, atol=1e-12)


def test_turning_back_copies_no_table(monkeypatch):
    """What the backward pass turns by is there already."""
    monkeypatch.setattr(use, "is_installed", lambda: False)
    x = torch.zeros(2, 3, 4, 5, 6, device=META, requires_grad=True)
    turned, gradient = rotate(x, 10000.0, torch.float32), torch.zeros_like(x)
    with Traced() as calls:
        turned.backward(gradient)
    assert any("mul" in name for name in calls.called)
    assert not any("conj" in name or "clone" in name for name in calls.called)
