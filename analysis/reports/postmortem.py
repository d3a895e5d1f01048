"""The post-mortem of a trial's incident, as an operator writes it: HTML that needs nothing beside it, and Markdown."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from analysis.again.batches import BatchesUnseen, BatchReader, config_of, stored_trials
from analysis.again.sweep_folder import SweepFolder
from analysis.figures.drawing import Drawing
from analysis.figures.incident import activation_picture, incident_signals, token_histogram
from analysis.measures.anomalies import TrialSignals, usual
from analysis.measures.causes import UNKNOWN, Finding
from analysis.measures.confusion import Diagnosis, diagnosed, true_cause
from analysis.measures.evidence import offending, provenance_of
from analysis.measures.incidents import AFTER, Incident, all_incidents, of_one, runs, worst
from analysis.pages.trial_page import POSTMORTEMS
from analysis.reading.twins import numbers_of, values_of
from analysis.reports.evidence_words import HEADING, measured_rows, odd_line, provenance_line
from analysis.reports.follow_ups import SUGGESTED, followed
from analysis.reports.report import DOTS_PER_INCH, Picture, rendered
from analysis.reports.verdict import no_symptom, shows, verdict
from analysis.reports.words import in_nat, nat, rounded, signed
from harness.basics.printing import count, label
from harness.config import NO_FAULT, ConfigError
from harness.config.names import OWN
from harness.objectives.outcome import NON_FINITE
from harness.storage.results_folder import ResultsPath

MOST_SEQUENCES, MOST_TOKENS, MOST_BATCHES = 3, 240, 3  # of a batch, a sequence, an incident, that are shown as text
SEVERITY = {1: "1 recoverable", 2: "2 lingering", 3: "3 divergent"}
NO_PLAYBOOK = "None: no playbook watched the trial."


@dataclass
class Section:
    """One part of the page."""

    title: str
    lines: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)  # heading and rows
    texts: list[tuple[str, str]] = field(default_factory=list)  # what it is, and the text itself
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Postmortem:
    """Where the two files are, and what they say in short; `diagnosis` is None for a trial without an incident."""

    html: Path
    markdown: Path
    words: list[str]
    diagnosis: Diagnosis | None


def write_postmortem(
    out: Path | str, trial: str, cost_per_hour: float = 0.0, currency: str = "", data: Path | None = None
) -> Postmortem:
    """Write `out`/postmortems/TRIAL.html, TRIAL.md and its pictures, on the worst incident of a trial.

    Args:
        out: A results folder.
        trial: An id.
        cost_per_hour: What an hour of training costs.
        currency: Of that, as it is to be shown.
        data: Where the text lies, if it is not built in. Without it, and where the batches cannot be made again, the
            page says so.

    Returns:
        The files, and what they say.

    Raises:
        ConfigError: The folder has no results, or no such trial.
        OSError: It cannot be written to.
    """
    return _write(SweepFolder.open(out), trial, cost_per_hour, currency, data)


def _write(
    known: SweepFolder, trial: str, cost_per_hour: float = 0.0, currency: str = "", data: Path | None = None
) -> Postmortem:
    known.check(trial)
    sweep = known.sweep
    folder = ResultsPath.open(known.out) / POSTMORTEMS
    (run,) = runs(sweep, known.setups, [trial], heard=None)
    reading, missing = _reading(known, trial, data)
    found = of_one(run, known.logs.get(trial), cost_per_hour, is_asked=True, reading=reading)
    incident = worst(found)
    head = _head(known, trial)
    folder.make_folder()
    if incident is None:
        words = [f"Trial {trial}: no incident: no symptom, no alarm, and no check that was made failed."]
        words += [f"The batches were not seen: {missing}."] if missing else []
        page = {
            "title": f"Trial {trial}: no incident",
            "verdict": words[0],
            "head": head,
            "sections": [Section("No incident", words)],
        }
        return _written(folder, known, trial, page, words, None)
    diagnosis = diagnosed(run, incident, reading, provenance_of(sweep, trial))
    sections = [
        _symptoms(run, diagnosis, found),
        _evidence(folder, run, diagnosis, reading, missing),
        _classification(run, diagnosis),
        _recovery(run, incident),
        _result(sweep, trial, run, incident),
        _cost(run, incident, currency, cost_per_hour),
        _follow_ups(known, diagnosis),
        _record(sweep, trial, diagnosis.finding),
    ]
    cause = diagnosis.finding.cause if diagnosis.finding.cause != UNKNOWN else "cause unknown"
    kind = f"{SEVERITY[incident.outcome]}, {cause}"
    head |= {"steps": f"{diagnosis.evidence.begin} to {incident.last}", "class": kind}
    said = verdict(incident, diagnosis.finding, run.loss_unit)
    page = {"title": f"Post-mortem of trial {trial}", "verdict": said, "head": head, "sections": sections}
    number, fate = SEVERITY[incident.outcome].split()
    words = [
        f"Trial {trial}, steps {head['steps']}: {fate} (type {number}), {cause}.",
        f"Cause: {diagnosis.finding.reason}",
    ]
    if incident.batches:
        words.append("No signal says so for sure: the batch does, which is unlike the others of the run.")
    elif not incident.is_sure:
        words.append("This is the oddest that there is; healthy runs have such steps, too.")
    return _written(folder, known, trial, page, words, diagnosis)


def write_worst(out: Path | str, most: int, **options: Any) -> list[Postmortem]:
    """`write_postmortem` of the trials with the `most` worst incidents, fewer where there are fewer.

    Those that a playbook has answered come first.
    """
    known = SweepFolder.open(out)
    by_trial: dict[str, tuple[bool, bool, float]] = {}
    for one in all_incidents(known.sweep, known.setups, known.logs):
        here = (one.is_logged, one.outcome == 3, one.size)
        by_trial[one.trial] = max(by_trial.get(one.trial, here), here)
    chosen = sorted(by_trial, key=lambda name: (by_trial[name], name), reverse=True)[:most]
    return [_write(known, trial, **options) for trial in chosen]


def _written(
    folder: ResultsPath,
    known: SweepFolder,
    trial: str,
    page: dict[str, Any],
    words: list[str],
    diagnosis: Diagnosis | None,
) -> Postmortem:
    for kind in ("html", "md"):
        text = rendered(f"postmortem.{kind}", known.sweep, **page)
        (folder / f"{trial}.{kind}").write(text.encode())
    at = known.out / POSTMORTEMS
    return Postmortem(at / f"{trial}.html", at / f"{trial}.md", words, diagnosis)


def _reading(known: SweepFolder, trial: str, data: Path | None) -> tuple[BatchReader | None, str]:
    """The trial's batches, or why there are none."""
    try:
        reading = known.readings(data)(trial)
        reading.batch(0)
    except ConfigError as error:
        if data is not None:
            raise
        return None, error.sentence if isinstance(error, BatchesUnseen) else "their text cannot be opened here"
    return reading, ""


