"""What torch is told before a pack is trained, and that it is told nothing for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness.basics import devices
from harness.model.determinism import make_deterministic, settings_kept
from harness.model.products import product
from harness.testing import engine

CUDA, CUDNN, ONEDNN = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
MATMUL = CUDA.matmul
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

FLOAT32: dict[str, Callable[[], str]] = {
    "all": lambda: torch.backends.fp32_precision,
    "cuBLAS": lambda: MATMUL.fp32_precision,
    "cuDNN": lambda: CUDNN.fp32_precision,
    "cuDNN conv": lambda: CUDNN.conv.fp32_precision,
    "cuDNN rnn": lambda: CUDNN.rnn.fp32_precision,
    "oneDNN matmul": lambda: ONEDNN.matmul.fp32_precision,
    "oneDNN conv": lambda: ONEDNN.conv.fp32_precision,
    "oneDNN rnn": lambda: ONEDNN.rnn.fp32_precision,
}
REST: dict[str, tuple[Callable[[], Any], Any]] = {  # how to read it, and what it has to be
    "deterministic": (torch.are_deterministic_algorithms_enabled, True),
    "warnings only": (torch.is_deterministic_algorithms_warn_only_enabled, False),
    "filled memory": (lambda: torch.utils.deterministic.fill_uninitialized_memory, False),
    "workspace": (lambda: os.environ.get(WORKSPACE), ":4096:8"),
    "benchmarks": (lambda: CUDNN.benchmark, False),
    "cuDNN attention": (CUDA.cudnn_sdp_enabled, False),
    "half sums in attention": (CUDA.fp16_bf16_reduction_math_sdp_allowed, False),
    "fp16 accumulation": (lambda: MATMUL.allow_fp16_accumulation, False),
    "fp16 sums": (lambda: MATMUL.allow_fp16_reduced_precision_reduction, False),
    "bf16 sums": (lambda: MATMUL.allow_bf16_reduced_precision_reduction, False),
}


def now() -> dict[str, Any]:
    splits = {
        "fp16 split-K": MATMUL.allow_fp16_reduced_precision_reduction_split_k,
        "bf16 split-K": MATMUL.allow_bf16_reduced_precision_reduction_split_k,
    }
    rest = {name: read() for name, (read, _) in REST.items()}
    return {name: read() for name, read in FLOAT32.items()} | rest | splits


@pytest.fixture(autouse=True)
def as_torch_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever other tests have left in this process."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = now()
    with settings_kept():
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.backends.fp32_precision = CUDNN.fp32_precision = MATMUL.fp32_precision = "none"
        ONEDNN.matmul.fp32_precision = ONEDNN.conv.fp32_precision = ONEDNN.rnn.fp32_precision = "none"
        yield
    assert now() == before


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for an accelerator is done for this CPU."""
    monkeypatch.setattr(devices, "CPUS", ())


