"""From trials to packs: twins together, structures apart, as many at once as run fastest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from harness.basics.devices import on_cpu
from harness.basics.memory import in_units
from harness.config import NO_FAULT, Model, Problems, Trial
from harness.guards.playbook import goes_back, waits
from harness.memory.footprint import Footprint, footprint
from harness.memory.optimizer_arrays import optimizer_bytes
from harness.model.branches import Branches, branches_of
from harness.model.heads import heads_of
from harness.model.hyper_connections import kept_at_the_end, kept_of_streams
from harness.model.layers import kept_by_norms
from harness.model.outline import placement_norms
from harness.model.placements import has_final_norm
from harness.model.precision import FORMATS
from harness.model.scaling import tensor_table
from harness.model.tensors import ModelTensor
from harness.policy.sizes import trained_sequences
from harness.training.pack_sizes import rows_at_once, tried
from sweeps.planning.packs import PackPlan, Plan

STEP_BYTES = 24  # for each step of each trial: its rate, twice for a moment, and its loss
POLICY_COPIES = 3  # of a policy's weights: those of the start, of the reference and of the sampler
ROLLOUT_STEPS = 2.0  # what a rollout of a policy takes, in ordinary steps, where 16 tokens of 24 are sampled
LIKE = 0.7  # packs whose times differ by no more take turns
MOST_ALIKE = 64  # a golden twin and its faulty trials in a pack: they share a prefix, and its cost is then 2% a trial


def make_plan(
    trials: Sequence[Trial],
    complete: Iterable[str],
    size: int | None,
    device: str,
    workers: int,
    memory: float = math.inf,
    begun: Sequence[PackPlan] = (),
) -> Plan:
    """Packs for every trial that is not complete, and for the golden twin of every faulty one.

    `size` None fills packs until as many rows train at a time, on average, as pass through the model together, or
    less where that would leave some of `workers` idle: a faulty trial has a row from its fault on only, and with their
    golden twin up to `MOST_ALIKE` stay together, as far as their state fits into `memory` bytes: as many as an
    accelerator has slots in a part of small models. A number is the most trials of a pack. A pack holds the golden twin
    of each of its faulty trials, and a lone trial joins another pack, so one may be larger than `size` by one; where
    memory has no room for that, it trains beside a golden trial of another pack. The longest packs come first; of those
    that take about as long, one of each structure in turn, so that a machine that slows down slows all of them down.
    `complete` are the ids of trials to leave alone: stored, or in training elsewhere. Packs that are `begun` stay as
    they are: none of theirs is complete.
    """
    if device == "cuda":
        check_weights(trials, memory, device)
    complete = set(complete)
    wanted = {trial.id: trial for trial in trials}
    twins = {trial.golden.id: trial.golden for trial in trials if trial.golden.id not in wanted}
    everything = {**wanted, **twins}
    # Planned as if nothing were there, so that the same command has the same packs however often it is started. Where
    # a part of a pack is there, or begun in another pack, the rest is planned again.
    settled = complete.union(trial.id for pack in begun for trial in pack.recorded)
    options = (size, device, workers, memory)
    planned = _packs(everything.values(), *options) if len(everything.keys() - settled) else []
    whole = [(turn, pack) for turn, pack in planned if not any(trial.id in settled for trial in pack.recorded)]
    settled = settled.union(trial.id for _, pack in whole for trial in pack.recorded)
    rest = _packs([trial for trial in everything.values() if trial.id not in settled], *options)
    packs = [*((0, pack) for pack in begun), *whole, *(rest if size == 1 else _in_company(rest, everything.values()))]
    timed = [(pack_seconds(pack, device), turn, pack) for turn, pack in packs]
    classes = _classes(seconds for seconds, _, _ in timed)
    timed.sort(key=lambda entry: (classes[entry[0]], entry[1]))
    return Plan(tuple(pack for _, _, pack in timed), len(wanted), len(twins), len(everything.keys() & complete))


def _in_company(packs: list[tuple[int, PackPlan]], trials: Iterable[Trial]) -> list[tuple[int, PackPlan]]:
    """The packs; a lone trial with another one that is stored elsewhere, because a pack of one has other bits."""
    golden: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        if trial.fault == NO_FAULT:
            golden.setdefault(trial.structure, []).append(trial)
    for place, (turn, pack) in enumerate(packs):
        first = pack.trials[0]
        others = [trial for trial in golden[first.structure][:2] if trial.id != first.id]
        if len(pack.trials) == 1 and others:
            packs[place] = turn, PackPlan((first, others[0]), frozenset([others[0].id]))
    return packs


def _packs(
    trials: Iterable[Trial], size: int | None, device: str, workers: int, memory: float
) -> list[tuple[int, PackPlan]]:
    """Packs for these trials, each with its number among those of its structure."""
    families: dict[tuple[Any, ...], dict[str, list[Trial]]] = {}
    for trial in trials:
        families.setdefault(trial.structure, {}).setdefault(trial.golden.id, []).append(trial)
    packs: list[tuple[int, PackPlan]] = []
    for same_shape in families.values():
        members = list(same_shape.values())
        first = members[0][0]
        joins = True  # a lone trial, another pack
        if size:
            longest = limit = fitting = size
        else:
            sizes = first.model, first.train.sequences, torch.device(device)
            # As many as any device may want, which the job finds out; without knowing its memory, as the rule has it.
            best = max(tried(*sizes)) if memory < math.inf else rows_at_once(*sizes)
            share = max(2, math.ceil(sum(mean_rows(family) for family in members) / workers))
            # A family that is more than one worker's share is shared out, prefix and all.
            most = trials_that_fit(first, memory, device)
            fitting, joins = max(2, most - 1), most > 2
            longest = max(2, min(MOST_ALIKE, math.ceil(sum(map(len, members)) / workers) + 1, fitting))
            limit = min(best, share, fitting)
        # What a piece takes: its rows in training, on average, but at least its part of the trials that fit.
        pieces = [
            (math.ceil(max(mean_rows(piece.trials), limit / fitting * len(piece.trials))), piece)
            for family in members
            for piece in _pieces(family, longest)
        ]
        packs += enumerate(_fill(pieces, limit, joins))
    return packs


def _pieces(family: Sequence[Trial], limit: int) -> list[PackPlan]:
    """What has to stay together of a golden trial and its faulty ones: some of those, with their golden twin.

    The golden trial is recorded once; where it is there again, or stored already (`family` lacks it then), it is
    unstored. Strikes at like times stay together.
    """
    golden = family[0].golden
    faulty = sorted((trial for trial in family if trial.id != golden.id), key=lambda trial: trial.fault.start)
    if not faulty:
        return [PackPlan((golden,), frozenset())]
    count = math.ceil(len(faulty) / max(1, limit - 1))
    ends = [len(faulty) * i // count for i in range(count + 1)]
    recorded_first, unstored = len(faulty) < len(family), frozenset([golden.id])
    return [
        PackPlan((golden, *faulty[start:stop]), frozenset() if recorded_first and start == 0 else unstored)
        for start, stop in pairwise(ends)
    ]


def _fill(pieces: Sequence[tuple[int, PackPlan]], limit: int, joins: bool) -> list[PackPlan]:
    """Packs of about equal size: each piece, largest first, goes where it leaves the least room.

    `pieces` come with their sizes; one that is as large as `limit`, or larger, is a pack of its own. A lone trial
    `joins` another pack, or trains beside a golden trial of one, which is not recorded twice.
    """
    whole = [[piece] for size, piece in pieces if size >= limit]
    parts = [(size, piece) for size, piece in pieces if size < limit]
    total = sum(size for size, _ in parts)
    target = math.ceil(total / max(1, math.ceil(total / limit)))
    packs: list[list[PackPlan]] = []
    with_room: list[list[list[PackPlan]]] = [[] for _ in range(target + 1)]
    for size, piece in sorted(parts, key=lambda part: -part[0]):
        room = next((room for room in range(size, target + 1) if with_room[room]), None)
        if room is None:
            room = target
            packs.append([])
            with_room[room].append(packs[-1])
        pack = with_room[room].pop()
        pack.append(piece)
        with_room[max(0, room - size)].append(pack)
    packs = whole + packs
    lone = next((pack for pack in packs if len(pack) == len(pack[0].trials) == 1), None)
    if lone and len(packs) > 1 and limit > 1:  # a pack of one has other bits than a larger one
        packs.remove(lone)
        beside = packs[-1][0].trials[0].golden
        if joins:
            packs[-1] += lone
        else:
            packs.append([*lone, PackPlan((beside,), frozenset([beside.id]))])
    return [_join(pack) for pack in packs]


def _join(pieces: Sequence[PackPlan]) -> PackPlan:
    """One pack; a golden trial that several of its pieces share is in it once."""
    trials = {trial.id: trial for piece in pieces for trial in piece.trials}
    recorded = {trial.id for piece in pieces for trial in piece.recorded}
    return PackPlan(tuple(trials.values()), frozenset(trials.keys() - recorded))


# --- what a pack costs -------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _weights(model: Model, vocabulary: int, branches: Branches, heads: tuple[ModelTensor, ...] = ()) -> tuple[int, int]:
    """How many numbers all tensors of the model have, and how many its matrices; a deep one takes a while to list."""
    rows = tensor_table(model, vocabulary, branches=branches, heads=heads)
    return sum(row.size for row in rows), sum(row.size for row in rows if len(row.shape) == 2)


@lru_cache(maxsize=256)
def activation_elements(model: Model, vocabulary: int, checkpointing: bool = False, branches: Branches = ()) -> int:
    """Values that one token leaves for the backward pass: a count over the model's code. No `branches`: the usual."""
    width, drops, branches = model.width, model.dropout is not None, branches or branches_of(Trial(model))
    scaled = drops + (model.layer_scale is not None) + (model.init == "fixup")  # what each branch gives
    scaled += 3 * model.hypersphere  # which is turned, with the stream; the next branch reads what that gives
    each = [[branch.at(number) for branch in branches] for number in range(model.depth)]
    of_blocks = [sum(one.kept() + scaled * width + kept_of_streams(model) for one in block) for block in each]
    norms = [sum(norm.size for norm in placement_norms(model, number, branches)) for number in range(model.depth)]
    # With what is made on the way back.
    kept = [of_block + 4 * width + kept_by_norms(model, fed) for of_block, fed in zip(of_blocks, norms, strict=True)]
    inside = sum(kept)
    if checkpointing:  # what each block reads, and one block three times: its values, gradients, unused room (measured)
        inside = model.depth * model.residual_streams * width + 3 * max(kept)
    outside = width * (1 + 2 * has_final_norm(model) + 2 * model.embedding_norm + drops)
    outside += kept_at_the_end(model)
    return inside + outside + (2 + (model.output_cap is not None) + model.hypersphere) * vocabulary


