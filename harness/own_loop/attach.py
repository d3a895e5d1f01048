"""`attach`: the door to all of this from a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from harness.config import ConfigError, Problems, Trial, checked, shown
from harness.config.limits import MOST_STEPS
from harness.own_loop.campaign import Body, Campaign, run_campaign
from harness.own_loop.course import Asked
from harness.own_loop.keeping import Keeping
from harness.own_loop.presets import Given, chosen_faults, settings
from harness.own_loop.run import Run


class _Door(type):
    """What needs a package that not everybody has is looked up when it is asked for."""

    @property
    def TrainerCallback(cls) -> Any:
        """Makes a `harness.own_loop.trainer.TrainerCallback`, by the arguments of `attach` that no Trainer has."""
        try:
            from harness.own_loop.trainer import TrainerCallback
        except ImportError as error:
            why = f"needs transformers, which cannot be imported ({error})"
            raise ConfigError(
                f"attach.TrainerCallback: {why}; allowed: pip install 'stability-harness[transformers]'"
            ) from None

        def made(
            fault: Given | Sequence[Given] | None = None,
            detect: str | Mapping[str, Any] | None = "default",
            recover: str | Path | Mapping[str, Any] | None = None,
            out: str | Path | None = None,
            extra: Sequence[Any] = (),
            seed: int = 0,
            facts: Mapping[str, Any] | None = None,
        ) -> Any:
            asked = _asked(nn.Identity(), (), extra, fault, detect, recover, None, seed, facts)
            return TrainerCallback(asked, None if out is None else Keeping(Path(out)))

        return made


class attach(metaclass=_Door):
    """Faults, detectors, a playbook and a golden twin for a model and a loop of one's own, while the block lasts.

        with attach(model, optimizer, extra=[scheduler, scaler], fault="weight_bit", recover="ladder") as run:
            for batch in run.steps(loader):
                loss = my_step(model, batch)  # forward, backward, clipping, optimizer.step(), scheduler
                run.observe(loss)

    `optimizer` may be a list, in the order in which they step, all in the same pass. `extra` is what else a step
    changes: objects with state_dict, random generators. `fault` is a name, a mapping with `name` and fields, a YAML
    file, or a list of those; `detect` names of detectors, a mapping with their constants, or None; `recover` a playbook
    by name, file or mapping, or None. `steps` is how many steps of the optimizer the run has; by default the length of
    its loader. With `twin` the golden twin is trained after the run; with None (the default) what `run.twin()` needs is
    kept where there is a fault. `facts` are what some faults ask for and no loop shows: rate(step), warmup, peak,
    tokens, token_counts. With `out` the run is written into a results folder, as a sweep is.

    After the block, or an exception in it, every hook and wrapper is gone. Raises ConfigError, a ValueError, for what
    cannot be, at once where it can be known.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        extra: Sequence[Any] = (),
        fault: Given | Sequence[Given] | None = None,
        detect: str | Mapping[str, Any] | None = "default",
        recover: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        steps: int | None = None,
        twin: bool | None = None,
        seed: int = 0,
        facts: Mapping[str, Any] | None = None,
    ):
        self._asked = _asked(model, optimizer, extra, fault, detect, recover, steps, seed, facts)
        self._twin, self._out = twin, None if out is None else Path(out)
        self._run: Run | None = None

    def __enter__(self) -> Run:
        self._run = Run(self._asked, self._twin, None if self._out is None else Keeping(self._out))
        return self._run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._run is not None
        self._run.close(is_whole=error is None)

    @staticmethod
    def campaign(
        body: Body,
        model: nn.Module,
        optimizer: Any,
        extra: Sequence[Any] = (),
        *,
        fault: Given | Sequence[Given],
        samples: int,
        out: str | Path,
        detect: str | Mapping[str, Any] | None = "default",
        recover: str | Path | Mapping[str, Any] | None = None,
        steps: int | None = None,
        seed: int = 0,
        facts: Mapping[str, Any] | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> Campaign:
        """Train `samples` different faults of one's own run, each from the step at which it begins.

        `body(run)` is the loop: `for batch in run.steps(loader): ...; run.observe(loss)`. It is called once; its loop
        goes through the golden run, then on from the start of each fault to the end, or until the run is its golden
        twin again, bit for bit, or not finite. What `fault` leaves open, such as tensor, element, bit and step (up to
        `until`), is drawn with the seed. `out` becomes an ordinary results folder with all of them, to which the same
        call again adds only what is missing; of a list of faults each may have `samples` of its own. `report(done,
        total)` follows each fault. The other arguments are those of `attach`. The model is left as it was. Raises
        ConfigError as `attach`, and for a loop that does not repeat itself.
        """
        asked = _asked(model, optimizer, extra, fault, detect, recover, steps, seed, facts)
        described, asked = asked.chosen, replace(asked, chosen=())
        if not described:
            raise ConfigError("fault=none: nothing to draw; allowed: a fault of values, such as weight_bit")
        return run_campaign(body, asked, described, samples, Path(out), report)


def _asked(
    model: nn.Module,
    optimizer: Any,
    extra: Sequence[Any],
    fault: Given | Sequence[Given] | None,
    detect: str | Mapping[str, Any] | None,
    recover: str | Path | Mapping[str, Any] | None,
    steps: int | None,
    seed: int,
    facts: Mapping[str, Any] | None,
) -> Asked:
    """All of it checked. Raises ConfigError with everything that is wrong."""
    problems, chosen, asked = Problems(), [], Trial()
    with problems.collect():
        _check_arguments(model, steps, seed)
    with problems.collect():
        chosen = chosen_faults(fault)
    with problems.collect():
        asked = settings(detect, recover)
    problems.check()
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    return Asked(model, optimizers, list(extra), chosen, asked, steps, seed, dict(facts or {}))


def _check_arguments(model: Any, steps: Any, seed: Any) -> None:
    problems = Problems()
    if not isinstance(model, nn.Module):
        problems.reasons[f"model={type(model).__name__}: no model; allowed: a torch.nn.Module"] = None
    if steps is not None and not (isinstance(steps, int) and not isinstance(steps, bool) and 1 <= steps <= MOST_STEPS):
        problems.reasons[f"steps={shown(steps)}: no number of steps; allowed: 1 to {MOST_STEPS}"] = None
    with problems.collect():
        checked("seed", Trial, "seed", seed)
    problems.check()


__all__ = ["Campaign", "ConfigError", "Run", "attach"]
