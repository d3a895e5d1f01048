"""Run a sweep: check everything, plan, train or submit, and say what came of it."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections.abc import Generator, Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from rich.console import Console

from harness.basics.memory import bytes_of
from harness.basics.printing import count
from harness.config import ConfigError, Data, Fault, Problems, Trial
from harness.data.corpus import check_data
from harness.model.branches import branches_of
from harness.model.precision import pick_device
from harness.model.scaling import tensor_table
from harness.model.start import check_start, start_digests
from harness.storage.last_weights import has_weights
from harness.storage.results_folder import ResultsPath
from harness.storage.store import check_store, open_store
from harness.storage.stored import STORE, complete_trials, is_complete, read_packs
from harness.storage.zarr_files import METADATA
from injectors import InjectableFault
from injectors.value import Value
from sweeps.compose.settings import Run
from sweeps.planning.campaign import campaign_of, check_samples, envelope, widest_interval
from sweeps.planning.limits import check_processes, check_results
from sweeps.planning.plan_table import print_plan, say_counts
from sweeps.planning.planner import PackPlan, Plan, make_plan
from sweeps.running.claims import LOCKS, all_claims, lock_of
from sweeps.running.job import (
    CHECKPOINTS,
    ERRORS,
    PROGRESS,
    Elsewhere,
    Failed,
    Finished,
    Job,
    begun_packs,
    corpus_of,
    without_order,
    write_plan,
)
from sweeps.running.local import SHARE_OF_MEMORY, Executor, LocalExecutor
from sweeps.running.locks import is_locked
from sweeps.running.progress import Display
from sweeps.running.summary import summarize

PACK_ID = "[0-9a-f]{16}"


@contextlib.contextmanager
def _stopped_by_sigterm() -> Generator[None]:
    """SIGTERM ends the sweep as Ctrl-C does; only the exit status differs. Signals come to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def run_grid(
    trials: Sequence[Trial],
    last_bit: Fault,
    run: Run,
    executor: Executor,
    console: Console,
    notices: Sequence[str] = (),
) -> int:
    """Run the sweep, its campaigns drawn; in rounds, if it is to stop by itself. Returns the exit status.

    `notices` are lines that belong to the plan.

    Raises ConfigError before anything is written if something about the run is wrong.
    """
    problems, campaigns, single = Problems(), [], []
    for trial in trials:
        with problems.collect():
            campaign = campaign_of(trial)
            if campaign is None:
                single.append(trial)
            else:
                campaigns.append(campaign)
    with problems.collect():
        check_samples(campaigns)
    problems.check()
    assert isinstance(last_bit, Value)
    notes = [*notices, *(campaign.words() for campaign in campaigns)]
    asked = run.campaign
    common = [*single, *(envelope(campaigns, last_bit, asked.envelope) if asked.envelope and campaigns else ())]
    largest = max((campaign.samples for campaign in campaigns), default=0)
    rounds = [largest] if asked.width is None or run.plan else [*range(asked.round, largest, asked.round), largest]
    for most in rounds:
        drawn = [trial for campaign in campaigns for trial in campaign.trials(most)]
        name = "" if most == rounds[0] else f"{most} faults of each description"
        status = run_sweep([*common, *drawn], run, executor, console, notes, name)
        notes = []
        if status or asked.width is None or most == largest:
            break
        if not run.wait and not {trial.id for trial in drawn} <= complete_trials(run.out):
            break  # the same command looks at this round once its jobs have ended
        widest = widest_interval(run.out, campaigns, most)
        words = f"widest 95% interval of a masked share: {widest:.3f} after {most} faults of each description"
        console.print(f"{words}; asked for: {asked.width}", highlight=False, soft_wrap=True)
        if widest <= asked.width:
            break
    return status


def _check_heads(trials: Sequence[Trial]) -> None:
    """Raise ConfigError for muP over several sizes of heads of which none is said to be the base."""
    models = {trial.model for trial in trials if trial.model.parametrization != "standard"}
    sizes = sorted({model.head_dim for model in models if model.base_head_dim is None})
    if len(sizes) > 1:
        values, kinds = ",".join(map(str, sizes)), ",".join(sorted({model.parametrization for model in models}))
        raise ConfigError(
            f"model.head_dim={values}: under model.parametrization={kinds} attention's scores follow the head's size "
            f"from a base on, and each of these would be its own; allowed: model.base_head_dim={sizes[0]}, or one size"
        )


