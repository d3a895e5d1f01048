"""What is said at the end of a run that was not what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.user_loop.loop_driver import LoopDriver


@dataclass(frozen=True)
class Shortcoming:
    """In two or three words, which stand in the outcome, and in a sentence that names what to change."""

    label: str
    text: str


def shortcomings(driver: LoopDriver, lacks_twin: bool) -> Iterator[Shortcoming]:
    """No steps, fewer steps than were asked for, faults that never struck, a twin that is missing."""
    replay, asked = driver.run_replay, driver.asked
    done = replay.series.length
    if replay.strikes.facts is None:
        yield Shortcoming(
            "no steps",
            "the loop never went through run.steps, run.epochs or run.next, so nothing was measured or struck; "
            "allowed: `for batch in run.steps(loader):` around each pass",
        )
        return
    if asked.steps is not None and done < asked.steps and not replay.stopped:
        text = f"steps={asked.steps}: the loop ended after {done} steps; allowed: steps={done}, or a longer loop"
        yield Shortcoming("ended early", text)
    elif (passed := replay.interventions.batches(0)) and done < replay.steps and not replay.stopped:
        why = (
            f"the loader ended after {done} of {replay.steps} steps, because answers have passed over {passed} batches"
        )
        yield Shortcoming("ended early", f"{why}; allowed: a longer loader, or attach(..., steps={done})")
    schedules = [one.fault_schedule for one in replay.strikes.faults]
    strikes = driver.ranks.total([schedule.strikes[0] if schedule else 0 for schedule in schedules])
    changes = driver.ranks.total([schedule.changes[0] if schedule else 0 for schedule in schedules])
    for one, struck, changed in zip(replay.strikes.faults, strikes, changes, strict=True):
        if one.fault_schedule is None:
            what = " and ".join(sorted(set(one.fault.asks()) - replay.strikes.known)) or "a step"
            text = f"fault={one.fault.name}: never struck, because the run ended before {what} was known"
            yield Shortcoming("never struck", text)
        elif not struck:
            yield Shortcoming("never struck", f"fault={one.fault.name}: never struck; {_why(one, driver, done)}")
        elif not changed:
            text = f"fault={one.fault.name}: struck {'once' if struck == 1 else f'{struck} times'} and changed nothing"
            yield Shortcoming("changed nothing", text)
    if lacks_twin and done:
        why = f"the loop ended after {done} of {driver.total} steps, so its twin was not trained"
        yield Shortcoming("no twin", f"twin=true: {why}; allowed: steps={done}, or run.twin() after the run")


def _why(one: object, driver: LoopDriver, done: int) -> str:
    fault_schedule, fault = one.fault_schedule, one.fault  # type: ignore[attr-defined]
    first = fault_schedule.first[0]
    if first is not None and first >= done:
        return f"it begins at step {first}, and the run has {done} steps; allowed: fault.start=0 to {max(done - 1, 0)}"
    if first is not None and first < driver.first_step:
        begun = driver.first_step
        return f"it begins at step {first}, and the run went on from step {begun}; allowed: fault.start={begun} or more"
    place = getattr(fault, "tensor", None)
    where = "" if place is None else f" of fault.tensor={place}"
    return (
        f"nothing{where} was there to strike at its steps, as where a layer has no part in the loss or its optimizer "
        "did not step; allowed: a tensor that is trained at these steps"
    )
