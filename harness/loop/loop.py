"""The training loop of a pack, on one screen.

A step of it, with every site at which a fault can strike, is in harness/loop/passes.py.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from harness.incidents.guard_runner import GuardRunner
from harness.loop.graphs import Graphs, Recording
from harness.loop.passes import Passes
from harness.loop.resume import restore, state_of
from harness.storage.checkpoint import Checkpoints, Saved
from harness.storage.kept_states import StateKeeper
from harness.training.activation_counts import idle_parts
from harness.training.pack import Pack
from harness.training.pack_sizes import smallest_pack
from harness.training.ranks import Replica
from harness.training.signals import Recorder, Write
from harness.training.sites import Event, FaultSchedule
from harness.training.strikes import Strikes

Leave = Callable[[int, Mapping[str, Tensor]], None]  # is given a planned trial's number and tensors by name
SHRINK_SHARE = 0.25  # the pack drops the rows of trials that are done once they are this share of it


@dataclass
class Result:
    """What a trained pack leaves beside its signals; one entry a planned trial."""

    outcome: list[str]
    nonfinite_step: list[int | None]
    masked_step: list[int | None]
    events: list[list[Event]]
    strikes: list[int]
    changes: list[int]
    dropped: list[list[dict[str, Any]]]
    incidents: list[list[dict[str, Any]]]  # what playbooks have answered
    acts: list[dict[str, int]]  # by part of the recipe, at how many steps it acted
    idle: list[dict[str, str]]  # by part that could not act, why
    provenance: list[dict[str, Any]]  # of the first non-finite value; empty without one
    digest: list[str]  # of all losses: that of another trial is equal where those are, bit for bit
    # As `harness.storage.store.ENDS` has them; arrays have no one equality.
    ends: dict[str, np.ndarray] = field(compare=False)


def train(
    pack: Pack,
    fault_schedule: FaultSchedule,
    block: int,
    write: Write,
    progress: Callable[[int, int], None] = lambda steps, frozen: None,
    telemetry: bool = True,
    detection: bool = True,
    until: int | None = None,
    checkpoints: Checkpoints | None = None,
    saved: Saved | None = None,
    leave: Leave | None = None,
    provenance: bool = True,
    record: Callable[[], Recording] | None = None,
    not_recorded: Callable[[str], None] = warnings.warn,
    states: StateKeeper | None = None,
    bystanders: Collection[int] = (),
) -> Result:
    """Train every trial of the pack from where it stands to its last step (or `until` one), or while it is finite.

    It goes on from `saved`, if that is given, and saves `checkpoints`; raises Stopped after one of them if they say so.
    Beside these `states` are kept for good. The rows of `bystanders`, planned trials of which nobody asks, may go.

    `write(first_step, signals)` gets each block of steps. `progress(steps done, trials frozen)` follows each step; what
    has frozen is known once a block.
    A trial whose loss or gradient is not finite freezes: that step and all later ones change none of its weights.
    With dynamic loss scaling a gradient alone costs it that step and half of its scale (harness/optim/loss_scale.py).
    One whose batch is dropped as a whole misses that step and nothing else (harness/data/screening.py).
    `leave` is given each trial's last weights, when its row goes or at the end (harness/storage/last_weights.py).
    With `record`, which makes recordings, steps and validation are recorded and replayed (harness/loop/graphs.py);
    `not_recorded` is told once of each of them that could not be.
    With `provenance` the step at which a trial froze is run once more, to find out why.
    The host waits for the device once a block, and at the step of a strike. Without `telemetry` only the loss, the
    two factors in force and validation are recorded; without `detection` nothing freezes. Neither changes a healthy
    trial.
    """
    graphs = Graphs(pack, record, not_recorded) if record else None
    recorder = Recorder(pack, block, write, telemetry, graphs.window_losses if graphs else None)
    answers = GuardRunner(pack, fault_schedule, recorder, detection, provenance)
    passes = Passes(pack, recorder, answers, Strikes(pack, fault_schedule), telemetry, detection)
    step = partial(graphs.train, passes) if graphs else passes.train
    state = partial(state_of, pack, fault_schedule, recorder, answers)
    if saved:
        restore(saved, pack, fault_schedule, recorder, answers)
    pack.ranks.verify(state)
    while (pack_step := pack.row_steps.pack_step(until)) is not None:
        if forked := pack.fork(pack_step):
            answers.forked(forked)
            pack_step = pack.row_steps.pack_step(until) or pack_step
        answers.begin(pack_step)
        found = step(pack_step, passes.feed(pack_step))
        recorder.keep(pack_step, found)
        pack.row_steps.done(pack_step)
        is_due = recorder.is_due(pack_step)
        is_saved = checkpoints is not None and checkpoints.is_due(pack.row_steps.number)
        is_kept = states is not None and states.is_due(pack_step.front, pack.row_steps.steps)
        saves = checkpoints is not None and pack.ranks.agreed(is_saved or is_kept)
        answers.settle(pack_step, found.loss, is_due, saves)
        if is_due and not _look(pack, recorder, answers, state, leave, bystanders):
            break
        progress(pack_step.front + 1, len(recorder.nonfinite))
        if checkpoints and saves and not pack.row_steps.is_over:
            pack.ranks.verify(state)
            if states and is_kept:
                states.keep(pack_step.front + 1, pack.row_steps.number, *state())
            if is_saved:
                checkpoints.save(pack.row_steps.number, *state())
    if leave:
        hand_over(pack, range(len(pack)), leave)
    return _result(pack, fault_schedule, recorder, answers)


def _look(
    pack: Pack,
    recorder: Recorder,
    answers: GuardRunner,
    state: Replica,
    leave: Leave | None,
    bystanders: Collection[int],
) -> bool:
    """Write full blocks, look why rows froze, and drop rows that need no more training; returns whether any is left.

    Rows of frozen and masked trials go when they are many, but the smallest pack that rounds alike is kept.
    """
    pack.ranks.verify(state)
    recorder.flush()
    answers.provenances.look()
    active, row_steps, rows = pack.active.tolist(), pack.row_steps, range(len(pack))
    finished = set() if row_steps.is_over else {row for row in rows if row_steps.steps[row] >= row_steps.last}
    finished |= {row for row in rows if pack.rows[row] in pack.twins.masked or pack.rows[row] in bystanders}
    done = [row for row in rows if not active[row] or row in finished]
    few = len(done) < SHRINK_SHARE * len(rows)
    gone = [] if few else done[max(0, smallest_pack(pack.device) - (len(rows) - len(done))) :]
    if gone:
        if leave:
            hand_over(pack, gone, leave)
        pack.keep([row for row in rows if row not in gone])
    return bool(pack.active.any())


def _result(pack: Pack, fault_schedule: FaultSchedule, recorder: Recorder, answers: GuardRunner) -> Result:
    recorder.close()
    answers.provenances.look()
    numbers = range(len(pack.planned))
    losses, ends, read = recorder.losses(), recorder.ends(), recorder.judged()
    nonfinite = [recorder.nonfinite_step(number) for number in numbers]
    return Result(
        outcome=[
            pack.objective.judge_with(
                {name: values[number] for name, values in read.items()}, loss, step, trial.model.start is None
            )
            for number, loss, step, trial in zip(numbers, losses, nonfinite, pack.planned, strict=True)
        ],
        nonfinite_step=nonfinite,
        masked_step=[pack.twins.masked.get(number) for number in numbers],
        events=fault_schedule.events,
        strikes=fault_schedule.strikes,
        changes=fault_schedule.changes,
        dropped=pack.twins.records(pack.objective.records),
        incidents=pack.twins.records(answers.incidents()),
        acts=pack.acts.totals(pack.twins, pack.steps - 1),
        idle=[idle_parts(trial) for trial in pack.planned],
        provenance=[recorder.provenance_of(number) for number in numbers],
        digest=[
            hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()[:16]
            for rows in zip(losses, *ends.values(), strict=True)
        ],
        ends=ends,
    )


def hand_over(pack: Pack, rows: Iterable[int], leave: Leave) -> None:
    """Give `leave` the weights of rows that are about to go: of their trials, and of all whose twin they serve."""
    twins, judged = pack.twins, pack.optimizer.judged()
    for row in rows:
        trial, tensors = pack.rows[row], pack.tensors(pack.weights if judged is None else judged, row)
        if trial in twins.masked:
            continue  # its twin's are handed over for it
        leave(trial, tensors)
        for number, leader in enumerate(twins.leader):
            if leader == trial and (number in twins.masked or number not in twins.forked):
                leave(number, tensors)
