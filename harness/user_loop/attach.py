"""`attach`: faults, detectors, playbooks and golden twins for a training loop of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn

from harness.basics.errors import nearest
from harness.config import ConfigError, Problems, Trial, checked, shown
from harness.config.limits import MOST_STEPS
from harness.recovery.base import Alarm
from harness.user_loop.campaign import Body, CampaignCounts, run_campaign
from harness.user_loop.presets import Given, chosen_faults, settings
from harness.user_loop.results_writer import Keeping
from harness.user_loop.run import AttachedRun
from harness.user_loop.steps import AttachConfig, detach

OnAlarm = Callable[[Alarm], Any]
KEEP = ("all", "alarms")
P = ParamSpec("P")
R = TypeVar("R")


def _known_options(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """An option that `name` does not have is a ConfigError, which says what was meant."""

    def checking(function: Callable[P, R]) -> Callable[P, R]:
        known = [option for option in inspect.signature(function).parameters if option != "self"]

        @functools.wraps(function)
        def called(*args: P.args, **options: P.kwargs) -> R:
            reasons = (
                f"{name}({option}=): unknown option; {nearest(option, known)}allowed: {', '.join(known)}"
                for option in options
                if option not in known
            )
            if listed := [*reasons]:
                raise ConfigError(*listed)
            return function(*args, **options)

        return called

    return checking


class Attach:
    """What `attach` is: a function, with `campaign` and adapters for trainers as its attributes."""

    @_known_options("attach")
    def __call__(
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
        on_alarm: OnAlarm | None = None,
        keep: str = "all",
    ) -> AttachedRun:
        """Faults, detectors, a playbook and a golden twin for a model and a loop of the user's own.

            with attach(model, optimizer, extra=[scheduler, scaler], fault="weight_bit", recover="ladder") as run:
                for batch in run.steps(loader):
                    loss = my_step(model, batch)  # forward, backward, clipping, optimizer.step(), scheduler
                    run.observe(loss)

        Without a `with` block: `run = attach(...)`, and `run.close()` at the end. For alarms alone a loop needs
        `run = attach(model, optimizer, on_alarm=print)` and, in each step, `run.observe(loss)`. After the block, or an
        exception in it, every hook and wrapper is gone.

        Args:
            model: The user's own, also compiled or in DistributedDataParallel.
            optimizer: One of torch's form, or a list; each may have a backward pass of its own, and need not step in
                every pass.
            extra: What else a step changes: objects with state_dict, random generators.
            fault: A name, a mapping with `name` and fields, a YAML file, a fault, or a list of those; None: none.
            detect: Names of detectors joined by +, a mapping with their constants, `default`, or None.
            recover: A playbook by name, file or mapping, or None.
            out: A results folder, into which the run is written as a sweep is.
            steps: How many steps of the optimizer the run has; by default the length of its loaders.
            twin: Whether the golden twin is trained after the run; None: if `run.twin()` asks for it.
            seed: From which follows what a fault draws.
            facts: What some faults ask for and no loop shows: rate(step), warmup, peak, tokens, token_counts.
            on_alarm: Called with each step of the run that is an alarm (`harness.recovery.base.Alarm`).
            keep: With `alarms` the run is written only once there is one; with `all` always.

        Returns:
            The run: `run.steps(loader)`, `run.observe(loss)`, `run.twin()`, `run.outcome`, ...

        Raises:
            ConfigError: What cannot be, at once where it can be known. It is a ValueError.
        """
        asked = _asked(model, optimizer, extra, fault, detect, recover, steps, seed, facts, on_alarm, twin, out)
        if keep not in KEEP:
            raise ConfigError(f"keep={shown(keep)}: no choice; allowed: {', '.join(KEEP)}")
        return AttachedRun(asked, twin, None if out is None else Keeping(Path(out), keep == "alarms"))

    @_known_options("attach.campaign")
    def campaign(
        self,
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
    ) -> CampaignCounts:
        """Train `samples` different faults of the user's run, each from the step at which it begins.

        The body's loop goes through the golden run, the same once more to see that it repeats itself, then on from the
        start of each fault to the end, or until the run is its golden twin again, bit for bit, or not finite. The model
        is left as it was. The other arguments are those of `attach`.

        Args:
            body: Called once, with the run: `for batch in run.steps(loader): ...; run.observe(loss)`.
            model: As in `attach`.
            optimizer: As in `attach`.
            extra: As in `attach`.
            fault: One, or a list. What it leaves open, such as tensor, element, bit and step (up to `until`), is drawn
                with the seed.
            samples: How many faults; of a list each may have `samples` of its own.
            out: An ordinary results folder with all of them, to which the same call again adds only what is missing.
            detect: As in `attach`.
            recover: As in `attach`.
            steps: As in `attach`.
            seed: From which follows what is drawn.
            facts: As in `attach`.
            report: Called with (done, total) after each fault.

        Returns:
            How many faults were trained, and in how many steps.

        Raises:
            ConfigError: As `attach`, and for a loop that does not repeat itself.
        """
        asked = _asked(model, optimizer, extra, fault, detect, recover, steps, seed, facts, None, None, out)
        described, asked = asked.chosen, replace(asked, chosen=())
        if not described:
            raise ConfigError("fault=none: nothing to draw; allowed: a fault of values, such as weight_bit")
        if not callable(body):
            raise ConfigError(f"body={shown(body)}: cannot be called; allowed: a function of the run, with its loop")
        return run_campaign(body, asked, described, samples, Path(out), report)

    @staticmethod
    def detach(optimizer: Any) -> bool:
        """Release an optimizer and its model from a run that was not closed, as after an error in a notebook.

        Gives whether it was attached. Raises ConfigError for what is no optimizer.
        """
        return detach(optimizer)

    @property
    def TrainerCallback(self) -> Any:
        """Makes a `harness.user_loop.trainer.TrainerCallback`, by the arguments of `attach` that no Trainer has."""
        try:
            from harness.user_loop.trainer import TrainerCallback
        except ImportError as error:
            raise _lacking("TrainerCallback", "transformers", error) from None
        return _made(TrainerCallback)

    @property
    def LightningCallback(self) -> Any:
        """Makes a `harness.user_loop.lightning.LightningCallback`, by the same arguments."""
        try:
            from harness.user_loop.lightning import LightningCallback
        except ImportError as error:
            raise _lacking("LightningCallback", "lightning", error) from None
        return _made(LightningCallback)


def _lacking(name: str, package: str, error: ImportError) -> ConfigError:
    why = f"needs {package}, which cannot be imported ({error})"
    return ConfigError(f"attach.{name}: {why}; allowed: pip install 'stability-harness[{package}]'")


def _made(kind: type[Any]) -> Callable[..., Any]:
    """A callback of this kind by the arguments of `attach` that no trainer has."""

    @_known_options(f"attach.{kind.__name__}")
    def made(
        fault: Given | Sequence[Given] | None = None,
        detect: str | Mapping[str, Any] | None = "default",
        recover: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        extra: Sequence[Any] = (),
        seed: int = 0,
        facts: Mapping[str, Any] | None = None,
        on_alarm: OnAlarm | None = None,
    ) -> Any:
        no_model = nn.Identity(), ()
        asked = _asked(*no_model, extra, fault, detect, recover, None, seed, facts, on_alarm, None, out)
        return kind(asked, None if out is None else Keeping(Path(out)))

    return made


attach = Attach()


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
    on_alarm: OnAlarm | None,
    twin: bool | None,
    out: str | Path | None,
) -> AttachConfig:
    """All of it checked. Raises ConfigError with everything that is wrong."""
    problems, chosen, asked = Problems(), [], Trial()
    with problems.collect():
        _check_arguments(model, steps, seed, facts, on_alarm, twin, out, extra)
    with problems.collect():
        chosen = chosen_faults(fault)
    with problems.collect():
        asked = settings(detect, recover)
    problems.check()
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    return AttachConfig(model, optimizers, list(extra), chosen, asked, steps, seed, dict(facts or {}), on_alarm)


def _check_arguments(
    model: Any, steps: Any, seed: Any, facts: Any, on_alarm: Any, twin: Any, out: Any, extra: Any
) -> None:
    problems = Problems()
    wrong = {
        f"model={type(model).__name__}: no model; allowed: a torch.nn.Module": not isinstance(model, nn.Module),
        f"steps={shown(steps)}: no number of steps; allowed: 1 to {MOST_STEPS}": steps is not None
        and not (isinstance(steps, int) and not isinstance(steps, bool) and 1 <= steps <= MOST_STEPS),
        f"twin={shown(twin)}: no choice; allowed: True, False, or None": not (twin is None or isinstance(twin, bool)),
        f"out={shown(out)}: no folder; allowed: a path, or None": not (out is None or isinstance(out, str | Path)),
        "out='': no folder; allowed: a path, or None": out == "",
        f"facts={shown(facts)}: no mapping; allowed: facts={{name: value}}": not isinstance(facts or {}, Mapping),
        f"on_alarm={shown(on_alarm)}: cannot be called; allowed: a function of an alarm": not (
            on_alarm is None or callable(on_alarm)
        ),
        f"extra={type(extra).__name__}: no list; allowed: extra=[scheduler, scaler, ...]": not isinstance(
            extra, list | tuple
        ),
    }
    problems.reasons |= {reason: None for reason, is_wrong in wrong.items() if is_wrong}
    with problems.collect():
        checked("seed", Trial, "seed", seed)
    problems.check()


__all__ = ["AttachedRun", "CampaignCounts", "ConfigError", "attach"]
