"""Run a sweep: check everything, plan, train or submit, and say what came of it."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from rich.console import Console

from harness.basics.memory import bytes_of
from harness.basics.printing import count
from harness.config import ConfigError, Data, Fault, Problems, Trial
from harness.data.corpus import check_data
from harness.model.branches import branches_of
from harness.model.heads import heads_of
from harness.model.precision import pick_device
from harness.model.scaling import tensor_table
from harness.model.start import check_start, start_digests, start_of
from harness.storage.checkpoint import Checkpoints
from harness.storage.last_weights import has_weights
from harness.storage.progress_files import read_asked, write_plan
from harness.storage.records import Unreadable
from harness.storage.results_folder import FolderLost, ResultsPath
from harness.storage.store import check_store, open_store
from harness.storage.stored import STORE, complete_trials, read_packs
from harness.storage.zarr_files import METADATA
from harness.training.longer import goes_on_from
from injectors import InjectableFault
from injectors.value import Value
from sweeps.compose.hydra_calls import current
from sweeps.compose.settings import RunSettings
from sweeps.planning.campaign import campaign_of, check_samples, envelope, widest_interval
from sweeps.planning.limits import check_block, check_disk, check_processes
from sweeps.planning.packs import PackPlan, Plan
from sweeps.planning.plan_table import print_plan, say_counts
from sweeps.planning.planner import make_plan
from sweeps.running.job import CHECKPOINTS, Ended, Failed, Job, begun_packs, corpus_of, without_order
from sweeps.running.kernels import kernel_notes, with_kernels
from sweeps.running.leftovers import remove_leftovers
from sweeps.running.local import SHARE_OF_MEMORY, Executor, LocalExecutor, heard_by
from sweeps.running.progress import Display, summarize


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: it ends the sweep as Ctrl-C does, and only the exit status differs."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def run_grid(
    trials: Sequence[Trial],
    last_bit: Fault,
    run: RunSettings,
    executor: Executor,
    console: Console,
    notices: Sequence[str] = (),
) -> int:
    """Run the sweep, its campaigns drawn; in rounds, if it is to stop by itself. Returns the exit status.

    `notices` are lines that belong to the plan. Raises ConfigError before anything is written if something about the
    run is wrong.
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
    notes = [*notices, *(campaign.description() for campaign in campaigns)]
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
        line = f"widest 95% interval of a masked share: {widest:.3f} after {most} faults of each description"
        console.print(f"{line}; asked for: {asked.width}", highlight=False, soft_wrap=True)
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


class Begun(Protocol):
    """Packs that are not in the folder yet, and are begun from what is."""

    @property
    def trials(self) -> Sequence[Trial]:
        """All that are asked for."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines that belong to the plan."""

    def packs(self, known: Sequence[PackPlan], settled: Set[str]) -> list[PackPlan]:
        """Those of them that are not `known`, less the trials that are `settled`."""

    def begin(self, folder: ResultsPath) -> None:
        """Have them in the folder, as if they had been stopped there."""