def _head(known: SweepFolder, trial: str) -> dict[str, str]:
    """What stands on top: when it was trained, and what it was."""
    pack = stored_trials(known.packs)[trial]
    created, config = pack.attributes["created"], config_of(pack, trial)
    model, train = config["model"], config["train"]
    sizes = f"width {model.get('width')}, {model.get('depth')} layers"
    precision = train.get("precision", "")
    if OWN in config:
        sizes = f"{model.get('kind')} of {model.get('parameters')} parameters"
        precision = config["optim"].get("name", "")
    sizes += f", {train.get('steps')} steps"
    rate = f"learning rate {config['optim'].get('lr')}, {precision}, seed {config.get('seed')}"
    recipe = f"recipe {config.get('recipe', 'plain')}, mitigation {config.get('mitigation', 'none')}"
    return {"date": created[:19].replace("T", " ") + " UTC", "trial": trial, "run": f"{recipe}; {sizes}; {rate}"}


# --- sections ----------------------------------------------------------------------------------------------------


def _symptoms(run: TrialSignals, diagnosis: Diagnosis, found: Sequence[Incident]) -> Section:
    incident, begin = diagnosis.incident, diagnosis.evidence.begin
    levels, _ = usual(run["grad_norm"])
    after = f"after {AFTER} steps" if incident.after_step - incident.first >= AFTER - 1 else "at the end of the run"
    rows = [
        ["loss before, mean of up to 50 steps", nat(incident.loss_before)],
        [f"loss at its peak, step {incident.peak_step}", nat(incident.loss_peak)],
        [f"loss {after}, mean of up to 50 steps before step {incident.after_step}", nat(incident.loss_after)],
        ["gradient norm before clipping, usual", rounded(float(levels[begin]))],
        ["gradient norm before clipping, peak", rounded(incident.grad_norm_peak)],
    ]
    told = [
        [one.symptom, one.begin, one.end, rounded(one.usual), rounded(np.nan_to_num(one.peak, nan=np.inf))]
        for one in incident.symptoms
        if one.symptom != "plateau"
    ]
    tables = [{"heading": ["what", "value"], "rows": rows}]
    lines = []
    if told:
        tables.append({"heading": ["symptom", "from step", "to step", "usual", "farthest from it"], "rows": told})
    elif shows(incident):
        lines.append(no_symptom(run, incident))
    else:
        lines.append("The loss alone shows none of the symptoms of docs/detection.md; what was odd is in the evidence.")
    if len(found) > 1:
        others = ", ".join(f"{one.first} to {one.last}" for one in found if one is not incident)
        lines.append(f"The trial had {count(len(found) - 1, 'other incident')}, less severe: steps {others}.")
    return Section("Symptoms", lines, tables)