def mean_rows(trials: Sequence[Trial]) -> float:
    """Rows that train at a time, on average: a faulty trial needs none before its strike."""
    steps = trials[0].steps
    return sum(1.0 if trial.fault == NO_FAULT else max(0, steps - trial.fault.start) / steps for trial in trials)


def state_bytes(trial: Trial) -> int:
    """Memory of one trial's weights, gradients and two moments, and of the matrices that the model makes of weights."""
    train = trial.train
    copies = 4 + 2 * (train.ranks > 1) + (train.micro_batches > 1) + bool(trial.model.sigma_reparam)
    copies += older_weights(trial) + POLICY_COPIES * is_policy(trial)
    return copies * weight_bytes(trial) + branch_bytes(trial) + optimizer_bytes(trial)


def is_policy(trial: Trial) -> bool:
    """Whether it samples what it trains on."""
    return trial.objective.name == "policy"


def with_text(trial: Trial) -> int:
    """By how much more a step trains on: a policy that mixes in text has a window for each completion."""
    return 1 + (is_policy(trial) and trial.section("policy").mix_in is not None)


def older_weights(trial: Trial) -> int:
    """Copies of a policy's weights of earlier rollouts, which are state of its row."""
    lag: int = trial.section("policy").sampler_lag if is_policy(trial) else 0
    return lag