def run_sweep(
    trials: Sequence[Trial],
    run: RunSettings,
    executor: Executor,
    console: Console,
    notes: Sequence[str] = (),
    name: str = "",
    is_rehearsal: bool = False,
    more: Begun | None = None,
) -> int:
    """Check, plan and train. Returns the exit status: 0, 1 if a pack failed, 130 after Ctrl-C, 143 after SIGTERM.

    `notes` are lines that belong to the plan. `name` is that of one round of many, which is worth one line. A plan says
    what this machine has no room for, because it may be for another one; one that is a rehearsal refuses it. Raises
    ConfigError before anything is written if something about the run is wrong.
    """
    device, processes, left_out = _checked(trials, run)
    # Rounds after the first have no notes.
    notes = [*notes, *left_out] if notes or not name else notes
    has_results = (run.out / STORE / METADATA).exists()
    complete = complete_trials(run.out) if has_results else set()
    running = executor.running(run.out)
    taken = {trial.id for job in running for trial in job.pack.recorded}
    asked = {trial.id for trial in trials} | {trial.golden.id for trial in trials}
    begun = begun_packs(run.out, asked - complete - taken) if has_results else []
    notes = [*notes, *_going_on(run.out, begun)]
    begun += more.packs(begun, complete | taken) if more else []
    plan, executor, lacking = _planned(trials, run, executor, device, processes, complete | taken, begun)
    if is_rehearsal or not run.plan:
        lacking.check()
    if run.plan:
        _say(notes, console)
        print_plan(plan, device, executor.workers, console)
        _say([f"no room: {reason}" for reason in lacking.reasons], console)
        return 0
    check_corpora(trials, run, has_results)
    if device == "cpu" and isinstance(executor, LocalExecutor):
        run, why = with_kernels(run)
        packs = read_packs(run.out) if has_results and not name else ()
        notes = [*notes, *([why] if current().is_verbose and not name else []), *kernel_notes(run, packs)]
    folder = open_store(run.out, run.study)
    if run.keep != "nothing" and (bare := sum(not has_weights(run.out, trial) for trial in asked & complete)):
        line = f"{count(bare, 'trial')} complete already without weights, which only a new folder would keep"
        notes = [*notes, f"keep={run.keep}: {line}"]
    notes = [*notes, *(_never_kept(trials) if run.keep == "state" else ())]
    if more:
        more.begin(folder)
    if plan.packs:
        _keep_plan(folder, asked, more is not None)
    remove_leftovers(folder, {job.pack.id for job in running}, complete)
    _say([*(() if name else (f"study {run.study} -> {run.out}",)), *notes], console)
    if not name:
        say_counts(plan, console)
    jobs = [Job(pack, run, folder.id) for pack in plan.packs]
    results, stopped = _followed(jobs, running, run.out, executor, console)
    if not run.wait and not results and not stopped and (jobs or running):
        line = f"{count(len(jobs), 'pack')} submitted, {len(running)} in the queue already"
        _say([f"{line}; the same command picks up what has finished"], console)
        return 0
    summarize(plan, run, results, console, is_idle=not (jobs or running), name=name)
    if stopped:
        line = f"interrupted; {_saved(jobs)}the same command goes on from here"
        console.print(line, highlight=False, soft_wrap=True)
        return 143 if isinstance(stopped, Terminated) else 130
    return 1 if any(isinstance(result, Failed) for result in results) else 0


def _going_on(out: Path, begun: Sequence[PackPlan]) -> Iterator[str]:
    """A line on packs that were stopped and have checkpoints."""
    if begun:
        folder = ResultsPath.at(out) / CHECKPOINTS
        farthest = max(Checkpoints(folder / pack.id).latest or 0 for pack in begun)
        several = f"{len(begun)} packs go on from their checkpoints, the farthest at"
        yield f"{several if len(begun) > 1 else '1 pack goes on from its checkpoint, at'} step {farthest}"


def _saved(jobs: Sequence[Job]) -> str:
    """How far the checkpoints of packs are that were stopped; empty where there is none."""
    steps = []
    with contextlib.suppress(FolderLost, ConfigError):
        steps = [step for job in jobs if (step := job.checkpoints.latest)]
    return f"checkpoints saved up to step {max(steps)}; " if steps else ""


def _never_kept(trials: Sequence[Trial]) -> Iterator[str]:
    """A line on trials of which `keep=state` can keep none."""
    alike = {(trial.schedule, trial.train, trial.optim.lr, trial.model.context): trial for trial in trials}
    decays = sorted({trial.schedule.decay for trial in alike.values() if goes_on_from(trial) is None})
    if decays:
        why = f"schedule.decay={','.join(decays)}: the rate of each step depends on the length of the run"
        yield f"keep=state: {why}, so of these trials only the last weights are kept (constant, wsd: also the state)"


