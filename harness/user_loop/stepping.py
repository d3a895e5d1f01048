"""What happens between the backward pass and the update in the user's loop, reached by hooks that go again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from harness.training.interventions import Interventions
from harness.training.sites import Site, SiteCall
from harness.user_loop.hooks import wrap
from harness.user_loop.measures import Measures
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.sparse import dense_views, has_any
from harness.user_loop.strikes import LoopStrikes, ScheduledFault
from harness.user_loop.watching import Watching


class Judge(Protocol):
    """Asked in the midst of a step, before anything is changed."""

    def may_step(self) -> bool:
        """Whether the update is made, as far as is known by now."""


@dataclass
class PendingStrike:
    """A strike at gradients that another backward pass may still add to: then it is taken back, and comes later."""

    fault: ScheduledFault
    site: Site
    kept: dict[str, tuple[Tensor | None, Tensor]]  # the gradient that was struck, and what it was before
    mark: Any  # where the fault stood


class Stepping:
    """Gradients, moments and updates of one step; hooks stand until `attach`'s are closed.

    A step has any number of backward passes, and each optimizer steps in it or does not. Nobody says which backward
    pass is the last before an update: so gradients are struck and measured after each of them, and where another one
    adds to what was struck, the strike is taken back first. Of several optimizers each has its gradients struck and
    measured before its own update. Where a scaler stands before an optimizer, reduced gradients are those without its
    scale.
    """

    def __init__(
        self,
        places: NamedTensors,
        scaler: GradScaler | None,
        measures: Measures,
        strikes: LoopStrikes,
        interventions: Interventions,
        judge: Judge,
    ):
        self._places, self.scaler, self._measures, self._judge = places, scaler, measures, judge
        self.strikes, self.interventions = strikes, interventions
        self._expected = 1  # backward passes of a step, as the one before had
        self.is_muted = False  # nothing is struck, measured or answered
        self.measures_now = True
        self._is_distributed = strikes.ranks > 1
        self._local = ExitStack()  # hooks of one step
        self._hooked: dict[Tensor, Any] = {}
        self._fresh: set[str] = set()  # weights whose gradient was added to since their optimizer stepped
        self._is_queued = False
        self.has_learned = False  # a backward pass was made
        self._watching: Watching | None = None
        self.follows_gradients = False  # whether a snapshot asks for the next
        self.carries_gradients: bool | None = None
        """Whether a step adds to gradients that the one before has left; None: not known."""
        self._left: dict[str, tuple[Tensor, int]] = {}  # such gradients at the beginning, with their version
        self.begin(0)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self._backwards = step, 0
        self._stepped: set[int] = set()  # optimizers that were told to step
        self._reduced_of: set[int] = set()  # optimizers whose reduced gradients were struck
        self._struck: dict[tuple[int, Site], set[str]] = {}  # by fault: weights whose gradients it has struck for good
        self._pending: list[PendingStrike] = []
        self.was_asked = self._has_rate = False
        self.is_taken = True
        self.planned = self.rate = self._first_rate()
        self._measures.clear()
        self._local.close()
        self._hook_weights()
        if self.is_muted:
            return
        if self.follows_gradients:
            self._see_left_gradients()
        if any(self._due_gradients()):
            if self._is_distributed:
                self._strike_locally()
            for name, weight in self._places.trained.items():
                self._local.callback(weight.register_hook(partial(self._more_comes, name)).remove)

    @property
    def has_arrived(self) -> bool:
        """Whether an optimizer was told to step; not where a scaler has found gradients that overflowed."""
        return bool(self._stepped)

    def end(self) -> None:
        """All passes of a step were made."""
        self._expected = max(1, self._backwards)
        for number in range(len(self._places.optimizers)):
            if self._stepped and number not in self._stepped:
                self._measures.forget(number)

    def _due_gradients(self) -> Iterator[ScheduledFault]:
        for site in (Site.GRADIENT, Site.REDUCED_GRADIENT):
            yield from self.strikes.due(site, self.step)

    # --- hooks ---------------------------------------------------------------------------------------------------

    def attach(self, hooks: ExitStack) -> None:
        """Stand between the backward pass and the update from here on."""
        hooks.callback(self._let_go)
        self._hook_weights()
        for number, optimizer in enumerate(self._places.optimizers):
            wrap(optimizer, "step", self._around(number, optimizer), hooks)
        if self.scaler is not None:
            wrap(self.scaler, "unscale_", self._unscaled, hooks)
            wrap(self.scaler, "step", self._scaled_step, hooks)

    def follow(self, watching: Watching) -> None:
        """Tell it of backward passes and updates."""
        self._watching = watching

    def _let_go(self) -> None:
        self._local.close()
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _hook_weights(self) -> None:
        """Every weight that is trained now is followed; what was unfrozen or added since is new here."""
        for name, weight in self._places.trained.items():
            if weight not in self._hooked:
                self._hooked[weight] = weight.register_post_accumulate_grad_hook(partial(self._accumulated, name))

    def _around(self, number: int, optimizer: Optimizer) -> Callable[..., Any]:
        def step(real: Callable[..., Any], closure: Any = None, *args: Any, **more: Any) -> Any:
            return self._step(number, optimizer, real, closure, args, more)

        return step

    def _unscaled(self, real: Callable[..., Any], optimizer: Any, *args: Any, **more: Any) -> Any:
        given, inner = real(optimizer, *args, **more), getattr(optimizer, "optimizer", optimizer)
        for number, one in enumerate(self._places.optimizers):
            if one is optimizer or one is inner:
                self._reduced(number, None)
        return given

    def _scaled_step(self, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.was_asked = True
        given = real(*args, **more)
        if self._watching is not None and not self._stepped:  # the scaler has found gradients that overflowed
            self._watching.updated(self._backwards)
        return given

    # --- gradients -----------------------------------------------------------------------------------------------

    def _accumulated(self, name: str, weight: Tensor) -> None:
        self._fresh.add(name)
        if name in self._left:
            left, version = self._left.pop(name)
            self.carries_gradients = weight.grad is left and left._version == version + 1
        if not self._is_queued:
            if self._watching is not None:
                self._watching.learns()
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _see_left_gradients(self) -> None:
        """Look whether the step adds to what is there, by one weight of each optimizer."""
        self._left = {}
        for number in range(len(self._places.optimizers)):
            gradients = self._places.gradients(number)
            name = min(gradients, key=lambda name: gradients[name].numel(), default=None)
            if name is not None and (gradients[name].device.type != "cpu" or has_any(gradients[name])):
                self._left[name] = gradients[name], gradients[name]._version

    def _backward_over(self, is_reduced: bool = False) -> None:
        if self._is_distributed and not is_reduced:  # what reduces the gradients comes first
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._backward_over, True))
            return
        self._is_queued = False
        self._backwards += 1
        self.has_learned = True
        if self.is_muted:
            return
        owners = {number for name in self._fresh if (number := self._places.owner(name)) is not None}
        here = owners - self._stepped
        if not self._is_distributed:
            self._strike_gradients(Site.GRADIENT, here)
        if self.scaler is None and (not self._is_distributed or self._is_last()):
            self._strike_gradients(Site.REDUCED_GRADIENT, here)
            self._reduced_of |= here
        if self.measures_now:
            for number in sorted(here):
                self._measures.learned(number, self.scale)

    def _is_last(self) -> bool:
        """Of several processes: whether this backward pass, which is over or under way, is the one that is reduced."""
        outer = self._places.outer
        if isinstance(outer, nn.parallel.DistributedDataParallel):
            return bool(outer.require_backward_grad_sync)
        return self._backwards + self._is_queued >= self._expected

    def _strike_gradients(self, site: Site, numbers: set[int], only_fresh: bool = True) -> None:
        """Let faults strike the gradients of these optimizers; those that a fault has struck already are left out."""
        for one in self.strikes.due(site, self.step):
            done = self._struck.setdefault((id(one), site), set())
            waits = [pending for pending in self._pending if pending.fault is one and pending.site == site]
            done_now = done.union(*(pending.kept for pending in waits))
            found = {
                name: gradient
                for number in sorted(numbers)
                for name, gradient in self._places.gradients(number).items()
                if name not in done_now and (name in self._fresh or not only_fresh)
            }
            targets = getattr(one.injector, "targets", None)
            struck = found if targets is None else {t.tensor: found[t.tensor] for t in targets if t.tensor in found}
            if not struck:
                continue
            weights = self._places.trained
            before = {name: grad.clone() for name in struck if (grad := weights[name].grad) is not None}
            mark = one.fault_schedule.mark(0) if one.fault_schedule else None
            with dense_views(struck, weights) as tensors:
                one.visit(SiteCall(site, self.step, tensors, self.strikes.rank if site == Site.GRADIENT else 0))
            kept = {name: (weights[name].grad, there) for name, there in before.items()}
            self._pending.append(PendingStrike(one, site, kept, mark))

    def _more_comes(self, name: str, gradient: Tensor) -> None:
        """Another backward pass adds to a gradient: what was struck is as it was, and struck when that is over."""
        for pending in [pending for pending in self._pending if name in pending.kept]:
            for weight_name, (struck, before) in pending.kept.items():
                weight = self._places.trained.get(weight_name)
                if weight is None or weight.grad is not struck or struck is None:
                    continue  # cleared in between
                if struck.layout == torch.strided:
                    struck.data.copy_(before)
                else:
                    weight.grad = before
            if pending.fault.fault_schedule is not None:
                pending.fault.fault_schedule.take_back(0, pending.mark)
            self._pending.remove(pending)

    def _commit(self, number: int) -> None:
        """An optimizer steps: what was struck of its gradients stays so."""
        for pending in list(self._pending):
            if any(self._places.owner(name) == number for name in pending.kept):
                self._struck[id(pending.fault), pending.site] |= set(pending.kept)
                self._pending.remove(pending)

    def _strike_locally(self) -> None:
        """Of several processes, each one's gradient is struck before it is reduced."""
        for one in self.strikes.due(Site.GRADIENT, self.step):
            for target in one.injector.targets:
                weight = self._places.trained[target.tensor]
                self._local.callback(weight.register_hook(partial(self._strike_local, one, target.tensor)).remove)

    def _strike_local(self, one: ScheduledFault, name: str, gradient: Tensor) -> Tensor:
        outer = self._places.outer
        is_ddp = isinstance(outer, nn.parallel.DistributedDataParallel)
        if not self._is_last() if is_ddp else self._backwards + 1 < self._expected:
            return gradient
        changed = gradient.resolve_conj().clone()
        one.visit(SiteCall(Site.GRADIENT, self.step, {name: changed}, self.strikes.rank))
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

    def _reduced(self, number: int, scale: Tensor | None) -> None:
        """The gradients of an optimizer are without the loss's scale."""
        if self.is_muted:
            return
        if number not in self._reduced_of:
            self._reduced_of.add(number)
            self._strike_gradients(Site.REDUCED_GRADIENT, {number}, only_fresh=False)
        if self.measures_now:
            self._measures.learned(number, scale)

    # --- the update ----------------------------------------------------------------------------------------------

    def _step(
        self, number: int, optimizer: Optimizer, real: Callable[..., Any], closure: Any, args: Any, more: Any
    ) -> Any:
        if self.is_muted:
            self.was_asked = True
            return real(closure, *args, **more) if closure is not None else real(*args, **more)
        loss = None
        if closure is not None:  # as the optimizers of torch call it: once, before they begin
            with torch.enable_grad():
                loss = closure()
        self._before_update(number, optimizer)
        if not self.is_taken:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler would warn
            return loss
        with self._rates(optimizer):
            given = real(*args, **more)
        self.strikes(Site.UPDATE, self.step, partial(self._places.around_update, number))
        if self._watching is not None:
            self._watching.updated(self._backwards)
        return loss if closure is not None else given

    def _before_update(self, number: int, optimizer: Optimizer) -> None:
        places, step = self._places, self.step
        ours = {name for name in self._fresh if places.owner(name) == number}
        scale = getattr(optimizer, "grad_scale", None)  # of one that takes the scale out by itself
        if not ours and number not in self._stepped and not self._is_distributed:
            # No backward pass was seen: the loop has put the gradients there.
            self._strike_gradients(Site.GRADIENT, {number}, only_fresh=False)
        if number not in self._reduced_of:  # as where the update itself takes the scale out
            self._reduced(number, scale)
        elif self.measures_now and not self._measures.has_norm(number):
            self._measures.learned(number, scale)
        self._commit(number)
        self._fresh -= ours
        if not self._stepped:
            if self.measures_now:
                self._measures.before()
            self.was_asked = True
            self.is_taken = self._judge.may_step()
            self._strike_rate()
        self._stepped.add(number)
        if not self.is_taken:
            return
        if any(self.strikes.due(Site.CLIPPED_GRADIENT, step)):
            with dense_views(places.gradients(number), places.trained) as gradients:
                self.strikes(Site.CLIPPED_GRADIENT, step, lambda: gradients)
        for site in (Site.MOMENT_1, Site.MOMENT_2):
            self.strikes(site, step, partial(places.slot, site.value, number))
        self.strikes(Site.BEFORE_UPDATE, step, partial(places.around_update, number))
        self._measures.updates(number)

    @property
    def rates(self) -> list[float]:
        """The learning rates of all parameter groups, as the loop has set them."""
        return [float(group["lr"]) for group in self._places.groups if "lr" in group]

    def _first_rate(self) -> float:
        return float(self._places.groups[0].get("lr", float("nan")))

    def _strike_rate(self) -> None:
        """The rate in force is the first group's, after interventions and faults; others follow it in proportion."""
        self.planned = self._first_rate()
        factor = self.interventions.rates([0], self.step)
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


def scaler_among(extras: Sequence[Any]) -> GradScaler | None:
    """The scaler that is in use."""
    scalers = (extra for extra in extras if isinstance(extra, GradScaler) and extra.is_enabled())
    return next(scalers, None)
