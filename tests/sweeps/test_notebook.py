"""`sweeps.run`: a sweep from Python. Equal to the command's, with errors as exceptions, and nothing left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

import sweeps
from harness.model import determinism
from sweeps.running import local
from tests.sweeps import command


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `call` has it."""
    monkeypatch.setattr(local, "available_cores", lambda: 1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ConfigStore:
    """What Hydra knows in a process that has never started a sweep."""
    Plugins.instance()  # puts some there
    found = ConfigStore.instance()
    hydras = {name: node for name, node in found.repo.items() if name.startswith(("hydra", "_"))}
    ours = {"launcher": ("local.yaml", "slurm.yaml"), "sweeper": ("grid.yaml",)}
    for group, names in ours.items():
        kept = {name: node for name, node in hydras["hydra"].get(group, {}).items() if name not in names}
        hydras["hydra"] = {**hydras["hydra"], group: kept}
    monkeypatch.setattr(found, "repo", hydras)
    return found


def state() -> dict[str, Any]:
    """What a sweep could leave behind in a process."""
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "folder": os.getcwd(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "masked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "logging": (root.level, list(root.handlers), logging.root.manager.disable),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "kernels": {setting.name: setting.read() for setting in determinism.SETTINGS},
        "random": torch.random.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "hydra": (GlobalHydra.instance().is_initialized(), sorted(ConfigStore.instance().repo)),
        "launchers": sorted(ConfigStore.instance().repo["hydra"].get("launcher", {})),
        "resolvers": dict(BaseContainer._resolvers),
    }


def test_it_is_the_commands_sweep(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = command.tiny("seed=range(3)", "optim.lr=1e-3,1e-2")
    found = sweeps.run(line, out="it's [mine], C#")
    printed = capsys.readouterr()
    assert "trained 6 of 6 trials" in printed.out and not printed.err
    assert command.call(*line, "out=other").status == 0
    assert list(found.trial.values) and found.loss.dims == ("trial", "step")
    assert command.differing(command.results(empty / "it's [mine], C#"), command.results(empty / "other")) == []
    again = sweeps.run(line, out=empty / "it's [mine], C#", progress=False)
    assert capsys.readouterr() == ("", "") and len(again.trial) == 6


def test_nothing_is_left_behind(empty: Path, store: ConfigStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a notebook has set before; and none of that reaches the trials."""
    store.store(name="schema", node={"mine": 1})
    monkeypatch.setattr(BaseContainer, "_resolvers", dict(BaseContainer._resolvers))
    OmegaConf.register_new_resolver("now", lambda: "mine", replace=True)
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")  # some CPUs multiply in bf16 then
    try:
        with torch.no_grad():
            before = state()
            sweeps.run(command.tiny("seed=1,2"), out="out", progress=False)
            sweeps.run(command.tiny("seed=1,2"), study="grid", out="again", progress=False)
            with pytest.raises(sweeps.ConfigError):
                sweeps.run(["seed=no"])
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert store.load("schema.yaml").node == {"mine": 1}
    monkeypatch.undo()
    monkeypatch.chdir(empty)
    assert command.call(*command.tiny("seed=1,2", "out=plain")).status == 0
    for out in ("out", "again"):
        assert command.differing(command.results(empty / out), command.results(empty / "plain")) == []


def test_a_users_own_hydra_is_not_disturbed(empty: Path, store: ConfigStore) -> None:
    store.store(group="fault", name="theirs", node={"of": "somebody"})
    with initialize(version_base="1.3", config_path=None):
        sweeps.run(command.tiny(), out="out", progress=False)
        assert compose(overrides=["+fault=theirs"]).fault.of == "somebody"
    with pytest.raises(sweeps.ConfigError, match="fault=theirs: "):
        sweeps.run(["fault=theirs"])


def test_in_a_thread_and_with_workers(empty: Path) -> None:
    """Signals may be set in the main thread alone."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(
                sweeps.run(command.tiny("seed=range(8)", "hydra.launcher.workers=2"), out="out", progress=False)
            )
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found[0].trial) == 8


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["seed=no", "sed=1"], "seed=no: .*sed=1: unknown key; did you mean seed"),
        ("seed=1", "overrides='seed=1': one string; allowed: a list of them"),
        (["--help"], "overrides: '--help': not an override; allowed: 'KEY=VALUE', and config_dir=DIR"),
        ([1], "overrides: 1: not an override"),
        (["plan=true"], "plan=true: trains nothing that could be opened; allowed: leave it out"),
        (["mitigation=nonsense"], "mitigation=nonsense: "),
        (["hydra/launcher=nonsense"], "hydra/launcher=nonsense: "),
    ],
)
def test_wrong_input_raises_and_writes_nothing(empty: Path, overrides: Any, said: str) -> None:
    with pytest.raises(sweeps.ConfigError, match=f"(?s){said}"):
        sweeps.run(overrides)
    assert not list(empty.iterdir())


