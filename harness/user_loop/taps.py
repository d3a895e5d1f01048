"""Activations of the user's model by the names of its modules: what they are like, and strikes at them."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.faults.facts import formats_of, shapes_of
from harness.training.sites import Site, SiteCall
from harness.user_loop.hooks import Hook
from harness.user_loop.named_tensors import NamedTensors, first_tensor
from harness.user_loop.strikes import LoopStrikes, ScheduledFault


class ModuleTaps:
    """Hooks on modules for one step, at those alone that are to be struck.

    An activation is the first floating-point tensor that a module gives, complex numbers as pairs. Of a module that is
    called several times in a step, as where gradients are accumulated, the first call is struck. Where the model is
    called under `no_grad`, to sample or to evaluate, that is no part of a step.
    """

    def __init__(self, places: NamedTensors, as_written: set[int], rank: int):
        """`as_written` are the steps that are run without compilation, by whatever replay."""
        self._places, self._as_written, self._rank = places, as_written, rank
        self._hooks = ExitStack()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._formats: dict[str, str] = {}
        self._is_looking = False
        self._calls: list[bool] = []  # of the model, one inside of the other: whether gradients are wanted

    def begin(self, strikes: LoopStrikes, step: int) -> None:
        """A step begins."""
        self._hooks.close()
        if strikes.wants_taps:
            self._look()
            self._as_written.add(step)
        if step in self._as_written and "torch._dynamo" in sys.modules:
            # What was compiled does not see hooks; in the twin and where the step is run again it is the same.
            self._hooks.enter_context(torch.compiler.set_stance("force_eager"))
        struck = list(strikes.at_taps(step))
        modules = self._places.modules if struck else {}
        if struck or self._is_looking:
            self._follow_calls()
        for site, fault, name in struck:
            strike = partial(self._strike, site, fault, step, name, [])
            # First, so that whatever else is hooked there sees what the model goes on with.
            self._hooks.callback(modules[name].register_forward_hook(Hook(strike), prepend=True).remove)

    def end(self, strikes: LoopStrikes, step: int) -> None:
        """The step is over."""
        self._hooks.close()
        if self._is_looking:
            self._is_looking = False
            strikes.tapped(step, self._shapes, self._formats)

    def close(self) -> None:
        """No hook is left."""
        self._hooks.close()

    def _follow_calls(self) -> None:
        """See whether calls of the model are part of the step."""
        self._calls = []
        model, before, after = self._places.model, Hook(self._call_begins), Hook(self._call_ends)
        self._hooks.callback(model.register_forward_pre_hook(before, prepend=True).remove)
        self._hooks.callback(model.register_forward_hook(after, always_call=True).remove)

    def _call_begins(self, *_: Any) -> None:
        self._calls.append(torch.is_grad_enabled())

    def _call_ends(self, *_: Any) -> None:
        del self._calls[-1:]

    def _look(self) -> None:
        """See which activations there are."""
        self._is_looking = True
        for name, module in self._places.modules.items():
            self._hooks.callback(module.register_forward_hook(Hook(partial(self._seen, name))).remove)

    def _seen(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if all(self._calls) and (x := first_tensor(output)) is not None and name not in self._shapes:
            self._shapes |= shapes_of({name: x.detach()})
            self._formats |= formats_of({name: x.detach()})

    def _strike(
        self,
        site: Site,
        fault: ScheduledFault,
        step: int,
        name: str,
        done: list[bool],
        module: nn.Module,
        _: Any,
        output: Any,
    ) -> None:
        x = first_tensor(output)
        if done or x is None or not all(self._calls):
            return
        done.append(True)

        def visit(values: Tensor) -> None:
            fault.visit(SiteCall(site, step, {name: values}, self._rank))

        if site == Site.ACTIVATION:
            # In place and out of autograd's sight, as a fault of the memory is: the gradient passes straight through.
            visit(x.data)
            return

        def change(gradient: Tensor) -> Tensor:
            changed = gradient.clone()  # other branches of the graph may be given the same array
            visit(changed)
            return changed

        if x.requires_grad:
            x.register_hook(change)