def _evidence(
    folder: ResultsPath, run: TrialSignals, diagnosis: Diagnosis, reading: BatchReader | None, missing: str
) -> Section:
    incident, evidence = diagnosis.incident, diagnosis.evidence
    steps = offending(evidence, incident)
    alone = "batch" if incident.batches else "alarm"
    lines = [
        f"Batches: steps {steps[0]} to {steps[-1]}." if len(steps) > 1 else f"Batch: step {steps[0]}.",
        odd_line(evidence, f"nothing but the {alone}"),
    ]
    if arrays := ", ".join(name.replace("_", " ") for name in evidence.changed):
        lines.append(f"Changed between the step's beginning and its update, where nothing writes to them: {arrays}.")
    heard = [[one.detector, one.step, one.step - evidence.begin, rounded(one.score)] for one in incident.alarms]
    heading = ["detector", "first alarm", "steps after the onset", "largest score"]
    tables = [{"heading": HEADING, "rows": measured_rows(evidence)}]
    tables += [{"heading": heading, "rows": heard}] if heard else []
    lines += [] if heard else ["No detector had an alarm."]
    if told := provenance_line(evidence):
        lines.append(told)
    drawings = {"signals": incident_signals(run, incident, evidence)}
    if run.has_layers:
        drawings["layers"] = activation_picture(run, incident, evidence)
    section = Section("Evidence", lines, tables)
    if reading is None:
        lines.append(f"The batches were not seen: {missing}.")
    else:
        batches = [reading.batch(step) for step in steps]
        drawings["tokens"] = token_histogram(reading, steps, batches)
        lines.append(
            f"Tokens of the onset's batch: mean surprise {in_nat(rounded(evidence.rarity))} (before: "
            f"{rounded(evidence.usual_rarity)}), share of repeated token pairs {rounded(evidence.repetition)} (before: "
            f"{rounded(evidence.usual_repetition)})."
        )
        section.texts = _texts(reading, steps, batches)
    section.pictures = [_picture(folder, incident.trial, kind, drawing) for kind, drawing in drawings.items()]
    return section


def _texts(reading: BatchReader, steps: Sequence[int], batches: Sequence[np.ndarray]) -> list[tuple[str, str]]:
    shown = []
    for step, batch in list(zip(steps, batches, strict=True))[:MOST_BATCHES]:
        for number, tokens in enumerate(batch[:MOST_SEQUENCES]):
            cut = f", the first {MOST_TOKENS} tokens" if len(tokens) > MOST_TOKENS else ""
            what = f"step {step}, sequence {number} of {len(batch)}{cut}"
            shown.append((what, reading.text(tokens[:MOST_TOKENS])))
    return shown


def _classification(run: TrialSignals, diagnosis: Diagnosis) -> Section:
    incident, finding = diagnosis.incident, diagnosis.finding
    against = "what it was before" if run.golden is None else "the undisturbed run on the same batches"
    unit = run.loss_unit.removesuffix("/token")
    left = f"what is left of it against {against} is {in_nat(signed(incident.left), unit)}"
    peak = signed(incident.loss_peak - incident.loss_before)
    types = {
        1: f"the loss came back; {left}",
        2: f"the loss came back in part; {left}, of {in_nat(peak, unit)} at the peak",
        3: "the run ended with values that are not finite, or its loss had not come down by half",
    }
    lines = [
        f"Type {SEVERITY[incident.outcome]}: {types[incident.outcome]}.",
        f"Root cause: {finding.cause}. Reason: {finding.reason}",
        "Both follow from signals, batches and recipe alone, by the rules of analysis/measures/causes.py.",
    ]
    return Section("Classification", lines)


def _recovery(run: TrialSignals, incident: Incident) -> Section:
    if not incident.acts:
        ending = "It stood still from there on." if run.outcome == NON_FINITE else "It went on by itself."
        return Section("Recovery action", [f"{NO_PLAYBOOK} {ending}"])
    rows = [
        [
            act.step,
            act.action,
            "" if act.to is None else act.to,
            ", ".join(act.detectors),
            rounded(act.loss),
            rounded(act.grad_norm),
            ", ".join(f"{name}: {_shown(value)}" for name, value in act.detail.items()),
        ]
        for act in incident.acts
    ]
    heading = ["step", "action", "back to", "asked by", "loss", "gradient norm", "more"]
    return Section("Recovery action", [f"{count(len(rows), 'action')}."], [{"heading": heading, "rows": rows}])


