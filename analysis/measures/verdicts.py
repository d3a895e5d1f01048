"""How often running a step again tells a transient, a persistent and a data fault apart."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.measures.statistics import wilson_interval
from analysis.reading.incident_log import logs_of
from harness.config.names import Site
from harness.storage.stored import read_packs

CORRECT = "correct"  # an alarm without a fault


def verdicts(out: Path | str) -> pd.DataFrame:
    """What re-execution has told in the results folder `out`, a row a verdict.

    Columns: `trial`, `playbook`, `fault`, `truth`, and `verdict`. Of a trial with a fault it is the first verdict of an
    alarm since the fault began that its golden twin has not at that step; the truth is `data` for a fault of batches,
    `persistent` for one to the end of the run, `transient` for any other. Of a golden run it is the first of each
    incident, and the truth is `correct`.
    """
    packs = [pack for pack in read_packs(Path(out)) if pack.complete]
    logs, rows = logs_of(packs), []
    columns = ("ids", "golden", "trials", "faults")
    for pack in packs:
        for trial, golden, config, events in zip(*(pack.attributes[name] for name in columns), strict=True):
            fault, of_golden = config["fault"], config["fault"]["kind"] == "none"
            known = set() if of_golden else {act.step for one in logs.get(golden, []) for act in one.acts}
            told = [
                [
                    act.detail["verdict"]
                    for act in one.acts
                    if "verdict" in act.detail and act.step >= fault["start"] and act.step not in known
                ]
                for one in logs.get(trial, [])
            ]
            firsts = [of_one[0] for of_one in told if of_one]
            lasting = "persistent" if fault.get("duration") is None else "transient"
            truth = "data" if any(event["site"] == Site.BATCH for event in events) else lasting
            name = config.get("playbook", {}).get("name", "none")
            for verdict in firsts if of_golden else firsts[:1]:
                rows.append((trial, name, fault["name"], CORRECT if of_golden else truth, verdict))
    return pd.DataFrame(rows, columns=["trial", "playbook", "fault", "truth", "verdict"])


def verdict_table(found: pd.DataFrame) -> pd.DataFrame:
    """Truths down, verdicts across, and the share that is right with its 95% Wilson interval."""
    table = pd.crosstab(found["truth"], found["verdict"])
    right = (found["truth"] == found["verdict"]).groupby(found["truth"]).agg(["sum", "count"])
    low, high = wilson_interval(right["sum"], right["count"])
    return table.assign(right=right["sum"] / right["count"], low=low, high=high).reset_index()