def branch_bytes(trial: Trial) -> int:
    """Memory that the branches of one trial keep from step to step."""
    return sum(branch.state_bytes(trial, weight_bytes(trial)) for branch in branches_of(trial))


def snapshot_bytes(trial: Trial, device: str) -> int:
    """Memory of one trial's snapshots, of weights and two moments each, where the pack's is."""
    snapshot = trial.section("playbook.snapshot")
    is_here = device == "cpu" or snapshot.on == "device"
    kept = snapshot.kept + (snapshot.every > 1 and waits(trial))
    of_one = (3 + older_weights(trial)) * weight_bytes(trial) + branch_bytes(trial) + optimizer_bytes(trial)
    return kept * of_one if is_here and goes_back(trial) else 0


def weight_bytes(trial: Trial) -> int:
    """Memory of one trial's weights alone."""
    state, _ = FORMATS[trial.train.precision]
    return state.itemsize * _weights(trial.model, trial.data.vocabulary, branches_of(trial), heads_of(trial))[0]


def activation_bytes(trial: Trial, rows: int, device: str) -> float:
    """Memory of the activations of those of `rows` trials that pass through the model together."""
    # Those in which rollouts are scored, or those that train.
    sequences = max(trial.train.sequences, trained_sequences(trial) * with_text(trial))
    together = min(rows, 1.5 * rows_at_once(trial.model, sequences, torch.device(device)))
    a_token = activation_elements(trial.model, trial.data.vocabulary, trial.train.checkpointing, branches_of(trial))
    return together * FORMATS[trial.train.precision][0].itemsize * (sequences * trial.model.context * a_token)


def counted(trial: Trial, device: str) -> Footprint | None:
    """The memory of packs of such trials on an accelerator.

    None on a CPU, where the rules above are; and, with a warning, where a part of an installed package cannot be
    counted, for which they have to do.
    """
    if on_cpu(torch.device(device)):
        return None
    try:
        return footprint(trial)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        warnings.warn(f"memory on {device} is a rough estimate: {reason}", RuntimeWarning, stacklevel=2)
        return None