def _shown(value: Any) -> str:
    """A detail of an action, as words of a configuration have it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _result(sweep: xr.Dataset, trial: str, run: TrialSignals, incident: Incident) -> Section:
    here = sweep.sel(trial=trial)
    golden = str(here["golden"].values)
    lines = [f"The run ended as: {run.outcome}, after {count(run.steps, 'step')}."]
    final = np.inf if run.outcome == NON_FINITE else float(here["final_loss"])
    lines.append(f"Final loss: {in_nat(nat(final), run.loss_unit)}.")
    if golden != trial and golden in sweep["trial"].values:
        twin = float(sweep["final_loss"].sel(trial=golden))
        unit = run.loss_unit.removesuffix("/token")
        apart = f": a difference of {in_nat(signed(final - twin), unit)}" if np.isfinite(final - twin) else ""
        lines.append(f"The same run undisturbed ({golden}) ended at {in_nat(nat(twin), run.loss_unit)}{apart}.")
    return Section("Outcome", lines)


def _cost(run: TrialSignals, incident: Incident, currency: str, per_hour: float) -> Section:
    share = incident.steps / max(1, run.steps)
    money = f"{incident.money:.4g} {currency}".strip() if per_hour else "0 (cost.per_hour is not given)"
    rows = [
        ["steps trained in vain or skipped", f"{incident.steps} ({share:.0%} of those trained)"],
        ["tokens", "not known" if np.isnan(incident.tokens) else f"{incident.tokens:,.0f}"],
        ["seconds of this trial", rounded(incident.seconds)],
        ["money", money],
    ]
    return Section("Cost", tables=[{"heading": ["what", "how much"], "rows": rows}])


def _follow_ups(known: SweepFolder, diagnosis: Diagnosis) -> Section:
    lines, table = followed(known, diagnosis.incident)
    tables = []
    if len(table):
        rows = [
            [rounded(cell) if isinstance(cell, float) else cell for cell in row] for row in table.to_numpy().tolist()
        ]
        tables = [{"heading": list(table.columns), "rows": rows}]
    else:
        lines = ["The results folder has no other trial with the same fault and seed."]
    trial, tried = diagnosis.incident.trial, " ".join(map(str, table.get("under", [])))
    if OWN in config_of(stored_trials(known.packs)[trial], trial):
        return Section("Follow-ups", lines, tables)
    names = [name for name in SUGGESTED[diagnosis.finding.cause] if f"mitigation={name}" not in tried]
    if names:
        lines.append(f"Not in this sweep, and made for this cause: mitigation={','.join(names)}.")
    lines.append(f"Whether the data are to blame: stability-harness cross OUT {trial} --from OTHER.")
    return Section("Follow-ups", lines, tables)


def _record(sweep: xr.Dataset, trial: str, finding: Finding) -> Section:
    """What was injected, which nothing above knows."""
    here = sweep.sel(trial=[trial])
    name = str(here["fault"].values[0])
    title = "For comparison: what was injected"
    if name == NO_FAULT.name:
        return Section(title, ["Nothing: the incident is the run's own."])
    kind, site = str(values_of(here, "fault_kind", "")[0]), str(here["struck_site"].values[0])
    true = true_cause(name, kind, site)
    start = numbers_of(here, "fault_start", np.nan)[0]
    other = "none was inferred" if finding.cause == UNKNOWN else f"not the inferred one, {finding.cause}"
    verdict = "the inferred one" if true == finding.cause else other
    strikes, changes = int(here["strikes"].values[0]), int(here["changes"].values[0])
    lines = [f"Fault {label(name)} at site {site or 'none'}, from step {start:g}; strikes: {strikes}."]
    if bool(here["complete"].values[0]) and not changes:
        how = "none of them changed anything: each wrote what was there" if strikes else "it never fired"
        lines.append(f"It is idle: {how}. So the incident is the run's own.")
        return Section(title, [*lines, "Nothing above was told this."])
    lines.append(f"Its cause by definition: {true}, {verdict}." if true else "No cause is defined for this fault.")
    return Section(title, [*lines, "Nothing above was told this."])


# --- words -------------------------------------------------------------------------------------------------------


def _picture(folder: ResultsPath, trial: str, kind: str, drawing: Drawing) -> Picture:
    assert drawing.figure is not None
    drawn = io.BytesIO()
    drawing.figure.savefig(drawn, dpi=DOTS_PER_INCH)
    file = folder / f"{trial}_{kind}.png"
    file.write(drawn.getvalue())
    return Picture(kind, None, drawing.caption, Path(file.name), base64.b64encode(drawn.getvalue()).decode())