def run_sweep(
    trials: Sequence[Trial],
    run: Run,
    executor: Executor,
    console: Console,
    notes: Sequence[str] = (),
    name: str = "",
    is_rehearsal: bool = False,
) -> int:
    """Check, plan and train. Returns the exit status: 0, 1 if a pack failed, 130 after Ctrl-C, 143 after SIGTERM.

    `notes` are lines that belong to the plan. `name` is that of one round of many, which is worth one line. A plan says
    what this machine has no room for, because it may be for another one; one that is a rehearsal refuses it.

    Raises ConfigError before anything is written if something about the run is wrong.
    """
    device, processes = _checked(trials, run)
    has_results = (run.out / STORE / METADATA).exists()
    complete = complete_trials(run.out) if has_results else set()
    running = executor.running(run.out)
    taken = {trial.id for job in running for trial in job.pack.recorded}
    asked = {trial.id for trial in trials} | {trial.golden.id for trial in trials}
    begun = begun_packs(run.out, asked - complete - taken) if has_results else []
    plan, executor, lacking = _planned(trials, run, executor, device, processes, complete | taken, begun)
    if is_rehearsal or not run.plan:
        lacking.check()
    if run.plan:
        _say(notes, console)
        print_plan(plan, device, executor.workers, console)
        _say([f"no room: {reason}" for reason in lacking.reasons], console)
        return 0
    check_corpora(trials, run, has_results)
    folder = open_store(run.out, run.study)
    if run.keep == "weights" and (bare := sum(not has_weights(run.out, trial) for trial in asked & complete)):
        words = f"{count(bare, 'trial')} complete already without weights, which only a new folder would keep"
        notes = [*notes, f"keep=weights: {words}"]
    if plan.packs:
        write_plan(folder, asked)
    _remove_leftovers(folder, {job.pack.id for job in running}, complete)
    _say([*(() if name else (f"study {run.study} -> {run.out}",)), *notes], console)
    if not name:
        say_counts(plan, console)
    jobs = [Job(pack, run, folder.id) for pack in plan.packs]
    results, stopped = _followed(jobs, running, run.out, executor, console)
    if not run.wait and not results and not stopped and (jobs or running):
        words = f"{count(len(jobs), 'pack')} submitted, {len(running)} in the queue already"
        _say([f"{words}; the same command picks up what has finished"], console)
        return 0
    summarize(plan, run, results, console, is_idle=not (jobs or running), name=name)
    if stopped:
        console.print("interrupted; the same command goes on from here", highlight=False)
        return 143 if isinstance(stopped, Terminated) else 130
    return 1 if any(isinstance(result, Failed) for result in results) else 0