def pack_bytes(pack: PackPlan, device: str = "cpu") -> int:
    """Memory of a pack at its peak: the state of all its trials, activations, and rates and losses of all steps.

    On a CPU, measured, it was 0.94 to 1.2 times as much.
    """
    trial, rows = pack.trials[0], len(pack.trials)
    if (found := counted(trial, device)) is not None:
        return found.bytes(rows)
    of_a_row = state_bytes(trial) + snapshot_bytes(trial, device) + STEP_BYTES * trial.steps
    return int(rows * of_a_row + activation_bytes(trial, rows, device))


def check_weights(trials: Iterable[Trial], memory: float, device: str = "cpu") -> None:
    """Raise ConfigError for a model whose weights and gradients, or snapshots, of one trial exceed `memory` bytes."""
    problems = Problems()
    for trial in {trial.structure: trial for trial in trials}.values():
        if (needed := 2 * weight_bytes(trial)) > memory:
            sizes = f"model.width={trial.model.width}, model.depth={trial.model.depth}"
            takes = f"weights and gradients of one trial take {in_units(needed)}"
            allowed = f"at most the {in_units(memory)} of a worker: a smaller model, or workers with more"
            problems.reasons[f"{sizes}: {takes}; allowed: {allowed}"] = None
        elif needed + (kept := snapshot_bytes(trial, device)) > memory:
            snapshots = (
                f"playbook.snapshot.kept={trial.section('playbook.snapshot').kept}: so many snapshots of one trial"
            )
            allowed = f"at most the {in_units(memory)} of a worker: fewer of them, a smaller model, or more memory"
            problems.reasons[f"{snapshots} take {in_units(kept)}; allowed: {allowed}"] = None
    problems.check()


def trials_that_fit(trial: Trial, memory: float, device: str) -> int:
    """How many trials like this one a pack can have in `memory` bytes; at least two, the smallest pack."""
    if memory == math.inf:
        return 2**31
    if (found := counted(trial, device)) is not None:
        return max(2, found.rows_within(memory, 2**31))
    state = state_bytes(trial) + snapshot_bytes(trial, device)
    whole = int((memory - activation_bytes(trial, 2**31, device)) // state)
    few = int(memory // (state + activation_bytes(trial, 1, device)))
    return max(2, whole, min(few, rows_at_once(trial.model, trial.train.sequences, torch.device(device))))


def trial_step_seconds(trial: Trial, device: str) -> float:
    """A rough time for one step of one trial on one worker.

    Matrix products at a fixed rate plus passes over activations at a fixed bandwidth; both constants were fitted on
    two cores of a 2023 Xeon and are within a factor of two there. For CUDA they are a guess from data sheets.
    """
    passes = 4 / 3 if trial.train.checkpointing else 1.0  # a forward pass is a third of a step
    if is_policy(trial):
        options = trial.section("policy")
        passes *= with_text(trial) / options.minibatches
        passes += ROLLOUT_STEPS / options.updates
    tokens = trial.train.batch * trial.model.context
    return passes * tokens * _token_seconds(trial.model, trial.data.vocabulary, branches_of(trial), device)


@lru_cache(maxsize=256)
def _token_seconds(model: Model, vocabulary: int, branches: Branches, device: str) -> float:
    _, matrices = _weights(model, vocabulary, branches)
    operations = 6 * (matrices + model.depth * sum(branch.operations() for branch in branches))
    traffic = 4 * 5 * activation_elements(model, vocabulary, branches=branches)
    rate, bandwidth = (1e14, 1e12) if device == "cuda" else (1.5e11, 5e9)
    return operations / rate + traffic / bandwidth


def _classes(lengths: Iterable[float]) -> dict[float, int]:
    """Length -> the number of its class, the longest first: what is at least 0.7 times as long as the longest of it."""
    classes, longest, number = {}, math.inf, 0
    for length in sorted(set(lengths), reverse=True):
        if length < LIKE * longest:
            longest, number = length, number + 1
        classes[length] = number
    return classes


def pack_seconds(pack: PackPlan, device: str) -> float:
    """A rough time for a pack on one worker."""
    trial = pack.trials[0]
    train, step = trial.train, trial_step_seconds(trial, device)
    # Where sequences or batches grow, more steps are as many tokens.
    training = mean_rows(pack.trials) * train.steps * step
    tokens = train.validate_tokens + train.validate_between * (1 + (trial.steps - 1) // train.validate_every)
    # A forward pass is a third of a step.
    validation = tokens / (train.batch * trial.model.context) * step / 3
    return training + len(pack.trials) * validation


def wall_seconds(plan: Plan, device: str, workers: int) -> float:
    """A rough time for all packs on `workers` workers, longest first."""
    free = [0.0] * max(1, min(workers, len(plan.packs)))
    for pack in plan.packs:
        free[free.index(min(free))] += pack_seconds(pack, device)
    return max(free)
