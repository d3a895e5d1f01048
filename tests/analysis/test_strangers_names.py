"""Names in a store are anybody's: nothing of them reaches a terminal, a formula or a page as more than text."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
import optuna
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from analysis.__main__ import main
from analysis.commands.figure import figure_names
from analysis.figures.drawing import Drawing
from analysis.figures.labels import labelled
from analysis.figures.registry import Needs, Results, figures
from analysis.reading.open_sweep import fault_events, open_sweep
from harness.basics.printing import label, printable
from harness.config import Fault, Trial
from tests.analysis import synthetic

EVIL = {
    "a formula": r"$\frac{$",
    "dollars": r"$a$ $b_{$",
    "the screen": "\x1b[2J\x1b]0;title\x07\x9b31m",
    "lines": "none\nerror: out=x\r\x85\u2028end",
    "direction": "a\u202egnp.exe\u2066\u200b\u200d\ufeffz",
    "half a pair": "\ud800",
    "a page": "<script>alert(1)</script>&\"'",
    "nothing": "\x00",
    "long": "x" * 10_000,
    "long too": "x" * 10_000 + "y",
}


@dataclass(frozen=True)
class Odd(Fault):
    kind: str = "value"
    site: str = "weight"
    bit: int = 3


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose every name is one of EVIL."""
    out = tmp_path_factory.mktemp("evil")
    names = [*EVIL.values()]
    for number, mitigation in enumerate(("none", *names)):
        faults = [Fault(), Odd(name=names[number % 4], start=20), Odd(name=EVIL["long"], start=10)]
        trials = [
            synthetic.make_trial(lr=lr, mitigation=mitigation, fault=fault)
            for lr, fault in product((1e-3, 1e-2), faults)
        ]

        def events(trial: Trial, tensor: str = names[number % len(names)]) -> list[dict]:
            event = {"site": tensor, "tensor": tensor, "index": 1, "bit": 3, "changed": True, "step": trial.fault.start}
            return [event | {"before": 0.1, "after": np.inf}] if trial.fault.name != "none" else []

        synthetic.write_pack(out, trials, synthetic_curve, faults=events, study=EVIL["the screen"] + EVIL["long"])
    _write_searches(out)
    return out


def synthetic_curve(trial: Trial) -> np.ndarray:
    steps = np.arange(trial.train.steps)
    rise = np.where(steps > trial.fault.start, 0.5, 0.0) if trial.fault.name != "none" else 0
    return 3 + np.exp(-steps / 10) + rise + 0.1 * trial.seed + abs(np.log10(trial.optim.lr) + 2)


def _write_searches(out: Path) -> None:
    (out / "search").mkdir()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = JournalStorage(JournalFileBackend(str(out / "search" / "journal.jsonl")))
    for number, name in enumerate([name for name in EVIL.values() if name != "\ud800"]):
        study = optuna.create_study(storage=storage, study_name=str(number), directions=["minimize", "minimize"])
        for key, value in {"kind": "pareto", "cell": name, "objectives": [name, "loss"]}.items():
            study.set_user_attr(key, value)
        for value in (1.0, 2.0, 3.0):
            trial = study.ask({name: optuna.distributions.CategoricalDistribution([name])})
            study.tell(trial, [value, -value])


def call(*arguments: str) -> tuple[int, str]:
    """The command's exit status, and what it says on a terminal that takes ASCII alone: printable, in lines."""
    streams = {"strict": io.BytesIO(), "backslashreplace": io.BytesIO()}
    out, err = (
        io.TextIOWrapper(stream, encoding="ascii", errors=errors, write_through=True)
        for errors, stream in streams.items()
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    shown = b"".join(stream.getvalue() for stream in streams.values())
    assert not set(shown) - {*range(0x20, 0x7F), 0x0A}, shown
    return status, shown.decode()


@pytest.mark.parametrize("command", ["report", "campaign"])
def test_a_page_and_what_is_printed(evil: Path, command: str) -> None:
    status, shown = call(command, str(evil))
    assert status == 0
    assert max(map(len, shown.splitlines())) < 5000 and "\nerror:" not in shown
    page = (evil / f"{command}.html").read_bytes().decode()
    assert "<script>" not in page and not [c for c in page if not c.isprintable() and c != "\n"]
    assert "&lt;script&gt;" in page and "x" * 65 not in page and r"$\frac{$" in page
    assert len(list((evil / "figures").glob("*.png"))) >= 3


@pytest.mark.parametrize("name", figure_names())
def test_a_figure(evil: Path, tmp_path: Path, name: str) -> None:
    status, shown = call("figure", name, str(evil), str(tmp_path / "figure.svg"))
    if status:  # there is nothing of the kind to draw
        assert status == 2 and "error: figure " in shown and "No figure" in shown
    else:
        picture = (tmp_path / "figure.svg").read_text()
        assert not [c for c in picture if not c.isprintable() and c != "\n"] and "x" * 65 not in picture


def test_different_names_stay_different(evil: Path) -> None:
    before, (after, _) = open_sweep(evil), labelled(open_sweep(evil), fault_events(evil))
    for name in ("mitigation", "fault", "trial", "struck_site"):
        pairs = set(zip(before[name].values.tolist(), after[name].values.tolist(), strict=True))
        assert len(pairs) == len({new for _, new in pairs}) == len({old for old, _ in pairs}), name
    assert after.sizes == before.sizes


def test_a_formula_is_drawn_as_it_stands_even_where_tex_is_asked_for(tmp_path: Path) -> None:
    mitigations = ("none", EVIL["a formula"], "$x^2$")
    synthetic.write_pack(
        tmp_path, [synthetic.make_trial(lr=lr, mitigation=name) for name in mitigations for lr in (1e-3, 1e-2, 1e-1)]
    )
    with matplotlib.rc_context({"text.usetex": True}):
        drawing: Drawing = figures(Needs.SWEEP)["loss_against_rate"](Results(open_sweep(tmp_path)))
    assert drawing.figure is not None
    FigureCanvasAgg(drawing.figure).draw()
    texts = {text.get_text(): text for text in drawing.figure.findobj(matplotlib.text.Text)}
    assert f"mitigation: {EVIL['a formula']}" in texts
    assert not any(text.get_usetex() for text in texts.values())
    assert not any(text.get_parse_math() for text in texts.values())
    assert {"0.001", "0.01", "0.1"} <= texts.keys(), "numbers on a logarithmic axis are plain"


@pytest.mark.parametrize("name", EVIL)
def test_labels(name: str) -> None:
    words = label(EVIL[name])
    assert words.isprintable() and len(words) <= 64
    assert printable(words) == words == label(words)
    assert label("qk_norm+attention_cap") == "qk_norm+attention_cap"
