"""From trials to packs: twins together, structures apart, as many at once as run fastest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.config import Model, Trial
from harness.precision import FORMATS
from harness.scaling import feedforward_size, tensor_table


@dataclass(frozen=True)
class PackPlan:
    """Trials to train together. A witness is a golden twin whose results are stored elsewhere already."""

    trials: tuple[Trial, ...]
    witnesses: frozenset[str]

    @property
    def id(self) -> str:
        text = " ".join(trial.id for trial in self.recorded)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def recorded(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.id not in self.witnesses)


@dataclass(frozen=True)
class Plan:
    """What a sweep is going to do."""

    packs: tuple[PackPlan, ...]
    asked: int
    added_twins: int
    complete: int

    @property
    def trials(self) -> int:
        return sum(len(pack.recorded) for pack in self.packs)


def make_plan(trials: Sequence[Trial], complete: Iterable[str], size: int | None, device: str, workers: int) -> Plan:
    """Packs for every trial that is not complete, and for the golden twin of every faulty one.

    `size` None takes `best_pack_size`, or less where that would leave some of `workers` idle. A pack holds the golden
    twin of each of its faulty trials, and a lone trial joins another pack, so one may be larger than `size` by one.
    Largest packs come first. `complete` are the ids of trials to leave alone: stored, or in training elsewhere.
    """
    complete = set(complete)
    wanted = {trial.id: trial for trial in trials}
    twins = {trial.golden.id: trial.golden for trial in trials if trial.golden.id not in wanted}
    everything = {**wanted, **twins}

    families: dict[tuple, dict[str, list[Trial]]] = {}
    for trial in everything.values():
        if trial.id not in complete:
            families.setdefault(trial.structure, {}).setdefault(trial.golden.id, []).append(trial)

    packs: list[PackPlan] = []
    for same_shape in families.values():
        members = list(same_shape.values())
        model, train = members[0][0].model, members[0][0].train
        pending = sum(len(family) for family in members)
        limit = size or min(best_pack_size(model, train.batch, device), max(2, math.ceil(pending / workers)))
        packs += _fill([piece for family in members for piece in _pieces(family, limit)], limit)
    packs.sort(key=lambda pack: -pack_seconds(pack, device))
    return Plan(tuple(packs), len(wanted), len(twins), len(everything.keys() & complete))


def _pieces(family: Sequence[Trial], limit: int) -> list[PackPlan]:
    """What has to stay together of a golden trial and its faulty ones: some of those, with their golden twin.

    The golden trial is recorded once; where it is there again, or stored already (`family` lacks it then), it is a
    witness.
    """
    golden = family[0].golden
    faulty = [trial for trial in family if trial.id != golden.id]
    is_witness = len(faulty) == len(family)
    if not faulty:
        return [PackPlan((golden,), frozenset())]
    pieces = []
    step = max(1, limit - 1)
    for start in range(0, len(faulty), step):
        pieces.append(PackPlan((golden, *faulty[start : start + step]), frozenset([golden.id] if is_witness else [])))
        is_witness = True
    return pieces


def _fill(pieces: Sequence[PackPlan], limit: int) -> list[PackPlan]:
    """Packs of about equal size: each piece, largest first, goes where it leaves the least room."""
    total = sum(len(piece.trials) for piece in pieces)
    target = math.ceil(total / math.ceil(total / limit))
    packs: list[list[PackPlan]] = []
    with_room: list[list[list[PackPlan]]] = [[] for _ in range(target + 1)]
    for piece in sorted(pieces, key=lambda piece: -len(piece.trials)):
        length = len(piece.trials)
        room = next((room for room in range(length, target + 1) if with_room[room]), None)
        if room is None:
            pack: list[PackPlan] = []
            packs.append(pack)
        else:
            pack = with_room[room].pop()
        pack.append(piece)
        with_room[max(0, (target if room is None else room) - length)].append(pack)
    lone = next((pack for pack in packs if len(pack) == len(pack[0].trials) == 1), None)
    if lone and len(packs) > 1 and limit > 1:  # a pack of one has other bits than a larger one
        packs.remove(lone)
        packs[-1] += lone
    return [_join(pack) for pack in packs]


def _join(pieces: Sequence[PackPlan]) -> PackPlan:
    trials = tuple(trial for piece in pieces for trial in piece.trials)
    return PackPlan(trials, frozenset().union(*(piece.witnesses for piece in pieces)))


# --- what a pack costs -------------------------------------------------------------------------------------------


def activation_elements(model: Model, vocabulary: int) -> int:
    """Values that one token leaves for the backward pass: a count over the model's code, scores included."""
    heads = model.width // model.head_dim
    explicit_scores = 2 * heads * model.context
    norms = 2 * model.width if model.qk_norm else 0
    feedforward = (3 if model.activation == "swiglu" else 2) * feedforward_size(model)
    block = 14 * model.width + norms + explicit_scores + feedforward
    return model.depth * block + 3 * model.width + 2 * vocabulary


def trial_bytes(trial: Trial) -> int:
    """Memory of one trial in a pack: weights, gradients, two moments, and activations."""
    state, _ = FORMATS[trial.train.precision]
    parameters = sum(row.size for row in tensor_table(trial.model, trial.data.vocabulary))
    tokens = trial.train.batch * trial.model.context
    return state.itemsize * (4 * parameters + tokens * activation_elements(trial.model, trial.data.vocabulary))


def pack_bytes(pack: PackPlan) -> int:
    """Memory of a pack: measured, it was 0.94 to 1.2 times as much."""
    return len(pack.trials) * trial_bytes(pack.trials[0])


def trial_step_seconds(trial: Trial, device: str) -> float:
    """A rough time for one step of one trial on one worker.

    Matrix products at a fixed rate plus passes over activations at a fixed bandwidth; both constants were fitted on
    two cores of a 2023 Xeon and are within a factor of two there. For CUDA they are a guess from data sheets.
    """
    model, tokens = trial.model, trial.train.batch * trial.model.context
    matrices = sum(row.size for row in tensor_table(model, trial.data.vocabulary) if len(row.shape) == 2)
    operations = 6 * tokens * (matrices + 2 * model.depth * model.context * model.width)
    traffic = 4 * 5 * tokens * activation_elements(model, trial.data.vocabulary)
    rate, bandwidth = (1e14, 1e12) if device == "cuda" else (1.5e11, 5e9)
    return operations / rate + traffic / bandwidth


def pack_seconds(pack: PackPlan, device: str) -> float:
    """A rough time for a pack on one worker."""
    trial = pack.trials[0]
    return len(pack.trials) * trial.train.steps * trial_step_seconds(trial, device)


def wall_seconds(plan: Plan, device: str, workers: int) -> float:
    """A rough time for all packs on `workers` workers, longest first."""
    free = [0.0] * workers
    for pack in plan.packs:
        free[free.index(min(free))] += pack_seconds(pack, device)
    return max(free)


def best_pack_size(model: Model, batch: int, device: str) -> int:
    """Trials in a pack: enough that the fixed cost of an operation is shared, few enough that activations stay cached.

    From tests/benchmarks/pack_size.py, see docs/benchmarks.md.
    """
    tokens = batch * model.context
    if device == "cuda":
        return max(2, min(64, 2**25 // (tokens * model.width)))
    return max(2, min(8, 2**18 // (tokens * model.width)))
