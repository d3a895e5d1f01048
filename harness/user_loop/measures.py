"""What is measured at each step of the user's loop, and what detectors say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import hypot, nan

import numpy as np
import torch
from torch import Tensor

from harness.config import Trial
from harness.detectors.bank import DetectorBank, chosen_options, watched_by
from harness.detectors.loop_signals import PER_RATE, RATE, STEP, UPDATE, has_new_rate, per_rate, stored
from harness.model.formats import to_measure
from harness.model.state import State
from harness.readings.at_rest import SLOTS, AtRest
from harness.user_loop.inputs import checksum
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.norms import Norm, joined, joined_each, stacked

AT_ONCE = 16  # steps that are judged together
MEASURED = {torch.float32, torch.float64, torch.bfloat16, torch.float16}  # types that are measured as they are
YES, NO = torch.tensor([True]), torch.tensor([False])  # of the one row
LAYERED = ("activation_rms", "attention_logit_max")  # which no model but ours shows: they have no layers here


MEASURED_AT_END = {"param_norm": "weights", "second_moment_norm": "moment_2"}
"""Norms of a step's end, each finite exactly if all of the array is, and of what."""


class Measures:
    """Norms around the update of a step, which stay on the device until `told`.

    The gradient's norm is that before clipping, right after the backward pass, of gradients without the loss's scale.
    Of several optimizers each has its own, of its own weights; theirs together is that of the step.
    """

    def __init__(self, places: NamedTensors, looks_at_rest: bool = False):
        self._places, self._looks_at_rest = places, looks_at_rest
        self._at_rest: dict[str, dict[str, int]] = {}  # checksums by array and weight, as the step began
        self._changed: dict[str, float] = {}
        self._weights: dict[str, Tensor] = {}  # before the update
        self._together: Tensor | None = None  # the memory of all of these, if they are of one type
        self._has_before = False
        self._norms: dict[int, Norm] = {}  # of gradients, by number of the optimizer
        self._now: dict[str, Norm] = {}

    def clear(self) -> None:
        """Another step begins."""
        self._now.clear()
        self._norms.clear()
        self._has_before = False
        self._changed.clear()

    def begun(self) -> None:
        """Another step begins, of which nothing was done yet; or the loop has loaded a state."""
        if self._looks_at_rest:
            arrays = self._arrays(None)
            self._at_rest = {array: {name: checksum(x) for name, x in named.items()} for array, named in arrays.items()}
            self._changed = dict.fromkeys(AtRest.signals, 0.0)

    def updates(self, number: int | None) -> None:
        """An optimizer makes its first update of the step next: what is its own is as it was, or has changed.

        None: the step is over, and so it is with what no optimizer has updated.
        """
        for array, named in self._arrays(number).items() if self._at_rest else ():
            before = self._at_rest[array]
            if [name for name, x in named.items() if name in before and before.pop(name) != checksum(x)]:
                self._changed[f"{array}_changed"] = 1.0

    def _arrays(self, number: int | None) -> dict[str, dict[str, Tensor]]:
        """By array and weight what an optimizer has, and weights that none trains; without a number all there are."""
        places = self._places
        weights = {
            name: weight
            for name, weight in places.weights.items()
            if number is None or places.owner(name) in (None, number) or not weight.requires_grad
        }
        return {"weights": weights} | {slot: places.slot(slot, number) for slot in SLOTS}

    def has_norm(self, number: int) -> bool:
        """Whether the gradients of an optimizer were measured in this step."""
        return number in self._norms

    @torch.no_grad()
    def learned(self, number: int, scale: Tensor | None) -> None:
        """The gradients of an optimizer are there."""
        norm = joined(list(self._places.gradients(number).values()), self._places.device)
        if scale is not None:
            norm = norm / (scale.double().to(norm.device) if isinstance(norm, Tensor) else float(scale) or nan)
        self._norms[number] = norm

    def forget(self, number: int) -> None:
        """The optimizer makes no update in this step, so its gradients are no part of it."""
        self._norms.pop(number, None)

    def _live(self) -> dict[str, Tensor]:
        """The trained weights, as they are measured."""
        trained = self._places.trained
        if {weight.dtype for weight in trained.values()} <= MEASURED:
            return trained
        return {name: to_measure(weight) for name, weight in trained.items()}

    @torch.no_grad()
    def before(self) -> None:
        """The update comes next."""
        live = self._live()
        fits = self._weights.keys() == live.keys() and all(
            kept.shape == live[name].shape and kept.dtype == live[name].dtype for name, kept in self._weights.items()
        )
        if not fits:
            self._weights, self._together = _room_for(live)
        if live:
            torch._foreach_copy_([self._weights[name] for name in live], list(live.values()))
        self._has_before = True

    @torch.no_grad()
    def after(self) -> None:
        """The step is over; without an update the change is 0."""
        self.updates(None)
        live = self._live()
        groups = {"param_norm": list(live.values()), "update_rms": []}
        changed = [name for name in live if name in self._weights and self._weights[name].shape == live[name].shape]
        if self._has_before and changed:
            before = [self._weights[name] for name in changed]
            torch._foreach_sub_(before, [live[name] for name in changed])
            groups["update_rms"] = before
            if self._together is not None and len(changed) == len(self._weights):
                groups["update_rms"] = [self._together]  # one long tensor takes less time than many
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
        found = self._changed | ({"grad_norm": self.norm()} if self._norms else {})
        if not self._now:
            return found
        on_device = [value for value in self._now.values() if isinstance(value, Tensor)]
        values = stacked(on_device, self._places.device).tolist() if on_device else self._now.values()
        return found | dict(zip(self._now, values, strict=True))


