"""Whether mitigations acted: what the store says of each trial, and how tables and figures mark it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from analysis import compare, open_sweep, part_acts
from analysis.figures.mitigation_map import mitigation_map
from analysis.figures.mitigation_words import table_rows
from analysis.figures.registry import Needs, Results, figures
from analysis.reading.acted import EVERY_BIT, Acting, idle_note, marked
from analysis.reports.report import write_report
from harness.config import NO_FAULT, Trial
from tests.analysis import synthetic
from tests.analysis.given import given
from tests.analysis.mitigated import Study, of_faults

PLAIN = Acting({}, {}, "plain")


@pytest.fixture
def write(tmp_path: Path) -> Callable:
    """Write trials of these mitigations, each with what the store has of it; the folder."""

    def write(
        acting: Callable[[Trial], Acting],
        mitigations: Sequence[str] = ("none", "clip_1"),
        widths: Sequence[int] = (32,),
        rates: Sequence[float] = (1e-3, 1e-2),
        faults: Sequence = (None,),
        **options,
    ) -> Path:
        for mitigation in mitigations:
            for width in widths:
                trials = [
                    synthetic.make_trial(width, lr, seed, mitigation, fault)
                    for lr in rates
                    for seed in range(2)
                    for fault in faults
                ]
                shape = {"block": 40, "measured": synthetic.READ}
                synthetic.write_pack(tmp_path, trials, acting=acting, **shape, **options)
        return tmp_path

    return write


def of(mitigation: Callable[[Trial], Acting]) -> Callable[[Trial], Acting]:
    """That for trials with a mitigation, and the recipe's own losses for those without."""
    return lambda trial: PLAIN if trial.mitigation == "none" else mitigation(trial)


CASES: dict[str, tuple[Acting, float, str]] = {
    "other bits, no parts": (Acting({}, {}, "other"), 1, ""),
    "a part that acted": (Acting({"optim.clip": 7}, {}, "other"), 1, ""),
    "a part that never did": (Acting({"optim.clip": 0}, {}, "plain"), 0, "optim.clip"),
    "one of two": (Acting({"spam.interval": 4, "spam.threshold": 0}, {}, "other"), 0, "spam.threshold"),
    "could not": (Acting({"spam.interval": 0}, {"spam.interval": "why"}, "other"), 0, "spam.interval"),
    "could not, and is not counted": (Acting({}, {"model.mix": "why"}, "other"), 0, "model.mix"),
    "the recipe's own bits": (Acting({}, {}, "plain"), 0, EVERY_BIT),
}


@pytest.mark.parametrize("case", CASES)
def test_acted_by_hand(write, case: str) -> None:
    found, acted, idle = CASES[case]
    sweep = open_sweep(write(of(lambda trial: found)))
    is_own = sweep["mitigation"].values == "clip_1"
    assert (sweep["acted"].values[is_own] == acted).all() and np.isnan(sweep["acted"].values[~is_own]).all()
    assert set(sweep["idle_parts"].values[is_own]) == {idle} and set(sweep["idle_parts"].values[~is_own]) == {""}


def test_what_the_recipe_itself_has_is_not_the_mitigations(write) -> None:
    """A study that clips everywhere: clipping that never acts says nothing of the mitigation."""
    plain = Acting({"optim.clip": 0}, {"schedule.decay": "why"}, "plain")
    own = Acting({"optim.clip": 0, "zclip.threshold": 3}, {"schedule.decay": "why"}, "other")
    sweep = open_sweep(write(lambda trial: plain if trial.mitigation == "none" else own, ("none", "zclip")))
    assert (sweep["acted"].values[sweep["mitigation"].values == "zclip"] == 1).all()
    assert sweep["idle_parts"].values.tolist() == ["schedule.decay, optim.clip"] * 4 + [""] * 4


def test_a_trial_is_compared_with_its_own_counterpart(write) -> None:
    """Of the same rate, seed, width and fault, whatever a mitigation sets beside."""

    def name(trial: Trial) -> str:
        return f"{trial.optim.lr} {trial.seed} {trial.model.width} {trial.fault.name}"

    fault = synthetic.WeightBit(start=5)
    alike = write(lambda trial: Acting({}, {}, name(trial)), widths=(32, 64), faults=(None, fault))
    sweep = open_sweep(alike)
    assert (sweep["acted"].values[sweep["mitigation"].values != "none"] == 0).all()


def test_without_a_counterpart_parts_alone_tell(write) -> None:
    words = {"zclip": Acting({"zclip.threshold": 3}, {}, "a"), "qk_norm": Acting({}, {}, "b")}
    sweep = open_sweep(write(lambda trial: words[trial.mitigation], ("zclip", "qk_norm")))
    acted = {name: set(sweep["acted"].values[sweep["mitigation"].values == name].tolist()) for name in ("zclip",)}
    assert acted == {"zclip": {1.0}} and np.isnan(sweep["acted"].values[sweep["mitigation"].values == "qk_norm"]).all()