def careless() -> None:
    """The fastest that torch can be told to be."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.fp32_precision = "tf32"
    MATMUL.fp32_precision = CUDNN.fp32_precision = CUDNN.conv.fp32_precision = "tf32"
    ONEDNN.matmul.fp32_precision, ONEDNN.conv.fp32_precision = "bf16", "tf32"
    CUDNN.benchmark = True
    CUDA.enable_cudnn_sdp(True)
    CUDA.allow_fp16_bf16_reduction_math_sdp(True)
    MATMUL.allow_fp16_accumulation = True
    MATMUL.allow_fp16_reduced_precision_reduction = MATMUL.allow_bf16_reduced_precision_reduction = True


@pytest.mark.parametrize("start", [lambda: None, careless], ids=["as torch starts", "careless"])
def test_everything_is_as_a_pack_needs_it(accelerator: None, start: Callable[[], None]) -> None:
    start()
    make_deterministic(engine.CPU)
    assert {name: read() for name, read in FLOAT32.items()} == dict.fromkeys(FLOAT32, "ieee")
    assert {name: read() for name, (read, _) in REST.items()} == {name: wanted for name, (_, wanted) in REST.items()}
    make_deterministic(engine.CPU)
    assert {name: read() for name, (read, _) in REST.items()} == {name: wanted for name, (_, wanted) in REST.items()}


@pytest.mark.parametrize("start", [lambda: None, careless], ids=["as torch starts", "careless"])
def test_everything_is_afterwards_as_it_was(accelerator: None, start: Callable[[], None]) -> None:
    start()
    before = now()
    with settings_kept():
        make_deterministic(engine.CPU)
        assert now() != before
    assert now() == before
    with pytest.raises(ZeroDivisionError), settings_kept():
        make_deterministic(engine.CPU)
        raise ZeroDivisionError
    assert now() == before


def test_what_follows_the_widest_setting_still_does(accelerator: None) -> None:
    """What was not said of a backend alone is not said of it afterwards."""
    with settings_kept():
        make_deterministic(engine.CPU)
    torch.backends.fp32_precision = "tf32"
    assert MATMUL.fp32_precision == CUDNN.fp32_precision == ONEDNN.matmul.fp32_precision == "tf32"


def test_an_operation_without_a_deterministic_kernel_raises(accelerator: None) -> None:
    """`put_` has none on any device."""
    x, index, source = torch.zeros(4), torch.tensor([1]), torch.ones(1)
    x.put_(index, source)
    make_deterministic(engine.CPU)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        x.put_(index, source)


def test_memory_is_not_filled(accelerator: None) -> None:
    """In torch's deterministic mode `empty` is full of NaN, at the cost of a pass, unless it is told otherwise."""
    torch.use_deterministic_algorithms(True)
    size = 3001  # nobody else's
    assert torch.empty(size).isnan().all()
    torch.ones(size)
    make_deterministic(engine.CPU)
    assert not torch.empty(size).isnan().all()


def test_a_cpu_keeps_what_concerns_accelerators_alone() -> None:
    before = now()
    make_deterministic(engine.CPU)
    changed = {name for name, value in now().items() if value != before[name]}
    assert changed >= {"all", "oneDNN matmul", "filled memory"}
    assert not changed & {*REST} - {"filled memory"}


def test_a_cpus_products_are_those_of_float32() -> None:
    """A CPU with instructions for bf16 multiplies float32 so where it is told to."""
    a, b = torch.randn(2, 1, 256, 256, generator=torch.Generator().manual_seed(0))
    exact = product(a, b)
    torch.set_float32_matmul_precision("medium")
    try:
        make_deterministic(engine.CPU)
        assert ONEDNN.matmul.fp32_precision == "ieee"
        assert torch.equal(product(a, b), exact)
    finally:
        torch.set_float32_matmul_precision("highest")
        ONEDNN.matmul.fp32_precision = MATMUL.fp32_precision = "none"


@pytest.mark.parametrize("legacy", [False, True])
def test_the_older_flag_can_be_read_afterwards(accelerator: None, legacy: bool) -> None:
    """torch refuses to where both ways of saying it were used: in a process of its own, because it is for good."""
    code = f"""if True:
        import torch
        from harness.basics import devices
        from harness.model.determinism import make_deterministic, settings_kept
        devices.CPUS = ()
        if {legacy}:
            torch.backends.cuda.matmul.allow_tf32 = True
        with settings_kept():
            make_deterministic(torch.device("cpu"))
        print(torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["True", "high"] if legacy else ["False", "highest"])


def test_a_workspace_of_ones_own_stays(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    make_deterministic(engine.CPU)
    assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.parametrize(("library", "splits"), [("Cublas", True), ("Cublaslt", False)])
def test_sums_in_parts_are_off_where_torch_can_multiply_without(
    accelerator: None, monkeypatch: pytest.MonkeyPatch, library: str, splits: bool
) -> None:
    """With cuBLAS torch refuses two-dimensional half products then."""
    chosen = getattr(torch._C._BlasBackend, library)
    monkeypatch.setattr(CUDA, "preferred_blas_library", lambda: chosen)
    make_deterministic(engine.CPU)
    assert MATMUL.allow_fp16_reduced_precision_reduction_split_k == splits
    assert MATMUL.allow_bf16_reduced_precision_reduction_split_k == splits
    assert not MATMUL.allow_fp16_reduced_precision_reduction and not MATMUL.allow_bf16_reduced_precision_reduction


def test_a_pack_has_the_bits_of_one_without(accelerator: None) -> None:
    trials = engine.different(3, clip=1.0, z_loss=1e-3)
    plain = engine.run(trials)
    make_deterministic(engine.CPU)
    strict = engine.run(trials)
    engine.assert_same_trials(plain, strict)