def _say(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _checked(trials: Sequence[Trial], run: Run) -> tuple[str, int]:
    """The device, and how many processes train one pack. Raises ConfigError with all that speaks against the run."""
    problems = Problems()
    with problems.collect():
        check_store(run.out, run.study)
    with problems.collect():
        _check_heads(trials)
    problems.check()
    is_for_another = run.plan and run.device == "cuda" and not torch.cuda.is_available()
    for precision in {trial.train.precision for trial in trials}:
        with problems.collect():
            device = "cuda" if is_for_another else pick_device(run.device, precision).type
    with problems.collect():
        processes = _processes(trials, run)
    for data, context in _corpora(trials):
        with problems.collect():
            check_data(data, context)
    for trial in {(t.structure, t.model.start): t for t in trials if t.model.start is not None}.values():
        table = tensor_table(trial.model, trial.data.vocabulary, branches=branches_of(trial))
        with problems.collect():
            check_start(str(trial.model.start), {scaled.name: scaled.shape for scaled in table})
    problems.check()
    return device, processes


def _followed(
    jobs: Sequence[Job], running: Sequence[Job], out: Path, executor: Executor, console: Console
) -> tuple[list[Finished | Failed | Elsewhere], KeyboardInterrupt | None]:
    """What came of each pack that is trained now, or runs already; and what has stopped that, if anything has."""
    results: list[Finished | Failed | Elsewhere] = []
    with (
        _stopped_by_sigterm(),
        Display([job.pack for job in (*jobs, *running)], out, console) as display,
        contextlib.closing(executor(jobs, running)) as stream,
    ):
        try:
            for result in stream:
                if result is None:
                    display.update()
                else:
                    results.append(result)
                    display.finished(result)
        except KeyboardInterrupt as interrupt:
            return results, interrupt
    return results, None


def _processes(trials: Sequence[Trial], run: Run) -> int:
    """The most that train one pack at the same time. Raises ConfigError where there are no ranks to train in them."""
    if run.ranks == "simulated":
        return 1
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("ranks=processes: this build of torch lacks torch.distributed with gloo; allowed: simulated")
    most = max((trial.train.ranks for trial in trials), default=1)
    if most == 1:
        raise ConfigError("ranks=processes: every trial has train.ranks=1; allowed: simulated, or train.ranks >= 2")
    return most


def _planned(
    trials: Sequence[Trial],
    run: Run,
    executor: Executor,
    device: str,
    processes: int,
    settled: Set[str],
    begun: Sequence[PackPlan],
) -> tuple[Plan, Executor, Problems]:
    """The plan, whoever trains it as far as memory goes, and what there is no room for."""
    lacking = Problems()
    if isinstance(executor, LocalExecutor):
        with lacking.collect():
            check_processes(processes)
        executor = executor.sharing(processes)
    make = partial(make_plan, trials, settled, run.pack_size, device, executor.splits_over, begun=begun)
    try:
        plan = make(memory=_memory(run, executor, device, processes))
    except ConfigError as error:
        lacking.reasons |= dict.fromkeys(error.reasons)
        plan = make()
    with lacking.collect():
        executor = executor.fitting(plan.packs) if device == "cpu" else executor
    with lacking.collect():
        check_results(plan, run.out, run.telemetry.block, run.keep)
    return plan, executor, lacking


def _memory(run: Run, executor: Executor, device: str, processes: int) -> float:
    """Bytes that each process of a pack may take; infinite where that is not known."""
    if run.memory is not None and (size := bytes_of(run.memory)):
        return SHARE_OF_MEMORY * size
    if device == "cuda" and not torch.cuda.is_available():
        return math.inf
    return executor.memory(device) / _processes_on_one(device, processes)


def _processes_on_one(device: str, processes: int) -> int:
    """How many of a pack's processes share the memory of one device."""
    return math.ceil(processes / torch.cuda.device_count()) if device == "cuda" else processes


def _remove_leftovers(folder: ResultsPath, running: Set[str], complete: Set[str]) -> None:
    """What a killed sweep has left of packs that do not run any more, or all of whose trials are `complete`.

    Only what has a name that a sweep gives: anything else is somebody's own.
    """
    for entry, pack in _of_packs(folder / PROGRESS, r"(?P<pack>)\.json|\.(?P<half>)\.json\.[0-9a-f]{32}"):
        if pack not in running and not is_locked(lock_of(folder, pack)):
            entry.unlink()
    for entry, _ in _of_packs(folder / ERRORS, r"\.(?P<half>)\.txt\.[0-9a-f]{32}"):  # was being written
        entry.unlink()
    ended = [*_of_packs(folder / CHECKPOINTS, "(?P<pack>)"), *_of_packs(folder / LOCKS, r"(?P<pack>)\.lock")]
    settled = {claim.pack for claim in all_claims(folder) if claim.trials <= complete} if ended else set()
    for entry, pack in ended:
        if (pack in settled or is_complete(folder.root, pack)) and not is_locked(lock_of(folder, pack)):
            entry.remove_tree()
            entry.unlink()


def _of_packs(folder: ResultsPath, pattern: str) -> list[tuple[ResultsPath, str]]:
    """What is in a folder with names of this pattern, and the pack that `(?P<pack>)` or `(?P<half>)` stands for."""
    whole = re.compile(pattern.replace(">)", ">" + PACK_ID + ")"))
    found = ((entry, whole.fullmatch(entry.name)) for entry in folder.entries())
    return [(entry, next(filter(None, match.groups()))) for entry, match in found if match]


def _corpora(trials: Sequence[Trial]) -> set[tuple[Data, int]]:
    """What is to be read, and the longest window of it."""
    longest: dict[Data, int] = {}
    for data, context in {(trial.data, trial.model.context) for trial in trials}:
        longest[without_order(data)] = max(context, longest.get(without_order(data), 0))
    return set(longest.items())


def check_corpora(trials: Sequence[Trial], run: Run, has_results: bool) -> None:
    """Refuse to mix results from different texts or stored weights: the store's must be those that this run reads."""
    stored: dict[Data, str] = {}
    starts: dict[str, str] = {}
    for pack in read_packs(run.out) if has_results else ():
        if pack.complete:
            data = without_order(Data(**pack.attributes["trials"][0]["data"]))
            stored[data] = pack.attributes["corpus"]["fingerprint"]
            starts |= pack.attributes["environment"].get("starts", {})
    fingerprints = {data: corpus_of(data, context).fingerprint for data, context in _corpora(trials)}
    problems = Problems()
    for trial in trials:
        if isinstance(trial.fault, InjectableFault):
            with problems.collect():
                trial.fault.check_corpus(fingerprints[without_order(trial.data)])
    problems.check()
    for data, now in fingerprints.items():
        before = stored.get(data, now)
        if now != before:
            raise ConfigError(
                f"out={run.out}: its results come from another text (fingerprint {before}, now {now}, "
                f"data.source={data.source}); allowed: a new folder"
            )
    for given, now in start_digests(trials).items():
        if starts.get(given, now) != now:
            reason = "its results come from another file of that name"
            raise ConfigError(f"out={run.out}: model.start={given}: {reason}; allowed: a new folder")
