"""Sees what stands at the sites of a real pack without the injectors' help, and shows injectors tensors without a pack.

Spies are injectors of another trial, further back in the pack: they are visited after the strike, and copy the arrays
of the whole pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import Fault, Trial
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault
from harness.testing import engine
from harness.training.pack import Pack
from harness.training.sites import AT_TAPS, Event, Injector, Site, SiteCall

START, STEPS = 4, 8
TOKENS = np.arange(1000) % 10


def trial(fault: Fault | None = None, **fields: Any) -> Trial:
    """A small trial with two ranks and clipping, so that every site is one of its own."""
    fields = {"ranks": 2, "batch": 4, "warmup": 6, "qk_norm": True, "clip": 1.0, "seed": 7, "steps": STEPS, **fields}
    return engine.trial(**fields) if fault is None else engine.trial(**fields, fault=fault)


class Spy:
    """Keeps copies: `arrays[site, step, rank][tensor]` are [R, ...] of the whole pack, after all strikes there.

    `taps[site, step][tap]` are [ranks, R, ...]; `batches[step][rank][planned]` is what a trial
    learned from, [B, T + 1].
    """

    taps: tuple[str, ...] = ()
    permanent = False

    def __init__(self, sites: Sequence[Site], steps: Sequence[int]):
        self.calls = [(site, step) for step in range(max(steps) + 2) for site in {Site.LEARNING_RATE, *sites}]
        self.wanted = {(site, step) for site in sites for step in steps}
        self.arrays: dict[tuple[Site, int, int], dict[str, Tensor]] = {}
        self.read: dict[tuple[Site, int, str], list[Tensor]] = {}
        self.batches: dict[int, list[dict[int, Tensor]]] = {}
        self.step = -1

    def prepare(self, pack: Pack) -> None:
        """Listen at the pack's taps, and to what it learns from."""
        self.pack, learn = pack, pack.learn
        pack.model.taps.attach("*", self._listen)

        def listening(batch: Tensor, *rest: Any) -> Any:
            self.batches.setdefault(self.step, []).append(dict(zip(pack.rows, batch.clone(), strict=True)))
            return learn(batch, *rest)

        pack.learn = listening  # type: ignore[method-assign]

    def _listen(self, name: str, x: Tensor) -> None:
        step = self.step
        if (Site.ACTIVATION, step) in self.wanted:
            self.read.setdefault((Site.ACTIVATION, step, name), []).append(x.detach().clone())
        if (Site.ACTIVATION_GRADIENT, step) in self.wanted and x.requires_grad:
            kept = self.read.setdefault((Site.ACTIVATION_GRADIENT, step, name), [])
            x.register_hook(lambda gradient: kept.append(gradient.clone()))

    def visit(self, site_call: SiteCall) -> list[Event]:
        self.step = site_call.step
        if (site_call.site, site_call.step) in self.wanted and site_call.site not in AT_TAPS:
            self.arrays[site_call.site, site_call.step, site_call.rank] = self._copy(site_call.site)
        return []

    def _copy(self, site: Site) -> dict[str, Tensor]:
        pack, optimizer = self.pack, self.pack.optimizer
        moments = {"moment_1": optimizer.slot("moment_1"), "moment_2": optimizer.slot("moment_2")}
        if site in (Site.MOMENT_1, Site.MOMENT_2):
            flats = {"": moments[site]}
        elif site in (Site.WEIGHT, Site.BEFORE_UPDATE, Site.UPDATE):
            flats = {"": pack.weights, **{f"{name}:": moment for name, moment in moments.items()}}
        else:
            flats = {"": pack.gradients}
        names = pack.layout.by_name
        return {key + name: pack.layout.view(flat, name).clone() for key, flat in flats.items() for name in names}

    def at_taps(self, site: Site, step: int) -> dict[str, Tensor]:
        """Activations or their gradients, [ranks, R, ...]: parts of the pack come one after the other in each rank."""
        found = {
            name: torch.cat(values)
            for (where, when, name), values in self.read.items()
            if (where, when) == (site, step)
        }
        return {name: values.unflatten(0, (-1, len(self.pack))) for name, values in found.items()}


def watch(
    trials: Sequence[Trial], sites: Sequence[Site], steps: Sequence[int] = (START,), **options: Any
) -> tuple[Any, Spy]:
    """Train these trials, and the spy's own as the last; the run and the spy."""
    spy = Spy(sites, steps)
    own = trials[0].golden
    injectors: Mapping[int, Injector] = {len(trials): spy}
    return engine.run([*trials, own], injectors, prepare=spy.prepare, **options), spy


def watch_each(
    faults: Sequence[Fault], sites: Sequence[Site], steps: Sequence[int] = (START,), **fields: Any
) -> tuple[Any, Spy]:
    """The same for a trial of each fault, each between two golden ones: that of fault n is number 2 n + 1."""
    golden = trial(**fields)
    pairs = [(trial(fault, **fields), golden) for fault in faults]
    return watch([golden, *(each for pair in pairs for each in pair)], sites, steps)


# --- addresses and values ----------------------------------------------------------------------------------------


def words(x: Tensor) -> np.ndarray:
    """The bits of float32 values."""
    return x.detach().contiguous().numpy().view(np.uint32)


def differing(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """name -> flat indices at which two sets of tensors differ in any bit."""
    assert left.keys() == right.keys()
    found = {name: np.flatnonzero(words(left[name]).ravel() != words(right[name]).ravel()) for name in left}
    return {name: where.tolist() for name, where in found.items() if len(where)}


def row(tensors: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: values[number] for name, values in tensors.items()}


# --- without a pack ----------------------------------------------------------------------------------------------


def facts(shapes: Mapping[str, Sequence[int]], seed: int = 0, **others: Any) -> Facts:
    """What a fault is told of a run whose tensors, and whose activations, have these shapes."""
    own = {name: tuple(shape) for name, shape in shapes.items()}
    text = {"tokens": TOKENS, "token_counts": np.bincount(TOKENS)}
    slots = ("moment_1", "moment_2")
    return Facts(Trial().steps, own, own, **{"seed": seed, "slots": slots, "context": 64, **text, **others})


def strike(
    fault: InjectableFault, tensors: Mapping[str, Tensor], seed: int = 0, step: int | None = None, **others: Any
) -> list[Event]:
    """The events of one strike on these tensors, which it changes; at the fault's own site and first step."""
    own = facts({name: x.shape for name, x in tensors.items()}, seed, **others)
    injector = fault.arm(own)
    site = next(site for site, when in injector.calls if when == (fault.start if step is None else step))
    return injector.visit(SiteCall(site, fault.start if step is None else step, tensors))
