"""What stands between the backward pass and the update in somebody's loop, put there by wrappers that go again."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from harness.own_loop.measures import Measures
from harness.own_loop.places import Places
from harness.own_loop.strikes import Fault, Strikes
from harness.training.remedies import Remedies
from harness.training.sites import Site, Visit


class Judge(Protocol):
    """Asked in the midst of a step, before anything is changed."""

    def may_step(self) -> bool:
        """Whether the update is made, as far as is known by now."""


class Stepping:
    """Gradients, moments and updates of one step; the wrappers stand until the `hooks` are closed.

    A step has one or more backward passes, and one update of each optimizer. Gradients are struck at the last backward
    pass, of which there are as many as in the step before, and where a scaler stands before the optimizer, after it has
    taken its scale out.
    """

    def __init__(
        self,
        places: Places,
        scaler: GradScaler | None,
        measures: Measures,
        strikes: Strikes,
        remedies: Remedies,
        judge: Judge,
    ):
        self._places, self.scaler, self._measures, self._judge = places, scaler, measures, judge
        self.strikes, self.remedies = strikes, remedies
        self._expected = 1  # backward passes
        self.is_muted = False  # nothing is struck, measured or answered
        self.measures_now = True
        self._is_distributed = strikes.ranks > 1
        self._local = ExitStack()  # hooks on what a rank has before it is reduced
        self.begin(0)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self._backwards, self._arrived, self._unscaled_of = step, 0, 0, 0
        self.was_asked = self._is_reduced = self._is_queued = False
        self.is_taken = True
        self.planned = self.rate = self._first_rate()
        self._measures.clear()
        self._local.close()
        if self._is_distributed and not self.is_muted:
            self._strike_locally()

    @property
    def has_arrived(self) -> bool:
        """Whether an optimizer was told to step; not where a scaler has found gradients that overflowed."""
        return self._arrived > 0

    def end(self) -> None:
        """All passes of a step were made."""
        self._expected = max(1, self._backwards)

    # --- wrappers ------------------------------------------------------------------------------------------------

    def attach(self, hooks: ExitStack) -> None:
        """Stand between the backward pass and the update from here on."""
        hooks.callback(self._local.close)
        for weight in self._places.trained.values():
            hooks.callback(weight.register_post_accumulate_grad_hook(self._accumulated).remove)
        for optimizer in self._places.optimizers:
            _wrap(optimizer, "step", self._around(optimizer), hooks)
        if self.scaler is not None:
            _wrap(self.scaler, "unscale_", self._unscaled, hooks)
            _wrap(self.scaler, "step", self._scaled_step, hooks)

    def _around(self, optimizer: Optimizer) -> Callable[..., Any]:
        def step(real: Callable[..., Any], closure: Any = None, *args: Any, **more: Any) -> Any:
            return self._step(optimizer, real, closure, args, more)

        return step

    def _unscaled(self, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        given = real(*args, **more)
        self._unscaled_of += 1
        if self._unscaled_of >= len(self._places.optimizers):
            self._reduced(None)
        return given

    def _scaled_step(self, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.was_asked = True
        return real(*args, **more)

    # --- gradients -----------------------------------------------------------------------------------------------

    def _accumulated(self, weight: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self, is_reduced: bool = False) -> None:
        if self._is_distributed and not is_reduced:  # what reduces the gradients comes first
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._backward_over, True))
            return
        self._is_queued = False
        self._backwards += 1
        if self.is_muted:
            return
        is_last = self._backwards >= self._expected
        if is_last and not self._is_distributed:
            self.strikes(Site.GRADIENT, self.step, self._places.gradients)
        if is_last and self.scaler is None:
            self._reduced(None)
        elif self.measures_now:
            self._measures.learned(self.scale)

    def _strike_locally(self) -> None:
        """Of several processes, each one's gradient is struck before it is reduced."""
        for one in self.strikes.due(Site.GRADIENT, self.step):
            for target in one.injector.targets:
                weight = self._places.trained[target.tensor]
                self._local.callback(weight.register_hook(partial(self._struck, one, target.tensor)).remove)

    def _struck(self, one: Fault, name: str, gradient: Tensor) -> Tensor:
        if self._backwards + 1 < self._expected:
            return gradient
        changed = gradient.clone()
        one.visit(Visit(Site.GRADIENT, self.step, {name: changed}, self.strikes.rank))
        return changed

    @property
    def scale(self) -> Tensor | None:
        """The loss's scale; None without any."""
        return None if self.scaler is None else self.scaler._scale

    def shown_scale(self) -> dict[str, Tensor]:
        """The scale as faults see it; only where there is a scaler."""
        assert self.scaler is not None
        if self.scaler._scale is None:  # made when a loss is first scaled
            self.scaler.scale(torch.zeros((), device=self._places.device))
        assert self.scaler._scale is not None
        return {"loss_scale": self.scaler._scale}

    def _reduced(self, scale: Tensor | None) -> None:
        if self.is_muted:
            return
        if not self._is_reduced:
            self._is_reduced = True
            self.strikes(Site.REDUCED_GRADIENT, self.step, self._places.gradients)
        if self.measures_now:
            self._measures.learned(scale)

    # --- the update ----------------------------------------------------------------------------------------------

    def _step(self, optimizer: Optimizer, real: Callable[..., Any], closure: Any, args: Any, more: Any) -> Any:
        if self.is_muted:
            self.was_asked = True
            return real(closure, *args, **more) if closure is not None else real(*args, **more)
        loss = None
        if closure is not None:  # as the optimizers of torch call it: once, before they begin
            with torch.enable_grad():
                loss = closure()
        if self._arrived == 0:
            self._before_update(optimizer)
        self._arrived += 1
        if not self.is_taken:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler would warn
            return loss
        with self._rates(optimizer):
            given = real(*args, **more)
        if self._arrived == len(self._places.optimizers):
            self.strikes(Site.UPDATE, self.step, self._places.around_update)
        return loss if closure is not None else given

    def _before_update(self, optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of one that takes the scale out by itself
        if not self._is_reduced:  # as where the update itself takes the scale out
            self._reduced(scale)
        elif self.measures_now and not self._measures.has_norm:
            self._measures.learned(scale)
        if self.measures_now:
            self._measures.before()
        self.was_asked = True
        self.is_taken = self._judge.may_step()
        self._strike_rate()
        if not self.is_taken:
            return
        places, step = self._places, self.step
        self.strikes(Site.CLIPPED_GRADIENT, step, places.gradients)
        for site in (Site.MOMENT_1, Site.MOMENT_2):
            self.strikes(site, step, partial(places.slot, site.value))
        self.strikes(Site.BEFORE_UPDATE, step, places.around_update)

    def _first_rate(self) -> float:
        return float(self._places.groups[0].get("lr", float("nan")))

    def _strike_rate(self) -> None:
        """The rate in force is that of the first group, after remedies and faults; others follow it in proportion."""
        self.planned = self._first_rate()
        factor = self.remedies.rates([0], self.step)
        rate = torch.tensor(self.planned * (1.0 if factor is None else float(factor)), dtype=torch.float64)
        self.strikes(Site.LEARNING_RATE, self.step, lambda: {"learning_rate": rate})
        self.rate = float(rate)

    @contextmanager
    def _rates(self, optimizer: Optimizer) -> Iterator[None]:
        """The rates of an optimizer are those in force while it steps."""
        if self.rate == self.planned or self.planned != self.planned:
            yield
            return
        kept = [group["lr"] for group in optimizer.param_groups]
        numbers = [float(rate) for rate in kept]
        for group, rate in zip(optimizer.param_groups, numbers, strict=True):
            is_first = rate == self.planned
            _put_rate(group, self.rate if is_first else rate * (self.rate / self.planned if self.planned else 1.0))
        try:
            yield
        finally:
            for group, there, rate in zip(optimizer.param_groups, kept, numbers, strict=True):
                group["lr"] = there
                _put_rate(group, rate)


def _put_rate(group: dict[str, Any], rate: float) -> None:
    """In place where it is a tensor, to which a compiled step refers."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _wrap(owner: Any, name: str, around: Callable[..., Any], hooks: ExitStack) -> None:
    """`around(real, ...)` stands for a method of one object until the hooks are closed."""
    own, real, is_over = vars(owner).get(name), getattr(owner, name), False

    @wraps(real)
    def method(_: Any, *args: Any, **more: Any) -> Any:
        return real(*args, **more) if is_over else around(real, *args, **more)

    ours = types.MethodType(method, owner)  # bound, as schedulers of torch want it
    setattr(owner, name, ours)

    def undo() -> None:
        nonlocal is_over
        is_over = True
        if vars(owner).get(name) is not ours:
            return  # a scheduler, perhaps, has wrapped it since, and calls it through us
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    hooks.callback(undo)


def scaler_among(extras: Sequence[Any]) -> GradScaler | None:
    """The scaler that is in use."""
    scalers = (extra for extra in extras if isinstance(extra, GradScaler) and extra.is_enabled())
    return next(scalers, None)