def _keep_plan(folder: ResultsPath, asked: Set[str], is_added: bool) -> None:
    """What was asked for, and in which words; what `is_added` belongs to the command before."""
    question, words = ("", None) if is_added else (current().question, current().words)
    if is_added:
        with contextlib.suppress(Unreadable):
            before = read_asked(folder.root)
            asked, question, words = asked | set(before.trials), before.question, before.words
    write_plan(folder, asked, question, words)


def _say(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _checked(trials: Sequence[Trial], run: RunSettings) -> tuple[str, int, list[str]]:
    """The device, how many processes train one pack, and lines on files that are left out of the data.

    Raises ConfigError with all that speaks against the run.
    """
    problems, left_out = Problems(), []
    with problems.collect():
        check_store(run.out, run.study)
    with problems.collect():
        _check_heads(trials)
    problems.check()
    is_for_another = run.plan and run.device == "cuda" and not torch.cuda.is_available()
    for precision in {trial.train.precision for trial in trials}:
        with problems.collect():
            device = "cuda" if is_for_another else pick_device(run.device, precision).type
    processes = 1
    if run.ranks == "processes":
        with problems.collect():
            processes = max((trial.train.ranks for trial in trials), default=1)
            if not dist.is_available() or not dist.is_gloo_available():
                lacking = "this build of torch lacks torch.distributed with gloo"
                raise ConfigError(f"ranks=processes: {lacking}; allowed: simulated")
            if processes == 1:
                allowed = "simulated, or train.ranks >= 2"
                raise ConfigError(f"ranks=processes: every trial has train.ranks=1; allowed: {allowed}")
    for data, context in _corpora(trials):
        with problems.collect():
            left_out.append(check_data(data, context))
    starting = {
        (trial.structure, trial.model.start, trial.seed): trial for trial in trials if trial.model.start is not None
    }
    for trial in starting.values():
        branches, heads = branches_of(trial), heads_of(trial)
        table = tensor_table(trial.model, trial.data.vocabulary, branches=branches, heads=heads)
        with problems.collect():
            check_start(str(start_of(trial)), {scaled.name: scaled.shape for scaled in table})
    problems.check()
    return device, processes, sorted({line for line in left_out if line})


def _followed(
    jobs: Sequence[Job], running: Mapping[Job, str], out: Path, executor: Executor, console: Console
) -> tuple[list[Ended], KeyboardInterrupt | None]:
    """What came of each pack that is trained now, or runs already; and what has stopped that, if anything has."""
    results: list[Ended] = []
    with (
        heard_by(_terminate, signal.SIGTERM),
        heard_by(signal.default_int_handler, signal.SIGINT),  # a shell has a command in the background ignore it
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


def _planned(
    trials: Sequence[Trial],
    run: RunSettings,
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
        check_disk(plan, run.out, run.keep)
    with lacking.collect():
        check_block(plan, run.telemetry.block)
    return plan, executor, lacking


def _memory(run: RunSettings, executor: Executor, device: str, processes: int) -> float:
    """Bytes that each process of a pack may take; infinite where that is not known."""
    if run.memory is not None and (size := bytes_of(run.memory)):
        return SHARE_OF_MEMORY * size
    if device == "cuda" and not torch.cuda.is_available():
        return math.inf
    shared_by = math.ceil(processes / torch.cuda.device_count()) if device == "cuda" else processes
    return executor.memory(device) / shared_by


def _corpora(trials: Sequence[Trial]) -> set[tuple[Data, int]]:
    """What is to be read, and the longest window of it."""
    longest: dict[Data, int] = {}
    for data, context in {(trial.data, trial.model.context) for trial in trials}:
        longest[without_order(data)] = max(context, longest.get(without_order(data), 0))
    return set(longest.items())


def check_corpora(trials: Sequence[Trial], run: RunSettings, has_results: bool) -> None:
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