def test_an_unfinished_trial_is_not_judged(write) -> None:
    sweep = open_sweep(write(of(lambda trial: Acting({"optim.clip": 0}, {}, "plain")), finish=False))
    assert np.isnan(sweep["acted"].values).all() and set(sweep["idle_parts"].values) == {""}


def test_how_often_each_part_acted(write) -> None:
    out = write(of(lambda trial: Acting({"spam.interval": 4, "spam.threshold": 0}, {"model.mix": "half"}, "x")))
    table = part_acts(out)
    assert list(table.columns) == ["trial", "part", "steps", "idle"] and len(table) == 12
    own = table[table["trial"] == table["trial"].iloc[0]].set_index("part")
    assert own["steps"].fillna(-1).to_dict() == {"spam.interval": 4, "spam.threshold": 0, "model.mix": -1}
    assert own["idle"].to_dict() == {"spam.interval": "", "spam.threshold": "", "model.mix": "half"}


# --- in tables and figures ---------------------------------------------------------------------------------------


def sometimes(trial: Trial) -> Acting:
    """Clipping acts at the larger rate alone; muP never at width 32."""
    if trial.mitigation == "clip_1":
        return Acting({"optim.clip": 9 if trial.optim.lr > 5e-3 else 0}, {}, "other")
    is_base = trial.mitigation == "mup" and trial.model.width == 32
    return Acting({}, {"model.parametrization": "base"}, "plain") if is_base else Acting({}, {}, "other")


def test_a_mark_is_on_what_acted_in_no_trial_of_a_width(write) -> None:
    out = write(of(sometimes), ("none", "clip_1", "mup", "qk_norm"), widths=(32, 64))
    sweep = open_sweep(out)
    assert set(marked(sweep)["mitigation"].values) == {"none", "clip_1", "mup †", "qk_norm"}
    note = "† did not act as named in any trial: mup (model.parametrization at width 32)."
    assert idle_note(sweep) == note == idle_note(marked(sweep))
    table = compare(sweep).table.set_index(["mitigation", "width"])
    idle = table["idle_parts"][table["idle_parts"] != ""].to_dict()
    assert idle == {("mup", 32): "model.parametrization"}


RATES = (1e-3, 1e-2)


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("acts_at", RATES)
def test_a_mark_is_on_each_number_behind_which_nothing_acted(write, acts_at: float) -> None:
    """Clipping acts at one of two rates: what is taken from the other says nothing of it, what is of both does."""

    def at_one(trial: Trial) -> Acting:
        return Acting({"optim.clip": 9 * (trial.optim.lr == acts_at)}, {}, "other")

    out = write(of(at_one), rates=RATES)
    found = compare(open_sweep(out))
    plain, clipped = found.table.iloc
    assert clipped["mitigation"] == "clip_1" and clipped["idle_parts"] == ""
    assert not any(plain[f"{name}_idle"] for name in found.metrics)
    idle = {name for name in found.metrics if clipped[f"{name}_idle"]}
    rates = {"final_loss": clipped["best_rate"], "common_loss": clipped["common_rate"]}
    assert idle == {name for name, rate in rates.items() if rate != acts_at}
    cells = dict(zip(found.metrics, table_rows(found)["rows"][1]["cells"], strict=True))
    assert {name for name, cell in cells.items() if "†" in cell.value} == idle
    page, drawing = write_report(out).html.read_text(), mitigation_map(given(comparison=found))
    texts = [text.get_text() for text in drawing.figure.axes[0].texts]
    for words in (page.split("</figure>")[-1], drawing.caption):
        assert ("† behind a number: the mitigation did not act as named" in words) == bool(idle)
    assert any(text.endswith("†") for text in texts) == bool(idle)


def test_of_faults_those_at_the_common_rate_count(tmp_path: Path) -> None:
    """What screens batches acts where one is poisoned, and not without a fault."""

    def screens(trial: Trial) -> Acting:
        return Acting({"screen.rarity": int(trial.fault != NO_FAULT)}, {}, "other")

    study = Study(tmp_path)
    study.write(of_faults(lambda trial: {3: 1.0}), faults=[study.poison()], acting=of(screens))
    found, row = study.compare(), study.row()
    idle = {name for name in found.metrics if row[f"{name}_idle"]}
    assert {name for name in found.metrics if not name.startswith(("deviation", "recovery"))} == idle
    assert any(name.startswith("deviation") for name in found.metrics)


@pytest.mark.usefixtures("unrendered")
def test_every_table_and_figure_shows_the_mark(write) -> None:
    out = write(of(sometimes), ("none", "mup"), widths=(32, 64))
    written = write_report(out)
    assert any("did not act as named in any trial: mup" in line for line in written.findings)
    page = written.html.read_text()
    assert page.count("mup †") >= 4 and "did not act as named" in page
    results = Results.open(out)
    for name in ("mitigation_map", "loss_against_rate", "sensitivity_against_width"):
        figure = figures(*Needs)[name](results).figure
        texts = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
        assert any("mup †" in text for text in texts), name


def test_without_anything_idle_nothing_is_marked(write) -> None:
    sweep = open_sweep(write(of(lambda trial: Acting({}, {}, "other"))))
    assert marked(sweep) is sweep and idle_note(sweep) == ""
