"""How often running a step again tells a transient, a persistent and a data fault apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.measures.statistics import wilson_interval
from analysis.reading.incident_log import Logged, logs_of
from harness.config.names import Site
from harness.storage.stored import read_packs

RE_EXECUTE = "re_execute"
CORRECT = "correct"  # an alarm without a fault


def verdicts(out: Path | str) -> pd.DataFrame:
    """What re-execution has told in the results folder `out`, a row a verdict.

    Columns: `trial`, `playbook`, `fault`, `truth`, `verdict`, and `in_reach`. Of a trial with a fault it is the first
    verdict of an alarm since the fault began that its golden twin has not at that step; the truth is `data` for a fault
    of batches, `persistent` for one to the end of the run, `transient` for any other. Of a golden run it is the first
    of each incident, and the truth is `correct`. It is `correct`, too, where the fault struck none of the steps that
    were run again, since these were computed as they should be; `in_reach` is False there.
    """
    packs = [pack for pack in read_packs(Path(out)) if pack.complete]
    logs, rows = logs_of(packs), []
    columns = ("ids", "golden", "trials", "faults")
    for pack in packs:
        for trial, golden, config, events in zip(*(pack.attributes[name] for name in columns), strict=True):
            fault, of_golden = config["fault"], config["fault"]["kind"] == "none"
            known = set() if of_golden else {act.step for one in logs.get(golden, []) for act in one.acts}
            told = [list(_told(one, fault["start"], known)) for one in logs.get(trial, [])]
            firsts = [of_one[0] for of_one in told if of_one]
            lasting = "persistent" if fault.get("duration") is None else "transient"
            of_fault = "data" if any(event["site"] == Site.BATCH for event in events) else lasting
            name = config.get("playbook", {}).get("name", "none")
            for verdict, first, last in firsts if of_golden else firsts[:1]:
                in_reach = of_golden or _is_there(fault, first, last)
                truth = CORRECT if of_golden or not in_reach else of_fault
                rows.append((trial, name, fault["name"], truth, verdict, in_reach))
    return pd.DataFrame(rows, columns=["trial", "playbook", "fault", "truth", "verdict", "in_reach"])


def _told(one: Logged, start: int, known: Collection[int]) -> Iterator[tuple[str, int, int]]:
    """Each verdict of an incident on an alarm from step `start` on, and the first and last step that were run again."""
    first = None
    for act in one.acts:
        if act.to is not None and act.action == RE_EXECUTE:
            first = act.to if first is None else min(first, act.to)
        if "verdict" in act.detail:
            if act.step >= start and act.step not in known:
                yield act.detail["verdict"], act.step if first is None else min(first, act.step), act.step
            first = None


def _is_there(fault: Mapping[str, Any], first: int, last: int) -> bool:
    """Whether a fault strikes, as it is planned, in one of these steps."""
    start, duration, period = fault["start"], fault.get("duration"), fault.get("period", 1)
    strike = start + max(0, -(-(first - start) // period)) * period  # the first that is not before these steps
    return strike <= last and (duration is None or strike < start + duration)


def verdict_table(found: pd.DataFrame) -> pd.DataFrame:
    """Truths down, verdicts across, and the share that is right with its 95% Wilson interval."""
    table = pd.crosstab(found["truth"], found["verdict"])
    right = (found["truth"] == found["verdict"]).groupby(found["truth"]).agg(["sum", "count"])
    low, high = wilson_interval(right["sum"], right["count"])
    return table.assign(right=right["sum"] / right["count"], low=low, high=high).reset_index()
