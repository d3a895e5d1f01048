"""`sweeps.run`: a sweep from Python, such as in a notebook.

It is the command `stability-harness sweep` with exceptions in place of exit statuses. What it sets for its time in
Hydra, torch and the signals of this process is afterwards as it was before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import optuna
import torch
import xarray as xr
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from analysis.reading.open_sweep import open_sweep
from harness.basics.printing import count
from harness.basics.terminal import Terminal
from harness.config import ConfigError, Problems
from harness.model.determinism import settings_kept
from harness.storage.results_folder import FolderLost
from sweeps.commands.status import status_of
from sweeps.commands.sweep import explained, sweep
from sweeps.compose.hydra_calls import resolvers_put_back
from sweeps.compose.overrides import out_word

__all__ = ["ConfigError", "FolderLost", "SweepFailed", "run"]

_one_at_a_time = threading.Lock()


class SweepFailed(RuntimeError):
    """Packs have failed; the results of the others are stored in `out`. `packs`: the error of each, by its name."""

    def __init__(self, out: Path, packs: dict[str, str]):
        reasons = "; ".join(f"{pack}: {reason}" for pack, reason in packs.items())
        super().__init__(f"{count(len(packs), 'pack')} failed ({reasons}); traces in {out / 'errors'}")
        self.out, self.packs = out, packs


def run(
    overrides: Sequence[str] = (),
    *,
    study: str | None = None,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Train what the command `sweep` would with the same words, and open the results.

    Trials that `out` has already are not trained again. A second call in another thread waits.

    Args:
        overrides: `KEY=VALUE[,VALUE...]` as on the command line, without a shell's quotes.
        study: The key of this name.
        out: The key of this name, for a path that needs no quotes either.
        config_dir: A folder of the user's own studies, mitigations and faults, as --config-dir.
        progress: Whether anything is printed.

    Returns:
        The sweep, as `analysis.open_sweep` gives it.

    Raises:
        ConfigError: Wrong input, before anything is written.
        SweepFailed: Packs have failed, once the rest is trained.
        FolderLost: `out` was moved or removed meanwhile.
        KeyboardInterrupt: After Ctrl-C, from which the same call goes on.
    """
    arguments = _arguments(overrides, study, out, config_dir)
    console = Terminal(quiet=not progress)
    with _one_at_a_time, _left_as_it_was(), explained(arguments):
        status, settings = sweep(arguments, console)
    if status == 128 + signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)  # what this process does then is not ours to say
    if status >= 128:
        raise KeyboardInterrupt
    if status:
        raise SweepFailed(settings.out, status_of(settings.out).failed)
    return open_sweep(settings.out)


def _arguments(
    overrides: Sequence[str], study: str | None, out: str | Path | None, folder: str | Path | None
) -> list[str]:
    """The words of the command line. Raises ConfigError for those that ask it something else than to train."""
    problems = Problems()
    texts = [overrides] if isinstance(overrides, str) else list(overrides)
    with problems.collect():
        if isinstance(overrides, str):
            raise ConfigError(f"overrides={overrides!r}: one string; allowed: a list of them")
    for text in texts:
        with problems.collect():
            if not isinstance(text, str) or text.startswith("-"):
                raise ConfigError(f"overrides: {text!r}: not an override; allowed: 'KEY=VALUE', and config_dir=DIR")
            if text.replace(" ", "").lower() in ("plan=true", "plan=1", "plan=yes", "plan=on"):
                raise ConfigError(f"{text}: trains nothing that could be opened; allowed: leave it out")
    problems.check()
    arguments = [*texts, *([f"study={study}"] if study is not None else [])]
    if out is not None:
        arguments.append(out_word(out))
    return [*arguments, *([f"--config-dir={folder}"] if folder is not None else [])]


@contextlib.contextmanager
def _left_as_it_was() -> Iterator[None]:
    """A sweep as in a process of its own; what it sets there is afterwards as the rest of a notebook has it."""
    environment, verbosity = dict(os.environ), optuna.logging.get_verbosity()
    try:
        with resolvers_put_back(), _hydras_configurations(), _own_torch():
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def _hydras_configurations() -> Iterator[None]:
    """Alone: by a configuration of a notebook's, stored as `config` or `schema`, Hydra would check ours."""
    Plugins.instance()  # which puts some there once, for whoever comes later
    store = ConfigStore.instance()
    before = store.repo
    store.repo = {name: node for name, node in before.items() if name.startswith(("hydra", "_"))}
    try:
        yield
    finally:
        store.repo = before


@contextlib.contextmanager
def _own_torch() -> Iterator[None]:
    """What decides the bits of a pack that is trained in this process."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.enable_grad(), settings_kept():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