def _room_for(live: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Tensors like these, in one piece of memory where they are of one type; and that piece."""
    if len({(weight.dtype, weight.device) for weight in live.values()}) != 1:
        return {name: torch.empty_like(weight) for name, weight in live.items()}, None
    first = next(iter(live.values()))
    together = torch.empty(sum(weight.numel() for weight in live.values()), dtype=first.dtype, device=first.device)
    parts = together.split([weight.numel() for weight in live.values()])
    return {name: part.view(live[name].shape) for name, part in zip(live, parts, strict=True)}, together


@dataclass(frozen=True)
class SeenStep:
    """A step that detectors judge later; `began_anew`: they begin anew with it. `values` are known since it is over."""

    step: int
    loss: float
    norm: float
    is_judged: bool
    began_anew: bool
    values: Mapping[str, float]


class Watch:
    """The detectors that watch one run, and what they remember.

    Where nothing waits for what they say, steps are judged some at once, and at the latest when somebody asks: in the
    midst of a training step each of their operations finds the CPU's caches full of something else.
    """

    def __init__(self, trial: Trial):
        self._waiting: list[SeenStep] = []
        self._tell: Callable[[int, Mapping[str, float]], None] = lambda step, said: None
        options = chosen_options([trial])
        self.names = list(options)
        self.state = State(1)
        like = {signal: torch.zeros(1, dtype=torch.float64) for signal in watched_by(self.names)}
        like |= {signal: torch.zeros(1, 0, dtype=torch.float64) for signal in LAYERED if signal in like}
        self._bank = DetectorBank(options, like, self.state)
        before = {name: self.state.add(f"before_{name}", like[name].clone()).used for name in self._bank.lagging}
        self._wanted = {RATE, *stored(list(before))}
        self._now = np.zeros((3, 1))
        shown = dict(zip(("loss", "grad_norm", STEP), torch.from_numpy(self._now), strict=True))
        self._values = before | {signal: like[signal] for signal in LAYERED if signal in like} | shown
        # Rows of one run stay where they are, so they are written through NumPy, which takes less for a number.
        self._before = {name: values.numpy() for name, values in before.items()}
        self._has_before = self._added("has_before", torch.zeros(1, dtype=torch.bool))
        self._is_known = self._added("is_known", torch.zeros(1, len(before), dtype=torch.bool))  # measured so far
        self._rates = self._added("rates", torch.full((1, 3), nan, dtype=torch.float64))  # of the last three steps
        self._usual = self._added("usual", torch.full((1, len(self.names)), nan, dtype=torch.float64))

    def _added(self, name: str, values: Tensor) -> np.ndarray:
        """An array of the state, as NumPy has it, in the same memory."""
        return self.state.add(name, values).used.numpy()

    @property
    def usual(self) -> dict[str, float]:
        """The scores of the last step without an alarm."""
        return dict(zip(self.names, self._usual[0].tolist(), strict=True))

    def tells(self, tell: Callable[[int, Mapping[str, float]], None]) -> None:
        """What is said of a step that is judged later is told so."""
        self._tell = tell

    def judge_later(self, seen: SeenStep) -> None:
        """A step is over of which nobody waits for what the detectors say."""
        self._waiting.append(seen)
        if len(self._waiting) >= AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Judge what waits."""
        waiting, self._waiting = self._waiting, []
        for seen in waiting:
            if seen.began_anew:
                self._restart()
            alarms, scores, _ = self.judge(seen.loss, seen.norm, seen.step, seen.is_judged)
            self.stepped(seen.values)
            self._tell(seen.step, said(alarms, scores))

    def keep_usual(self, scores: Mapping[str, float]) -> None:
        """This step was one."""
        self._usual[0] = [scores[name] for name in self.names]

    @torch.inference_mode()  # a fifth faster than with the bookkeeping of gradients that are never asked for
    def judge(
        self, loss: float, norm: float, step: int, is_judged: bool = True
    ) -> tuple[dict[str, bool], dict[str, float], bool]:
        """Of each detector, whether this step is an alarm, and its score; and whether it is of the step before, too.

        Not `is_judged`: its gradients overflowed under a dynamic loss scale, which is that one's to judge.
        """
        self._now[:, 0] = loss, norm, step
        alarms, scores, is_late = dict.fromkeys(self.names, False), dict.fromkeys(self.names, nan), False
        is_new, has_before = YES if is_judged else NO, YES if self._has_before[0] else NO
        new_rate = YES if has_new_rate(*self._rates[0]) else None
        for name, is_alarm, score in self._bank.judge(self._values, is_new, has_before, new_rate):
            alarms[name], scores[name] = bool(is_alarm), float(score)
            is_late = is_late or (alarms[name] and bool(self._bank.late(name, is_alarm)))
        return alarms, scores, is_late

    def stepped(self, values: Mapping[str, float]) -> None:
        """What is known now that the step is over."""
        with np.errstate(over="ignore"):  # as stored: what float32 cannot hold is infinite
            shown = {name: float(np.float32(values.get(name, nan))) for name in self._wanted}
        if PER_RATE in self._before:
            shown[PER_RATE] = float(per_rate(np.float64(shown[UPDATE]), np.float64(shown[RATE])))
        is_known = self._is_known[0]
        for number, (name, kept) in enumerate(self._before.items()):
            value = shown[name]
            is_known[number] |= value == value
            kept[0] = value if is_known[number] else 0.0
        self._has_before[0] = True
        self._rates[0] = [shown[RATE], *self._rates[0, :-1]]

    def restart(self) -> None:
        """The detectors begin anew."""
        self.settle()
        self._restart()

    def _restart(self) -> None:
        self._bank.restart(YES)
        self._has_before[0] = False

    def memory(self) -> dict[str, Tensor]:
        """What they remember, copied."""
        self.settle()
        return {name: values.clone() for name, values in self.state}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Go on with this memory."""
        self.settle()
        for name, values in self.state:
            values.copy_(memory[name])


def said(alarms: Mapping[str, bool], scores: Mapping[str, float]) -> dict[str, float]:
    """What detectors say of a step, by the names of the store."""
    of_alarms = {f"alarm_{name}": float(is_alarm) for name, is_alarm in alarms.items()}
    return of_alarms | {f"score_{name}": score for name, score in scores.items()}


class SignalBuffer:
    """Numbers by signal and step, which may be written anew from any step on; NaN where there is none.

    `settle` is called before anything is read.
    """

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}
        self.length = 0  # steps
        self.settle: Callable[[], None] = lambda: None

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step, which is the last one now."""
        self.length = step + 1
        self.add(step, values)
        for name in self._values.keys() - values.keys():
            if step < len(self._values[name]):
                self._values[name][step] = nan

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """More numbers of a step."""
        with np.errstate(over="ignore"):
            for name, value in values.items():
                if (room := self._values.get(name)) is None:
                    room = self._values[name] = np.full(64, nan, np.float32)
                if step >= len(room):
                    more = np.full(max(len(room), step + 1 - len(room)), nan, np.float32)
                    room = self._values[name] = np.concatenate([room, more])
                room[step] = value

    def take(self, other: SignalBuffer, stop: int) -> None:
        """The first steps of another series."""
        other.settle()
        self._values = {name: values.copy() for name, values in other._values.items()}
        self.length = min(stop, other.length)

    def get(self, name: str) -> np.ndarray:
        """[steps], float32."""
        self.settle()
        values = np.full(self.length, nan, np.float32)
        kept = self._values.get(name, values)[: self.length]
        values[: len(kept)] = kept
        return values

    @property
    def names(self) -> list[str]:
        self.settle()
        return list(self._values)

    def arrays(self) -> dict[str, np.ndarray]:
        """All of them by name."""
        return {name: self.get(name) for name in self.names}
