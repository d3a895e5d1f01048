"""What is measured at each step of the user's loop, and what detectors say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, nan

import numpy as np
import torch
from torch import Tensor

from harness.config import Trial, sections
from harness.detectors.base import AFTER_THE_STEP, Detector
from harness.detectors.loop_signals import PER_RATE, RATE, UPDATE, has_new_rate, per_rate, stored
from harness.detectors.table import DETECTORS
from harness.model.formats import to_measure
from harness.model.state import State
from harness.optim.clipping import SAFE
from harness.own_loop.places import Places

PLAIN = {(torch.strided, torch.float32), (torch.strided, torch.float64)}
LAYERED = ("activation_rms", "attention_logit_max")  # which no model but ours shows: they have no layers here


class Measures:
    """Norms around the update of a step, as numbers on the device until `told`.

    The gradient's norm is that before clipping, right after the backward pass, of gradients without the loss's scale.
    Of several optimizers each has its own, of its own weights; theirs together is that of the step.
    """

    def __init__(self, places: Places):
        self._places = places
        self._weights: dict[str, Tensor] = {}  # before the update
        self._has_before = False
        self._norms: dict[int, Tensor] = {}  # of gradients, by number of the optimizer
        self._now: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Another step begins."""
        self._now.clear()
        self._norms.clear()
        self._has_before = False

    def has_norm(self, number: int) -> bool:
        """Whether the gradients of an optimizer were measured in this step."""
        return number in self._norms

    @torch.no_grad()
    def learned(self, number: int, scale: Tensor | None) -> None:
        """The gradients of an optimizer are there."""
        norm = joined(list(self._places.gradients(number).values()), self._places.device)
        self._norms[number] = norm if scale is None else norm / scale.to(norm.device).double()

    def forget(self, number: int) -> None:
        """The optimizer makes no update in this step, so its gradients are no part of it."""
        self._norms.pop(number, None)

    @torch.no_grad()
    def before(self) -> None:
        """The update comes next."""
        live = {name: to_measure(weight) for name, weight in self._places.trained.items()}
        fits = self._weights.keys() == live.keys() and all(
            kept.shape == live[name].shape and kept.dtype == live[name].dtype for name, kept in self._weights.items()
        )
        if not fits:
            self._weights = {name: torch.empty_like(weight) for name, weight in live.items()}
        if live:
            torch._foreach_copy_([self._weights[name] for name in live], list(live.values()))
        self._has_before = True

    @torch.no_grad()
    def after(self) -> None:
        """The step is over; without an update the change is 0."""
        live = {name: to_measure(weight) for name, weight in self._places.trained.items()}
        groups = {"param_norm": list(live.values()), "update_rms": []}
        changed = [name for name in live if name in self._weights and self._weights[name].shape == live[name].shape]
        if self._has_before and changed:
            before = [self._weights[name] for name in changed]
            torch._foreach_sub_(before, [live[name] for name in changed])
            groups["update_rms"] = before
        if moments := self._places.slot("moment_2"):
            groups["second_moment_norm"] = list(moments.values())
        self._now |= dict(zip(groups, joined_each(list(groups.values()), self._places.device), strict=True))
        count = sum(weight.numel() for weight in live.values())
        self._now["update_rms"] = self._now["update_rms"] / max(1, count) ** 0.5

    def norm(self) -> float:
        """The gradient's norm; NaN where there was no backward pass. The host waits for the device."""
        if not self._norms:
            return nan
        values = [float(norm) for norm in self._norms.values()]
        return values[0] if len(values) == 1 else hypot(*values)

    def told(self) -> dict[str, float]:
        """The numbers; here the host waits for the device."""
        found = {"grad_norm": self.norm()} if self._norms else {}
        if not self._now:
            return found
        values = torch.stack([value.double() for value in self._now.values()]).tolist()
        return found | dict(zip(self._now, values, strict=True))


def joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The L2 norm of all together, float64; finite exactly if every element is.

    The squares of float32 overflow at 2e19, so on a CPU a norm that is not well inside the range is taken once more in
    float64; elsewhere looking would cost more than taking it so at once.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if any(x.layout != torch.strided for x in tensors):
        tensors = [x.coalesce().values() if x.layout == torch.sparse_coo else x for x in tensors]
    exact = None if device.type == "cpu" else torch.float64
    norm = _norm(tensors, device, exact)
    if exact is None and not SAFE[0] < float(norm) < SAFE[1]:
        norm = _norm(tensors, device, torch.float64)
    return norm


def joined_each(groups: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """`joined` of each of these, bit for bit, in one call where their tensors allow it."""
    tensors = [x for group in groups for x in group]
    is_plain = {(x.layout, x.dtype) for x in tensors} <= PLAIN
    if not tensors or not is_plain:
        return [joined(group, device) for group in groups]
    exact = None if device.type == "cpu" else torch.float64
    sizes = [len(group) for group in groups]
    parts = stacked(torch._foreach_norm(tensors, 2, dtype=exact), device).split(sizes)
    norms = [torch.linalg.vector_norm(part) for part in parts]
    is_safe = [exact is not None or SAFE[0] < float(norm) < SAFE[1] for norm in norms]
    return [norm if safe else joined(group, device) for norm, safe, group in zip(norms, is_safe, groups, strict=True)]


def _norm(tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    wide = list(tensors)
    if not {x.dtype for x in wide} <= {torch.float32, torch.float64}:
        wide = [to_measure(x) for x in wide]
        if dtype is None:  # in their own type, norms of half precision would be rounded to it
            wide = [x.float() if x.element_size() < 4 else x for x in wide]
    return torch.linalg.vector_norm(stacked(torch._foreach_norm(wide, 2, dtype=dtype), device))


def stacked(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalars as one tensor, float64."""
    if len({(x.dtype, x.device) for x in numbers}) == 1:
        return torch.stack(list(numbers)).to(device, torch.float64)
    return torch.stack([x.to(device, torch.float64) for x in numbers])


class Watch:
    """The detectors that watch one run, and what they remember."""

    def __init__(self, trial: Trial):
        name = trial.section("detect").name
        self.names = [] if name == "none" else name.split("+")
        self.state = State(1)
        like = {
            signal: torch.zeros(1, dtype=torch.float64) for name in self.names for signal in DETECTORS[name].watches
        }
        like |= {signal: torch.zeros(1, 0, dtype=torch.float64) for signal in LAYERED if signal in like}
        self._like = like
        self._detectors: dict[str, Detector] = {}
        for name in self.names:
            key = f"detect.{name}"
            options = trial.section(key) if key in sections() else None
            self._detectors[name] = DETECTORS[name](f"detect_{name}", [options], like, self.state)
        lagging = AFTER_THE_STEP.intersection(like)
        self._before = {name: self.state.add(f"before_{name}", like[name].clone()) for name in sorted(lagging)}
        self._wanted = {RATE, *stored(list(self._before))}
        self._has_before = self.state.add("has_before", torch.zeros(1, dtype=torch.bool))
        self._is_known = self.state.add("is_known", torch.zeros(1, len(lagging), dtype=torch.bool))  # measured so far
        self._rates = self.state.add("rates", torch.full((1, 3), nan, dtype=torch.float64))  # of the last three steps
        self._usual = self.state.add("usual", torch.full((1, len(self.names)), nan, dtype=torch.float64))

    @property
    def usual(self) -> dict[str, float]:
        """The scores of the last step without an alarm."""
        return dict(zip(self.names, self._usual.used[0].tolist(), strict=True))

    def keep_usual(self, scores: Mapping[str, float]) -> None:
        """This step was one."""
        self._usual.used.copy_(torch.tensor([[scores[name] for name in self.names]], dtype=torch.float64))

    @torch.inference_mode()  # a fifth faster than with the bookkeeping of gradients that are never asked for
    def judge(self, loss: float, norm: float, is_judged: bool = True) -> tuple[dict[str, bool], dict[str, float], bool]:
        """Of each detector, whether this step is an alarm, and its score; and whether it is of the step before, too.

        Not `is_judged`: its gradients overflowed under a dynamic loss scale, which is that one's to judge.
        """
        values: dict[str, Tensor] = {name: kept.used for name, kept in self._before.items()}
        values |= {signal: self._like[signal] for signal in LAYERED if signal in self._like}
        values |= {"loss": torch.tensor([loss]).double(), "grad_norm": torch.tensor([norm]).double()}
        alarms, scores, is_late = {}, {}, False
        is_new_rate = has_new_rate(*self._rates.used[0].numpy())
        told, everywhere = torch.tensor([is_judged]), torch.tensor([True])
        for name, detector in self._detectors.items():
            if is_new_rate:
                detector.see_new_rate(everywhere)
            is_new = told & self._has_before.used if AFTER_THE_STEP.intersection(detector.watches) else told
            is_alarm, score = detector.judge(values, is_new)
            alarms[name], scores[name] = bool(is_alarm), float(score)
            is_late = is_late or (alarms[name] and bool(detector.late(is_alarm)))
        return alarms, scores, is_late

    def stepped(self, values: Mapping[str, float]) -> None:
        """What is known now that the step is over."""
        with np.errstate(over="ignore"):  # as stored: what float32 cannot hold is infinite
            shown = {name: float(np.float32(values.get(name, nan))) for name in self._wanted}
        if PER_RATE in self._before:
            shown[PER_RATE] = float(per_rate(*torch.tensor([shown[UPDATE], shown[RATE]])))
        for number, (name, kept) in enumerate(self._before.items()):
            value = shown[name]
            self._is_known.used[0, number] |= value == value
            kept.used.fill_(value if self._is_known.used[0, number] else 0.0)
        self._has_before.used.fill_(True)
        rates = self._rates.used
        rates.copy_(torch.tensor([[shown[RATE], *rates[0, :-1].tolist()]]))

    def restart(self) -> None:
        """The detectors begin anew."""
        everywhere = torch.ones(1, dtype=torch.bool)
        for detector in self._detectors.values():
            detector.restart(everywhere)
        self._has_before.used.fill_(False)

    def memory(self) -> dict[str, Tensor]:
        """What they remember, copied."""
        return {name: values.clone() for name, values in self.state}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Go on with this memory."""
        for name, values in self.state:
            values.copy_(memory[name])


class Series:
    """Numbers by signal and step, which may be written anew from any step on; NaN where there is none."""

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}
        self.length = 0  # steps

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step, which is the last one now."""
        self.length = step + 1
        for name, value in values.items():
            if (room := self._values.get(name)) is None:
                room = self._values[name] = np.full(64, nan, np.float32)
            if step >= len(room):
                more = np.full(max(len(room), step + 1 - len(room)), nan, np.float32)
                room = self._values[name] = np.concatenate([room, more])
            with np.errstate(over="ignore"):
                room[step] = value
        for name in self._values.keys() - values.keys():
            if step < len(self._values[name]):
                self._values[name][step] = nan

    def take(self, other: Series, stop: int) -> None:
        """The first steps of another series."""
        self._values = {name: values.copy() for name, values in other._values.items()}
        self.length = min(stop, other.length)

    def get(self, name: str) -> np.ndarray:
        """[steps], float32."""
        values = np.full(self.length, nan, np.float32)
        kept = self._values.get(name, values)[: self.length]
        values[: len(kept)] = kept
        return values

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def arrays(self) -> dict[str, np.ndarray]:
        """All of them by name."""
        return {name: self.get(name) for name in self._values}
