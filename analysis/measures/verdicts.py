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
    """The first verdict of each incident in the results folder `out`, a row a trial that has one.

    Columns: `trial`, `playbook`, `fault`, `truth`: `data` for a fault of batches, `persistent` for one to the end of
    the run, `transient` for any other, `correct` for an alarm before the fault began, or without one; and `verdict`. Of
    a trial the incident that its fault has caused counts, or its first.
    """
    packs = [pack for pack in read_packs(Path(out)) if pack.complete]
    logs, rows = logs_of(packs), []
    for pack in packs:
        for trial, config, events in zip(*(pack.attributes[name] for name in ("ids", "trials", "faults")), strict=True):
            incidents = logs.get(trial, [])
            begin = config["fault"]["start"] if config["fault"]["kind"] != "none" else float("inf")
            chosen = next((one for one in incidents if one.last >= begin), incidents[0] if incidents else None)
            said = [act.detail["verdict"] for act in chosen.acts if "verdict" in act.detail] if chosen else []
            if chosen is None or not said:
                continue
            is_of_data = any(event["site"] == Site.BATCH for event in events)
            lasting = "persistent" if config["fault"].get("duration") is None else "transient"
            truth = CORRECT if chosen.last < begin else "data" if is_of_data else lasting
            name = config.get("playbook", {}).get("name", "none")
            rows.append((trial, name, config["fault"]["name"], truth, said[0]))
    return pd.DataFrame(rows, columns=["trial", "playbook", "fault", "truth", "verdict"])


def verdict_table(found: pd.DataFrame) -> pd.DataFrame:
    """Truths down, verdicts across, and the share that is right with its 95% Wilson interval."""
    table = pd.crosstab(found["truth"], found["verdict"])
    right = (found["truth"] == found["verdict"]).groupby(found["truth"]).agg(["sum", "count"])
    low, high = wilson_interval(right["sum"], right["count"])
    return table.assign(right=right["sum"] / right["count"], low=low, high=high).reset_index()