def test_a_folder_of_own_files(empty: Path) -> None:
    command.write_yaml(empty / "my files", "mitigation/own.yaml", "optim: {beta2: 0.9}")
    found = sweeps.run(command.tiny("mitigation=own"), out="out", config_dir="my files", progress=False)
    assert list(found.mitigation.values) == ["own"]
    with pytest.raises(sweeps.ConfigError, match="--config-dir=nowhere: no such folder"):
        sweeps.run(config_dir="nowhere")


def test_packs_that_fail(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are trained, and can be opened."""
    line = command.tiny("seed=range(8)")
    whole = sweeps.run(line, out="whole", progress=False)
    from sweeps.running import local as executor

    train, calls = executor.train_pack_safely, []

    def fail_first(job: Any, *others: Any) -> Any:
        calls.append(job)
        if len(calls) == 1:
            return executor.record_failure(job, "RuntimeError: out of luck", "Traceback\nRuntimeError: out of luck")
        return train(job, *others)

    monkeypatch.setattr(executor, "train_pack_safely", fail_first)
    with pytest.raises(sweeps.SweepFailed, match="1 pack failed .*RuntimeError: out of luck.*out/errors") as failed:
        sweeps.run(line, out="out", progress=False)
    assert list(failed.value.packs.values()) == ["RuntimeError: out of luck"]
    import analysis

    assert int(analysis.open_sweep(failed.value.out).complete.sum()) == 4
    monkeypatch.undo()
    monkeypatch.chdir(empty)
    assert len(sweeps.run(line, out="out", progress=False).trial) == len(whole.trial)


def test_an_interrupt_passes_and_the_same_call_goes_on(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = command.tiny("seed=range(8)")
    train = local.train_pack_safely

    def interrupt(job: Any, *others: Any) -> Any:
        train(job, *others)
        signal.raise_signal(signal.SIGINT)

    before = state()
    with monkeypatch.context() as patch:
        patch.setattr(local, "train_pack_safely", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sweeps.run(line, out="out", progress=False)
    assert state() == before
    assert len(sweeps.run(line, out="out", progress=False).trial) == 8


def test_a_folder_that_is_moved_meanwhile(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, line = local.train_pack_safely, command.tiny("seed=range(8)")

    def move(job: Any, *others: Any) -> Any:
        if not Path("elsewhere").exists():
            Path("out").rename("elsewhere")
        return train(job, *others)

    monkeypatch.setattr(local, "train_pack_safely", move)
    with pytest.raises(sweeps.FolderLost, match=f"out={empty / 'out'}: was moved or removed meanwhile"):
        sweeps.run(line, out="out", progress=False)
    assert not Path("out").exists()
    assert len(sweeps.run(line, out="elsewhere", progress=False).trial) == 8


def test_importing_it_loads_nothing(empty: Path) -> None:
    code = "import sys, sweeps; print('torch' in sys.modules, 'hydra' in sys.modules)\n"
    code += "from sweeps.running.job import Job; print(sweeps.run.__name__, callable(sweeps.run))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=empty)
    assert (done.stdout, done.stderr) == ("False False\nrun True\n", "")
    with pytest.raises(AttributeError, match="'sweeps' has no attribute 'nonsense'"):
        sweeps.nonsense  # noqa: B018


def test_workers_do_not_load_the_script_again(empty: Path) -> None:
    """Which would start the sweep once more."""
    line = command.tiny("seed=range(8)", "hydra.launcher.workers=2")
    (empty / "script.py").write_text(f"import sweeps\nprint(len(sweeps.run({line!r}, out='out').trial), 'trials')\n")
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=empty, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("8 trials\n") and ended.stdout.count("trials asked for") == 1
